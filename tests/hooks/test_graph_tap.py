"""Graph taps give the results of live taps, and issue the same operations on the same buffers for any requests."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from birkhoff.engine.host_copier import HostCopier
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.capture_buffer import RowCopyPlan
from birkhoff.hooks.edit import SiteContext, SiteEdit, edit_stages, row_sum
from birkhoff.hooks.graph_tap import GraphTap, Scratch, plan_graph
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.row_edits import RowEditBuffers, group_row_edits
from birkhoff.hooks.sites import BY_NAME, MHC_FFN_POST_MIX, MHC_STREAMS_PRE_ATTN, MLP_OUT, POST_ATTN
from birkhoff.hooks.vector_table import TableRows, Tables
from tests.hooks.test_vector_table import Everywhere, vector
from tests.operations import Issued
from tests.sizes import scaled

D, M, ROWS, LAYER = 40, 4, 8, 1
WIDTHS = {"mlp_out": D, "mhc_streams_pre_attn": M * D}
KEYS = [(hook, LAYER) for hook in WIDTHS]


class CaptureJob:
    """A job that captures the rows of some sites for every token."""

    def __init__(self, keys, after=False):
        self.keys, self.after, self.got = keys, after, {}

    def offsets(self, start, token_ids, prompt_len):
        return range(len(token_ids))

    def open(self):
        pass

    def deliver(self, rows):
        self.got.setdefault((rows.hook, rows.layer), []).append(rows.tensor)

    def close(self, finish_reason, num_tokens):
        pass


@st.composite
def site_edits(draw, hook):
    """Any site edit that steering can resolve to."""
    has_streams = hook.startswith("mhc")
    kinds = ["add", "add", "patch", "clamp", "norm_match", *(["post_mix"] if has_streams else [])]
    kind = draw(st.sampled_from(kinds))
    seed, scale = draw(st.integers(0, 9)), draw(st.sampled_from([0.5, -2.0, 0.3]))
    path = draw(st.sampled_from(["both", "read", "carry"])) if has_streams else "both"
    streams = None
    if has_streams and kind != "post_mix":
        streams = draw(st.sampled_from([None, (0,), (1, 3)]))
    width = D if streams is not None or kind == "post_mix" else WIDTHS[hook]
    if kind == "patch" and streams is not None and draw(st.booleans()):
        width = WIDTHS[hook]  # one part per stream
    row = vector(width, seed)
    if kind == "clamp":
        low, high = draw(st.sampled_from([(-0.2, 0.3), (None, 0.1), (0.4, None), (0.0, 0.0)]))
        return SiteEdit("clamp", row / row.norm(), scale, path, streams, low=low, high=high)
    if kind == "patch":
        return SiteEdit("patch", row, abs(scale) / 2, path, streams)
    return SiteEdit(
        "add", row, scale, path, streams, norm_match=kind == "norm_match", post_mix=kind == "post_mix"
    )


@st.composite
def requests(draw):
    specs = []
    for _ in range(draw(st.integers(1, 4))):
        edits = [
            Everywhere(
                {(hook, LAYER): draw(site_edits(hook)) for hook in draw(st.sets(st.sampled_from([*WIDTHS])))}
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        captured = draw(st.sampled_from([None, False, True]))
        specs.append((edits, captured, draw(st.booleans())))
    return specs


def plans_of(specs, tables):
    plans = []
    for edits, captured, tabled in specs:
        jobs = () if captured is None else (CaptureJob(KEYS, captured),)
        plan = Plan(jobs=jobs, edits=tuple(edits))
        if tabled:
            plan.table = TableRows(tables, [edit.sites for edit in edits], WIDTHS)
            assert plan.table.reserve()
        plans.append(plan)
    return plans


def armed_tap(plans, staging=None, at=10):
    spans = [Span(plan, row, at, [5], 4) for row, plan in enumerate(plans)]
    return arm(staging or StepStaging(), spans, len(plans))


def random_tensor(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run_sites(tap, count, dtype):
    """Run two sites, and the write-out weights before them, through the tap; returns read, carried and output rows."""
    post, y, x = (
        torch.rand(ROWS, M, generator=torch.Generator().manual_seed(1)),
        random_tensor(2, ROWS, D),
        random_tensor(3, ROWS, M, D),
    )
    tap.at(LAYER - 1)(MHC_FFN_POST_MIX, post[:count])
    at = tap.at(LAYER)
    read, carried = at.part(MHC_STREAMS_PRE_ATTN, x[:count].to(dtype))
    out = at(MLP_OUT, y[:count].to(dtype))
    if isinstance(tap, GraphTap):
        tap.end()
    return read, carried, out


def copy_to_host(graph_tap, tap):
    """Copy the capture buffer to the host as the source of the tap's jobs, as it is done from a GPU."""
    if tap.requests:
        sites = [[(want.key, want.after) for want, _ in share] for share in tap.layout.sites_of]
        copy_plan = RowCopyPlan(
            graph_tap.buffer, [(rows[0], job_sites) for rows, job_sites in zip(tap.layout.rows, sites)]
        )
        tap.set_source(HostCopier().copy(graph_tap.buffer, copy_plan))


@settings(max_examples=scaled(400, 60))
@given(specs=requests(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_graph_taps_equal_live_taps(specs, dtype):
    count = len(specs)
    tables = Tables()
    live = armed_tap(plans_of(specs, tables))
    if live is None:
        return
    reference = run_sites(live, count, dtype)
    plans = plans_of(specs, tables)
    tap = armed_tap(plans)
    graph_plan = plan_graph(tap, WIDTHS)
    assert graph_plan is not None
    graph_tap = GraphTap(graph_plan, tap.edits, ROWS, torch.device("cpu"))
    graph_tap.fill(tap, graph_plan)
    actual = run_sites(graph_tap, ROWS, dtype)
    x, y = random_tensor(3, ROWS, M, D).to(dtype), random_tensor(2, ROWS, D).to(dtype)
    for new, expected, old in zip(actual, reference, (x, x, y)):
        assert torch.equal(new[:count], expected), (new[:count].float() - expected.float()).abs().max()
        assert torch.equal(new[count:], old[count:]), "rows without a request are unchanged bit for bit"
        untouched = [row for row, (edits, _, _) in enumerate(specs) if not any(edit.sites for edit in edits)]
        assert torch.equal(new[untouched], old[untouched])
    live.deliver()
    copy_to_host(graph_tap, tap)
    tap.deliver()
    for one, other in zip(tap.requests, live.requests):
        assert set(one.job.got) == set(other.job.got) == set(KEYS) and one.rows == other.rows
        for key, (rows,) in one.job.got.items():
            (expected,) = other.job.got[key]
            assert rows.shape == expected.shape and rows.dtype is expected.dtype is dtype
            assert torch.equal(rows, expected)


KINDS = {
    "add": SiteEdit("add", vector(M * D, 1), 0.7),
    "add to streams": SiteEdit("add", vector(D, 1), 0.7, streams=(1, 3)),
    "norm_match": SiteEdit("add", vector(M * D, 1), 0.7, norm_match=True),
    "norm_match of streams": SiteEdit("add", vector(D, 1), 0.7, streams=(0, 2), norm_match=True),
    "post_mix": SiteEdit("add", vector(D, 1), 0.7, post_mix=True),
    "patch": SiteEdit("patch", vector(M * D, 1), 0.7),
    "patch of streams": SiteEdit("patch", vector(M * D, 1), 0.7, streams=(1, 2)),
    "clamp": SiteEdit("clamp", vector(M * D, 1) / vector(M * D, 1).norm(), 0.9, low=-0.1, high=0.2),
    "clamp of streams": SiteEdit("clamp", vector(D, 1) / vector(D, 1).norm(), streams=(3,), low=0.5),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_in_a_batch_and_in_a_recorded_step_has_equal_bits(kind, dtype):
    """The result of an edit depends on its row only, not on the number of rows or on how the step runs."""
    specs = [([Everywhere({("mhc_streams_pre_attn", LAYER): KINDS[kind]})], None, False) for _ in range(5)]
    tap = armed_tap(plans_of(specs, Tables()))
    plan = plan_graph(tap, WIDTHS)
    graph = GraphTap(plan, tap.edits, ROWS, torch.device("cpu"))
    graph.fill(tap, plan)
    recorded = run_sites(graph, ROWS, dtype)[1]
    batched = run_sites(armed_tap(plans_of(specs, Tables())), 5, dtype)[1]
    assert torch.equal(recorded[:5], batched)
    assert not torch.equal(batched, random_tensor(3, ROWS, M, D)[:5].to(dtype))
    alone = run_sites(armed_tap(plans_of(specs[:1], Tables())), 1, dtype)[1]
    assert torch.equal(alone, batched[:1])


@pytest.mark.parametrize("streams", [None, (0, 2)], ids=["rows", "streams"])
def test_rows_of_different_norms_are_matched_one_by_one(streams):
    """An add with a row for each position scales every one of them to its own norm, eagerly and recorded."""
    width = M * D if streams is None else D
    vectors = torch.stack([vector(width, 1), 100 * vector(width, 2), 0.01 * vector(width, 3)])
    edit = SiteEdit("add", vectors, 0.5, streams=streams, norm_match=True, positions=(4, 6, 7)).at([4, 6, 7])
    x, rows = random_tensor(3, ROWS, M, D), [1, 2, 5]
    expected = x.clone()
    for row, direction in zip(rows, vectors):
        unit = direction / direction.norm()
        if streams is None:
            expected[row] += (0.5 * x[row].norm() * unit).view(M, D)
        for stream in streams or ():
            expected[row, stream] += 0.5 * x[row, stream].norm() * unit
    eager = x
    for stage in edit_stages([(edit, rows)]):
        eager = stage(eager, SiteContext())
    torch.testing.assert_close(eager, expected)
    ((kind, own),) = group_row_edits([(edit, rows)], M * D).items()
    buffers = RowEditBuffers(kind, ROWS, torch.device("cpu"))
    buffers.fill(own)
    assert torch.equal(buffers.run(x, SiteContext()), eager)


@pytest.mark.parametrize("width", [40, 2048, 7168, 16384])
def test_sums_of_rows_do_not_depend_on_the_number_of_rows(width):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = random_tensor(1, 96, width).to(device)
    alone = torch.cat([row_sum(x[row : row + 1]) for row in range(96)])
    for count in (1, 2, 3, 5, 8, 16, 17, 32, 64, 96):
        assert torch.equal(row_sum(x[:count]), alone[:count]), count
    assert torch.equal(row_sum(x.view(24, 4, width)).view(-1, 1), alone)
    assert torch.allclose(alone.double(), x.double().sum(-1, keepdim=True), atol=1e-3)


class Operations(TorchDispatchMode):
    """Records every operation with the shapes of its inputs, and their addresses if they are in one of `buffers`."""

    def __init__(self, buffers):
        self.seen, self._buffers = [], buffers

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        inputs = []
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage().data_ptr()
                inputs.append((tuple(value.shape), storage if storage in self._buffers else None))
            elif isinstance(value, (int, float, bool)):
                inputs.append(value)
        self.seen.append((str(op), tuple(inputs)))
        return op(*args, **(kwargs or {}))


def persistent_buffers(graph_tap):
    tensors = [graph_tap._token_rows, graph_tap.buffer.data]
    for lane in graph_tap._row_edits.values():
        tensors += [lane.numbers, lane.active]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def request(seed, clamp, captured=True):
    """One request with an added vector, a clamp and a capture."""
    bound = SiteEdit("clamp", vector(D, seed) / vector(D, seed).norm(), low=-clamp, high=clamp)
    edits = [
        Everywhere({("mhc_streams_pre_attn", LAYER): SiteEdit("add", vector(M * D, seed))}),
        Everywhere({("mlp_out", LAYER): bound}),
    ]
    return edits, False if captured else None, True


def test_other_edits_and_captures_are_the_same_operations_on_the_same_buffers():
    """Steps whose requests, vectors, bounds and captured rows all differ have one pattern and one list of operations.
    Nothing of an earlier step remains: the last step has fewer requests, and the rows after them are unchanged."""
    tables, staging = Tables(), StepStaging()
    first = [request(1, 0.1), request(2, 0.2, captured=False)]
    other = [request(7, 0.9, captured=False), request(8, 0.5), request(9, 0.3)]
    recorded, patterns, graph_tap = [], [], None
    x, y = random_tensor(3, ROWS, M, D), random_tensor(2, ROWS, D)
    for specs in (first, other, [request(4, 0.4)]):
        plans = plans_of(specs, tables)
        tap = armed_tap(plans, staging)
        graph_plan = plan_graph(tap, WIDTHS)
        patterns.append(graph_plan.pattern)
        if graph_tap is None:
            graph_tap = GraphTap(graph_plan, tap.edits, ROWS, torch.device("cpu"))
            graph_tap.fill(tap, graph_plan)
            # The first step of a pattern allocates the staging buffers.
            run_sites(graph_tap, ROWS, torch.float32)
        graph_tap.fill(tap, graph_plan)
        kept = persistent_buffers(graph_tap)
        with Operations(kept) as operations:
            actual = run_sites(graph_tap, ROWS, torch.float32)
        recorded.append((operations.seen, kept))
        reference = run_sites(armed_tap(plans_of(specs, tables)), len(specs), torch.float32)
        for new, expected in zip(actual, reference):
            assert torch.equal(new[: len(specs)], expected)
        for new, old in zip(actual, (x, x, y)):
            assert torch.equal(new[len(specs) :], old[len(specs) :])
        for plan in plans:
            plan.table.release()
    assert patterns[0] == patterns[1] == patterns[2] and hash(patterns[0]) == hash(patterns[1])
    assert recorded[0] == recorded[1] == recorded[2] and len(recorded[0][0]) > 10


def test_edits_of_one_kind_on_one_row_run_in_order():
    """Two patches and two clamps of one row, one patch of another: edits of one kind run in consecutive lanes."""
    unit, other = (torch.nn.functional.normalize(vector(D, seed), dim=0) for seed in (5, 6))
    kinds = [
        SiteEdit("patch", vector(D, 1), 0.5),
        SiteEdit("patch", vector(D, 2), 0.25),
        SiteEdit("clamp", unit, low=0.5),
        SiteEdit("clamp", other, high=-0.5),
    ]
    specs = [
        ([Everywhere({("mlp_out", LAYER): kind}) for kind in kinds], None, False),
        ([Everywhere({("mlp_out", LAYER): kinds[1]})], None, False),
    ]
    tap = armed_tap(plans_of(specs, Tables()))
    graph_plan = plan_graph(tap, WIDTHS)
    graph_tap = GraphTap(graph_plan, tap.edits, ROWS, torch.device("cpu"))
    graph_tap.fill(tap, graph_plan)
    reference = run_sites(armed_tap(plans_of(specs, Tables())), 2, torch.float32)[2]
    assert torch.equal(run_sites(graph_tap, ROWS, torch.float32)[2][:2], reference)
    assert [lane.rank for _, lane in graph_plan.pattern.row_edits] == [0, 1, 0, 1]


def test_a_capture_only_tap_returns_the_same_tensor():
    plans = plans_of([([], False, False)], Tables())
    tap = armed_tap(plans)
    graph_plan = plan_graph(tap, WIDTHS)
    graph_tap = GraphTap(graph_plan, None, ROWS, torch.device("cpu"))
    graph_tap.fill(tap, graph_plan)
    x = random_tensor(1, ROWS, M, D)
    read, carried = graph_tap.at(LAYER).part(MHC_STREAMS_PRE_ATTN, x)
    assert read is x and carried is x
    assert graph_tap.at(LAYER).live(MHC_STREAMS_PRE_ATTN) and not graph_tap.at(LAYER).live(
        BY_NAME["pre_attn"]
    )
    assert not graph_tap.at(0).live(MLP_OUT) and graph_tap.at(0)(MLP_OUT, x) is x


def test_plan_graph_returns_none_without_a_fixed_shape():
    class Host:
        order = 0

        def run(self, x, uses, context):
            return x

        def graph_kind(self, uses):
            return None

    class Use:
        op, path, needs_post, gate, host = "delta", "both", False, None, Host()

    plan = Plan(edits=(Everywhere({("mlp_out", LAYER): Use()}),))
    assert plan_graph(armed_tap([plan]), WIDTHS) is None


def run_layers(graph_tap, layers, seed):
    """Run the outputs of several layers as a decoder does: written to the buffer that `keep` returns, or passed
    through the tap. Outputs are float32, those of one site in three parts to be summed. Returns the expected bfloat16
    rows and the names of the operations that `end` issues."""
    reference = {}
    for layer in range(layers):
        at = graph_tap.at(layer)
        for site, shape in ((POST_ATTN, (ROWS, D)), (MLP_OUT, (ROWS, 3, D))):
            output = random_tensor(seed + 10 * layer + site.id, *shape)
            whole = output if output.dim() == 2 else output.sum(1)
            kept = at.keep(site, output)
            if kept is not None:
                kept.copy_(output)
            elif at.live(site):
                at(site, whole.bfloat16())
            reference[site.name, layer] = whole.bfloat16()
    with Issued() as ending:
        graph_tap.end()
    return reference, ending.names


def capture_job(layers, after=False, without=()):
    return CaptureJob(
        [
            (hook, layer)
            for hook in ("post_attn", "mlp_out")
            for layer in range(layers)
            if layer not in without
        ],
        after,
    )


@pytest.mark.parametrize("layers", [2, 7])
def test_outputs_that_are_only_captured_take_three_operations_at_the_end_of_a_step(layers):
    plans = [Plan(jobs=(capture_job(layers),)), Plan(), Plan(jobs=(capture_job(layers),))]
    graph_tap, staging = None, StepStaging()
    for step in range(3):
        tap = armed_tap(plans, staging, 10 + step)
        graph_plan = plan_graph(tap, WIDTHS)
        graph_tap = graph_tap or GraphTap(graph_plan, None, ROWS, torch.device("cpu"))
        graph_tap.fill(tap, graph_plan)
        reference, ending = run_layers(graph_tap, layers, 100 * step)
        assert step == 0 or (len(ending) == 3 and set(ending) == {"sum", "copy_"}), ending
        copy_to_host(graph_tap, tap)
        tap.deliver()
        for row in (0, 2):
            for key, rows in reference.items():
                assert torch.equal(plans[row].jobs[0].got[key][step], rows[row : row + 1]), key


@pytest.mark.parametrize("scratch_bytes", [0, 1 << 20])
def test_captured_outputs_do_not_depend_on_edits_elsewhere_or_on_scratch_size(scratch_bytes):
    """One job captures before edits, another after them at some layers. The edited output is not deferred to `end`."""
    change = Everywhere({("mlp_out", 2): SiteEdit("patch", torch.zeros(D))})
    jobs = (capture_job(5), capture_job(5, after=True, without=(1, 3)))
    plan, staging, graph_tap = Plan(jobs=jobs, edits=(change,)), StepStaging(), None
    for step in range(2):
        tap = armed_tap([plan], staging, 10 + step)
        graph_plan = plan_graph(tap, WIDTHS | {"post_attn": D})
        scratch = Scratch(torch.device("cpu"), scratch_bytes)
        graph_tap = graph_tap or GraphTap(graph_plan, tap.edits, ROWS, torch.device("cpu"), scratch)
        graph_tap.fill(tap, graph_plan)
        reference, _ = run_layers(graph_tap, 5, 100 * step)
        copy_to_host(graph_tap, tap)
        tap.deliver()
        for job in jobs:
            for key in job.keys:
                expected = reference[key][:1] * (not (job.after and key == ("mlp_out", 2)))
                assert torch.equal(job.got[key][step], expected), (key, job.after)
    kept = graph_tap.at(0).keep(MLP_OUT, random_tensor(1, ROWS, 3, D))
    assert (kept is not None) == (scratch_bytes > 0) and graph_tap.at(2).keep(
        MLP_OUT, random_tensor(1, ROWS, 3, D)
    ) is None


def test_a_step_equal_to_the_last_is_armed_without_operations_and_reuses_its_layout():
    plans = plans_of([request(1, 0.1), request(2, 0.2, captured=False), ([], True, False)], Tables())
    staging = StepStaging()
    first = armed_tap(plans, staging, 10)
    with Issued() as arming:
        second = armed_tap(plans, staging, 11)
    assert arming.names == [] and second.layout is first.layout and second.edits is first.edits
    assert [take.positions for take in second.requests] == [(11,), (11,)] and [
        take.rows for take in second.requests
    ] == [[0], [2]]
    other = armed_tap([plans[0], plans[2]], staging, 12)
    assert other.layout is not first.layout and [take.rows for take in other.requests] == [[0], [1]]
    gone = weakref.ref(plans[2].jobs[0])
    del first, second, other, plans
    gc.collect()
    assert gone() is None, "state kept between steps must not keep jobs alive"
