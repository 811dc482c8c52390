"""Python functions as edits: equal to the edits that are data, kept to their own request, and differentiable."""

from __future__ import annotations

import pytest
import torch

import birkhoff
from birkhoff import Add, Call, Clamp, Patch
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, SteeringError
from birkhoff.planning.request_planner import cache_salt
from tests.oracle import build_oracle
from tests.steering.hooked import LAYER, hook_oracle

PROMPT = [0, *range(40, 80)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, kernels="reference") as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(engine):
    return build_oracle(engine.model)


def greedy(engine, prompts, **options):
    return engine.generate(prompts, max_tokens=6, temperature=0, ignore_eos=True, **options)


@pytest.mark.parametrize(
    ("hook", "path"),
    [
        ("post_attn", "both"),
        ("mlp_out", "both"),
        ("final_hidden", "both"),
        ("mhc_streams_pre_attn", "both"),
        ("mhc_streams_pre_attn", "read"),
        ("mhc_streams_pre_mlp", "carry"),
    ],
)
def test_it_is_the_same_function_in_transformers(engine, oracle, hook, path):
    """An edit that no other kind can express: tanh of every number, and rows in reversed order."""
    layer = engine.config.num_hidden_layers - 1 if hook == "final_hidden" else LAYER
    ours = engine.logits(PROMPT, [Call(lambda rows: rows.tanh().flip(0), hook, [layer], path=path)])
    theirs = hook_oracle(oracle, hook, lambda x: x.tanh().flip(-2), path, layer).logits(PROMPT)
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - engine.logits(PROMPT)).abs().max() > 1e-2


def test_a_function_of_a_mixer_equals_a_patch(engine):
    hook, identity = "mhc_ffn_res_mix", torch.eye(4)
    ours = engine.logits(
        PROMPT, [Call(lambda rows: identity.expand(len(rows), 4, 4).reshape(rows.shape), hook, [2])]
    )
    assert torch.equal(ours, engine.logits(PROMPT, [Patch("identity", hook, [2])]))
    assert not torch.equal(ours, engine.logits(PROMPT))


def test_it_equals_edits_that_are_data(engine):
    d = engine.config.hidden_size
    v = torch.randn(d, generator=torch.Generator().manual_seed(1))
    pairs = [
        (
            Add(v, "mlp_out", [2, 3], where=[0, 5]),
            Call(lambda rows: rows + v, "mlp_out", [2, 3], where=[0, 5]),
        ),
        (Patch(0, "post_attn", "all"), Call(torch.zeros_like, "post_attn", "all")),
        (
            Patch(0, "mhc_streams_pre_mlp", [1], streams=[2]),
            Call(_without_stream_2, "mhc_streams_pre_mlp", [1]),
        ),
    ]
    for data, function in pairs:
        assert torch.equal(engine.logits(PROMPT, [data]), engine.logits(PROMPT, [function]))
        expected, actual = (greedy(engine, PROMPT, steer=[edit]) for edit in (data, function))
        assert expected.token_ids == actual.token_ids
        assert expected.interp["steered_positions"] == actual.interp["steered_positions"]


def _without_stream_2(rows):
    rows = rows.clone()
    rows[:, 2] = 0
    return rows


def test_it_is_told_where_it_is(engine):
    calls = []
    edit = Call(
        lambda rows, site: calls.append((site, tuple(rows.shape))), "mlp_out", [-1], where="all_prompt"
    )
    engine.trace(PROMPT, hooks="mlp_out", steer=[edit])
    (site, shape), last = calls[0], engine.config.num_hidden_layers - 1
    assert (site.hook, site.layer, site.positions) == ("mlp_out", last, tuple(range(len(PROMPT))))
    assert shape == (len(PROMPT), engine.config.hidden_size) and len(calls) == 1
    calls.clear()
    decoded = Call(lambda rows, site: calls.append((site, None)), "mlp_out", [0], phase="decode")
    output = greedy(engine, PROMPT, steer=decoded)
    positions = sorted({position for site, _ in calls for position in site.positions})
    assert positions == list(range(len(PROMPT), len(PROMPT) + len(output.token_ids) - 1))
    assert output.interp["functions"] == ["mlp_out[0]"]


def test_it_runs_after_other_edits_and_before_clamps(engine):
    seen = []
    v = torch.ones(engine.config.hidden_size)
    call = Call(lambda rows: seen.append(rows.clone()) or rows + 7 * v, "mlp_out", [1])
    trace = engine.trace(PROMPT, steer=[Clamp(v, "mlp_out", [1], max=0.0), call, Add(v, "mlp_out", [1])])
    assert torch.allclose(seen[0], trace["mlp_out", 1] + 1)
    capture = birkhoff.Capture({"mlp_out": [1]}, "all_prompt", capture_point="after")
    steer = [call, Clamp(v, "mlp_out", [1], max=0.0)]
    rows = greedy(engine, PROMPT, steer=steer, capture=capture).acts["mlp_out", 1].tensor
    assert (rows.sum(-1) / v.norm()).max() < 1e-4


def test_functions_at_one_site_run_in_the_order_given(engine):
    double, plus = Call(lambda rows: rows * 2, "mlp_out", [1]), Call(lambda rows: rows + 1, "mlp_out", [1])
    both = engine.logits(PROMPT, [Call(lambda rows: rows * 2 + 1, "mlp_out", [1])])
    assert torch.equal(engine.logits(PROMPT, [double, plus]), both)
    assert not torch.equal(engine.logits(PROMPT, [plus, double]), both)


def test_other_requests_of_the_batch_are_not_changed(engine):
    prompts = [PROMPT, PROMPT[:20], [*PROMPT, 7]]
    plain = [output.token_ids for output in greedy(engine, prompts)]
    edits = [None, [Call(lambda rows: rows * 0, "mlp_out", "all")], None]
    mixed = [output.token_ids for output in greedy(engine, prompts, steer=edits)]
    assert mixed[0] == plain[0] and mixed[2] == plain[2] and mixed[1] != plain[1]


def test_nothing_computed_with_a_function_is_shared(tmp_path):
    synth(tmp_path / "tiny", like="tiny")
    prompt = [index % 400 + 3 for index in range(300)]
    with birkhoff.load(tmp_path / "tiny", prefix_cache=True, max_context=600) as engine:
        edit = Call(lambda rows: rows * 0, "mlp_out", "all")
        first = greedy(engine, prompt, steer=[edit])
        assert first.interp.get("reuse", {}).get("cached_tokens", 0) == 0
        assert greedy(engine, prompt).interp.get("reuse", {}).get("cached_tokens", 0) == 0
        plain = greedy(engine, prompt)
        assert plain.interp["reuse"]["cached_tokens"] >= 128
        again = greedy(engine, prompt, steer=[edit])
        assert again.interp.get("reuse", {}).get("cached_tokens", 0) == 0
        assert again.token_ids == first.token_ids != plain.token_ids
        planner = engine._planner
        plans = [planner.plan(prompt, 4, planner.edits([edit], prompt, 4)) for _ in range(2)]
        assert cache_salt(plans[0], 300) != cache_salt(plans[1], 300) and cache_salt(plans[0], 300)


def test_an_exception_of_the_function_reaches_the_caller_and_the_engine_goes_on(engine):
    def fails(rows):
        raise ZeroDivisionError("mine")

    edit = [Call(fails, "mlp_out", [1])]
    plain = greedy(engine, PROMPT).token_ids
    for call in (engine.logits, engine.trace):
        with pytest.raises(ZeroDivisionError, match="mine"):
            call(PROMPT, steer=edit)
    with pytest.raises(ZeroDivisionError, match="mine"):
        greedy(engine, PROMPT, steer=edit)
    assert greedy(engine, PROMPT).token_ids == plain


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda rows: rows[:1], "one row for each row"),
        (lambda rows: rows.sum(-1), "one row for each row"),
        (lambda rows: 3, "returned int"),
    ],
)
def test_a_wrong_result_is_refused(engine, fn, message):
    with pytest.raises(SteeringError, match=message):
        engine.logits(PROMPT, [Call(fn, "mlp_out", [1])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": 3}, "expected a function"),
        ({"fn": lambda: 0}, r"\(rows\) or of \(rows, site\)"),
        ({"fn": lambda a, b, c: 0}, r"\(rows\) or of \(rows, site\)"),
        ({"hook": 5}, "name of a hook"),
        ({"hook": "mlp_oat"}, "Did you mean 'mlp_out'"),
        ({"hook": "moe_topk"}, "capture-only"),
        ({"layers": [99]}, "does not exist"),
        ({"layers": None}, "needs layers"),
        ({"hook": "blocks.2.mlp.hook_out"}, "tensor of layer 2"),
        ({"phase": "never"}, "expected one of"),
        ({"path": "none"}, "expected one of"),
        ({"where": {"prompt": "some"}}, "where"),
    ],
)
def test_what_is_refused(engine, arguments, message):
    fields = {"fn": lambda rows: rows, "hook": "mlp_out", "layers": [1], **arguments}
    with pytest.raises(BirkhoffError, match=message):
        engine.logits(PROMPT, [Call(**fields)])


def test_a_hook_that_says_its_layer_needs_no_layers(engine):
    for name, hook in (("blocks.1.mlp.hook_out", "mlp_out"), ("final_hidden", "final_hidden")):
        layer = 1 if hook == "mlp_out" else engine.config.num_hidden_layers - 1
        given = engine.logits(PROMPT, [Call(lambda rows: rows * 2, hook, [layer])])
        assert engine.logits(PROMPT, [Call(lambda rows: rows * 2, name)]).equal(given)


def test_what_a_function_may_look_like(engine):
    doubled = engine.logits(PROMPT, [Call(lambda rows: rows * 2, "mlp_out", [1])])

    class Doubling(torch.nn.Module):
        def forward(self, rows):
            return rows * 2

    def with_default(rows, factor=2):
        return rows * factor

    for fn in (Doubling(), with_default, lambda rows, site=None: rows * (2 if site.layer == 1 else 0)):
        assert torch.equal(engine.logits(PROMPT, Call(fn, "mlp_out", [1])), doubled)
    relu = engine.logits(PROMPT, Call(torch.nn.functional.relu, "mlp_out", [1]))
    assert torch.equal(relu, engine.logits(PROMPT, Call(torch.relu, "mlp_out", [1])))


def test_requests_and_tiers_take_data_only(engine):
    with pytest.raises(SteeringError, match="call"):
        engine.edits_from_json({"interventions": [{"op": "call", "at": {"hook": "mlp_out", "layers": [1]}}]})
    with pytest.raises(SteeringError), engine.steering(Call(lambda rows: rows, "mlp_out", [1])):
        pass


def test_gradients_flow_through_a_function(engine):
    """A vector that a function adds is trained; its gradient is a central difference of the loss."""
    d = engine.config.hidden_size
    v = torch.zeros(d, requires_grad=True)
    last, end = engine.config.num_hidden_layers - 1, len(PROMPT) - 1
    steer = [Call(lambda rows: rows + v, "mlp_out", [last], where=[end])]

    def loss():
        return engine.logits(PROMPT, steer)[-1].log_softmax(-1)[17]

    with engine.grad() as g:
        loss().backward()
        g.backward(loss())
    assert torch.allclose(v.grad, g["mlp_out", last][end], atol=1e-5)
    along = torch.randn(d, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        ends = []
        for step in (5e-3, -5e-3):
            v.copy_(step * along)
            ends.append(float(loss()))
    assert (ends[0] - ends[1]) / 1e-2 == pytest.approx(float(v.grad @ along), rel=2e-2)
    engine.model.zero_grad(set_to_none=True)
