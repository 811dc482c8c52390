"""Decode steps replayed as CUDA graphs, one per number of rows and context length, recorded at load (`gpu_warmup.py`).

A row is a token: the next one of a sequence, or a draft token after it in the following row. Row counts are rounded up
to a few sizes; padding rows use a scratch slot that belongs to no request, at position 0, where they complete no
compressed entry and their output is not read. Context lengths are rounded up as well, because they determine the buffer
sizes of attention and indexers. Between replays the host writes token ids, positions and slots, and reads nothing but
the logits.

A step with captures or edits has its own graphs, one per pattern of operations and sites (`hooks/graph_tap.py`). The
first step of a pattern is launched kernel by kernel and the second is recorded, so that a pattern that occurs once
costs no recording. Captured rows are copied by `host_copier.py`. A step with the same captures and edits as the
previous one reuses its plan, its buffers and its copy plan at the cost of two comparisons.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.host_copier import HostCopier, JoinedRows
from birkhoff.hooks.batch_tap import BatchTap, CaptureLayout
from birkhoff.hooks.capture_buffer import RowCopyPlan
from birkhoff.hooks.graph_tap import AttentionShape, GraphPlan, GraphTap, Pattern, Scratch, plan_graph
from birkhoff.hooks.sites import SITES
from birkhoff.hooks.step_edits import StepEdits

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (2048, 8192, 32768, 131072, 1 << 30)
MAX_PATTERNS = 32  # least recently used evicted first


def row_sizes(drafts: int) -> tuple[int, ...]:
    """The row counts that steps are rounded up to, if sequences have up to `drafts` draft tokens: with two of them, a
    power of two of sequences is no power of two of rows."""
    return tuple(sorted({*ROWS, *(rows * (1 + drafts) for rows in ROWS if rows * (1 + drafts) <= ROWS[-1])}))


@dataclass(eq=False)
class TappedGraph:
    """The tap of a pattern for one step size, its number of steps, and its graph once recorded."""

    tap: GraphTap
    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    last_copy: tuple[CaptureLayout, RowCopyPlan] | None = None

    def copy_plan(self, layout: CaptureLayout) -> RowCopyPlan:
        """Where the rows of a layout go on the host, row by row; the last plan is reused for the same layout."""
        if self.last_copy is None or self.last_copy[0] is not layout:
            assert self.tap.buffer is not None, "no step has run"
            sites = [[(site.key, site.after) for site, _ in own] for own in layout.sites_of]
            single_rows = [(row, own) for rows, own in zip(layout.rows, sites) for row in rows]
            plan = RowCopyPlan(self.tap.buffer, single_rows)
            self.last_copy = layout, plan
        return self.last_copy[1]


@dataclass(frozen=True, eq=False)
class _PlannedTap:
    """The plan of the last tap, valid for taps with the same layout and edits."""

    layout: CaptureLayout
    edits: StepEdits | None
    plan: GraphPlan | None


class CudaGraphs:
    """`scratch_slot` is a slot of the decoder's state that no request uses. Without a GPU, steps run without graphs."""

    def __init__(
        self, decoder: Decoder, scratch_slot: int, max_context: int, max_patterns: int = MAX_PATTERNS
    ):
        self.decoder = decoder
        self.scratch_slot = scratch_slot
        self.max_context = max_context
        self.max_patterns = max_patterns
        self.widths = site_widths(decoder)
        self.attention = AttentionShape(decoder.config.num_attention_heads, [w.ratio for w in decoder.layers])
        self.row_sizes = row_sizes(decoder.drafts)
        self._plain: dict[tuple[int, int], tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]] = {}
        self._tapped: OrderedDict[tuple[int, int, Pattern], TappedGraph] = OrderedDict()
        self._copier = HostCopier()
        self._scratch = Scratch(decoder.state.device)
        self._planned: _PlannedTap | None = None
        self._last: tuple[DecodeBuffers, GraphPlan, TappedGraph] | None = None  # the last step with a tap
        self._memory_pool: Any = None  # shared by all graphs

    def prepare(self, rows: int, context: int) -> None:
        """Record the graph for steps of up to `rows` tokens in contexts of up to `context` tokens."""
        self._find_plain(rows, context)

    def fits(self, rows: int) -> bool:
        """Whether a step of this many rows has a graph size."""
        return rows <= ROWS[-1]

    def plan(self, tap: BatchTap) -> GraphPlan | None:
        """The graph plan of a tap, or None if a graph cannot run it."""
        last = self._planned
        if last is None or last.layout is not tap.layout or last.edits is not tap.edits:
            last = self._planned = _PlannedTap(
                tap.layout, tap.edits, plan_graph(tap, self.widths, self.attention)
            )
        return last.plan

    def step(
        self,
        token_ids: Sequence[int] | torch.Tensor,
        positions: Sequence[int],
        slots: Sequence[int],
        tap: BatchTap | None = None,
        plan: GraphPlan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute n tokens; several of one slot are adjacent and consecutive. Ids may be a tensor [n] on the device.

        Returns logits [n, vocab] float32 and the streams [n, m, d] after the last layer. With a `tap` and its `plan`,
        edits are applied and captures filled."""
        count = len(token_ids)
        buffers, graph = self._find_plain(count, max(positions) + 1)
        self.write_inputs(buffers, token_ids, positions, slots)
        if tap is not None and plan is not None:
            self._tapped_step(buffers, tap, plan)
        elif graph is None:
            self.decoder.step(buffers)
        else:
            graph.replay()
        return buffers.logits[:count].clone(), buffers.streams[:count].clone()

    def write_inputs(
        self,
        buffers: DecodeBuffers,
        token_ids: Sequence[int] | torch.Tensor,
        positions: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Write the inputs of a step; rows that are left over use the scratch slot."""
        count = len(slots)
        padding = buffers.inputs.shape[1] - count
        on_device = isinstance(token_ids, torch.Tensor)
        inputs = torch.tensor(
            (
                [*([0] * count if on_device else token_ids), *[0] * padding],
                [*positions, *[0] * padding],
                [*slots, *[self.scratch_slot] * padding],
            ),
            dtype=torch.long,
            pin_memory=buffers.inputs.is_cuda,
        )
        buffers.inputs.copy_(inputs, non_blocking=True)
        if isinstance(token_ids, torch.Tensor):
            buffers.inputs[0, :count].copy_(token_ids)

    def round_up(self, count: int) -> int:
        """The row count of the steps that compute `count` tokens."""
        return next(size for size in self.row_sizes if count <= size)

    def _find_plain(self, count: int, length: int) -> tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]:
        rows = self.round_up(count)
        context = min(next(size for size in CONTEXTS if length <= size), self.max_context)
        if (rows, context) not in self._plain:
            self._plain[rows, context] = self._record_plain(rows, context)
        return self._plain[rows, context]

    def _record_plain(self, rows: int, context: int) -> tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]:
        buffers = self.decoder.buffers(rows, context)
        return buffers, self.record_step(buffers, lambda: self.decoder.step(buffers))

    def record_step(self, buffers: DecodeBuffers, launch: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
        """Record what `launch` does with these buffers, or return None without a GPU."""
        if buffers.token_ids.device.type != "cuda":
            return None
        buffers.slots.fill_(self.scratch_slot)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch()  # compiles kernels, which recording cannot do
        torch.cuda.current_stream().wait_stream(side)
        return self._record(launch)

    def _record(self, launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory_pool):
            launch()
        self._memory_pool = graph.pool()
        return graph

    def _tapped_step(self, buffers: DecodeBuffers, tap: BatchTap, plan: GraphPlan) -> None:
        tapped = self._find_tapped(buffers, tap, plan)
        tapped.tap.fill(tap, plan)
        self._copier.wait()  # the rows of the previous step may still be copied from the buffer
        if tapped.steps == 1 and buffers.token_ids.device.type == "cuda":
            tapped.graph = self._record(lambda: self.decoder.step(buffers, tapped.tap))
        tapped.steps += 1
        if tapped.graph is None:
            self.decoder.step(buffers, tapped.tap)
        else:
            tapped.graph.replay()
        if tap.requests:
            assert tapped.tap.buffer is not None
            pending = self._copier.copy(tapped.tap.buffer, tapped.copy_plan(tap.layout))
            counts = [len(rows) for rows in tap.layout.rows]
            tap.set_source(pending if max(counts) == 1 else JoinedRows(pending, counts))

    @property
    def last_tapped(self) -> TappedGraph | None:
        """What ran the last step with captures or edits."""
        return None if self._last is None else self._last[2]

    def _find_tapped(self, buffers: DecodeBuffers, tap: BatchTap, plan: GraphPlan) -> TappedGraph:
        if self._last is not None and self._last[0] is buffers and self._last[1] is plan:
            return self._last[2]
        key = (buffers.rows, buffers.context, plan.pattern)
        tapped = self._tapped.get(key)
        if tapped is None:
            graph_tap = GraphTap(plan, tap.edits, buffers.rows, buffers.token_ids.device, self._scratch)
            tapped = self._tapped[key] = TappedGraph(graph_tap)
            while len(self._tapped) > self.max_patterns:
                self._tapped.popitem(last=False)
        self._tapped.move_to_end(key)
        self._last = buffers, plan, tapped
        return tapped


def site_widths(decoder: Decoder) -> dict[str, int]:
    """Row width of every site, by hook."""
    config = decoder.config
    m, d = config.hc_mult, config.hidden_size
    sizes = {"d": d, "md": m * d, "m": m, "mm": m * m, "k2": 2 * config.num_experts_per_tok}
    sizes |= {"E": config.n_routed_experts, "hc": config.num_attention_heads * config.head_dim}
    return {site.name: sizes[site.shape] for site in SITES if not site.absent and not site.ragged}
