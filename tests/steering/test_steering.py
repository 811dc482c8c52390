"""Edits in a running engine, compared with another implementation with hooks that apply the same change."""

from __future__ import annotations

import asyncio

import pytest
import torch

import birkhoff
from birkhoff import Add, Capture, Clamp, Patch, Project, Scale
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, SteeringError
from birkhoff.hooks.tap import EagerTap
from birkhoff.steering.position_rows import PositionRows
from tests.oracle import build_oracle
from tests.sizes import scaled
from tests.steering.hooked import LAYER, hook_oracle

PROMPT = [0, *range(40, 110)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, kernels="reference") as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(engine):
    return build_oracle(engine.model)


@pytest.fixture(scope="module")
def sizes(engine):
    return engine.config.hc_mult, engine.config.hidden_size


def vector(width, seed=0, norm=3.0):
    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v / v.norm() * norm


CASES = [
    ("pre_attn", "both"),
    ("post_attn", "both"),
    ("mlp_in", "both"),
    ("mlp_out", "both"),
    ("final_hidden", "both"),
    ("mhc_streams_pre_attn", "both"),
    ("mhc_streams_pre_attn", "read"),
    ("mhc_streams_pre_attn", "carry"),
    ("mhc_streams_pre_mlp", "both"),
    ("mhc_streams_pre_mlp", "read"),
    ("mhc_streams_pre_mlp", "carry"),
    ("mhc_streams_final", "both"),
    ("mhc_streams_final", "read"),
    ("mhc_streams_final", "carry"),
]


@pytest.mark.parametrize("kind", ["add", "project", "clamp", "patch"])
@pytest.mark.parametrize(("hook", "path"), CASES)
def test_steered_logits_equal_transformers_with_the_same_edit(engine, oracle, sizes, hook, path, kind):
    m, d = sizes
    v = vector(m * d if hook.startswith("mhc") else d, seed=7)
    unit = v / v.norm()
    layers = {"hook": hook, "layers": [LAYER], "path": path}
    edit, change = {
        "add": (Add(v, scale=1.5, **layers), lambda x: x + 1.5 * v),
        "project": (Project(v, scale=0.7, **layers), lambda x: x - 0.7 * (x @ unit).unsqueeze(-1) * unit),
        "clamp": (
            Clamp(v, min=-0.2, max=0.1, **layers),
            lambda x: x + ((x @ unit).clamp(-0.2, 0.1) - x @ unit).unsqueeze(-1) * unit,
        ),
        "patch": (Patch(v, scale=0.5, **layers), lambda x: x + 0.5 * (v - x)),
    }[kind]
    plain = engine.logits(PROMPT)
    steered = engine.logits(PROMPT, steer=[edit])
    theirs = hook_oracle(oracle, hook, change, path).logits(PROMPT)
    assert (steered - theirs).abs().max() < 1e-4
    assert (steered - plain).abs().max() > 1e-2  # the edit has an effect


@pytest.mark.parametrize("phase", ["both", "prefill", "decode"])
@pytest.mark.parametrize(("hook", "path"), CASES)
def test_steered_outputs_equal_transformers_with_the_same_edit(engine, oracle, sizes, hook, path, phase):
    """The engine, with chunks, cache and decoding, against one forward pass over the whole text."""
    m, d = sizes
    v = vector(m * d if hook.startswith("mhc") else d, seed=3, norm=6.0)
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "logprobs": 20}
    out = engine.generate(PROMPT, steer=[Add(v, hook, [LAYER], path=path, phase=phase)], **options)
    ids = PROMPT + out.token_ids[:-1]
    generated = torch.arange(len(ids)) >= len(PROMPT)
    mask = {"both": torch.ones_like(generated), "prefill": ~generated, "decode": generated}[phase].float()
    change = lambda x: x + mask.view(-1, 1) * v  # noqa: E731
    theirs = hook_oracle(oracle, hook, change, path).logits(ids).log_softmax(-1)
    plain = hook_oracle(oracle, hook, lambda x: x, path).logits(ids).log_softmax(-1)
    moved = 0.0
    for step, logprob in enumerate(out.logprobs):
        row = theirs[len(PROMPT) - 1 + step]
        for token, value in logprob.top:
            assert abs(value - float(row[token])) <= 1e-4
            moved = max(moved, abs(value - float(plain[len(PROMPT) - 1 + step, token])))
    assert moved > 1e-3  # the edit has an effect


@pytest.mark.parametrize(
    "hook", ["mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final", "mlp_out", "pre_attn"]
)
def test_t_ste_1_a_zero_edit_changes_no_bit_and_a_stream_edit_touches_its_stream_alone(engine, sizes, hook):
    m, d = sizes
    width = m * d if hook.startswith("mhc") else d
    zero = Add(torch.zeros(width), hook=hook, layers=[LAYER])
    assert torch.equal(engine.logits(PROMPT), engine.logits(PROMPT, steer=[zero]))
    if hook.startswith("mhc") and hook != "mhc_streams_final":
        edit = Add(vector(d), hook=hook, layers=[LAYER], streams=[1])
        out = engine.generate(
            PROMPT, max_tokens=1, steer=[edit], capture=Capture({hook: [LAYER]}, capture_point="after")
        )
        plain = engine.generate(PROMPT, max_tokens=1, capture=Capture({hook: [LAYER]}))
        before, after = plain.acts[hook, LAYER].tensor, out.acts[hook, LAYER].tensor
        assert torch.equal(before[:, [0, 2, 3]], after[:, [0, 2, 3]])
        assert torch.allclose(after[:, 1] - before[:, 1], vector(d).expand(len(before), d), atol=1e-5)


def test_t_ste_7_paths(engine, sizes):
    """`carry` leaves u, p and R of the site unchanged bit for bit; `read` leaves the carried streams unchanged."""
    m, d = sizes
    v = vector(m * d)
    plain = engine.trace(PROMPT)
    edit = {"vector": v, "hook": "mhc_streams_pre_attn", "layers": [LAYER]}
    carry = engine.trace(PROMPT, steer=[Add(**edit, path="carry")])
    for hook in ("pre_attn", "mhc_attn_post_mix", "mhc_attn_res_mix", "mhc_attn_pre_mix"):
        assert torch.equal(carry[hook, LAYER], plain[hook, LAYER])
    assert not torch.equal(carry["mhc_streams_pre_mlp", LAYER], plain["mhc_streams_pre_mlp", LAYER])
    read = engine.trace(PROMPT, steer=[Add(**edit, path="read")])
    assert not torch.equal(read["pre_attn", LAYER], plain["pre_attn", LAYER])
    r, p, y, x = (
        read[name, LAYER]
        for name in ("mhc_attn_res_mix", "mhc_attn_post_mix", "post_attn", "mhc_streams_pre_attn")
    )
    # Rebuilt from the unedited streams.
    rebuilt = torch.einsum("njk,njd->nkd", r, x) + p.unsqueeze(-1) * y.unsqueeze(1)
    assert (rebuilt - read["mhc_streams_pre_mlp", LAYER]).abs().max() < 1e-4


def test_post_mix_equals_an_edit_of_the_sublayer_that_wrote_the_streams(engine, sizes):
    d = sizes[1]
    v = vector(d)
    at_output = engine.logits(PROMPT, steer=[Add(v, hook="mlp_out", layers=[LAYER - 1])])
    by_weight = engine.logits(
        PROMPT, steer=[Add(v, hook="mhc_streams_pre_attn", layers=[LAYER], streams="post_mix")]
    )
    assert (at_output - by_weight).abs().max() < 1e-4


def test_norm_match_scales_by_the_norm_of_each_row(engine, sizes):
    d = sizes[1]
    rows = engine.trace(PROMPT)["mlp_out", LAYER]
    spec = Capture({"mlp_out": [LAYER]}, capture_point="after")
    edit = Add(vector(d), hook="mlp_out", layers=[LAYER], scale=0.5, norm_match=True)
    after = engine.generate(PROMPT, max_tokens=1, steer=[edit], capture=spec).acts["mlp_out", LAYER].tensor
    expected = rows + 0.5 * rows.norm(dim=-1, keepdim=True) * vector(d) / vector(d).norm()
    assert (after - expected).abs().max() < 1e-4


def test_patches_and_factors_of_single_heads_equal_a_plain_pass(engine):
    """Mean ablation, patching and scaling of one head: the other heads keep their output."""
    hook, (heads, width) = "attn_head_out", engine.schema["attn_head_out"].logical_shape
    rows = engine.trace(PROMPT, hook)[hook, LAYER]
    mean, last = rows.mean(0), heads - 1

    def by_hand(change):
        def edit(site, layer, x):
            if (site.name, layer) != (hook, LAYER):
                return None
            new = x.clone()
            change(new)
            return new

        with torch.no_grad():
            return engine.model(torch.tensor([PROMPT]), tap=EagerTap(edit=edit))[0]

    def ablate(x):
        x[:, last] = mean[last]

    def half(x):
        x[:, 0] *= 0.5

    for edit, change in [
        (Patch(mean, hook, LAYER, heads=last), ablate),
        (Patch(mean[last], hook, LAYER, heads=[last]), ablate),
        (Patch(mean.expand(len(PROMPT), -1, -1), hook, LAYER, heads=last), ablate),
        (Scale(0.5, hook, LAYER, heads=0), half),
    ]:
        expected = by_hand(change)
        assert (engine.logits(PROMPT, [edit]) - expected).abs().max() < 1e-4
        assert (engine.logits(PROMPT) - expected).abs().max() > 1e-4
    wire = {"op": "scale", "at": {"hook": hook, "layers": [LAYER]}, "factor": 0.5, "heads": [0]}
    parsed = engine.edits_from_json({"interventions": [wire]})
    assert (
        parsed == [Scale(0.5, hook, [LAYER], heads=[0])] and Scale.from_json(parsed[0].to_json()) == parsed[0]
    )
    assert (engine.logits(PROMPT, parsed) - by_hand(half)).abs().max() < 1e-4
    for wrong, says in [
        (Scale(0.5, hook, LAYER, heads=heads), f"this model has heads 0..{last}"),
        (Scale(0.5, "mlp_out", LAYER, heads=0), "heads is for hooks that have the output of every head"),
        (Scale(0.5, "mhc_streams_pre_attn", LAYER, heads=0), "heads is for hooks that have"),
        (Patch(torch.ones(3), hook, LAYER, heads=0), f"{width} for each head"),
    ]:
        with pytest.raises(SteeringError, match=says):
            engine.logits(PROMPT, [wrong])
    with pytest.raises(SteeringError, match="heads is 'all', expected a list of numbers"):
        Patch(0, hook, LAYER, heads="all")


@pytest.mark.parametrize("streams", [None, 1, [0, 2]])
def test_norm_match_equals_a_plain_pass_with_the_change_written_out(engine, sizes, streams):
    """The same pass of the model with a function at the site: rows by row, and with streams stream by stream."""
    m, d = sizes
    v = vector(d if streams is not None else m * d)
    chosen = [streams] if isinstance(streams, int) else streams

    def by_hand(site, layer, x):
        if (site.name, layer) != ("mhc_streams_pre_mlp", LAYER):
            return None
        rows = x if chosen is not None else x.flatten(-2)
        added = 0.5 * rows.norm(dim=-1, keepdim=True) * v / v.norm()
        if chosen is None:
            return x + added.view(x.shape)
        mask = torch.zeros(m, 1)
        mask[chosen] = 1
        return x + added * mask

    with torch.no_grad():
        expected = engine.model(torch.tensor([PROMPT]), tap=EagerTap(edit=by_hand))[0]
    edit = Add(v, "mhc_streams_pre_mlp", LAYER, scale=0.5, streams=streams, norm_match=True)
    assert (engine.logits(PROMPT, [edit]) - expected).abs().max() < 1e-4
    assert (engine.logits(PROMPT) - expected).abs().max() > 1e-2


def test_t_ste_4_phase_and_where_select_the_right_tokens(engine, sizes):
    d = sizes[1]
    v, hook = vector(d), "mlp_out"
    spec = Capture({hook: [LAYER]}, positions="all", capture_point="after")

    def changed(**options):
        greedy = {
            "max_tokens": 6,
            "temperature": 0,
            "ignore_eos": True,
            "steer": [Add(v, hook, [LAYER], **options)],
        }
        out = engine.generate(PROMPT, capture=spec, **greedy)
        same = engine.generate(PROMPT, capture=Capture({hook: [LAYER]}, positions="all"), **greedy)
        moved = (out.acts[hook, LAYER].tensor - same.acts[hook, LAYER].tensor).abs().amax(-1) > 1e-3
        return [p for p, m in zip(out.acts[hook, LAYER].positions, moved.tolist()) if m]

    prompt, generated = list(range(len(PROMPT))), list(range(len(PROMPT), len(PROMPT) + 5))
    assert changed() == prompt + generated
    assert changed(phase="prefill") == prompt
    assert changed(phase="decode") == generated
    assert changed(where=[0, 5, -1]) == [0, 5, len(PROMPT) - 1]
    assert changed(where={"generated": {"window": [1, 3]}}) == generated[1:3]
    assert changed(where={"prompt": {"token_ids": [45, 50]}}) == [PROMPT.index(45), PROMPT.index(50)]


def test_t_ste_9_reported_positions_are_the_selected_ones(engine, sizes):
    """Also when the prompt is read in chunks and computed again after a preemption."""
    v = vector(sizes[1])
    long = [0] + [5 + n % 200 for n in range(600)]
    cases = [
        ({"phase": "decode"}, range(601, 605)),
        ({"where": [0, 599, -1]}, [0, 599, 600]),
        ({}, range(605)),
    ]
    for options, expected in cases:
        edit = Add(v, hook="mlp_out", layers=[0], **options)
        out = engine.generate(long, max_tokens=5, ignore_eos=True, steer=[edit])
        assert out.interp["steered_positions"] == list(expected) and out.interp["rows_steered"] == len(
            expected
        )
    assert "steered_positions" not in engine.generate(long, max_tokens=2).interp


def test_t_ste_3_sixteen_requests_with_sixteen_edits_equal_sixteen_single_runs(engine, sizes):
    m, d = sizes
    count = scaled(16, 8)
    hooks = ["mhc_streams_pre_attn", "mlp_out", "pre_attn", "mhc_streams_final", "post_attn"]
    steers, prompts = [], []
    for index in range(count):
        hook = hooks[index % len(hooks)]
        wide = hook.startswith("mhc")
        edit = Add(
            vector(m * d if wide else d, index), hook=hook, layers=[index % engine.config.num_hidden_layers]
        )
        steers.append(
            [edit] if index % 4 else [edit, Clamp(vector(d, index), hook="mlp_in", layers="all", max=0.0)]
        )
        prompts.append([0, *range(3 + index, 60 + 3 * index)])
    options = {"max_tokens": 6, "temperature": 1.0, "seed": 3, "logprobs": 1, "ignore_eos": True}
    together = engine.generate(prompts, steer=steers, **options)
    for prompt, steer, out in zip(prompts, steers, together):
        alone = engine.generate(prompt, steer=steer, **options)
        assert alone.token_ids == out.token_ids and alone.logprobs == out.logprobs  # bit for bit


def test_other_requests_of_a_batch_are_unchanged_by_a_steered_one(engine, sizes):
    options = {"max_tokens": 8, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    alone = engine.generate(PROMPT, **options)
    strong = [Add(vector(sizes[1], norm=50.0), hook="mlp_out", layers="all")]
    first, _, last = engine.generate([PROMPT] * 3, steer=[None, strong, None], **options)
    assert first.logprobs == last.logprobs == alone.logprobs


def test_streaming_and_generate_steer_alike(engine, sizes):
    """An edit has the same effect in `generate`, `stream` and `astream`."""
    edit = [Add(vector(sizes[1], norm=8.0), hook="mlp_out", layers="all")]
    options = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    whole = engine.generate(PROMPT, steer=edit, **options)
    assert whole.token_ids != engine.generate(PROMPT, **options).token_ids
    with engine.stream(PROMPT, steer=edit, **options) as stream:
        assert [event.token_id for event in stream] == whole.token_ids
    assert stream.output.interp["steered_positions"] == whole.interp["steered_positions"]

    async def read():
        return [event.token_id async for event in engine.astream(PROMPT, steer=edit, **options)]

    assert asyncio.run(read()) == whole.token_ids


def test_named_vectors_and_the_global_tier(engine, sizes):
    d = sizes[1]
    engine.modules["calm"] = vector(d)
    by_name = engine.logits(PROMPT, steer=[Add("calm", hook="mlp_out", layers=[1])])
    assert torch.equal(by_name, engine.logits(PROMPT, steer=[Add(vector(d), hook="mlp_out", layers=[1])]))
    with engine.steering(Add("calm", hook="mlp_out", layers=[1])):
        assert torch.equal(engine.logits(PROMPT), by_name)
        both = engine.logits(PROMPT, steer=[Add(vector(d), hook="mlp_out", layers=[1], scale=-1.0)])
        assert (both - engine.logits(PROMPT, steer=None)).abs().max() > 1e-3
    assert (both - engine.logits(PROMPT)).abs().max() < 1e-4  # plus and minus cancel
    del engine.modules["calm"]
    with pytest.raises(SteeringError, match="calm"):
        engine.logits(PROMPT, steer=[Add("calm", hook="mlp_out", layers=[1])])


BAD = [
    (lambda m, d: Add([float("nan")] * d, hook="mlp_out", layers=[0]), "finite"),
    (lambda m, d: Add([float("inf")] * d, hook="mlp_out", layers=[0]), "finite"),
    (lambda m, d: Add([1.0] * (d + 1), hook="mlp_out", layers=[0]), rf"{65}.*{64}"),
    (lambda m, d: Add([1.0] * (d + 1), hook="mhc_streams_pre_attn", layers=[0]), r"m\*d = 4\*64 = 256"),
    (lambda m, d: Add([1.0] * d, hook="mhc_streams_pre_attn", layers=[0]), "streams"),
    (lambda m, d: Clamp([0.0] * d, hook="mlp_out", layers=[0], max=0.0), "zero"),
    (lambda m, d: Clamp([1.0] * d, hook="mlp_out", layers=[0], min=1.0, max=0.0), "Swap"),
    (lambda m, d: Clamp([1.0] * d, hook="mlp_out", layers=[0]), "neither"),
    (lambda m, d: Add([1.0] * m, hook="mhc_attn_post_mix", layers=[0]), "takes clamp, patch, scale"),
    (lambda m, d: Add([1.0] * d, hook="post_mlp", layers=[0]), "mhc_streams_final"),
    (lambda m, d: Add([1.0] * d, hook="mlp_out", layers=[99]), "99"),
    (lambda m, d: Add([1.0] * d, hook="mlp_out"), "layers"),
    (lambda m, d: Add([1.0] * d, layers=[0]), "hook"),
    (lambda m, d: Add("nobody", hook="mlp_out", layers=[0]), "nobody"),
    (lambda m, d: Add([1.0] * d, hook="mlp_out", layers=[0], streams=[0]), "one stream"),
    (lambda m, d: Add([1.0] * d, hook="mhc_streams_pre_attn", layers=[0], streams=[9]), "0..3"),
    (lambda m, d: Add([1.0] * d, hook="mlp_out", layers=[0], phase="later"), "phase"),
    (lambda m, d: Add([1.0] * d, hook="mlp_out", layers=[0], path="sideways"), "path"),
    (lambda m, d: Add([1.0] * d, hook="mhc_streams_pre_attn", layers=[0], streams="post_mix"), "post_mix"),
    (lambda m, d: Add([[1.0]] * d, hook="mlp_out", layers=[0]), "shape"),
    (lambda m, d: "calm", "Add, Project"),
    (lambda m, d: Patch(PositionRows({99999: [1.0] * d}), hook="mlp_out", layers=[0]), "position 99999"),
    (lambda m, d: Patch(PositionRows({0: [1.0] * (d - 1)}), hook="mlp_out", layers=[0]), "63 numbers"),
    (lambda m, d: Patch(1.0, hook="mlp_out", layers=[0]), "one row"),
    (
        lambda m, d: Add(
            [1.0] * d, hook="mhc_streams_pre_attn", layers=[1], streams="post_mix", norm_match=True
        ),
        "one",
    ),
    (lambda m, d: Add([0.0] * d, hook="mlp_out", layers=[0], norm_match=True), "needs a direction"),
    (lambda m, d: Add([True] * d, hook="mlp_out", layers=[0]), "True"),
    (lambda m, d: Add(torch.ones(d, dtype=torch.complex64), hook="mlp_out", layers=[0]), "of numbers"),
    (lambda m, d: Add([1.0] * d, hook="mlp_out", layers=[0], where=[10**6]), "out of range"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_edits_are_refused_before_anything_runs(engine, sizes, make, words):
    with pytest.raises(BirkhoffError, match=words):
        engine.generate(PROMPT, max_tokens=2, steer=[make(*sizes)])
    assert engine._core.scheduler.idle and engine._steering.tables.rows_used == 0


def test_every_error_has_a_distinct_message_and_leaves_no_state(engine, sizes):
    messages = []
    for make, _ in BAD:
        with pytest.raises(BirkhoffError) as refused:
            engine.generate(PROMPT, max_tokens=2, steer=[make(*sizes)])
        messages.append(str(refused.value))
    assert len(set(messages)) == len(messages)
    assert len(engine.modules) == 0
    assert engine.generate(PROMPT, max_tokens=2, ignore_eos=True).finish_reason == "length"


def test_directions_at_one_site_are_counted_over_all_tiers(engine, sizes):
    d = sizes[1]
    clamps = [Clamp(vector(d, seed), hook="mlp_out", layers=[1], max=0.0) for seed in range(3)]
    options = {"max_tokens": 2, "ignore_eos": True}
    with engine.steering(*clamps):
        more = Project(vector(d, 8), hook="mlp_out", layers=[1], phase="prefill")
        assert engine.generate(PROMPT, steer=[more], **options).finish_reason == "length"  # four
        apart = Project(vector(d, 9), hook="mlp_out", layers=[1], phase="decode")
        four_per_phase = engine.generate(PROMPT, steer=[more, apart], **options)
        assert four_per_phase.finish_reason == "length"
        with pytest.raises(SteeringError, match=r"5 directions.*mlp_out\[1\] during prefill, at most 4"):
            engine.generate(PROMPT, steer=[more, more], **options)
    assert engine._steering.tables.rows_used == 0


def test_edits_are_plain_data(sizes):
    d = sizes[1]
    edit = Add(
        vector(d),
        hook="mlp_out",
        layers={"ranges": [[1, 2]]},
        scale=2.0,
        where={"generated": "all"},
        phase="decode",
    )
    assert Add.from_json(edit.to_json()) == edit and hash(Add.from_json(edit.to_json())) == hash(edit)
    assert edit != Add(vector(d, 1), hook="mlp_out", layers={"ranges": [[1, 2]]}, scale=2.0)
    with pytest.raises(SteeringError, match="strength"):
        Add.from_json({"op": "add", "vector": [1.0], "strength": 2})
    with pytest.raises(SteeringError, match="op"):
        Clamp.from_json(edit.to_json())
