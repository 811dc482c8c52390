"""Router edits: equal to `transformers` whose router returns what a plain float64 definition says; the same alone and
in a batch, in chunks and whole, eager and recorded; hash-routed layers too."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import birkhoff
from birkhoff import Capture, ExpertSet, Gate
from birkhoff.errors import BirkhoffError, SteeringSyntax
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import Routing
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.graph_tap import GraphTap, plan_graph
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.routing import ExpertUse, RouterHost
from birkhoff.hooks.sites import MLP_IN, MOE_TOPK
from birkhoff.steering.edit_syntax import parse_line, print_line
from birkhoff.steering.steering_fields import intervention, parse_steering
from tests.hooks.test_vector_table import Everywhere
from tests.sizes import scaled
from tests.steering.hooked import Hooked
from tests.steering.test_mixers import near

PROMPT = [0, *range(40, 60)]
HASHED, SCORED = 1, 4  # layers


def route(logits, bias, table, factor, k, edits):
    """The experts of one token and their weights, by the definition, in Python floats. `table`: experts by hash."""
    add, force, ban, weights = {}, set(), set(), {}
    for edit in edits:
        for expert, number in edit.add:
            add[expert] = add.get(expert, 0.0) + number
        force, ban = (force - set(edit.ban)) | set(edit.force), (ban - set(edit.force)) | set(edit.ban)
        weights |= dict(edit.weights)
    scores = [max(math.sqrt(math.log1p(math.exp(z))) + add.get(e, 0.0), 0.0) for e, z in enumerate(logits)]

    def rank(expert):
        group = 2 if expert in force else -1 if expert in ban else 1 if table and expert in table else 0
        return -group, -(scores[expert] + (0.0 if table else bias[expert])), expert

    chosen = sorted(range(len(scores)), key=rank)[:k]
    total = sum(scores[expert] for expert in chosen)
    return [(e, weights.get(e, scores[e] / total * factor if total else 0.0)) for e in chosen]


def hooked(oracle, edits, layer, chosen=lambda position: True):
    gate = oracle.model.layers[layer].mlp.gate
    h = Hooked(oracle)

    def after(_, args, out):
        logits, weights, ids = (part.clone() for part in out)
        for row in range(len(logits)):
            if chosen(row):
                table = ids[row].tolist() if hasattr(gate, "tid2eid") else None
                bias = None if table else gate.e_score_correction_bias.double().tolist()
                given = logits[row].double().tolist()
                new = route(given, bias, table, gate.routed_scaling_factor, gate.top_k, edits)
                ids[row] = torch.tensor([expert for expert, _ in new])
                weights[row] = torch.tensor([weight for _, weight in new])
        return logits, weights, ids

    h.handles.append(gate.register_forward_hook(after))
    return h


CASES = {
    "force": [{"force": [3]}],
    "force two": [{"force": [0, 6]}],
    "ban": [{"ban": [0, 1, 2, 5]}],
    "add": [{"add": {1: 0.5, 4: -2.0, 7: 0.25}}],
    "weights": [{"weights": {0: 2.0, 1: 0.0, 2: -1.0}}],
    "force with a weight": [{"force": [3], "ban": [1], "weights": {3: 1.5}, "add": {2: 1.0}}],
    "two edits": [{"force": [3], "add": {1: 0.3}}, {"ban": [3], "add": {1: 0.3}, "weights": {1: 0.7}}],
}


@pytest.mark.parametrize("layer", [HASHED, SCORED], ids=["hashed", "scored"])
@pytest.mark.parametrize("name", CASES)
def test_every_edit_equals_transformers_with_an_edited_router(engine, oracle, name, layer):
    edits = [ExpertSet([layer], **fields) for fields in CASES[name]]
    steered = engine.logits(PROMPT, steer=edits)
    assert (steered - hooked(oracle, edits, layer).logits(PROMPT)).abs().max() <= 1e-4
    assert (steered - engine.logits(PROMPT)).abs().max() > 1e-3  # the edit has an effect


@pytest.mark.parametrize("layer", [HASHED, SCORED], ids=["hashed", "scored"])
@pytest.mark.parametrize(
    "options", [{"phase": "prefill"}, {"phase": "decode"}, {"where": [3, 7, -1]}], ids=str
)
def test_positions_and_phases_equal_transformers(engine, oracle, layer, options):
    edits = [ExpertSet([layer], force=[3], weights={3: 1.2}, **options)]
    out = engine.generate(PROMPT, steer=edits, max_tokens=4, temperature=0, ignore_eos=True, logprobs=20)
    ids, prompt = PROMPT + out.token_ids[:-1], len(PROMPT)
    selected = {
        "prefill": lambda p: p < prompt,
        "decode": lambda p: p >= prompt,
        "where": lambda p: p in (3, 7, prompt - 1),
    }[options.get("phase", "where")]
    theirs = hooked(oracle, edits, layer, selected).logits(ids).log_softmax(-1)
    for step, logprob in enumerate(out.logprobs):
        for token, value in logprob.top:
            assert abs(value - float(theirs[prompt - 1 + step, token])) <= 1e-4
    assert out.interp["steered_positions"] == [p for p in range(len(ids)) if selected(p)]


def test_chosen_experts_are_captured_before_and_after(engine):
    edits = [ExpertSet([HASHED, SCORED], force=[3], ban=[0], weights={3: 0.4})]
    hooks = {"moe_topk": [HASHED, SCORED], "moe_router_logits": [SCORED]}
    before = engine.generate(PROMPT, steer=edits, max_tokens=1, capture=Capture(hooks))
    after = engine.generate(PROMPT, steer=edits, max_tokens=1, capture=Capture(hooks, capture_point="after"))
    plain = engine.generate(PROMPT, max_tokens=1, capture=Capture(hooks))
    assert torch.equal(before.acts["moe_topk", HASHED].tensor, plain.acts["moe_topk", HASHED].tensor)
    for layer in (HASHED, SCORED):
        rows = after.acts["moe_topk", layer].tensor
        assert (rows[..., 0] == 3).any(-1).all() and not (rows[..., 0] == 0).any()
        assert (rows[..., 1][rows[..., 0] == 3] == torch.tensor(0.4)).all()
    assert after.interp["experts"] == [
        {"force": [3], "ban": [0], "weights": {"3": 0.4}, "layers": [HASHED, SCORED]}
    ]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_an_edit_without_effect_changes_no_bit(path, kernels):
    with birkhoff.load(path, kernels=kernels) as engine:
        plain = engine.logits(PROMPT)
        assert torch.equal(engine.logits(PROMPT, steer=[ExpertSet("all", add={2: 0.0})]), plain)
        assert torch.equal(engine.logits(PROMPT, steer=[ExpertSet("all", ban=[1], phase="decode")]), plain)
        only = engine.logits(PROMPT, steer=[ExpertSet("all", ban=[1], where=[len(PROMPT) - 1])])
        assert torch.allclose(only[:-1], plain[:-1], atol=1e-4) and not torch.allclose(only[-1], plain[-1])


def test_alone_equals_batched(path):
    steers = [
        [ExpertSet("all", force=[3])],
        None,
        [ExpertSet([HASHED], ban=[1, 2], phase="decode")],
        [ExpertSet([SCORED], add={5: 0.4}), ExpertSet([SCORED], weights={5: 1.0})],
        [ExpertSet([0, 5], force=[7, 6], weights={7: 0.1})],
    ]
    prompts = [[0, *range(3 + index, 30 + 2 * index)] for index in range(len(steers))]
    options = {"max_tokens": 5, "temperature": 1.0, "seed": 3, "logprobs": 1, "ignore_eos": True}
    with birkhoff.load(path, batch_invariant=True) as engine:
        together = engine.generate(prompts, steer=steers, **options)
        for prompt, steer, out in zip(prompts, steers, together):
            alone = engine.generate(prompt, steer=steer, **options)
            assert alone.token_ids == out.token_ids and alone.logprobs == out.logprobs


def test_any_chunking_equals_the_whole_and_prompts_are_cached_by_edit(path, engine):
    text = [0] + [5 + n % 200 for n in range(200)]
    edits = [ExpertSet([HASHED, SCORED], force=[2], where={"prompt": {"window": [10, 150]}})]
    options = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    plain = engine.generate(text, **options)
    chunked, again = (engine.generate(text, steer=edits, **options) for _ in range(2))  # 24 tokens a step
    with birkhoff.load(path, kernels="reference") as whole_engine:
        whole = whole_engine.generate(text, steer=edits, **options)
    assert near(chunked, whole) and near(chunked, again) and not near(chunked, plain)
    assert near(engine.generate(text, **options), plain)
    other = engine.generate(PROMPT, steer=[ExpertSet([HASHED, SCORED], force=[3])], max_tokens=1)
    assert other.interp["steering_hash"] != chunked.interp["steering_hash"] == again.interp["steering_hash"]


def test_the_global_tier_is_merged_with_the_edits_of_a_request(engine):
    with engine.steering(ExpertSet([SCORED], force=[3], add={1: 0.2})):
        both = engine.logits(PROMPT, steer=[ExpertSet([SCORED], ban=[3], add={1: 0.2})])
    assert torch.equal(both, engine.logits(PROMPT, steer=[ExpertSet([SCORED], ban=[3], add={1: 0.4})]))


REFUSED = [
    (lambda: ExpertSet([0]), "changes nothing"),
    (lambda: ExpertSet(force=[1]), "no layers"),
    (lambda: ExpertSet([0], force=[1], ban=[1]), "forced and banned"),
    (lambda: ExpertSet([0], force=[99]), "experts 0..7"),
    (lambda: ExpertSet([0], force=[0, 1, 2]), "a token gets 2"),
    (lambda: ExpertSet([0], ban=list(range(7))), "a token needs 2"),
    (lambda: ExpertSet([0], force=3), "list of experts"),
    (lambda: ExpertSet([0], force=[True]), "number of an expert"),
    (lambda: ExpertSet([0], add={0: float("nan")}), "finite"),
    (lambda: ExpertSet([0], add=[1.0]), "by expert"),
    (lambda: ExpertSet([0], weights={"x": 1.0}), "number of an expert"),
    (lambda: ExpertSet([0], force=[1], phase="later"), "phase"),
    (lambda: ExpertSet([77], force=[1]), "77"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_makes_no_sense_is_refused_with_a_reason(engine, make, words):
    with pytest.raises(BirkhoffError, match=words):
        engine.generate(PROMPT, max_tokens=1, steer=[make()])


@pytest.mark.parametrize(
    ("line", "edit"),
    [
        ("@ moe_topk[2..4] op=force expert=3,5", ExpertSet({"ranges": [[2, 4]]}, force=[3, 5])),
        ("@ moe_topk[*] op=ban expert=0 phase=decode", ExpertSet("all", ban=[0], phase="decode")),
        ("+0.5 @ moe_topk[4] expert=3", ExpertSet([4], add={3: 0.5})),
        ("0.25 @ moe_topk[4] op=weight expert=3", ExpertSet([4], weights={3: 0.25})),
    ],
)
def test_python_wire_and_line_make_the_same_edit(line, edit):
    assert parse_line(line) == [edit] == parse_line(print_line([edit]))
    (wired,) = parse_steering({"interventions": [intervention(edit)]}, {})
    assert wired.edit == edit == ExpertSet.from_json(edit.to_json())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("@ mlp_out[2] op=force expert=3", "moe_topk"),
        ("2.0 @ moe_topk[2] op=ban expert=3", "no strength"),
        ("happy @ moe_topk[2] op=ban expert=3", "which have none"),
        ("@ moe_topk[2] op=force", "which experts"),
        ("@ moe_topk[2] op=clamp expert=3", "for op=add"),
        ("@ moe_topk[2] op=force expert=3 stream=1", "has no stream"),
    ],
)
def test_lines_name_what_is_wrong(line, words):
    with pytest.raises(SteeringSyntax, match=words):
        parse_line(line)


E, K, ROWS = 8, 3, 8
numbers = st.tuples(
    st.lists(st.sampled_from([0.0, 0.5, -1.0, 3.0]), min_size=E, max_size=E),
    st.lists(st.sampled_from([0.0, 0.0, 0.0, 1.0, -1.0]), min_size=E, max_size=E),
    st.lists(st.sampled_from([math.nan, 0.3]), min_size=E, max_size=E),
)


@settings(max_examples=scaled(200, 40), deadline=None)
@given(st.lists(st.lists(numbers, max_size=2), min_size=1, max_size=4), st.booleans())
def test_rows_alone_in_a_batch_and_recorded_have_equal_bits(requests, hashed):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, E, generator=generator)
    tokens = torch.arange(ROWS)
    table = torch.rand(ROWS, E, generator=generator).argsort(-1)[:, :K].int() if hashed else None
    bias = None if hashed else torch.randn(E, generator=generator)
    ids = (table.long() if hashed else logits.argsort(-1)[:, :K]).contiguous()
    weights = torch.rand(ROWS, K, generator=generator)
    host = RouterHost(E, K)

    def tap_of(specs):
        plans = []
        for uses in specs:
            rows = [torch.tensor(use) for use in uses]
            edits = tuple(Everywhere({("moe_topk", 1): ExpertUse(row, host)}) for row in rows)
            plans.append(Plan(edits=edits))
        return arm(StepStaging(), [Span(plan, row, 9, [5], 4) for row, plan in enumerate(plans)], len(specs))

    def run(tap, first, count):
        rows = slice(first, first + count)
        routing = Routing(logits[rows], bias, table, tokens[rows], 1.5)
        return tap.at(1).route(MOE_TOPK, ids[rows], weights[rows], routing)

    count = len(requests)
    tap = tap_of(requests)
    if tap is None:
        return
    batched = run(tap, 0, count)
    plan = plan_graph(tap, {"moe_topk": 2 * K})
    graph = GraphTap(plan, tap.edits, ROWS, torch.device("cpu"))
    graph.fill(tap, plan)
    recorded = run(graph, 0, ROWS)
    for new, eager, old in zip(recorded, batched, (ids, weights)):
        assert torch.equal(new[:count], eager) and torch.equal(new[count:], old[count:])
    for row, uses in enumerate(requests):
        alone = tap_of([uses])
        if alone is None:
            assert torch.equal(batched[0][row], ids[row]) and torch.equal(batched[1][row], weights[row])
            continue
        for one, other in zip(run(alone, row, 1), batched):
            assert torch.equal(one[0], other[row])
        assert len(set(batched[0][row].tolist())) == K


@settings(max_examples=scaled(100, 25), deadline=None)
@given(st.lists(st.tuples(st.lists(numbers, max_size=1), numbers, st.booleans()), min_size=1, max_size=4))
def test_a_gated_edit_is_that_edit_where_its_probe_fires_eager_and_recorded(requests):
    """Each request has at most one plain edit, and one that may be gated by a probe of `mlp_in`."""
    generator = torch.Generator().manual_seed(2)
    x, logits = torch.randn(ROWS, 8, generator=generator), torch.randn(ROWS, E, generator=generator)
    ids, weights = logits.argsort(-1)[:, :K].contiguous(), torch.rand(ROWS, K, generator=generator)
    host, direction = RouterHost(E, K), torch.randn(8, generator=generator)
    gate = SiteGate(("mlp_in", 1), direction, low=0.0)
    fires = (x.double() @ direction.double() > 0).tolist()

    def run(specs, gates, recorded=False):
        plans = []
        for (plain, other, _), own in zip(specs, gates):  # own: a gate, None, or False for no such edit
            uses = [ExpertUse(torch.tensor(row), host) for row in plain]
            if own is not False:
                uses.append(ExpertUse(torch.tensor(other), host, gate=own))
            plans.append(Plan(edits=tuple(Everywhere({("moe_topk", 1): use}) for use in uses)))
        tap = arm(StepStaging(), [Span(plan, row, 9, [5], 4) for row, plan in enumerate(plans)], len(specs))
        if tap is None:
            return ids, weights
        count = ROWS if recorded else len(specs)
        if recorded:
            plan = plan_graph(tap, {"moe_topk": 2 * K, "mlp_in": 8})
            eager, tap = tap, GraphTap(plan, tap.edits, ROWS, torch.device("cpu"))
            tap.fill(eager, plan)
        tap.at(1)(MLP_IN, x[:count])
        routing = Routing(logits[:count], None, None, torch.arange(count), 1.5)
        return tap.at(1).route(MOE_TOPK, ids[:count], weights[:count], routing)

    gates = [gate if gated else None for _, _, gated in requests]
    applied = [None if own is None or fires[row] else False for row, own in enumerate(gates)]
    expected = run(requests, applied)
    for recorded in (False, True):
        for new, true in zip(run(requests, gates, recorded), expected):
            assert torch.equal(new[: len(requests)], true[: len(requests)])


def test_gates_choose_the_tokens_of_an_expert_set(engine):
    plain = {"force": [0, 3], "weights": {3: 1.0}}
    direction = torch.randn(engine.config.hidden_size, generator=torch.Generator().manual_seed(3))
    scores = engine.trace(PROMPT, hooks=["mlp_in"])["mlp_in", SCORED].double() @ direction.double()
    scores = scores / direction.double().norm()
    bound = float(scores.sort().values[10:12].mean())
    cases = [
        (Gate(direction, "mlp_in", SCORED, above=bound), [i for i, s in enumerate(scores) if s > bound]),
        (Gate(tokens=PROMPT[3:6]), [3, 4, 5]),
    ]
    for gate, where in cases:
        gated = engine.logits(PROMPT, [ExpertSet([SCORED], **plain, when=gate)])
        assert torch.equal(gated, engine.logits(PROMPT, [ExpertSet([SCORED], **plain, where=where)]))
        assert not torch.equal(gated, engine.logits(PROMPT, [ExpertSet([SCORED], **plain)]))
        edit = ExpertSet([SCORED], **plain, when=gate)
        assert engine.edits_from_json({"interventions": [intervention(edit)]})[0].to_json() == edit.to_json()
    with pytest.raises(BirkhoffError, match="two edits of the router of layer 4 have a gate"):
        engine.logits(PROMPT, [ExpertSet([SCORED], force=[e], when=cases[0][0]) for e in (1, 2)])
    with pytest.raises(BirkhoffError, match="computed after"):
        engine.logits(PROMPT, [ExpertSet([1], force=[1], when=cases[0][0])])
