"""Logits against `transformers`' DeepseekV4ForCausalLM in float32 with the same random weights, at every position.

Each case names its purpose, and asserts that the mechanism is active: clamps clip, selections leave entries out, YaRN
changes frequencies.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.config import RopeScaling, V4Config
from birkhoff.model.rope import Rope
from tests.models import TINY, random_model, random_tokens, variant, weights_of
from tests.oracle import InDouble, agreement, build_oracle, oracle_logits, our_choices
from tests.sizes import scaled

TOLERANCE = 1e-4
EXACT = 1e-10  # in float64
NEAR_TIE = 1e-5  # two scores closer than this may be ranked either way in float32

FLASH = (0, 0) + (4, 128) * 2 + (4,)  # the released patterns with fewer repeats
PRO = (128, 128) + (4, 128) * 2 + (4,)
EACH = (0, 4, 128)

CASES: dict[str, tuple[V4Config, int]] = {
    "tiny": (TINY, 330),
    "flash pattern, 645 tokens, a YaRN ramp": (
        variant(
            compress_ratios=FLASH,
            num_hash_layers=3,
            head_dim=48,
            qk_rope_head_dim=16,
            index_head_dim=32,
            index_topk=24,
            rope_scaling=RopeScaling(16.0, 2048),
            swiglu_limit=0.7,
        ),
        645,
    ),
    "pro pattern, 128-wide lead, more heads and groups": (
        variant(
            compress_ratios=PRO,
            num_hash_layers=3,
            num_attention_heads=8,
            o_groups=4,
            routed_scaling_factor=2.5,
            n_routed_experts=12,
            num_experts_per_tok=3,
            index_n_heads=20,
        ),
        400,
    ),
    "no YaRN": (variant(rope_scaling=None), 310),
    "prime hidden size and expert width": (
        variant(hidden_size=61, moe_intermediate_size=37, compress_ratios=EACH),
        310,
    ),
    "one head, one group, sizes that divide nothing": (
        variant(
            hidden_size=67,
            num_attention_heads=1,
            o_groups=1,
            o_lora_rank=7,
            q_lora_rank=29,
            head_dim=22,
            qk_rope_head_dim=6,
            index_n_heads=17,
            index_head_dim=14,
            index_topk=11,
            compress_ratios=EACH,
            vocab_size=131,
        ),
        310,
    ),
    "window 1": (variant(sliding_window=1, compress_ratios=EACH), 310),
    "window wider than the text": (variant(sliding_window=500, compress_ratios=EACH), 310),
    "two streams": (variant(hc_mult=2, compress_ratios=EACH), 310),
    "three streams, few Sinkhorn rounds, other eps": (
        variant(hc_mult=3, hc_sinkhorn_iters=3, hc_eps=1e-4, rms_norm_eps=1e-3, compress_ratios=EACH),
        310,
    ),
    "96 experts, six of them": (
        variant(n_routed_experts=96, num_experts_per_tok=6, compress_ratios=EACH),
        310,
    ),
    "score routing from the first layer": (variant(num_hash_layers=0, compress_ratios=EACH), 310),
    "hash routing to the last layer": (variant(num_hash_layers=3, compress_ratios=EACH), 310),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_at_every_position(name):
    config, length = CASES[name]
    ours = random_model(config, seed=1)
    result = agreement(ours, build_oracle(ours), random_tokens(config, length, 1))
    print(f"{name}: max abs error {result.error:.1e} over {result.compared} of {length} positions")
    assert result.error <= TOLERANCE
    assert result.compared == length or (result.margin < NEAR_TIE and result.compared > length // 2), result


def test_a_batch_of_sequences_equals_the_oracles():
    ours = random_model(seed=2)
    tokens = torch.stack(
        [random_tokens(TINY, 200, 1), random_tokens(TINY, 200, 2), random_tokens(TINY, 200, 3)]
    )
    with torch.no_grad():
        error = (ours(tokens) - build_oracle(ours)(tokens, use_cache=False).logits).abs().max()
    assert error <= TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 255, 256, 257])
def test_lengths_around_every_block_edge(length):
    ours = random_model(seed=4)
    result = agreement(ours, build_oracle(ours), random_tokens(TINY, length, 4))
    assert result.error <= TOLERANCE and result.compared == length


def test_the_cases_cover_every_mechanism():
    configs = [config for config, _ in CASES.values()]
    assert {kind for c in configs for kind in c.compress_ratios} == {0, 4, 128}
    assert {c.is_hash_routed(layer) for c in configs for layer in range(c.num_hidden_layers)} == {True, False}
    assert {c.rope_scaling is None for c in configs} == {True, False}
    assert (
        min(length for _, length in CASES.values()) > 300
        and max(length for _, length in CASES.values()) > 600
    )
    assert all(c.index_n_heads >= 16 for c in configs)
    assert {c.hc_mult for c in configs} == {2, 3, 4}


@pytest.mark.parametrize("name", CASES)
def test_the_indexer_selects_a_subset_of_the_entries(name):
    config, length = CASES[name]
    ours = random_model(config, seed=1)
    tokens = random_tokens(config, length, 1)
    with torch.no_grad(), our_choices(ours) as (picked, tap):
        ours(tokens, tap)
    visible = (torch.arange(length) + 1) // 4
    for (kind, _), chosen in picked.items():
        if kind == "index":
            assert torch.equal(chosen.sum(-1), visible.clamp_max(config.index_topk))
            assert (visible > config.index_topk).sum() > length // 2
            # A selection by age would be contiguous; a selection by score leaves gaps.
            assert (chosen[-1].int().diff().abs().sum() > 2).item()


@pytest.mark.parametrize("name", CASES)
def test_the_clamps_clip_gates_from_above_and_values_from_both_sides(name):
    """For shared and routed experts in every layer; raising the limit changes the logits."""
    config, length = CASES[name]
    ours = random_model(config, seed=1)
    tokens, entering = random_tokens(config, length, 1), {}
    for layer, block in enumerate(ours.layers):
        block.ffn.register_forward_pre_hook(lambda m, args, layer=layer: entering.update({layer: args[0]}))
    with torch.no_grad():
        logits = ours(tokens)
    weights = weights_of(ours)
    for layer, x in entering.items():
        for expert in ("shared_experts", "experts.0"):
            gate, up = (x @ weights[f"layers.{layer}.ffn.{expert}.{w}.weight"].T for w in ("w1", "w3"))
            for clipped in (gate > config.swiglu_limit, up > config.swiglu_limit, up < -config.swiglu_limit):
                assert clipped.float().mean() > 0.05
    loose = random_model(replace(config, swiglu_limit=1e9), seed=1)
    with torch.no_grad():
        assert (loose(tokens) - logits).abs().max() > 0.1


def test_yarn_scales_some_frequencies_partly_and_changes_the_logits():
    config, length = CASES["flash pattern, 645 tokens, a YaRN ramp"]
    plain, slowed = Rope(replace(config, rope_scaling=None)).compressed, Rope(config).compressed
    share = ((plain - slowed) / (plain - plain / 16.0)).tolist()
    assert share[0] == 0.0 and share[-1] == pytest.approx(1.0)
    assert any(0.01 < s < 0.99 for s in share)  # inside the ramp, not only at its ends
    tokens = random_tokens(config, length, 1)
    with torch.no_grad():
        changed = random_model(replace(config, rope_scaling=None), 1)(tokens) - random_model(config, 1)(
            tokens
        )
    assert changed.abs().max() > 0.1


@st.composite
def configurations(draw) -> V4Config:
    """Any valid config of a small size."""

    def pick(*options):
        return draw(st.sampled_from(options))

    def between(low, high):
        return draw(st.integers(low, high))

    groups, rope, experts = pick(1, 2, 3), pick(2, 4, 8), between(1, 20)
    ratios = tuple(draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=4)))
    return variant(
        hidden_size=between(8, 80),
        compress_ratios=ratios,
        num_hash_layers=between(0, len(ratios)),
        o_groups=groups,
        num_attention_heads=groups * pick(1, 2, 4),
        o_lora_rank=between(1, 20),
        head_dim=rope + pick(0, 1, 8, 24),
        qk_rope_head_dim=rope,
        q_lora_rank=between(4, 40),
        sliding_window=between(1, 40),
        index_n_heads=between(16, 24),
        index_head_dim=rope + pick(0, 8, 11),
        index_topk=between(1, 30),
        n_routed_experts=experts,
        num_experts_per_tok=between(1, min(4, experts)),
        moe_intermediate_size=between(3, 70),
        swiglu_limit=pick(0.3, 1.0, 10.0),
        hc_mult=between(1, 5),
        hc_sinkhorn_iters=pick(1, 2, 20),
        routed_scaling_factor=pick(1.0, 1.5, 2.5),
        vocab_size=between(2, 300),
        rope_scaling=pick(None, RopeScaling(4.0, 64), RopeScaling(16.0, 4096, 8.0, 2.0)),
    )


@settings(max_examples=scaled(300, 25))
@given(config=configurations(), length=st.integers(1, 300), seed=st.integers(0, 1000))
def test_any_configuration_equals_the_oracle(config, length, seed):
    """Both are run in float64, where they have to be equal but for its rounding. Some random models amplify the
    rounding of float32 more than others, so that the oracle itself is more than the tolerance away from the exact
    logits: there ours may be twice as far away as its."""
    tokens = random_tokens(config, length, seed)
    with InDouble():
        exact = build_oracle(random_model(config, seed, torch.float64))
        result = agreement(random_model(config, seed, torch.float64), exact, tokens)
    assert result.error <= EXACT, result
    assert result.compared == length or result.margin < EXACT, result

    ours = random_model(config, seed)
    result = agreement(ours, exact, tokens)
    noise = (oracle_logits(build_oracle(ours), tokens) - oracle_logits(exact, tokens)).abs()
    assert result.error <= max(
        TOLERANCE, 2 * (noise[: result.compared].max().item() if result.compared else 0.0)
    ), result
    assert result.compared == length or result.margin < NEAR_TIE, result
