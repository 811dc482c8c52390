"""Vector tables: no slot leaks, equal vectors share a slot, results match the row-by-row twin, graphs see new rows."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from birkhoff.errors import CapacityError
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import SiteContext, SiteEdit, edit_stages
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.sites import MHC_STREAMS_PRE_ATTN, MLP_OUT
from birkhoff.hooks.vector_table import Content, TableRows, Tables, gather_add
from tests.sizes import scaled

WIDTHS = {"mlp_out": 6, "pre_attn": 6, "mhc_streams_pre_attn": 24, "mhc_streams_final": 24}
PATHS = ("both", "read", "carry")


class Everywhere:
    """An edit of every token, or of some offsets of each chunk."""

    generated = None

    def __init__(self, sites, only=None):
        self.sites, self._only = sites, only

    def offsets(self, start, token_ids, prompt_len):
        return range(len(token_ids)) if self._only is None else [o for o in self._only if o < len(token_ids)]

    def digest_parts(self, phase):
        return ()


def vector(width, seed, scale=1.0):
    return torch.randn(width, generator=torch.Generator().manual_seed(seed)) * scale


def add(hook, layer, seed, **options):
    return {(hook, layer): SiteEdit("add", vector(WIDTHS[hook], seed), **options)}


def rows_of(tables, *edits):
    return TableRows(tables, edits, WIDTHS)


edits = st.lists(
    st.dictionaries(
        st.tuples(st.sampled_from(sorted(WIDTHS)), st.integers(0, 2)),
        st.integers(0, 5),
        min_size=1,
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=scaled(400, 60))
@given(
    requests=st.lists(edits, min_size=1, max_size=8),
    moves=st.lists(st.integers(0, 7), max_size=40),
    max_slots=st.integers(9, 24),
)
def test_no_slot_leaks_in_any_order_of_reserve_and_release(requests, moves, max_slots):
    """Random reserve and release: after each move the tables hold exactly the vectors of the current reservations."""
    tables = Tables(max_slots=max_slots, max_rows=12)
    running: dict[int, TableRows] = {}
    for move in moves:
        request = move % len(requests)
        if request in running:
            running.pop(request).release()
        else:
            request_edits = [
                {site: SiteEdit("add", vector(WIDTHS[site[0]], seed)) for site, seed in edit.items()}
                for edit in requests[request]
            ]
            rows = TableRows(tables, request_edits, WIDTHS)
            before = {width: slab.uses.copy() for width, slab in tables.slabs.items()}
            if rows.reserve():
                running[request] = rows
            else:  # a refused reservation takes nothing
                assert {width: slab.uses for width, slab in tables.slabs.items() if slab.uses} == {
                    width: uses for width, uses in before.items() if uses
                }
        uses: dict[int, Counter] = {}
        for request in running:
            for edit in requests[request]:
                for (hook, _), seed in edit.items():
                    uses.setdefault(WIDTHS[hook], Counter())[seed] += 1
        for width, slab in tables.slabs.items():
            expected = uses.get(width, Counter())
            # One slot for each distinct vector.
            assert sorted(slab.uses.values()) == sorted(expected.values())
            assert torch.equal(slab.rows[0], torch.zeros(width)) and slab.rows[0].signbit().all()
            assert slab.room == max_slots - 1 - len(expected) and len(slab.rows) <= max_slots
        assert tables.rows_used == sum(len(requests[request]) for request in running)
    for rows in running.values():
        rows.release()
        rows.release()  # a second release has no effect
    assert tables.rows_used == 0 and not any(slab.uses for slab in tables.slabs.values())


def test_one_vector_at_all_layers_of_many_requests_is_one_row():
    tables = Tables()
    for _ in range(5):
        sites = {("mlp_out", layer): SiteEdit("add", vector(6, 1), scale=2.0) for layer in range(10)}
        assert rows_of(tables, sites).reserve()
    assert dict(tables.slabs[6].uses) == {1: 50}
    assert torch.equal(tables.slabs[6].rows[1], 2 * vector(6, 1))


def test_requests_that_never_fit_are_refused_and_others_wait():
    tables = Tables(max_slots=4, max_rows=5)
    with pytest.raises(CapacityError, match=r"4 different vectors of 6 numbers.*hold 3"):
        rows_of(tables, *(add("mlp_out", layer, layer) for layer in range(4)))
    with pytest.raises(CapacityError, match=r"6 edits.*rows for 4"):
        rows_of(tables, *(add("mlp_out", layer, 0) for layer in range(6)))
    first = rows_of(tables, add("mlp_out", 0, 1), add("mlp_out", 1, 2))
    second = rows_of(tables, add("mlp_out", 0, 1), add("mlp_out", 0, 3), add("mlp_out", 0, 4))
    assert first.reserve() and not second.reserve() and tables.slabs[6].room == 1
    first.release()
    assert second.reserve() and tables.slabs[6].room == 0


class Holding:
    def __init__(self, free):
        self.free, self.reserved = free, False

    def reserve(self):
        self.reserved = self.free
        return self.free

    def release(self):
        self.reserved = False


def test_a_plan_reserves_everything_or_nothing():
    yes, no = Holding(True), Holding(False)
    tables = Tables()
    plan = Plan(reservations=(yes, no), table=rows_of(tables, add("mlp_out", 0, 1)))
    assert not plan.reserve() and not yes.reserved and tables.rows_used == 0
    no.free = True
    assert plan.reserve() and yes.reserved and no.reserved and tables.rows_used == 1
    plan.release()
    assert not yes.reserved and tables.rows_used == 0


seeds = st.integers(0, 3)
some_tokens = st.none() | st.sets(st.integers(0, 5), min_size=1)
plain_sites = st.dictionaries(
    st.sampled_from([("mlp_out", 1), ("mhc_streams_pre_attn", 1)]),
    st.tuples(seeds, st.sampled_from(PATHS), st.sampled_from([0.0, 1.0, -2.5]), st.booleans()),
    min_size=1,
)


@settings(max_examples=scaled(300, 60))
@given(
    steps=st.lists(
        st.tuples(st.lists(st.tuples(plain_sites, some_tokens), max_size=3), st.integers(1, 6)),
        min_size=1,
        max_size=4,
    ),
    gap=st.integers(0, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_tables_and_the_row_by_row_twin_agree(steps, gap, dtype):
    """For any mix of requests, tokens, sites, paths and scales; rows without an edit are unchanged bit for bit."""
    tables, spans, twins, row = Tables(), [], [], gap
    for requested, count in steps:
        edits_of_request = []
        for sites, only in requested:
            edits_of_request.append(
                Everywhere(
                    {
                        (hook, layer): SiteEdit(
                            "add",
                            vector(6 if streamed else WIDTHS[hook], seed),
                            scale,
                            path if hook.startswith("mhc") else "both",
                            (1, 3) if streamed else None,
                        )
                        for (hook, layer), (seed, path, scale, narrow) in sites.items()
                        for streamed in [narrow and hook.startswith("mhc")]
                    },
                    only,
                )
            )
        table = (
            TableRows(tables, [edit.sites for edit in edits_of_request], WIDTHS) if edits_of_request else None
        )
        plan = Plan(edits=tuple(edits_of_request), table=table)
        assert plan.reserve()
        for span_plan, target in ((plan, spans), (Plan(edits=tuple(edits_of_request)), twins)):
            target.append(Span(span_plan, row, 0, [7] * count, count))
        row += count
    total = row + 2
    x, streams = (
        vector(total * 6, 50).view(total, 6).to(dtype),
        vector(total * 24, 51).view(total, 4, 6).to(dtype),
    )
    x[0], streams[1] = -0.0, -0.0
    staging = StepStaging()
    ours = [arm(staging, spans, total) for _ in range(2)]
    theirs = arm(StepStaging(), twins, total)
    assert ours[0] is ours[1]  # the tap of an equal step is reused
    if theirs is None:
        assert ours[0] is None
        return
    results = []
    for tap in (ours[0], theirs):
        at = tap.at(1)
        results.append((at(MLP_OUT, x), *at.part(MHC_STREAMS_PRE_ATTN, streams)))
    steered = {row for span in spans for row in range(span.first_row, span.first_row + len(span.token_ids))}
    untouched = [row for row in range(total) if row not in steered]
    for one, other, before in zip(*results, (x, streams, streams)):
        assert torch.allclose(one.float(), other.float(), atol=1e-6 if dtype is torch.float32 else 0.1)
        assert torch.equal(_bits(one[untouched]), _bits(before[untouched]))
    assert [span.plan.steered for span in spans] == [span.plan.steered for span in twins]


def _bits(x):
    return x.contiguous().view(torch.int16 if x.dtype is torch.bfloat16 else torch.int32)


def test_a_single_vector_equals_the_twin_bit_for_bit():
    tables = Tables()
    sites = add("mlp_out", 1, 3, scale=0.3)
    plan = Plan(edits=(Everywhere(sites),), table=rows_of(tables, sites))
    assert plan.reserve()
    x = vector(30, 9).view(5, 6)
    ours = arm(StepStaging(), [Span(plan, 0, 0, [1] * 5, 5)], 5).at(1)(MLP_OUT, x)
    theirs = edit_stages([(plan.edits[0].sites["mlp_out", 1], list(range(5)))])[0](x, SiteContext())
    assert torch.equal(ours, theirs)


def test_the_order_in_which_vectors_are_listed_changes_no_bit():
    """Sums of three float32 numbers depend on their order; the tables order them by the vectors alone."""
    x, adds, results = (
        vector(600, 2).view(100, 6),
        [add("mlp_out", 1, seed, scale=0.1 + seed) for seed in range(4)],
        set(),
    )
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        sites = [adds[index] for index in order]
        plan = Plan(edits=tuple(Everywhere(site) for site in sites), table=rows_of(Tables(), *sites))
        assert plan.reserve()
        tap = arm(StepStaging(), [Span(plan, 0, 0, [1] * 100, 100)], 100)
        results.add(tap.at(1)(MLP_OUT, x).numpy().tobytes())
    assert len(results) == 1


def test_plus_and_minus_cancel_exactly_in_low_precision():
    """Sums are float32 and rounded once, so opposite vectors cancel exactly."""
    tables = Tables()
    rows = rows_of(tables, add("mlp_out", 0, 1, scale=0.7), add("mlp_out", 0, 1, scale=-0.7))
    assert rows.reserve()
    x = vector(12, 2).view(2, 6).bfloat16()
    lanes = torch.tensor([[row] * 2 for row in rows.row_of.values()])
    assert torch.equal(gather_add(x, lanes, [tables.site(("mlp_out", 0, "both"))]), x)


def test_t_ste_6_a_recorded_graph_sees_rows_that_come_and_go():
    """The graph is recorded once with its buffers; requests that arrive, leave or change rows only change data.

    On a GPU the same operations are captured as a CUDA graph. Here they are recorded by the tracer, which also keeps
    the buffers and computes no indices itself."""
    tables, x = Tables(max_slots=8, max_rows=8, fixed=True), vector(18, 1).view(3, 6)
    first = rows_of(tables, add("mlp_out", 0, 1))
    assert first.reserve()
    token_rows = torch.zeros((1, 3), dtype=torch.long)
    slab, slots = tables.site(("mlp_out", 0, "both"))
    graph = make_fx(lambda rows: gather_add(rows, token_rows, [(slab, slots)]))(x)
    assert torch.equal(_bits(graph(x)), _bits(x))  # no row is steered
    token_rows[0, 1] = first.row_of[0]
    assert torch.equal(graph(x)[1], x[1] + vector(6, 1)) and torch.equal(graph(x)[0], x[0])
    second = rows_of(tables, add("mlp_out", 0, 2), add("mlp_out", 0, 3))
    assert second.reserve()
    token_rows.copy_(torch.tensor([[second.row_of[1], first.row_of[0], second.row_of[0]]]))
    assert torch.allclose(graph(x), x + torch.stack([vector(6, seed) for seed in (3, 1, 2)]))
    first.release()
    token_rows[0, 1] = 0
    assert torch.equal(graph(x)[1], x[1])
    assert (
        tables.site(("mlp_out", 0, "both"))[0] is slab and slab.data_ptr() == tables.slabs[6].rows.data_ptr()
    )


def test_content_digest_depends_on_the_scaled_vector():
    one, other = SiteEdit("add", vector(6, 1), 2.0), SiteEdit("add", 2 * vector(6, 1))
    assert Content.of(one, 6).digest == Content.of(other, 6).digest
    assert Content.of(one, 6).digest != Content.of(SiteEdit("add", vector(6, 1)), 6).digest
    zeros = SiteEdit("add", torch.zeros(6)), SiteEdit("add", -torch.zeros(6))
    assert len({Content.of(zero, 6).digest for zero in zeros}) == 1
    assert all(Content.of(zero, 6).row.signbit().all() for zero in zeros)
