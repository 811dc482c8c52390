"""Taps of fixed shape do what live taps do, and are the same operations on the same buffers whatever they are given."""

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
from birkhoff.hooks.edit import SiteEdit, row_sum
from birkhoff.hooks.graph_tap import GraphTap, Scratch, plan_graph
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.sites import BY_NAME, MHC_FFN_POST_MIX, MHC_STREAMS_PRE_ATTN, MLP_OUT, POST_ATTN
from birkhoff.hooks.vector_table import TableRows, Tables
from tests.hooks.test_vector_table import Everywhere, vector
from tests.operations import Issued
from tests.sizes import scaled

D, M, ROWS, LAYER = 40, 4, 8, 1
WIDTHS = {"mlp_out": D, "mhc_streams_pre_attn": M * D}
KEYS = [(hook, LAYER) for hook in WIDTHS]


class Wish:
    """A job that takes every token's rows of some sites."""

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
    """Any edit of a site that steering can resolve to."""
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
        width = WIDTHS[hook]  # each stream has its own part
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
    made = []
    for _ in range(draw(st.integers(1, 4))):
        edits = [
            Everywhere(
                {(hook, LAYER): draw(site_edits(hook)) for hook in draw(st.sets(st.sampled_from([*WIDTHS])))}
            )
            for _ in range(draw(st.integers(0, 3)))
        ]
        captured = draw(st.sampled_from([None, False, True]))
        made.append((edits, captured, draw(st.booleans())))
    return made


def plans_of(made, tables):
    plans = []
    for edits, captured, tabled in made:
        jobs = () if captured is None else (Wish(KEYS, captured),)
        plan = Plan(jobs=jobs, edits=tuple(edits))
        if tabled:
            plan.table = TableRows(tables, [edit.sites for edit in edits], WIDTHS)
            assert plan.table.reserve()
        plans.append(plan)
    return plans


def armed(plans, staging=None, at=10):
    spans = [Span(plan, row, at, [5], 4) for row, plan in enumerate(plans)]
    return arm(staging or StepStaging(), spans, len(plans))


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def through(tap, count, dtype):
    """What two sites and the write-out weights before them become."""
    post, y, x = (
        torch.rand(ROWS, M, generator=torch.Generator().manual_seed(1)),
        numbers(2, ROWS, D),
        numbers(3, ROWS, M, D),
    )
    tap.at(LAYER - 1).see(MHC_FFN_POST_MIX, post[:count])
    at = tap.at(LAYER)
    read, carried = at.part(MHC_STREAMS_PRE_ATTN, x[:count].to(dtype))
    out = at(MLP_OUT, y[:count].to(dtype))
    if isinstance(tap, GraphTap):
        tap.end()
    return read, carried, out


def landed(still, tap):
    """What is in the tray goes to whoever wants it, as it would from a GPU."""
    if tap.requests:
        sites = [[(want.key, want.after) for want, _ in share] for share in tap.layout.sites_of]
        cut = RowCopyPlan(still.buffer, [(rows[0], own) for rows, own in zip(tap.layout.rows, sites)])
        tap.set_source(HostCopier().copy(still.buffer, cut))


@settings(max_examples=scaled(400, 60))
@given(made=requests(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_they_do_what_live_taps_do(made, dtype):
    count = len(made)
    tables = Tables()
    live = armed(plans_of(made, tables))
    if live is None:
        return
    true = through(live, count, dtype)
    plans = plans_of(made, tables)
    tap = armed(plans)
    wishes = plan_graph(tap, WIDTHS)
    assert wishes is not None
    still = GraphTap(wishes, tap.edits, ROWS, torch.device("cpu"))
    still.fill(tap, wishes)
    mine = through(still, ROWS, dtype)
    x, y = numbers(3, ROWS, M, D).to(dtype), numbers(2, ROWS, D).to(dtype)
    for new, expected, old in zip(mine, true, (x, x, y)):
        assert torch.equal(new[:count], expected), (new[:count].float() - expected.float()).abs().max()
        assert torch.equal(new[count:], old[count:]), "rows of nobody keep their bits"
        untouched = [row for row, (edits, _, _) in enumerate(made) if not any(edit.sites for edit in edits)]
        assert torch.equal(new[untouched], old[untouched])
    live.deliver()
    landed(still, tap)
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
    made = [([Everywhere({("mhc_streams_pre_attn", LAYER): KINDS[kind]})], None, False) for _ in range(5)]
    tap = armed(plans_of(made, Tables()))
    plan = plan_graph(tap, WIDTHS)
    graph = GraphTap(plan, tap.edits, ROWS, torch.device("cpu"))
    graph.fill(tap, plan)
    recorded = through(graph, ROWS, dtype)[1]
    batched = through(armed(plans_of(made, Tables())), 5, dtype)[1]
    assert torch.equal(recorded[:5], batched)
    assert not torch.equal(batched, numbers(3, ROWS, M, D)[:5].to(dtype))
    alone = through(armed(plans_of(made[:1], Tables())), 1, dtype)[1]
    assert torch.equal(alone, batched[:1])


@pytest.mark.parametrize("width", [40, 2048, 7168, 16384])
def test_sums_of_rows_do_not_depend_on_the_number_of_rows(width):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = numbers(1, 96, width).to(device)
    alone = torch.cat([row_sum(x[row : row + 1]) for row in range(96)])
    for count in (1, 2, 3, 5, 8, 16, 17, 32, 64, 96):
        assert torch.equal(row_sum(x[:count]), alone[:count]), count
    assert torch.equal(row_sum(x.view(24, 4, width)).view(-1, 1), alone)
    assert torch.allclose(alone.double(), x.double().sum(-1, keepdim=True), atol=1e-3)


class Operations(TorchDispatchMode):
    """Every operation with the shapes it meets and where its inputs lie, when they lie in buffers that should stay."""

    def __init__(self, buffers):
        self.seen, self._buffers = [], buffers

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        places = []
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage().data_ptr()
                places.append((tuple(value.shape), storage if storage in self._buffers else None))
            elif isinstance(value, (int, float, bool)):
                places.append(value)
        self.seen.append((str(op), tuple(places)))
        return op(*args, **(kwargs or {}))


def held_buffers(still):
    tensors = [still._token_rows, still.buffer.data]
    for lane in still._row_edits.values():
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
    """Steps whose requests, vectors, bounds and captured rows all differ: one pattern, one list of operations. What was
    there before is gone: the last step has fewer requests, and rows behind it keep their bits."""
    tables, staging = Tables(), StepStaging()
    first = [request(1, 0.1), request(2, 0.2, captured=False)]
    other = [request(7, 0.9, captured=False), request(8, 0.5), request(9, 0.3)]
    recorded, patterns, still = [], [], None
    x, y = numbers(3, ROWS, M, D), numbers(2, ROWS, D)
    for made in (first, other, [request(4, 0.4)]):
        plans = plans_of(made, tables)
        tap = armed(plans, staging)
        wishes = plan_graph(tap, WIDTHS)
        patterns.append(wishes.pattern)
        if still is None:
            still = GraphTap(wishes, tap.edits, ROWS, torch.device("cpu"))
            still.fill(tap, wishes)
            through(
                still, ROWS, torch.float32
            )  # makes the staging buffers, as the first step of a pattern does
        still.fill(tap, wishes)
        kept = held_buffers(still)
        with Operations(kept) as operations:
            mine = through(still, ROWS, torch.float32)
        recorded.append((operations.seen, kept))
        true = through(armed(plans_of(made, tables)), len(made), torch.float32)
        for new, expected in zip(mine, true):
            assert torch.equal(new[: len(made)], expected)
        for new, old in zip(mine, (x, x, y)):
            assert torch.equal(new[len(made) :], old[len(made) :])
        for plan in plans:
            plan.table.release()
    assert patterns[0] == patterns[1] == patterns[2] and hash(patterns[0]) == hash(patterns[1])
    assert recorded[0] == recorded[1] == recorded[2] and len(recorded[0][0]) > 10


def test_edits_of_one_kind_that_meet_in_a_row_are_made_in_their_order():
    """Two patches and two clamps of one row, one of each of another: lanes one after the other."""
    unit, other = (torch.nn.functional.normalize(vector(D, seed), dim=0) for seed in (5, 6))
    kinds = [
        SiteEdit("patch", vector(D, 1), 0.5),
        SiteEdit("patch", vector(D, 2), 0.25),
        SiteEdit("clamp", unit, low=0.5),
        SiteEdit("clamp", other, high=-0.5),
    ]
    made = [
        ([Everywhere({("mlp_out", LAYER): kind}) for kind in kinds], None, False),
        ([Everywhere({("mlp_out", LAYER): kinds[1]})], None, False),
    ]
    tap = armed(plans_of(made, Tables()))
    wishes = plan_graph(tap, WIDTHS)
    still = GraphTap(wishes, tap.edits, ROWS, torch.device("cpu"))
    still.fill(tap, wishes)
    true = through(armed(plans_of(made, Tables())), 2, torch.float32)[2]
    assert torch.equal(through(still, ROWS, torch.float32)[2][:2], true)
    assert [lane.rank for _, lane in wishes.pattern.row_edits] == [0, 1, 0, 1]


def test_a_tap_that_only_looks_hands_on_the_very_tensor():
    plans = plans_of([([], False, False)], Tables())
    tap = armed(plans)
    wishes = plan_graph(tap, WIDTHS)
    still = GraphTap(wishes, None, ROWS, torch.device("cpu"))
    still.fill(tap, wishes)
    x = numbers(1, ROWS, M, D)
    read, carried = still.at(LAYER).part(MHC_STREAMS_PRE_ATTN, x)
    assert read is x and carried is x
    assert still.at(LAYER).live(MHC_STREAMS_PRE_ATTN) and not still.at(LAYER).live(BY_NAME["pre_attn"])
    assert not still.at(0).live(MLP_OUT) and still.at(0)(MLP_OUT, x) is x


def test_what_has_no_fixed_shape_is_said_so():
    class Host:
        order = 0

        def run(self, x, uses, context):
            return x

        def graph_kind(self, uses):
            return None

    class Use:
        op, path, needs_post, host = "delta", "both", False, Host()

    plan = Plan(edits=(Everywhere({("mlp_out", LAYER): Use()}),))
    assert plan_graph(armed([plan]), WIDTHS) is None


def stepped(still, layers, seed):
    """Outputs of several layers as a decoder leaves them: where it is told to, or through the tap. In float32, one kind
    in three parts; what they come to in bfloat16."""
    true = {}
    for layer in range(layers):
        at = still.at(layer)
        for site, shape in ((POST_ATTN, (ROWS, D)), (MLP_OUT, (ROWS, 3, D))):
            made = numbers(seed + 10 * layer + site.id, *shape)
            whole = made if made.dim() == 2 else made.sum(1)
            kept = at.keep(site, made)
            if kept is not None:
                kept.copy_(made)
            elif at.live(site):
                at(site, whole.bfloat16())
            true[site.name, layer] = whole.bfloat16()
    with Issued() as ending:
        still.end()
    return true, ending.names


def looking(layers, after=False, but=()):
    return Wish(
        [(hook, layer) for hook in ("post_attn", "mlp_out") for layer in range(layers) if layer not in but],
        after,
    )


@pytest.mark.parametrize("layers", [2, 7])
def test_outputs_that_are_only_looked_at_are_taken_at_the_end_of_a_step_by_three_operations(layers):
    plans = [Plan(jobs=(looking(layers),)), Plan(), Plan(jobs=(looking(layers),))]
    still, staging = None, StepStaging()
    for step in range(3):
        tap = armed(plans, staging, 10 + step)
        wishes = plan_graph(tap, WIDTHS)
        still = still or GraphTap(wishes, None, ROWS, torch.device("cpu"))
        still.fill(tap, wishes)
        true, ending = stepped(still, layers, 100 * step)
        assert step == 0 or (len(ending) == 3 and set(ending) == {"sum", "copy_"}), ending
        landed(still, tap)
        tap.deliver()
        for row in (0, 2):
            for key, rows in true.items():
                assert torch.equal(plans[row].jobs[0].got[key][step], rows[row : row + 1]), key


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_outputs_are_seen_alike_wherever_somebody_changes_one_and_whatever_room_there_is(most):
    """Some layers before and after edits, some after alone; one is changed, so it cannot wait for the end."""
    change = Everywhere({("mlp_out", 2): SiteEdit("patch", torch.zeros(D))})
    jobs = (looking(5), looking(5, after=True, but=(1, 3)))
    plan, staging, still = Plan(jobs=jobs, edits=(change,)), StepStaging(), None
    for step in range(2):
        tap = armed([plan], staging, 10 + step)
        wishes = plan_graph(tap, WIDTHS | {"post_attn": D})
        scratch = Scratch(torch.device("cpu"), most)
        still = still or GraphTap(wishes, tap.edits, ROWS, torch.device("cpu"), scratch)
        still.fill(tap, wishes)
        true, _ = stepped(still, 5, 100 * step)
        landed(still, tap)
        tap.deliver()
        for job in jobs:
            for key in job.keys:
                expected = true[key][:1] * (not (job.after and key == ("mlp_out", 2)))
                assert torch.equal(job.got[key][step], expected), (key, job.after)
    kept = still.at(0).keep(MLP_OUT, numbers(1, ROWS, 3, D))
    assert (kept is not None) == (most > 0) and still.at(2).keep(MLP_OUT, numbers(1, ROWS, 3, D)) is None


def test_a_step_like_the_last_is_armed_without_an_operation_and_what_it_wants_is_not_laid_out_again():
    plans = plans_of([request(1, 0.1), request(2, 0.2, captured=False), ([], True, False)], Tables())
    staging = StepStaging()
    first = armed(plans, staging, 10)
    with Issued() as arming:
        second = armed(plans, staging, 11)
    assert arming.names == [] and second.layout is first.layout and second.edits is first.edits
    assert [take.positions for take in second.requests] == [(11,), (11,)] and [
        take.rows for take in second.requests
    ] == [[0], [2]]
    other = armed([plans[0], plans[2]], staging, 12)
    assert other.layout is not first.layout and [take.rows for take in other.requests] == [[0], [1]]
    gone = weakref.ref(plans[2].jobs[0])
    del first, second, other, plans
    gc.collect()
    assert gone() is None, "what is kept between steps keeps no job alive"
