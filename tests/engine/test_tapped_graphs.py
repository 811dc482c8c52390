"""A decode step with captures and edits on the GPU path equals that of the plain model, at every site.

In Triton's interpreter no graph is recorded, but the same launches run on the same buffers;
`tests/hooks/test_graph_tap.py` tests that they can be recorded.
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
from birkhoff.hooks.attention_change import AttentionChange, Blocks
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.routing import ExpertUse, RouterHost
from birkhoff.hooks.sites import SITES
from birkhoff.hooks.vector_table import TableRows, Tables
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.hooks.test_graph_tap import CaptureJob
from tests.hooks.test_vector_table import Everywhere, vector
from tests.interpreter import DEVICE, packed_model
from tests.model.test_prefill import with_kernels
from tests.models import variant
from tests.operations import Issued
from tests.sizes import scaled

SHORT = variant(
    compress_ratios=(0, 4), num_hash_layers=1, num_nextn_predict_layers=0, hc_sinkhorn_iters=scaled(20, 3)
)
LAYERS, D, M = 2, SHORT.hidden_size, SHORT.hc_mult
HEADS = SHORT.num_attention_heads * SHORT.head_dim
TOKENS, POSITIONS, SLOTS = [5, 6, 8], [0, 3, 1], [2, 0, 1]
ALL = [
    (site.name, layer)
    for site in SITES
    if not site.absent and not site.ragged
    for layer in ([LAYERS - 1] if site.once else range(LAYERS))
]


@pytest.fixture(scope="module")
def model():
    return packed_model(SHORT)


def make_graphs(model, **options) -> CudaGraphs:
    state = State.contiguous(SHORT, 4, 128, device=DEVICE)
    return CudaGraphs(Decoder(model, state, fast=False), scratch_slot=3, max_context=128, **options)


def expert_use(seed: int) -> ExpertUse:
    """One expert forced with a weight, one banned, one with a higher score."""
    count = SHORT.n_routed_experts
    numbers = torch.zeros(3, count)
    numbers[2] = torch.nan
    forced, banned, raised = (seed % count, (seed + 1) % count, (seed + 2) % count)
    numbers[0, raised], numbers[1, forced], numbers[1, banned], numbers[2, forced] = 0.3, 1.0, -1.0, 0.4
    return ExpertUse(numbers, RouterHost(count, SHORT.num_experts_per_tok))


def gated(seed: int, hook: str, layer: int, width: int) -> SiteEdit:
    """A patch of the tokens whose rows at another site point one way."""
    return SiteEdit(
        "patch", vector(D, seed), 0.5, gate=SiteGate((hook, layer), vector(width, seed + 7), low=0.0)
    )


def edits(seed: int):
    """Additions, a patched output, a clamped input, streams edited on the read path only, mixers, routers (one
    hash-routed, one not), and gated patches."""
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
        Everywhere(
            {
                ("mhc_attn_pre_mix", 0): SiteEdit("patch", torch.zeros(M), 0.3, entries=(seed % M,)),
                ("mhc_ffn_post_mix", 0): SiteEdit("bound", torch.zeros(M), high=0.1 + seed / 100),
                ("mhc_attn_res_mix", 1): SiteEdit("patch", torch.eye(M).flatten(), 0.5, renormalise=True),
                ("mhc_head_mix", 1): SiteEdit("patch", vector(M, seed + 5).abs(), 0.5),
            }
        ),
        Everywhere({("moe_topk", layer): expert_use(seed) for layer in range(LAYERS)}),
        Everywhere({("mlp_out", 0): gated(seed, "mhc_streams_pre_attn", 0, M * D)}),
        Everywhere({("pre_attn", 1): gated(seed, "moe_router_logits", 0, SHORT.n_routed_experts)}),
        Everywhere(
            {
                ("attn_head_out", 0): SiteEdit("patch", torch.zeros(SHORT.head_dim), streams=(1, 3)),
                ("attn_head_out", 1): SiteEdit("add", vector(HEADS, seed + 5, 0.3)),
            }
        ),
    ]


def plans(tables: Tables, seed: int, widths) -> list[Plan]:
    """One request that is captured, one that is edited and captured after its edits, one that is only edited."""
    result = []
    for row in range(3):
        request_edits = edits(seed + 10 * row) if row else []
        plan = Plan(jobs=(CaptureJob(ALL, after=row == 1),) if row < 2 else (), edits=tuple(request_edits))
        plan.table = TableRows(tables, [edit.sites for edit in request_edits], widths)
        assert plan.table.reserve()
        result.append(plan)
    return result


def armed(request_plans: list[Plan]):
    spans = [Span(plan, row, POSITIONS[row], [TOKENS[row]], 0) for row, plan in enumerate(request_plans)]
    return arm(StepStaging(DEVICE), spans, len(spans))


def plain_step(model, tap):
    """Logits and streams from the plain forward pass, rows in the order of the requests."""
    state = State.contiguous(SHORT, 4, 128, device=DEVICE)
    pieces = [SequenceChunk(s, p, torch.tensor([t])) for t, p, s in zip(TOKENS, POSITIONS, SLOTS)]
    batch = Batch.of(pieces, DEVICE)
    assert list(batch.chunks) == pieces
    hidden, streams = model.run(batch, state, tap)
    tap.deliver()
    return model.logits(hidden), streams


@torch.inference_mode()
def test_every_site_is_captured_and_edited_as_in_the_plain_model(model):
    graphs, tables = make_graphs(model), Tables(DEVICE)
    widths = site_widths(graphs.decoder)
    for seed in (1, 50):
        actual, true = plans(tables, seed, widths), plans(tables, seed, widths)
        logits, streams = plain_step(model, armed(true))
        tap = armed(actual)
        graph_plan = graphs.plan(tap)
        assert graph_plan is not None
        new_logits, new_streams = graphs.step(TOKENS, POSITIONS, SLOTS, tap, graph_plan)
        tap.deliver()
        assert (new_logits - logits).abs().max() < 2e-4 and (new_streams - streams).abs().max() < 2e-4
        for plan, other in zip(actual[:2], true[:2]):
            got, expected = plan.jobs[0].got, other.jobs[0].got
            assert got.keys() == expected.keys() == set(ALL)
            for key, (rows,) in expected.items():
                assert got[key][0].shape == rows.shape and got[key][0].dtype == rows.dtype, key
                assert (got[key][0].float() - rows.float()).abs().max() < 2e-4, key
        for plan in (*actual, *true):
            plan.release()
    assert len(graphs._tapped) == 1, "other vectors and bounds have the same pattern"


@torch.inference_mode()
def test_captures_change_no_bit_and_plain_steps_are_not_affected(model):
    graphs, tables = make_graphs(model), Tables(DEVICE)
    plain = graphs.step(TOKENS, POSITIONS, SLOTS)
    watched = Plan(jobs=(CaptureJob(ALL),))
    tap = armed([watched, Plan(), Plan()])
    seen = graphs.step(TOKENS, POSITIONS, SLOTS, tap, graphs.plan(tap))
    again = graphs.step(TOKENS, POSITIONS, SLOTS)
    for one, two, three in zip(plain, seen, again):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert list(graphs._plain) == [(4, 128)] and tables.rows_used == 0


@torch.inference_mode()
def test_least_recently_used_patterns_are_evicted(model):
    graphs = make_graphs(model, max_patterns=2)
    for hook in ("mlp_out", "pre_attn", "mlp_out", "mlp_in"):
        plan = Plan(edits=(Everywhere({(hook, 0): SiteEdit("patch", vector(D, 1))}),))
        tap = armed([plan])
        graphs.step(TOKENS[:1], POSITIONS[:1], SLOTS[:1], tap, graphs.plan(tap))
    kept = [(pattern.row_edits[0][0][0], graph.steps) for (_, _, pattern), graph in graphs._tapped.items()]
    assert kept == [("mlp_out", 2), ("mlp_in", 1)]


def answers(model, name: str, widths) -> tuple[list[list[int]], list[CaptureJob]]:
    """Run two steered requests, one of them captured, through an engine; returns their tokens and the capture jobs."""
    core = EngineCore(with_kernels(model, name), max_requests=2, max_context=128, num_pages=4, device=DEVICE)
    tables, jobs, requests = Tables(DEVICE), [], []
    options = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    for row in range(2):
        request_edits, job = edits(3 + row), CaptureJob(ALL)
        plan = Plan(jobs=(job,) if row else (), edits=tuple(request_edits))
        plan.table = TableRows(tables, [edit.sites for edit in request_edits], widths)
        jobs.append(job)
        requests.append(Request((5 + row, 9), options, 3, seed=0, plan=plan))
        core.submit(requests[-1])
    while core.step():
        pass
    graphs = core.runner.graphs
    assert (graphs is None) == (name == "reference")
    if graphs is not None:
        assert [graph.steps for graph in graphs._tapped.values()] == [2], (
            "both decode steps used the tapped graph"
        )
    core.close()
    return [request.output_ids for request in requests], jobs


def test_an_engine_steers_and_captures_with_graphs(model):
    sizes = {"d": D, "md": M * D, "m": M, "mm": M * M, "k2": 2 * SHORT.num_experts_per_tok}
    sizes |= {"E": SHORT.n_routed_experts, "hc": HEADS}
    widths = {site.name: sizes[site.shape] for site in SITES if not site.absent and not site.ragged}
    (plain, plain_jobs), (actual, actual_jobs) = (
        answers(model, name, widths) for name in ("reference", "triton")
    )
    assert actual == plain
    for key, expected in plain_jobs[1].got.items():
        rows, true = torch.cat(actual_jobs[1].got[key]), torch.cat(expected)
        assert rows.shape == true.shape and len(true) == 4, key
        assert (rows.float() - true.float()).abs().max() < 5e-4, key


def test_requests_with_changed_attention_run_beside_the_graph_of_the_others(model):
    """Prompts and decode steps of GPU kernels: what a graph cannot hold is computed as in the plain model."""
    change = AttentionChange(mask=((0, 2),), forbid=Blocks((0,)), sink=0.5)
    keys = [("attn_weights", 1), ("index_blocks", 1), ("entry_tokens", 1)]
    results = {}
    for name in ("reference", "triton"):
        core = EngineCore(
            with_kernels(model, name), max_requests=2, max_context=128, num_pages=4, device=DEVICE
        )
        job = CaptureJob(keys, after=True)
        plan = Plan(jobs=(job,), edits=(Everywhere({("attn_weights", 1): change}),))
        options = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        requests = [Request(tuple(range(5, 14)), options, 2, seed=0, plan=each) for each in (plan, None)]
        for request in requests:
            core.submit(request)
        while core.step():
            pass
        if core.runner.graphs is not None:
            assert not core.runner.graphs._tapped and core.runner.graphs._plain
        core.close()
        results[name] = [request.output_ids for request in requests], job.got
    assert results["triton"][0] == results["reference"][0]
    assert results["triton"][0][0] != results["triton"][0][1]
    for key in keys:
        actual, expected = (torch.cat(results[name][1][key]) for name in ("triton", "reference"))
        assert actual.shape == expected.shape and (actual - expected).abs().max() < 5e-4, key


@torch.no_grad()
def test_a_repeated_tapped_step_issues_no_more_host_operations_than_a_plain_one(model):
    """Besides the recorded launches: one copy of token ids, positions and slots, and clones of logits and streams.
    Captured rows take one more copy, which on a host is not a PyTorch operation."""
    graphs, tables, staging = make_graphs(model), Tables(DEVICE), StepStaging(DEVICE)
    request_plans = plans(tables, 1, site_widths(graphs.decoder))
    counts = []
    for step in range(3):
        spans = [Span(plan, row, 4 + step, [TOKENS[row]], 0) for row, plan in enumerate(request_plans)]
        at = [4 + step] * len(spans)
        with Issued() as whole:
            tap = arm(staging, spans, len(spans))
            graphs.step(TOKENS, at, SLOTS, tap, graphs.plan(tap))
        counts.append(Counter(whole.names))
        tap.deliver()
    graph = graphs.last_tapped
    assert graph is not None and len(graph.copy_plan(tap.layout).copies) == 1
    with Issued() as recorded:
        graphs.decoder.step(graphs._find_plain(3, 8)[0], graph.tap)
    steady = counts[2] - Counter(recorded.names)
    assert counts[1] == counts[2] and (counts[0] - counts[2]).total() > 30, (
        "the first step writes tables and parameters"
    )
    with Issued() as whole:
        graphs.step(TOKENS, at, SLOTS)
    with Issued() as recorded:
        graphs.decoder.step(graphs._find_plain(3, 8)[0])
    bare = Counter(whole.names) - Counter(recorded.names)
    assert steady == bare and bare["copy_"] == 1 and bare["clone"] == 2 and bare.total() <= 6, (steady, bare)


class Numbered(CaptureJob):
    """A job that records the positions of its rows and, when closed, their number."""

    def __init__(self, keys):
        super().__init__(keys)
        self.positions, self.at_close = [], None

    def deliver(self, rows):
        super().deliver(rows)
        if (rows.hook, rows.layer) == self.keys[0]:
            self.positions += rows.positions

    def close(self, finish_reason, num_tokens):
        self.at_close = (finish_reason, len(self.positions))


class FailingMask:
    """A token mask that allows every token and raises once."""

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


def test_rows_are_delivered_during_the_next_step_and_before_a_request_ends(model):
    core = small_core(model)
    _, job = watched_request(core, 5)
    left, other = watched_request(core, 9)
    core.step()  # the prefill, which is not replayed
    assert job.positions == other.positions == [0, 1]
    core.step()
    assert job.positions == [0, 1], "the row of this step is not delivered yet"
    core.step()
    assert job.positions == other.positions == [0, 1, 2]
    core.cancel(left)
    computed = left.num_tokens - 1  # a step that was launched too far is discarded
    assert other.positions == list(range(computed)) and other.at_close == ("cancelled", computed)
    while core.step():
        pass
    assert job.positions == [0, 1, 2, 3, 4, 5] and job.at_close == ("length", 6)
    assert [len(rows) for rows in job.got.values()] == [5, 5], "the rows of the prompt are one delivery"
    core.close()
    assert left.plan.withheld is None, "nothing waits for a request that has ended"


@pytest.mark.parametrize(
    "error", [ValueError("a broken mask"), KeyboardInterrupt()], ids=["fails", "interrupted"]
)
def test_no_row_is_lost_or_repeated_when_a_step_fails(model, error):
    core = small_core(model)
    request, job = watched_request(core, 6, FailingMask(3, error))
    _, other = watched_request(core, 6)
    interrupted = 0
    while not request.done:
        try:
            core.step()
        except KeyboardInterrupt:
            interrupted += 1
    while core.step():
        pass
    if interrupted:
        assert job.positions == other.positions == [0, 1, 2, 3, 4, 5, 6]
        assert job.at_close == other.at_close == ("length", 7)
    else:
        assert job.positions == [0, 1, 2, 3, 4] and job.at_close == ("error", 5), (
            "includes the row of the failed step"
        )
        assert other.at_close == ("error", 5)
    core.close()
