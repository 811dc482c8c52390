"""A decode step with captures and edits on the GPU path equals that of the plain model, at every site.

In Triton's interpreter nothing is recorded, but the same launches run on the same buffers; that they can be recorded is
what `tests/hooks/test_graph_tap.py` asks of the taps.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cuda_graphs import CudaGraphs, site_widths
from birkhoff.engine.engine import EngineCore
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.sites import SITES
from birkhoff.hooks.vector_table import TableRows, Tables
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.hooks.test_graph_tap import Wish
from tests.hooks.test_vector_table import Everywhere, vector
from tests.interpreter import DEVICE, packed_model
from tests.model.test_prefill import with_kernels
from tests.models import variant
from tests.operations import Issued

SHORT = variant(compress_ratios=(0, 4), num_hash_layers=1, num_nextn_predict_layers=0)
LAYERS, D, M = 2, SHORT.hidden_size, SHORT.hc_mult
TOKENS, POSITIONS, SLOTS = [5, 6, 8], [0, 3, 1], [2, 0, 1]
ALL = [
    (site.name, layer)
    for site in SITES
    if not site.absent
    for layer in ([LAYERS - 1] if site.once else range(LAYERS))
]


@pytest.fixture(scope="module")
def model():
    return packed_model(SHORT)


def made(model, **options) -> CudaGraphs:
    state = State.contiguous(SHORT, 4, 128, device=DEVICE)
    return CudaGraphs(Decoder(model, state, fast=False), scratch_slot=3, max_context=128, **options)


def edits(seed: int):
    """Additions, a replaced output, a bounded input, and streams that are read otherwise than they are carried."""
    unit = vector(D, seed) / vector(D, seed).norm()
    return [
        Everywhere(
            {
                ("mhc_streams_pre_mlp", 0): SiteEdit("add", vector(M * D, seed, 0.3)),
                ("mlp_out", 1): SiteEdit("add", vector(D, seed + 1, 0.3)),
            }
        ),
        Everywhere(
            {
                ("post_attn", 0): SiteEdit("patch", vector(D, seed + 2, 0.5), 0.5),
                ("mlp_in", 1): SiteEdit("clamp", unit, low=-0.1, high=0.1),
            }
        ),
        Everywhere(
            {
                ("mhc_streams_pre_attn", 1): SiteEdit("add", vector(M * D, seed + 3, 0.3), path="read"),
                ("final_hidden", 1): SiteEdit("add", vector(D, seed + 4), 0.1, norm_match=True),
            }
        ),
    ]


def plans(tables: Tables, seed: int, widths) -> list[Plan]:
    """One request that is captured, one that is changed and captured after its edits, one that is only changed."""
    found = []
    for row in range(3):
        own = edits(seed + 10 * row) if row else []
        plan = Plan(jobs=(Wish(ALL, after=row == 1),) if row < 2 else (), edits=tuple(own))
        plan.table = TableRows(tables, [edit.sites for edit in own], widths)
        assert plan.table.reserve()
        found.append(plan)
    return found


def armed(wanted: list[Plan]):
    spans = [Span(plan, row, POSITIONS[row], [TOKENS[row]], 0) for row, plan in enumerate(wanted)]
    return arm(StepStaging(DEVICE), spans, len(spans))


def plainly(model, tap):
    """Logits and streams from the plain forward pass, rows in the order of the requests."""
    state = State.contiguous(SHORT, 4, 128, device=DEVICE)
    pieces = [SequenceChunk(s, p, torch.tensor([t])) for t, p, s in zip(TOKENS, POSITIONS, SLOTS)]
    batch = Batch.of(pieces, DEVICE)
    assert list(batch.chunks) == pieces
    hidden, streams = model.run(batch, state, tap)
    tap.deliver()
    return model.logits(hidden), streams


@torch.inference_mode()
def test_every_site_is_seen_and_changed_as_in_the_plain_model(model):
    graphs, tables = made(model), Tables(DEVICE)
    widths = site_widths(graphs.decoder)
    for seed in (1, 50):
        mine, true = plans(tables, seed, widths), plans(tables, seed, widths)
        logits, streams = plainly(model, armed(true))
        tap = armed(mine)
        wishes = graphs.plan(tap)
        assert wishes is not None
        new_logits, new_streams = graphs.step(TOKENS, POSITIONS, SLOTS, tap, wishes)
        tap.deliver()
        assert (new_logits - logits).abs().max() < 2e-4 and (new_streams - streams).abs().max() < 2e-4
        for plan, other in zip(mine[:2], true[:2]):
            got, expected = plan.jobs[0].got, other.jobs[0].got
            assert got.keys() == expected.keys() == set(ALL)
            for key, (rows,) in expected.items():
                assert got[key][0].shape == rows.shape and got[key][0].dtype == rows.dtype, key
                assert (got[key][0].float() - rows.float()).abs().max() < 2e-4, key
        for plan in (*mine, *true):
            plan.release()
    assert len(graphs._tapped) == 1, "other vectors and bounds are the same pattern"


@torch.inference_mode()
def test_looking_changes_no_bit_and_a_step_without_taps_is_left_alone(model):
    graphs, tables = made(model), Tables(DEVICE)
    plain = graphs.step(TOKENS, POSITIONS, SLOTS)
    watched = Plan(jobs=(Wish(ALL),))
    tap = armed([watched, Plan(), Plan()])
    seen = graphs.step(TOKENS, POSITIONS, SLOTS, tap, graphs.plan(tap))
    again = graphs.step(TOKENS, POSITIONS, SLOTS)
    for one, two, three in zip(plain, seen, again):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert list(graphs._plain) == [(4, 128)] and tables.rows_used == 0


@torch.inference_mode()
def test_patterns_unused_longest_are_let_go(model):
    graphs = made(model, max_patterns=2)
    for hook in ("mlp_out", "pre_attn", "mlp_out", "mlp_in"):
        own = Plan(edits=(Everywhere({(hook, 0): SiteEdit("patch", vector(D, 1))}),))
        tap = armed([own])
        graphs.step(TOKENS[:1], POSITIONS[:1], SLOTS[:1], tap, graphs.plan(tap))
    kept = [(pattern.row_edits[0][0][0], held.steps) for (_, _, pattern), held in graphs._tapped.items()]
    assert kept == [("mlp_out", 2), ("mlp_in", 1)]


def answers(model, name: str, widths) -> tuple[list[list[int]], list[Wish]]:
    """Two requests through an engine, both steered and one captured: their tokens, and what was captured."""
    core = EngineCore(with_kernels(model, name), max_requests=2, max_context=128, num_pages=4, device=DEVICE)
    tables, jobs, made = Tables(DEVICE), [], []
    options = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for row in range(2):
        own, job = edits(3 + row), Wish(ALL)
        plan = Plan(jobs=(job,) if row else (), edits=tuple(own))
        plan.table = TableRows(tables, [edit.sites for edit in own], widths)
        jobs.append(job)
        made.append(Request((5 + row, 9), options, 3, seed=0, plan=plan))
        core.submit(made[-1])
    while core.step():
        pass
    graphs = core.runner.graphs
    assert (graphs is None) == (name == "reference")
    if graphs is not None:
        assert [held.steps for held in graphs._tapped.values()] == [2], "both decoding steps went that way"
    core.close()
    return [request.output_ids for request in made], jobs


def test_an_engine_steers_and_captures_on_the_way_of_graphs(model):
    widths = {site.name: {"d": D, "md": M * D}[site.shape] for site in SITES if site.edit}
    (plain, plain_jobs), (mine, my_jobs) = (answers(model, name, widths) for name in ("reference", "triton"))
    assert mine == plain
    for key, expected in plain_jobs[1].got.items():
        rows, true = torch.cat(my_jobs[1].got[key]), torch.cat(expected)
        assert rows.shape == true.shape and len(true) == 4, key
        assert (rows.float() - true.float()).abs().max() < 5e-4, key


@torch.no_grad()
def test_a_steady_step_writes_nothing_and_asks_no_more_of_the_host_than_a_bare_one(model):
    """Beside what is recorded: token ids, positions and slots in one copy, logits and streams handed out. Captured rows
    are one copy more, which is not an operation of PyTorch's on a host."""
    graphs, tables, staging = made(model), Tables(DEVICE), StepStaging(DEVICE)
    wanted = plans(tables, 1, site_widths(graphs.decoder))
    asked = []
    for step in range(3):
        spans = [Span(plan, row, 4 + step, [TOKENS[row]], 0) for row, plan in enumerate(wanted)]
        at = [4 + step] * len(spans)
        with Issued() as whole:
            tap = arm(staging, spans, len(spans))
            graphs.step(TOKENS, at, SLOTS, tap, graphs.plan(tap))
        asked.append(Counter(whole.names))
        tap.deliver()
    held = graphs.last_tapped
    assert held is not None and len(held.copy_plan(tap.layout).copies) == 1
    with Issued() as recorded:
        graphs.decoder.step(graphs._find_plain(3, 8)[0], held.tap)
    steady = asked[2] - Counter(recorded.names)
    assert asked[1] == asked[2] and (asked[0] - asked[2]).total() > 30, (
        "the first of them had something to write"
    )
    with Issued() as whole:
        graphs.step(TOKENS, at, SLOTS)
    with Issued() as recorded:
        graphs.decoder.step(graphs._find_plain(3, 8)[0])
    bare = Counter(whole.names) - Counter(recorded.names)
    assert steady == bare and bare["copy_"] == 1 and bare["clone"] == 2 and bare.total() <= 6, (steady, bare)


class Numbered(Wish):
    """A job that remembers whose rows it was given; at the end, how many of them there were."""

    def __init__(self, keys):
        super().__init__(keys)
        self.positions, self.at_the_end = [], None

    def deliver(self, rows):
        super().deliver(rows)
        if (rows.hook, rows.layer) == self.keys[0]:
            self.positions += rows.positions

    def close(self, finish_reason, num_tokens):
        self.at_the_end = (finish_reason, len(self.positions))


class Trouble:
    """A form that allows everything, until it fails once."""

    def __init__(self, after, error):
        self.left, self.error = after, error

    def allowed(self, output_ids, vocab_size):
        self.left -= 1
        if self.left == -1:
            raise self.error
        return torch.ones(vocab_size, dtype=torch.bool)


def watched_request(core, tokens, mask=None):
    job = Numbered([("mlp_out", 0), ("mhc_streams_final", 1)])
    options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = Request((5, 9), options, tokens, seed=0, plan=Plan(jobs=(job,)), mask=mask)
    core.submit(request)
    return request, job


def small_core(model):
    return EngineCore(
        with_kernels(model, "triton"), max_requests=3, max_context=128, num_pages=4, device=DEVICE
    )


def test_rows_are_handed_over_while_the_next_step_runs_and_all_of_them_before_a_request_ends(model):
    core = small_core(model)
    _, job = watched_request(core, 5)
    left, other = watched_request(core, 9)
    core.step()  # prompts, which are not replayed
    assert job.positions == other.positions == [0, 1]
    core.step()
    assert job.positions == [0, 1], "the row of this step is on its way"
    core.step()
    assert job.positions == other.positions == [0, 1, 2]
    core.cancel(left)
    assert other.positions == [0, 1, 2, 3] and other.at_the_end == ("cancelled", 4)
    while core.step():
        pass
    assert job.positions == [0, 1, 2, 3, 4, 5] and job.at_the_end == ("length", 6)
    assert [len(rows) for rows in job.got.values()] == [5, 5], "the prompt came in one piece"
    core.close()
    assert core.runner._pending == [] or all(
        request.deliver_pending_rows is None for request in core.runner._pending
    )


@pytest.mark.parametrize(
    "error", [ValueError("a broken form"), KeyboardInterrupt()], ids=["fails", "interrupted"]
)
def test_no_row_is_lost_or_given_twice_when_a_step_goes_wrong(model, error):
    core = small_core(model)
    request, job = watched_request(core, 6, Trouble(3, error))
    _, beside = watched_request(core, 6)
    interrupted = 0
    while not request.done:
        try:
            core.step()
        except KeyboardInterrupt:
            interrupted += 1
    while core.step():
        pass
    if interrupted:
        assert job.positions == beside.positions == [0, 1, 2, 3, 4, 5, 6]
        assert job.at_the_end == beside.at_the_end == ("length", 7)
    else:
        assert job.positions == [0, 1, 2, 3, 4] and job.at_the_end == ("error", 5), (
            "with that of the step that failed"
        )
        assert beside.at_the_end == ("error", 5)
    core.close()
