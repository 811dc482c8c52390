"""Logit attribution: terms sum to the logit, and each equals what removing it from a plain reconstruction changes."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, AttentionEdit, ExpertSet, LogProb, Patch, Scale
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError, PromptError, SiteError

IDS = [0, 17, 300, 4, 99, 501, 17, 33, 250, 8]
UNITS = ("layer", "sublayer", "head", "expert", "stream")


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("attribution") / "tiny"
    synth(path, "tiny", seed=9)
    with birkhoff.load(path, cache_bytes=2**26, max_context=256, weights="dense") as engine:
        yield engine


def merged_without(trace, at, removed=None):
    """The merged residual from the recorded outputs and weights in float64; `removed` is a (hook, layer, stream) that
    writes nothing."""

    def row(hook, layer):
        return trace[hook, layer][at].double()

    streams = row("mhc_streams_pre_attn", 0).clone()
    if removed is not None and removed[0] == "embedding":
        streams[removed[2]] = 0
    for layer in range(trace.num_layers):
        for name, output in (("attn", "post_attn"), ("ffn", "mlp_out")):
            post = row(f"mhc_{name}_post_mix", layer).clone()
            if removed is not None and removed[:2] == (output, layer):
                post[removed[2]] = 0
            mixed = torch.einsum("jk,jd->kd", row(f"mhc_{name}_res_mix", layer), streams)
            streams = mixed + post.unsqueeze(-1) * row(output, layer)
    return row("mhc_head_mix", -1) @ streams


def direction_of(engine, merged, token):
    weights = {weight.name: weight.tensor.detach().double() for weight in engine.model.destinations()}
    scale = (merged.square().mean() + engine.config.rms_norm_eps).rsqrt()
    return weights["head.weight"][token] * weights["norm.weight"] * scale


@pytest.mark.parametrize("position, token", [(-1, None), (4, 7), (0, (7, 300)), (-1, (5, 6))])
def test_terms_sum_to_the_logit_in_every_unit(engine, position, token):
    found = engine.logit_attribution(IDS, token, position)
    logits = engine.logits(IDS)[position].double()
    ids = [int(logits.argmax())] if token is None else [token] if isinstance(token, int) else list(token)
    expected = float(logits[ids[0]] - logits[ids[1]]) if len(ids) == 2 else float(logits[ids[0]])
    assert found.tokens == tuple(ids) and found.position == position % len(IDS)
    assert abs(found.logit - expected) < 1e-4 and abs(found.total - expected) < 1e-4
    assert found.rest.abs().sum() < 1e-4  # the outputs alone are the logit: nothing is hidden in the rest
    for unit in UNITS:
        terms = found.by(unit)
        assert abs(sum(terms.values()) - expected) < 1e-4, unit
        assert all(abs(value) < 1e-4 for name, value in terms.items() if name.endswith("rest")), unit
    assert set(found.by("stream")) == {f"stream[{k}]" for k in range(4)}
    top = found.top("head", 3)
    assert [abs(value) for _, value in top] == sorted(
        (abs(v) for v in found.by("head").values()), reverse=True
    )[:3]


def test_a_term_is_what_removing_it_takes_away(engine):
    """Each term against a forward reconstruction in float64 in which that output is not written to that stream."""
    trace, token = engine.trace(IDS), 7
    found = engine.logit_attribution(IDS, token)
    whole = merged_without(trace, -1)
    direction = direction_of(engine, trace["final_hidden", -1][-1].double(), token)
    for stream in range(4):
        for hook, terms in (("post_attn", found.attention), ("mlp_out", found.experts)):
            for layer in range(6):
                change = (whole - merged_without(trace, -1, (hook, layer, stream))) @ direction
                assert abs(float(change) - float(terms[layer, stream])) < 1e-6, (hook, layer, stream)
        change = (whole - merged_without(trace, -1, ("embedding", 0, stream))) @ direction
        assert abs(float(change) - float(found.embedding[stream])) < 1e-6


def test_heads_and_experts_are_what_their_weights_give(engine):
    """The output of one head and of one expert from the checkpoint's tensors: everything else set to zero."""
    trace, token, at = engine.trace(IDS), 7, len(IDS) - 1
    found = engine.logit_attribution(IDS, token)
    direction = direction_of(engine, trace["final_hidden", -1][-1].double(), token)
    weights = {weight.name: weight.tensor.detach().double() for weight in engine.model.destinations()}
    config = engine.config
    for layer in range(6):
        block = engine.model.layers[layer]
        x = block.ffn_norm(trace["mlp_in", layer][at : at + 1])[0].detach().double()
        share = found.experts[layer].sum() / (trace["mlp_out", layer][at].double() @ direction)
        for expert, weight in trace["moe_topk", layer][at].tolist():
            name = f"layers.{layer}.ffn.experts.{int(expert)}"
            gate, up = weights[f"{name}.w1.weight"] @ x, weights[f"{name}.w3.weight"] @ x
            limit = config.swiglu_limit
            inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            alone = share * weight * float((weights[f"{name}.w2.weight"] @ inner) @ direction)
            assert abs(float(alone) - found.routed[layer][int(expert)]) < 1e-4, (layer, expert)
        assert set(found.routed[layer]) == {int(e) for e in trace["moe_topk", layer][at, :, 0]} | {"shared"}
        assert abs(float(found.heads[layer].sum()) - float(found.attention[layer].sum())) < 1e-4
        attn, heads = block.attn, config.num_attention_heads
        kept = attn.wo_a.weight.detach().clone()
        per_group = heads // config.o_groups
        outputs = []
        for head in range(heads):  # the model itself, with the output matrix of one head only
            only = torch.zeros_like(kept).view(
                config.o_groups, config.o_lora_rank, per_group, config.head_dim
            )
            group, place = divmod(head, per_group)
            only[group, :, place] = kept.view(only.shape)[group, :, place]
            with torch.no_grad():
                attn.wo_a.weight.copy_(only.view(kept.shape))
                outputs.append(engine.trace(IDS, "post_attn")["post_attn", layer][at].double() @ direction)
                attn.wo_a.weight.copy_(kept)
        share = found.attention[layer].sum() / (trace["post_attn", layer][at].double() @ direction)
        assert (share * torch.stack(outputs) - found.heads[layer]).abs().max() < 1e-4, layer


def test_weights_as_stored(tmp_path):
    """Codes of FP8 and FP4 are read as the kernels read them."""
    synth(tmp_path / "tiny", "tiny", seed=2)
    with birkhoff.load(tmp_path / "tiny", cache_bytes=2**26, max_context=256) as engine:
        assert engine.model.layers[0].ffn.experts.types is not None
        found = engine.logit_attribution(IDS)
        assert found.rest.abs().sum() < 1e-4
        for unit in ("head", "expert"):
            assert all(abs(value) < 1e-4 for name, value in found.by(unit).items() if name.endswith("rest"))


def test_edits_of_streams_are_in_the_rest(engine):
    """With an edit the terms still sum to the steered logit; what an edit of the streams adds is no output."""
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2
    for edit in (
        Add(vector, "mhc_streams_pre_mlp", [3], streams=[1]),
        Add(vector, "mhc_streams_pre_attn", [2], streams=[1], path="carry"),
        Add(vector, "final_hidden"),
    ):
        found = engine.logit_attribution(IDS, 7, steer=[edit])
        assert abs(found.logit - float(engine.logits(IDS, [edit])[-1, 7])) < 1e-4
        assert abs(found.total - found.logit) < 1e-4 and found.rest.abs().sum() > 1e-2


def test_terms_are_those_of_what_was_written(engine):
    """Outputs and weights count as the edits leave them: what is ablated has no term, and the rest hides nothing."""
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 2
    steers = (
        [Patch(0, "mlp_out", [2])],
        [Add(vector, "mlp_out", [2])],
        [AttentionEdit([3], heads=[1])],
        [Scale(0, "mhc_attn_post_mix", [3])],
        [Patch("uniform", "mhc_ffn_res_mix", [2])],
        [ExpertSet([3], ban=[0, 1])],
        [Scale(2, "mhc_head_mix", streams=[0])],
        [Add(vector, "mhc_streams_pre_mlp", [3], streams=[1], path="read")],
    )
    found = [engine.logit_attribution(IDS, 7, steer=steer) for steer in steers]
    for each, steer in zip(found, steers):
        assert abs(each.logit - float(engine.logits(IDS, steer)[-1, 7])) < 1e-4
        assert abs(each.total - each.logit) < 1e-4 and each.rest.abs().sum() < 1e-3, steer
    ablated, added, head, unwritten = (each.by("sublayer") for each in found[:4])
    assert ablated["experts[2]"] == 0 and unwritten["attention[3]"] == 0 and added["experts[2]"] != 0
    assert found[2].by("head")["head[3, 1]"] == 0 and head["attention[3]"] != 0
    banned = found[5].by("expert")
    assert "expert[3, 0]" not in banned and "expert[3, 1]" not in banned


def test_refusals(engine):
    for kind, says, call in [
        (SiteError, "the text has 10 tokens", lambda: engine.logit_attribution(IDS, 7, 10)),
        (OptionError, "expected one token, or two", lambda: engine.logit_attribution(IDS, (1, 2, 3))),
        (OptionError, "is 2 tokens", lambda: engine.logit_attribution(IDS, "ab")),
        (OptionError, "unit is 'word'", lambda: engine.logit_attribution(IDS).by("word")),
        (PromptError, "takes one prompt", lambda: engine.logit_attribution([IDS, IDS])),
    ]:
        with pytest.raises(kind, match=says):
            call()


def test_tokens_as_tensors(engine):
    """Ids as PyTorch gives them: `logits[-1].argmax()`, `topk(2).indices`."""
    logits = engine.logits(IDS)
    best, pair = logits[-1].argmax(), logits[-1].topk(2).indices
    plain = engine.logit_attribution(IDS, int(best))
    assert engine.logit_attribution(IDS, best).by("layer") == plain.by("layer")
    difference = engine.logit_attribution(IDS, pair)
    assert difference.tokens == tuple(pair.tolist())
    for metric in (best, pair, LogProb(best), (best, pair[1])):
        scores = engine.attribute(IDS, metric, "post_attn", layers=[2])
        assert len(scores) == len(IDS)
    assert engine.attribute(IDS, pair, "post_attn", layers=[2]).value == pytest.approx(
        difference.logit, abs=1e-4
    )
    for wrong in (torch.tensor(0.5), torch.tensor(True), torch.tensor([1, 2, 3])):
        with pytest.raises(OptionError, match="expected"):
            engine.logit_attribution(IDS, wrong)
