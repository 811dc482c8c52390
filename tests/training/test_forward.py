"""The training forward is the same function as other people's V4, and as our own exact model, MTP included."""

from __future__ import annotations

import pytest
import torch

from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch
from birkhoff.model.state import Fresh
from birkhoff.model.transformer import Transformer
from tests.training.tiny import randomise, released_name, tiny_config
from training.forward import Forward, Knobs
from training.parameters import Store

LENGTH = 264  # two HCA blocks and a rest, 66 CSA entries, 33 windows


@pytest.fixture(scope="module")
def model():
    config = tiny_config()
    store = Store(config)
    tensors = randomise(store, seed=3)
    ids = torch.randint(0, config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    return config, store, tensors, ids


def run(model, knobs=Knobs()):  # noqa: B008 - an immutable tuple
    config, store, _, ids = model
    weights = store.named(store.leaves(torch.float32))
    forward = Forward(config, ids.shape[1], "cpu")
    valid = torch.ones_like(ids)
    trunk = forward.trunk(weights, ids, valid, knobs, torch.float32)
    drafted, _ = forward.mtp(weights, trunk.streams, ids.roll(-1, 1), valid, knobs)
    logits = trunk.hidden @ weights["head.weight"].T
    return trunk, logits, drafted @ weights["head.weight"].T


def test_logits_equal_the_transformers_class(model):
    transformers = pytest.importorskip("transformers")
    config, _, tensors, ids = model
    other = transformers_model(transformers, config, tensors)
    with torch.no_grad():
        theirs = other(input_ids=ids).logits
    _, ours, _ = run(model)
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_logits_and_drafts_equal_our_own_model(model):
    config, _, tensors, ids = model
    exact = Transformer(config)
    with torch.no_grad():
        for destination in exact.destinations():
            destination.tensor.copy_(released_name(tensors, destination.name).reshape(destination.tensor.shape))
        hidden, streams = exact.run(Batch.whole(ids), Fresh(), NoTap())
        theirs = exact.logits(hidden).unflatten(0, ids.shape)
        drafted, _ = exact.draft(streams, Batch.whole(ids.roll(-1, 1)), Fresh())
        their_drafts = exact.logits(drafted).unflatten(0, ids.shape)
    trunk, ours, drafts = run(model)
    torch.testing.assert_close(trunk.streams.flatten(0, 1), streams, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(drafts, their_drafts, atol=1e-4, rtol=0)


def test_dense_selection_changes_only_late_positions(model):
    config, *_ = model
    _, sparse, _ = run(model)
    _, dense, _ = run(model, Knobs(dense=torch.tensor(1.0)))
    _, same, _ = run(model, Knobs(dense=torch.tensor(0.0)))
    first = 4 * (config.index_topk + 1) - 1  # the first query with more visible entries than the indexer keeps
    torch.testing.assert_close(dense[:, :first], sparse[:, :first], atol=1e-5, rtol=0)
    assert (dense[:, first:] - sparse[:, first:]).abs().max() > 1e-3
    assert torch.equal(same, sparse)


def test_nothing_sees_the_future(model):
    config, store, tensors, ids = model
    _, before, drafts = run(model)
    changed = ids.clone()
    changed[:, 150:] = (changed[:, 150:] + 1) % config.vocab_size
    _, after, later_drafts = run((config, store, tensors, changed))
    torch.testing.assert_close(after[:, :150], before[:, :150], atol=1e-5, rtol=0)
    torch.testing.assert_close(later_drafts[:, :149], drafts[:, :149], atol=1e-5, rtol=0)
    assert (after[:, 150:] - before[:, 150:]).abs().max() > 1e-2


def test_every_parameter_learns_and_the_indexer_only_from_its_own_loss(model):
    config, store, _, ids = model
    leaves = store.leaves(torch.float32)
    weights = store.named(leaves)
    for weight in weights.values():
        if weight.is_floating_point() and weight.requires_grad:
            weight.retain_grad()
    forward = Forward(config, ids.shape[1], "cpu")
    valid = torch.ones_like(ids)
    trunk = forward.trunk(weights, ids, valid, Knobs(), torch.float32)
    drafted, load = forward.mtp(weights, trunk.streams, ids.roll(-1, 1), valid, Knobs())
    text = forward.losses(trunk.hidden, weights, ids.roll(-1, 1)).mean() + forward.losses(drafted, weights, ids).mean()
    (text + sum(entry.loss for entry in (*trunk.loads, load))).backward(retain_graph=True)
    silent = {name for name, weight in weights.items() if weight.requires_grad and weight.grad is None}
    indexer = {name for name in weights if ".indexer." in name}
    assert silent == indexer and len(indexer) == 2 * 6
    assert all(weight.grad.any() for name, weight in weights.items() if weight.requires_grad and name not in indexer)
    sum(trunk.index_losses).backward()
    assert all(weights[name].grad.any() for name in indexer)


def test_padding_does_not_count_as_load(model):
    config, store, _, ids = model
    weights = store.named(store.leaves(torch.float32))
    forward = Forward(config, ids.shape[1], "cpu")
    valid = torch.ones_like(ids)
    valid[1] = 0
    half = forward.trunk(weights, ids, valid, Knobs(), torch.float32)
    alone = forward.trunk(weights, ids[:1], valid[:1], Knobs(), torch.float32)
    for with_padding, without in zip(half.loads, alone.loads):
        torch.testing.assert_close(with_padding.share, without.share)
        assert abs(float(with_padding.share.sum()) - 1) < 1e-5


def test_dropout_is_unbiased_and_off_at_zero(model):
    _, plain, _ = run(model)
    _, zero, _ = run(model, Knobs(dropout=torch.tensor(0.0)))
    _, some, _ = run(model, Knobs(dropout=torch.tensor(0.2)))
    torch.testing.assert_close(zero, plain)
    assert (some - plain).abs().mean() > 0.05


def transformers_model(transformers, config, tensors):
    """The `transformers` class with the same weights, through its own parameter names."""
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    scaling = config.rope_scaling
    rope = {"rope_theta": config.compress_rope_theta, "rope_type": "yarn", "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
            "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "attention_factor": 1.0}  # fmt: skip
    partial = {"partial_rotary_factor": config.qk_rope_head_dim / config.head_dim}
    same = ("vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups "
            "o_lora_rank sliding_window index_n_heads index_head_dim index_topk n_routed_experts num_experts_per_tok "
            "moe_intermediate_size routed_scaling_factor swiglu_limit hc_mult hc_sinkhorn_iters hc_eps rms_norm_eps "
            "max_position_embeddings").split()  # fmt: skip
    settings = transformers.DeepseekV4Config(
        **{name: getattr(config, name) for name in same},
        layer_types=[kinds[ratio] for ratio in config.compress_ratios],
        mlp_layer_types=["hash_moe" if config.is_hash_routed(i) else "moe" for i in range(config.num_hidden_layers)],
        rope_parameters={"main": {"rope_theta": config.rope_theta, "rope_type": "default", **partial},
                         "compress": rope | partial},
        attn_implementation="eager",
    )  # fmt: skip
    other = transformers.DeepseekV4ForCausalLM(settings).eval().float()
    state = other.state_dict()
    with torch.no_grad():
        for name, target in state.items():
            target.copy_(_by_transformers_name(tensors, name).reshape(target.shape))
    return other


def _by_transformers_name(tensors, name):
    for theirs, ours in (
        ("lm_head.", "head."), ("model.embed_tokens.", "embed."), ("model.hc_head.hc_", "hc_head_"), ("model.", ""),
        (".self_attn.compressor.indexer.scorer.weights_proj", ".attn.indexer.weights_proj"),
        (".self_attn.compressor.indexer.q_b_proj", ".attn.indexer.wq_b"),
        (".self_attn.compressor.indexer.", ".attn.indexer.compressor."), (".self_attn.", ".attn."), (".mlp.", ".ffn."),
        ("compressor.kv_proj", "compressor.wkv"), ("compressor.gate_proj", "compressor.wgate"),
        ("compressor.position_bias", "compressor.ape"), ("compressor.kv_norm", "compressor.norm"),
        ("q_a_proj", "wq_a"), ("q_b_proj", "wq_b"), ("q_a_norm", "q_norm"), ("attn.kv_proj", "attn.wkv"),
        ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"), (".sinks", ".attn_sink"), ("attn_hc.", "hc_attn_"),
        ("ffn_hc.", "hc_ffn_"), ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
        ("gate.e_score_correction_bias", "gate.bias"), ("shared_experts.gate_proj", "shared_experts.w1"),
        ("shared_experts.up_proj", "shared_experts.w3"), ("shared_experts.down_proj", "shared_experts.w2"),
        ("experts.down_proj", "experts.w2"),
    ):  # fmt: skip
        name = name.replace(theirs, ours)
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        return torch.cat((tensors[f"{stem}w1"], tensors[f"{stem}w3"]), 1)
    return tensors[name]
