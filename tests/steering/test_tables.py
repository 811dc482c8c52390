"""Vector tables of a running engine: several widths, admission, and no cost when steering is off."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import birkhoff
from birkhoff import Add, Capture, Clamp, Patch
from birkhoff.convert.synth import synth
from birkhoff.errors import CapacityError
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.hooks.vector_table import TableRows, Tables

PROMPT = [0, *range(40, 60)]
GREEDY = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "tiny"
    synth(path, like="tiny")
    with birkhoff.load(path, batch_invariant=True, kernels="reference", max_requests=4) as engine:
        yield engine


@pytest.fixture
def small(engine):
    """The engine with tables that hold two vectors of each width."""
    before, engine._steering.tables = engine._steering.tables, Tables(max_slots=3)
    yield engine
    engine._steering.tables = before


def vector(width, seed=0, norm=3.0):
    v = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    return v / v.norm() * norm


def test_t_ste_2_each_width_has_its_slab(engine):
    m, d = engine.config.hc_mult, engine.config.hidden_size
    steers = [
        [Add(vector(d), "mlp_out", [2]), Add(vector(m * d), "mhc_streams_pre_attn", [2])],
        [Add(vector(m * d, 1), "mhc_streams_pre_attn", [2])],
        [Add(vector(d, 2), "mlp_in", [2]), Add(vector(d, 3), "mhc_streams_pre_mlp", [2], streams=[0, 2])],
    ]
    seen = []
    requests = [engine.requests(PROMPT, steer=steer, **GREEDY)[0] for steer in steers]
    for request in requests:
        engine._core.submit(request)
    while not all(request.done for request in requests):
        engine._core.step()
        seen.append(
            {width: len(slab.uses) for width, slab in engine._steering.tables.slabs.items() if slab.uses}
        )
    assert {d: 2, m * d: 3} in seen and engine._steering.tables.rows_used == 0
    for request, steer in zip(requests, steers):
        alone = engine.generate(PROMPT, steer=steer, **GREEDY)
        assert alone.token_ids == request.output_ids and alone.logprobs == request.logprobs

    plain = build_hook_schema(d, "float32", None)  # a model without streams: three hooks, one width, one slab
    tables = Tables()
    sites = {(hook, layer): SiteEdit("add", vector(d)) for hook in plain for layer in range(3)}
    assert TableRows(tables, [sites], {hook: row.width for hook, row in plain.items()}).reserve()
    assert list(tables.slabs) == [d] and dict(tables.slabs[d].uses) == {1: 9}


def test_requests_wait_for_rows_and_all_finish(small):
    """The tables hold two vectors: five requests with five vectors run two at a time, in order, as in single runs."""
    d = small.config.hidden_size
    steers = [[Add(vector(d, seed), "mlp_out", [1])] for seed in range(5)]
    requests = [small.requests(PROMPT, steer=steer, **GREEDY)[0] for steer in steers]
    unsteered = small.requests(PROMPT, **GREEDY)[0]
    for request in [*requests, unsteered]:
        small._core.submit(request)
    max_running = 0
    while not all(request.done for request in [*requests, unsteered]):
        small._core.step()
        max_running = max(max_running, sum(request.slot is not None for request in requests))
    assert max_running == 2
    ended = [request.timings.finished for request in requests]
    assert ended == sorted(ended)
    for request, steer in zip(requests, steers):
        assert request.output_ids == small.generate(PROMPT, steer=steer, **GREEDY).token_ids
    assert small._steering.tables.rows_used == 0


def test_waiting_and_running_requests_release_their_rows_when_cancelled(small):
    d = small.config.hidden_size
    requests = [
        small.requests(PROMPT, steer=[Add(vector(d, seed), "mlp_out", [1])], **GREEDY)[0] for seed in range(4)
    ]
    for request in requests:
        small._core.submit(request)
    small._core.step()
    small._core.cancel(requests[3])  # still waiting
    small._core.cancel(requests[0])  # running
    while not all(request.done for request in requests):
        small._core.step()
    assert [request.finish_reason for request in requests] == ["cancelled", "length", "length", "cancelled"]
    assert small._steering.tables.rows_used == 0 and not small._steering.tables.slabs[d].uses


def test_requests_that_never_fit_are_refused_before_queueing(small):
    d = small.config.hidden_size
    edits = [Add(vector(d, seed), "mlp_out", [seed]) for seed in range(3)]
    with pytest.raises(CapacityError, match=rf"3 different vectors of {d} numbers.*hold 2"):
        small.generate(PROMPT, steer=edits, **GREEDY)
    assert small._core.scheduler.idle and small._steering.tables.rows_used == 0
    same = [Add(vector(d), "mlp_out", [layer]) for layer in range(3)]  # equal vectors share one row
    assert small.generate(PROMPT, steer=same, **GREEDY).finish_reason == "length"


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def decode_operations(engine, **request):
    """The number of operations of the third step of a request."""
    (submitted,) = engine.requests(PROMPT, **request, **GREEDY)
    engine._core.submit(submitted)
    for _ in range(2):
        engine._core.step()
    with Count() as count:
        engine._core.step()
    engine._core.cancel(submitted)
    return count.operations


def test_t_ste_5_inactive_steering_adds_no_operation(engine):
    """Without edits, or with edits that do not apply to the step, the operations are the same. Steered sites add only
    their operations.

    On a GPU the same decision selects the graph without steered sites."""
    d = engine.config.hidden_size
    plain = decode_operations(engine)
    inactive = [
        Add(vector(d), "mlp_out", "all", phase="prefill"),
        Clamp(vector(d), "mlp_in", "all", max=0.0, where=[0, 3]),
        Patch(0, "pre_attn", [1], where={"generated": {"window": [2, None]}}),
    ]
    assert decode_operations(engine, steer=inactive) == plain
    assert decode_operations(engine, capture=Capture({"mlp_out": "all"})) == plain
    one_layer = decode_operations(engine, steer=[Add(vector(d), "mlp_out", [1])]) - plain
    all_layers = decode_operations(engine, steer=[Add(vector(d), "mlp_out", "all")]) - plain
    assert 0 < one_layer <= 8 and all_layers == one_layer * engine.config.num_hidden_layers


def test_the_tap_of_an_equal_step_is_reused(engine):
    d = engine.config.hidden_size
    (request,) = engine.requests(
        PROMPT, steer=[Add(vector(d), "mlp_out", "all")], **{**GREEDY, "max_tokens": 8}
    )
    engine._core.submit(request)
    staging = engine._core.runner.hooks[0]._staging
    taps = []
    while not request.done:
        engine._core.step()
        taps.append(staging.last_edit_tap)
    assert len({id(tap) for tap in taps}) == 2  # one for the prefill, one for all decode steps
