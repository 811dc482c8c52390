"""Gated edits: equal to a forward pass whose tap applies the edit where a float64 probe fires, eager and recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import (
    Add,
    AttentionEdit,
    Capture,
    Clamp,
    Gate,
    Patch,
    Project,
    Sae,
    SaeReconstruct,
    SaeSet,
    Scale,
)
from birkhoff.errors import BirkhoffError
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.graph_tap import GraphTap, plan_graph
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.sites import MHC_STREAMS_PRE_ATTN, MLP_OUT, SITES, in_order
from birkhoff.hooks.tap import EagerTap
from birkhoff.steering.steering_fields import intervention, parse_steering
from tests.hooks.test_vector_table import Everywhere
from tests.hooks.test_vector_table import vector as random_vector
from tests.sizes import scaled
from tests.steering.test_mixers import near

LAYER = 2
PROMPT = [0, *range(40, 70)]


def vector(width, seed, norm=4.0):
    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v / v.norm() * norm


def scores(engine, hook, layer, direction, ids=PROMPT):
    rows = engine.trace(ids)[hook, layer].double().flatten(1)
    return rows @ (direction.double() / direction.double().norm())


def threshold(values):
    """Between two values in the middle, so that rounding does not decide."""
    ordered = values.sort().values
    middle = len(ordered) // 2
    return float(ordered[middle - 1 : middle + 1].mean())


def gated_pass(engine, ids, probe, fires, edited, change):
    """Log-probabilities of a whole forward pass with `change` of float64 rows where `fires` of the probe's rows."""
    open_rows = {}

    def seen(site, layer, x):
        if (site.name, layer) == probe:
            open_rows["now"] = fires(x.flatten(1).double())

    def edit(site, layer, x):
        if (site.name, layer) != edited:
            return None
        rows = x.flatten(1).double()
        new = torch.where(open_rows["now"].unsqueeze(-1), change(rows), rows)
        return new.view(x.shape).to(x.dtype)

    with torch.no_grad():
        return engine.model(torch.tensor(ids), EagerTap(seen, edit)).log_softmax(-1)


CHANGES = {
    "add": (lambda v, **at: Add(v, "mlp_out", [LAYER], **at), lambda x, v: x + v),
    "project": (
        lambda v, **at: Project(v, "mlp_out", [LAYER], **at),
        lambda x, v: x - (x @ (v / v.norm())).unsqueeze(-1) * v / v.norm(),
    ),
    "clamp": (
        lambda v, **at: Clamp(v, "mlp_out", [LAYER], max=-0.5, **at),
        lambda x, v: x + ((x @ (v / 4)).clamp(max=-0.5) - x @ (v / 4)).unsqueeze(-1) * v / 4,
    ),
    "patch": (lambda v, **at: Patch(v, "mlp_out", [LAYER], **at), lambda x, v: v.expand_as(x)),
    "scale": (lambda v, **at: Scale(0.0, "mlp_out", [LAYER], **at), lambda x, v: 0 * x),
    "norm_match": (
        lambda v, **at: Add(v, "mlp_out", [LAYER], norm_match=True, **at),
        lambda x, v: x + x.norm(dim=-1, keepdim=True) * v / 4,
    ),
}
PROBES = [("mlp_in", LAYER), ("mlp_out", LAYER), ("mhc_streams_pre_attn", 1), ("mhc_ffn_res_mix", 0)]
PROBES += [("moe_router_logits", 1)]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: f"{probe[0]}[{probe[1]}]")
@pytest.mark.parametrize("name", CHANGES)
def test_every_gated_edit_equals_a_float64_tap(engine, name, probe):
    make, change = CHANGES[name]
    v, direction = vector(engine.config.hidden_size, 1), vector(engine.schema[probe[0]].width, 2)
    bound = threshold(scores(engine, *probe, direction))
    unit = direction.double() / direction.double().norm()
    for side in ({"above": bound}, {"below": bound}):
        edit = make(v, when=Gate(direction, *probe, **side))
        out = engine.generate(PROMPT, steer=[edit], max_tokens=4, temperature=0, ignore_eos=True, logprobs=20)
        ids = PROMPT + out.token_ids[:-1]
        sign = 1 if "above" in side else -1

        def fires(x, sign=sign):
            return sign * (x @ unit) > sign * bound

        theirs = gated_pass(engine, ids, probe, fires, ("mlp_out", LAYER), lambda x: change(x, v.double()))
        for step, logprob in enumerate(out.logprobs):
            for token, value in logprob.top:
                assert abs(value - float(theirs[len(PROMPT) - 1 + step, token])) <= 1e-4


@pytest.mark.parametrize("probe", [("mlp_in", 1), ("attn_head_out", LAYER)])
def test_heads_are_taken_out_where_a_gate_is_open(engine, probe):
    heads, width = engine.schema["attn_head_out"].logical_shape
    direction = vector(engine.schema[probe[0]].width, 2)
    bound, unit = threshold(scores(engine, *probe, direction)), direction.double() / direction.double().norm()
    keep = torch.ones(heads, dtype=torch.float64)
    keep[[0, 2]] = 0
    edit = AttentionEdit([LAYER], heads=[0, 2], when=Gate(direction, *probe, above=bound))
    out = engine.generate(PROMPT, steer=[edit], max_tokens=4, temperature=0, ignore_eos=True, logprobs=20)
    assert out.interp["gates"] == [{"reads": f"{probe[0]}[{probe[1]}]", "above": bound}]
    theirs = gated_pass(
        engine,
        PROMPT + out.token_ids[:-1],
        probe,
        lambda x: x @ unit > bound,
        ("attn_head_out", LAYER),
        lambda x: x * keep.repeat_interleave(width),
    )
    for step, logprob in enumerate(out.logprobs):
        for token, value in logprob.top:
            assert abs(value - float(theirs[len(PROMPT) - 1 + step, token])) <= 1e-4


def test_attention_behind_a_gate_of_tokens(engine):
    """What a token attends to is decided by ids, so that it can be gated by tokens and not by a row."""
    chosen = [PROMPT[5], PROMPT[20]]
    for change in ({"mask": [0, 1]}, {"sink": 0.0}, {"heads": [1]}, {"heads": [1], "mask": [3]}):
        gated = AttentionEdit([1, LAYER], **change, when=Gate(tokens=chosen))
        assert AttentionEdit.from_json(gated.to_json()) == gated
        (wired,) = parse_steering({"interventions": [intervention(gated)]}, {})
        assert wired.edit == gated
        options = {"max_tokens": 1, "temperature": 0, "logprobs": 5}
        ours = engine.generate(PROMPT, steer=[gated], **options)
        at = engine.generate(PROMPT, steer=[AttentionEdit([1, LAYER], **change, where=[5, 20])], **options)
        plain = engine.generate(PROMPT, **options)
        assert ours.logprobs == at.logprobs != plain.logprobs
        assert ours.interp["steering_hash"] != at.interp["steering_hash"]
        assert ours.interp["gates"] == [{"tokens": 2}]
    reads = Gate(vector(engine.config.hidden_size, 2), "mlp_in", 1, above=0.0)
    with pytest.raises(BirkhoffError, match="gate by tokens"):
        engine.generate(PROMPT, steer=[AttentionEdit([LAYER], sink=0.0, when=reads)], max_tokens=1)
    with pytest.raises(BirkhoffError, match="computed after"):
        late = Gate(vector(engine.config.hidden_size, 2), "mlp_in", LAYER, above=0.0)
        engine.generate(PROMPT, steer=[AttentionEdit([LAYER], heads=[0], when=late)], max_tokens=1)


def test_a_gate_selects_some_tokens_and_says_what_it_reads(engine):
    direction = vector(engine.config.hidden_size, 2)
    bound = threshold(scores(engine, "mlp_in", 1, direction))
    edit = Scale(0.0, "mlp_out", [LAYER], when=Gate(direction, "mlp_in", 1, above=bound))
    rows = {
        point: engine.generate(
            PROMPT, steer=[edit], max_tokens=1, capture=Capture({"mlp_out": [LAYER]}, capture_point=point)
        )
        for point in ("before", "after")
    }
    after = rows["after"].acts["mlp_out", LAYER].tensor
    opened = (after == 0).all(-1)
    assert torch.equal(opened, scores(engine, "mlp_in", 1, direction) > bound) and 5 < opened.sum() < 26
    same = rows["before"].acts["mlp_out", LAYER].tensor
    assert torch.equal(after[~opened], same[~opened])  # bit for bit
    assert rows["after"].interp["gates"] == [{"reads": "mlp_in[1]", "above": bound}]


def test_closed_gates_change_no_bit_and_open_ones_equal_the_edit(engine):
    v, direction = vector(engine.config.hidden_size, 1), vector(engine.config.hidden_size, 2)
    plain = engine.logits(PROMPT)
    gate = {"hook": "mlp_in", "layer": 1}
    for edit in (Add(v, "mlp_out", "all"), Scale(0.5, "mhc_res_mix", [3], streams=[1], renormalise=True)):
        fields = {name: value for name, value in vars(edit).items() if name != "when"}
        late = {**fields, "layers": {"ranges": [[LAYER, -1]]}}
        closed = type(edit)(**late, when=Gate(direction, **gate, above=1e6))
        assert torch.equal(engine.logits(PROMPT, steer=[closed]), plain)
        opened = type(edit)(**late, when=Gate(direction, **gate, above=-1e6))
        assert (
            engine.logits(PROMPT, steer=[opened]) - engine.logits(PROMPT, steer=[type(edit)(**late)])
        ).abs().max() < 1e-4


def test_a_feature_gate_opens_where_the_dictionary_says(path):
    d = 64
    generator = torch.Generator().manual_seed(3)
    encoder, bias = torch.randn(6, d, generator=generator), torch.randn(6, generator=generator) * 0.1
    options = {
        "relu": {},
        "jumprelu": {"threshold": [0.4] * 6},
        "gated": {"scale": [1.5] * 6, "shift": [-0.3] * 6},
    }
    with birkhoff.load(path, kernels="reference") as engine:
        rows = engine.trace(PROMPT)["mlp_in", 1]
        for name, more in options.items():
            sae = Sae(
                encoder, bias, encoder, activation=name, hook="mlp_in", layer=1, labels={4: "four"}, **more
            )
            engine.attach(name, sae)
            features = sae.encode(rows)
            for feature in (2, "four"):
                f = features[:, 4 if feature == "four" else feature]
                bound = float(f[f > 0].median()) + 1e-4 if (f > 0).any() else 0.1
                edit = Scale(0.0, "mlp_out", [LAYER], when=Gate(module=name, feature=feature, above=bound))
                spec = Capture({"mlp_out": [LAYER]}, capture_point="after")
                out = engine.generate(PROMPT, steer=[edit], max_tokens=1, capture=spec)
                opened = (out.acts["mlp_out", LAYER].tensor == 0).all(-1)
                assert torch.equal(opened, f > bound), (name, feature)
        engine.attach("topk", Sae(encoder, bias, encoder, activation="topk", k=2, hook="mlp_in", layer=1))
        with pytest.raises(BirkhoffError, match="top-k"):
            engine.logits(
                PROMPT, steer=[Scale(0, "mlp_out", [3], when=Gate(module="topk", feature=1, above=0.1))]
            )


def test_token_gates(engine):
    edit = Scale(0.0, "mlp_out", [LAYER], when=Gate(tokens=[45, 50, 0]))
    out = engine.generate(PROMPT, steer=[edit], max_tokens=4, temperature=0, ignore_eos=True)
    ids = PROMPT + out.token_ids[:-1]
    assert out.interp["steered_positions"] == [p for p, token in enumerate(ids) if token in (45, 50, 0)]
    assert out.interp["gates"] == [{"tokens": 3}]
    other = engine.generate(
        PROMPT, steer=[Scale(0.0, "mlp_out", [LAYER], when=Gate(tokens=[45]))], max_tokens=1
    )
    assert other.interp["steering_hash"] != out.interp["steering_hash"]


def test_classes_of_tokens():
    with birkhoff.load("nano") as engine:
        text = "He was 3 years old. Then 27 dogs came!"
        for name, expected in {"digits": "327", "punctuation": ".!"}.items():
            edit = Scale(0.0, "mlp_out", [2], when=Gate(tokens=name))
            out = engine.generate(text, steer=[edit], max_tokens=1)
            ids = out.prompt_token_ids
            chosen = [engine.tokenizer.decode([ids[p]]).strip() for p in out.interp["steered_positions"]]
            assert "".join(chosen) == expected


def test_alone_equals_batched(path):
    directions = [vector(64, seed) for seed in range(4)]
    steers = [
        [Add(vector(64, 9), "mlp_out", [3, 4], when=Gate(directions[0], "mlp_in", 1, above=0.0))],
        None,
        [
            Scale(0.0, "mlp_out", [3], when=Gate(directions[1], "mlp_in", 1, below=0.0)),
            Add(vector(64, 8), "mlp_out", [3], when=Gate(directions[2], "mlp_in", 1, above=0.0)),
        ],
        [Add(vector(64, 7), "mlp_out", [3]), Scale(0, "mlp_out", [4], when=Gate(tokens=[5, 6]))],
    ]
    prompts = [[0, *range(3 + index, 30 + 2 * index)] for index in range(len(steers))]
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "logprobs": 1, "ignore_eos": True}
    with birkhoff.load(path, batch_invariant=True) as engine:
        together = engine.generate(prompts, steer=steers, **options)
        for prompt, steer, out in zip(prompts, steers, together):
            alone = engine.generate(prompt, steer=steer, **options)
            assert alone.token_ids == out.token_ids and alone.logprobs == out.logprobs


def test_any_chunking_equals_the_whole_and_prompts_are_cached_by_gate(path, engine):
    text = [0] + [5 + n % 200 for n in range(100)]
    direction = vector(64, 2)
    bound = threshold(scores(engine, "mlp_in", 1, direction, text))
    options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 5}

    def steered(engine, bound):
        edit = Add(vector(64, 1), "mlp_out", [LAYER], when=Gate(direction, "mlp_in", 1, above=bound))
        return engine.generate(text, steer=[edit], **options)

    chunked, again, other = steered(engine, bound), steered(engine, bound), steered(engine, bound + 1.0)
    with birkhoff.load(path, kernels="reference") as whole_engine:
        whole = steered(whole_engine, bound)
    assert near(chunked, whole) and near(chunked, again) and not near(chunked, other)
    assert chunked.interp["steering_hash"] == again.interp["steering_hash"] != other.interp["steering_hash"]


V = [1.0] * 64
REFUSED = [
    (lambda: Gate(), "reads nothing"),
    (lambda: Gate(V, tokens=[1], above=0), "vector and tokens"),
    (lambda: Gate(V, "mlp_in", 1), "no threshold"),
    (lambda: Gate(tokens=[1], above=1.0), "has no above"),
    (lambda: Gate(tokens="vowels"), "digits"),
    (lambda: Gate(tokens=[-1]), "token ids"),
    (lambda: Gate(feature=3, above=1.0), "attached dictionary"),
    (lambda: Gate(module="nobody", feature=3, above=1.0), "nobody"),
    (lambda: Gate("nobody", "mlp_in", 1, above=0), "nobody"),
    (lambda: Gate(V, "mlp_in", above=0), "no layer"),
    (lambda: Gate([1.0] * 3, "mlp_in", 1, above=0), "3 numbers"),
    (lambda: Gate([0.0] * 64, "mlp_in", 1, above=0), "is zero"),
    (lambda: Gate(V, "mlp_in", 1, above=0, stream=2), "one stream"),
    (lambda: Gate(V, "mhc_streams_pre_attn", 1, above=0, stream=9), "0..3"),
    (lambda: Gate(V, "mlp_out", 3, above=0), "computed after"),
    (lambda: Gate(V, "final_hidden", 0, above=0), "computed after"),
    (lambda: Gate([1.0] * 4, "moe_topk", 1, above=0), "no component"),
    (lambda: Gate(V, "nowhere", 1, above=0), "not a hook"),
    (lambda: {"vector": "spooky", "above": 1}, "expected '@'"),
    (lambda: {"vectors": "@spooky", "above": 1}, "no field of a gate"),
    (lambda: "spooky", "expected a Gate"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_with_a_reason(engine, make, words):
    with pytest.raises(BirkhoffError, match=words):
        engine.generate(PROMPT, max_tokens=1, steer=[Scale(0.0, "mlp_out", [LAYER], when=make())])


@pytest.mark.parametrize(
    "gate",
    [
        Gate("spooky", above=1.5),
        Gate([1.0, 2.0], "mlp_in", 3, above=-1.0, below=2.0),
        Gate(V, "mhc_streams_pre_attn", 3, below=0.0, stream=1),
        Gate(module="gg", feature="bridge", above=0.5),
        Gate(tokens=[5, 3]),
        Gate(tokens="digits"),
    ],
    ids=lambda gate: str(gate.to_json())[:30],
)
def test_python_and_wire_make_the_same_edit(gate):
    edit = Add("sea", scale=2.0, when=gate)
    assert Gate.parse(gate.to_json()) == gate and Add.from_json(edit.to_json()) == edit
    (wired,) = parse_steering({"interventions": [intervention(edit)]}, {})
    assert wired.edit == edit


def test_every_site_has_a_place_in_the_forward_pass(engine):
    order = []

    def seen(site, layer, x):
        order.append((site.name, layer))

    with torch.no_grad():
        engine.model(torch.tensor(PROMPT), EagerTap(seen))
    assert order == sorted(order, key=in_order)
    assert all(in_order((site.name, 0)) for site in SITES)


D, M, ROWS = 12, 4, 8
EDITS = {
    "add": SiteEdit("add", random_vector(D, 1), 0.7),
    "patch": SiteEdit("patch", random_vector(D, 2), 0.5),
    "clamp": SiteEdit("clamp", random_vector(D, 3) / random_vector(D, 3).norm(), low=0.3),
    "norm_match": SiteEdit("add", random_vector(D, 4), 0.2, norm_match=True),
}


@st.composite
def gated_edits(draw):
    edit = EDITS[draw(st.sampled_from(sorted(EDITS)))]
    hook = draw(st.sampled_from(["mhc_streams_pre_attn", "mlp_out", None]))
    if hook is None:
        return edit
    width = M * D if hook.startswith("mhc") else D
    direction = random_vector(width, draw(st.integers(0, 3)))
    low = draw(st.sampled_from([-torch.inf, -0.5, 0.0, 1.0]))
    return replace(
        edit, gate=SiteGate((hook, 1), direction, 0.1, low, draw(st.sampled_from([0.8, torch.inf])))
    )


@settings(max_examples=scaled(200, 50), deadline=None)
@given(
    st.lists(st.lists(gated_edits(), max_size=3), min_size=1, max_size=4),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_rows_alone_in_a_batch_and_recorded_have_equal_bits(requests, dtype):
    dtype = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(ROWS, M, D, generator=generator).to(dtype)
    y = torch.randn(ROWS, D, generator=generator).to(dtype)

    def tap_of(specs):
        plans = [Plan(edits=tuple(Everywhere({("mlp_out", 1): edit}) for edit in edits)) for edits in specs]
        return arm(StepStaging(), [Span(plan, row, 9, [5], 4) for row, plan in enumerate(plans)], len(specs))

    def run(tap, rows):
        tap.at(1).part(MHC_STREAMS_PRE_ATTN, streams[rows])
        return tap.at(1)(MLP_OUT, y[rows])

    count, tap = len(requests), tap_of(requests)
    if tap is None:
        return
    plan = plan_graph(tap, {"mlp_out": D, "mhc_streams_pre_attn": M * D})
    graph = GraphTap(plan, tap.edits, ROWS, torch.device("cpu"))
    graph.fill(tap, plan)
    batched, recorded = run(tap, slice(0, count)), run(graph, slice(0, ROWS))
    assert torch.equal(recorded[:count], batched) and torch.equal(recorded[count:], y[count:])
    for row, edits in enumerate(requests):
        alone = tap_of([edits])
        expected = y[row : row + 1] if alone is None else run(alone, slice(row, row + 1))
        assert torch.equal(expected, batched[row : row + 1])


def test_gates_choose_the_tokens_of_feature_edits(engine):
    d = engine.config.hidden_size
    weights = torch.randn(2, 12, d, generator=torch.Generator().manual_seed(5)) / d**0.5
    sae = Sae(weights[0], torch.zeros(12), weights[1], torch.zeros(d), hook="mlp_out", layer=LAYER)
    direction = vector(d, 7)
    bound = threshold(scores(engine, "mlp_in", LAYER, direction))
    where = [i for i, s in enumerate(scores(engine, "mlp_in", LAYER, direction)) if s > bound]
    gates = [(Gate(direction, "mlp_in", LAYER, above=bound), where), (Gate(tokens=PROMPT[4:9]), range(4, 9))]
    for kind, make in (
        ("delta", lambda **at: SaeSet("s", {3: 5.0}, **at)),
        ("full", lambda **at: SaeReconstruct("s", **at)),
    ):
        with engine.attach("s", sae, kind):
            whole = engine.logits(PROMPT, [make()])
            for gate, chosen in gates:
                edit = make(when=gate)
                gated = engine.logits(PROMPT, [edit])
                assert torch.equal(gated, engine.logits(PROMPT, [make(where=list(chosen))]))
                assert not torch.equal(gated, whole)
                assert (
                    engine.edits_from_json({"interventions": [edit.to_json()]})[0].to_json() == edit.to_json()
                )
            twice = [make(when=gates[0][0]), make(when=gates[0][0])]
            with pytest.raises(BirkhoffError, match="two edits of 's' have a gate"):
                engine.logits(PROMPT, twice)
