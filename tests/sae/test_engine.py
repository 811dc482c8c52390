"""Dictionaries in a running engine: each request gets its edits on its tokens, alone or in a batch."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, Capture, Clamp, SaeReconstruct, SaeSet
from birkhoff.convert.synth import synth
from birkhoff.hooks.tap import EagerTap
from birkhoff.sae.clamps import parse_clamp, resolve_clamps
from tests.sae.reference import plain, random_sae
from tests.sizes import scaled

PROMPT = [0, *range(40, 75)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, kernels="reference", max_requests=16) as engine:
        yield engine


@pytest.fixture(autouse=True)
def no_leaks(engine):
    yield
    assert not list(engine.saes.registry) and not engine.saes.tier
    assert all(pool.used == 0 for pool in engine.saes.registry.pools.values())
    assert engine._core.scheduler.idle


def sae_at(engine, hook, layer, family="jumprelu", seed=0, view=None, spread=None, features=32, **more):
    row = engine.schema[hook]
    view = view or ("single" if len(row.logical_shape) == 1 else "flat")
    width = row.width if view in ("single", "flat") else row.logical_shape[1]
    return random_sae(family, features, width, seed, hook=hook, layer=layer, view=view, spread=spread, **more)


def edited_logits(engine, ids, key, change):
    """Logits of the model without the engine, with one tensor edited by a tap."""

    def edit(site, layer, x):
        return change(x) if (site.name, layer) == key else None

    with torch.no_grad():
        return engine.model(torch.tensor(ids), EagerTap(edit=edit))


@pytest.mark.parametrize("hook", ["pre_attn", "post_attn", "mlp_in", "mlp_out", "final_hidden"])
@pytest.mark.parametrize("mode", ["delta", "keep", "drop"])
def test_logits_equal_those_of_the_model_edited_by_a_tap(engine, hook, mode):
    layer = engine.config.num_hidden_layers - 1 if hook == "final_hidden" else 2
    sae = sae_at(engine, hook, layer)
    clamps = {3: 4.0, 9: 0.0}
    row = resolve_clamps([parse_clamp(i, v, "absolute", False, "") for i, v in clamps.items()], sae, None)

    def change(x):
        return plain(sae, x, row, "drop" if mode == "drop" else "keep")

    edit = SaeSet("m", clamps) if mode == "delta" else SaeReconstruct("m", clamps, error=mode)
    with engine.attach("m", sae, kind="delta" if mode == "delta" else "full"):
        ours = engine.logits(PROMPT, steer=[edit])
    theirs = edited_logits(engine, PROMPT, (hook, layer), change)
    plain_logits = engine.logits(PROMPT)
    assert not torch.allclose(ours, plain_logits, atol=1e-2)
    assert torch.allclose(ours, theirs, atol=1e-3)


VIEWS = [
    ("flat", None),
    ("per_stream", None),
    ("mean", None),
    ("read", "read"),
    ("read", "post"),
    ("read", "uniform"),
]


@pytest.mark.parametrize(("view", "spread"), VIEWS)
@pytest.mark.parametrize("hook", ["mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final"])
def test_views_of_streams_in_the_model(engine, hook, view, spread):
    """Edited streams of the engine against the edit computed from a trace of the unedited model."""
    layer = engine.config.num_hidden_layers - 1 if hook.endswith("final") else 2
    sae = sae_at(engine, hook, layer, "relu", view=view, spread=spread)
    trace = engine.trace(PROMPT)
    before = trace[hook, layer]
    reads = {
        "mhc_streams_pre_attn": "mhc_attn_pre_mix",
        "mhc_streams_pre_mlp": "mhc_ffn_pre_mix",
        "mhc_streams_final": "mhc_head_mix",
    }[hook]
    last_written = (
        ("mhc_attn_post_mix", layer)
        if hook.endswith("pre_mlp")
        else ("mhc_ffn_post_mix", layer if hook.endswith("final") else layer - 1)
    )
    a, p = trace[reads, layer], trace[last_written]
    row = resolve_clamps([parse_clamp(5, 6.0, "absolute", False, "")], sae, None)
    if view == "flat":
        expected = plain(sae, before.flatten(1), row, "keep").view(before.shape)
    elif view == "per_stream":
        expected = torch.stack([plain(sae, before[:, s], row, "keep") for s in range(before.shape[1])], 1)
    else:
        v = before.mean(1) if view == "mean" else (a.unsqueeze(-1) * before).sum(1)
        delta = (plain(sae, v, row, "keep") - v).unsqueeze(1)
        shares = {
            "read": a / a.square().sum(-1, keepdim=True),
            "post": p,
            "uniform": torch.ones_like(a),
            None: torch.ones_like(a),
        }
        expected = before + shares[spread].unsqueeze(-1) * delta
    with engine.attach("m", sae):
        after = (
            engine.generate(
                PROMPT,
                max_tokens=1,
                temperature=0,
                steer=[SaeSet("m", {5: 6.0})],
                capture=Capture({hook: [layer]}, positions="all_prompt", capture_point="after"),
            )
            .acts[hook, layer]
            .tensor
        )
    assert not torch.allclose(after, before, atol=0.1)
    assert torch.allclose(after, expected, atol=2e-3)


def random_edits(g, index):
    features = torch.randperm(32, generator=g)[:3].tolist()
    kind = ("absolute", "additive", "multiply")[index % 3]
    where = {"generated": "all"} if index % 4 == 1 else None
    edits = [
        SaeSet(
            "d", dict.fromkeys(features, 1.0 + index), kind=kind, where=where, only_if_active=index % 5 == 0
        )
    ]
    if index % 2:
        edits.append(
            SaeReconstruct(
                "f", {features[0]: 2.0}, error="keep" if index % 4 == 3 else "drop", phase="decode"
            )
        )
    if index % 3 == 0:
        edits.append(SaeSet("s", {features[1]: 3.0}, streams=[index % 4]))
    if index % 6 == 0:
        edits.append(Add(torch.randn(64, generator=g), hook="mlp_out", layers=[2]))
    return edits


def test_sixteen_requests_in_a_batch_equal_single_runs(engine):
    g = torch.Generator().manual_seed(3)
    count = scaled(16, 8)
    steer = [random_edits(g, index) for index in range(count)]
    prompts = [[0, *torch.randint(40, 200, (5 + index,), generator=g).tolist()] for index in range(count)]
    attachments = [
        engine.attach("d", sae_at(engine, "mlp_out", 2, "topk", 1)),
        engine.attach("f", sae_at(engine, "mlp_out", 2, "jumprelu", 2), kind="full"),
        engine.attach("s", sae_at(engine, "mhc_streams_pre_attn", 3, "gated", 4, "per_stream")),
    ]
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    together = engine.generate(prompts, steer=steer, **options)
    alone = [engine.generate(prompt, steer=edits, **options) for prompt, edits in zip(prompts, steer)]
    unsteered = engine.generate(prompts, **options)
    for one, other in zip(together, alone):
        assert one.token_ids == other.token_ids
        assert [t.logprob for t in one.logprobs] == [t.logprob for t in other.logprobs]  # bit for bit
    assert sum(a.logprobs != b.logprobs for a, b in zip(together, unsteered)) == count
    for attachment in attachments:
        attachment.__exit__(None, None, None)


def test_phase_and_where_select_exactly_the_named_tokens(engine):
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    length = len(PROMPT)
    with engine.attach("m", sae_at(engine, "mlp_out", 2)) as attached:
        assert repr(attached) == "Attachment('m', delta, mlp_out[2])"
        for edit, expected in (
            (SaeSet("m", {1: 2.0}, phase="prefill"), range(length)),
            (SaeSet("m", {1: 2.0}, phase="decode"), range(length, length + 5)),
            (SaeSet("m", {1: 2.0}, where={"prompt": [3, -1]}), [3, length - 1]),
            (
                SaeSet("m", {1: 2.0}, where={"generated": {"window": [1, 3]}}, phase="decode"),
                [length + 1, length + 2],
            ),
        ):
            out = engine.generate(PROMPT, steer=[edit], **options)
            assert out.interp["steered_positions"] == list(expected)


def test_vector_and_feature_edits_run_in_the_fixed_order(engine):
    """add, then delta, then full, then clamp, in any order of the request's list."""
    delta, full = sae_at(engine, "mlp_out", 2, "relu", 1), sae_at(engine, "mlp_out", 2, "jumprelu", 2)
    g = torch.Generator().manual_seed(0)
    added, direction = torch.randn(64, generator=g), torch.randn(64, generator=g)
    unit = direction / direction.norm()
    row = resolve_clamps([parse_clamp(4, 3.0, "absolute", False, "")], delta, None)

    def change(x):
        x = x + 2 * added
        x = plain(delta, x, row, "keep")
        x = plain(full, x, row, "drop")
        along = x @ unit
        return x + (along.clamp(max=-0.5) - along).unsqueeze(-1) * unit

    edits = [
        Clamp(direction, hook="mlp_out", layers=[2], max=-0.5),
        SaeReconstruct("f", {4: 3.0}),
        SaeSet("d", {4: 3.0}),
        Add(added, hook="mlp_out", layers=[2], scale=2.0),
    ]
    with engine.attach("f", full, kind="full"), engine.attach("d", delta):
        ours = engine.logits(PROMPT, steer=edits)
    assert torch.allclose(ours, edited_logits(engine, PROMPT, ("mlp_out", 2), change), atol=1e-3)


def test_t_cache_1_edited_prompts_share_no_pages_and_unedited_ones_do(engine):
    """Unsteered; edited in the prompt as delta and as full with equal clamps; edited in generated tokens only."""
    prompt = [0, *[40 + index * 7 % 300 for index in range(400)]]
    dictionary = sae_at(engine, "mlp_out", 2)
    options = {"max_tokens": 2, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    edits = [
        [],
        [SaeSet("d", {3: 9.0})],
        [SaeReconstruct("f", {3: 9.0})],
        [SaeReconstruct("f", {3: 9.0}, error="keep")],
        [SaeSet("d", {3: 9.0}, phase="decode")],
    ]
    with engine.attach("d", dictionary), engine.attach("f", dictionary, kind="full"):
        outputs = [engine.generate(prompt, steer=steer, **options) for steer in edits]
        again = [engine.generate(prompt, steer=steer, **options) for steer in edits]
        for steer, out in zip(edits, outputs):
            prefill_edits = [e for e in steer if e.phase == "both"]
            logits = engine.logits(prompt, steer=prefill_edits)[-1]  # without any cache
            assert out.logprobs[0].logprob == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)
    cached = [out.interp.get("reuse", {}).get("cached_tokens", 0) for out in (*outputs, *again)]
    assert cached[1:4] == [0, 0, 0] and cached[4] > 0 and all(cached[5:])
    hashes = [out.interp["steering_hash"]["prefill"] for out in outputs[1:]]
    assert hashes[3] is None and len({*hashes[:3]}) == 3
    assert [out.logprobs for out in again] == [out.logprobs for out in outputs]
