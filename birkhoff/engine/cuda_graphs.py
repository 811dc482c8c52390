"""Decoding steps replayed as CUDA graphs: one per number of rows and length of context, captured when first needed.

Rows come in a few sizes; a step of fewer is filled up with rows of a scratch slot that belongs to no request, at
position 0, where they complete nothing and are read by nobody. Contexts come in a few sizes too, since they decide how
much room attention and indexers need; what the rows are is data. Between replays the host writes token ids, positions
and slots, and reads nothing but what it asks of the logits.

A step that is watched or changed has graphs of its own, one for each pattern of what is done where (`hooks/graph_tap.py`).
The first step of a pattern is launched piece by piece, the second is recorded: what comes once is not worth a graph.
Captured rows leave through `exit.py`. A step that wants what the last one wanted is sorted out, filled and cut as that
one was: beside its replay it costs two comparisons.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.host_copier import HostCopier
from birkhoff.hooks.batch_tap import BatchTap, CaptureLayout
from birkhoff.hooks.capture_buffer import RowCopyPlan
from birkhoff.hooks.graph_tap import GraphPlan, GraphTap, Pattern, Scratch, plan_graph
from birkhoff.hooks.step_edits import StepEdits

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (2048, 8192, 32768, 131072, 1 << 30)
MOST_PATTERNS = 32  # kept at a time; the one unused longest goes


@dataclass(eq=False)
class TappedGraph:
    """A pattern's tap for one size of step, how often it was used, and its graph once it has one."""

    tap: GraphTap
    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    cut: tuple[CaptureLayout, RowCopyPlan] | None = None  # who was given what in the last step

    def cut_for(self, layout: CaptureLayout) -> RowCopyPlan:
        if self.cut is None or self.cut[0] is not layout:
            assert self.tap.buffer is not None, "a step has run"
            assert all(len(rows) == 1 for rows in layout.rows), (
                "a decoding step has one token of each request"
            )
            sites = [[(want.key, want.after) for want, _ in share] for share in layout.sites_of]
            self.cut = (
                layout,
                RowCopyPlan(self.tap.buffer, [(rows[0], own) for rows, own in zip(layout.rows, sites)]),
            )
        return self.cut[1]


@dataclass(frozen=True, eq=False)
class _PlannedTap:
    """The last tap's wishes, for as long as taps want the same."""

    layout: CaptureLayout
    changes: StepEdits | None
    wishes: GraphPlan | None


class CudaGraphs:
    """`scratch` is a slot of the decoder's state that no request is given. Off a GPU steps run without a graph."""

    def __init__(self, decoder: Decoder, scratch: int, max_context: int, most_patterns: int = MOST_PATTERNS):
        self.decoder = decoder
        self.scratch = scratch
        self.max_context = max_context
        self.most_patterns = most_patterns
        self.widths = site_widths(decoder)
        self._captured: dict[tuple[int, int], tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]] = {}
        self._watched: OrderedDict[tuple[int, int, Pattern], TappedGraph] = OrderedDict()
        self._exit = HostCopier()
        self._scratch = Scratch(decoder.state.device)
        self._sorted: _PlannedTap | None = None
        self._last: tuple[DecodeBuffers, GraphPlan, TappedGraph] | None = (
            None  # the last step that was watched or changed
        )
        self._pool: Any = None  # memory that all graphs share

    def prepare(self, rows: int, context: int) -> None:
        """Record the graph for steps of up to `rows` tokens in contexts of up to `context` tokens."""
        self._find(rows, context)

    def takes(self, rows: int) -> bool:
        return rows <= ROWS[-1]

    def sorted_out(self, tap: BatchTap) -> GraphPlan | None:
        """What a tap wants, when a replayed step can do all of it."""
        last = self._sorted
        if last is None or last.layout is not tap.layout or last.changes is not tap.edits:
            last = self._sorted = _PlannedTap(tap.layout, tap.edits, plan_graph(tap, self.widths))
        return last.wishes

    def step(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        tap: BatchTap | None = None,
        wishes: GraphPlan | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token per sequence -> logits [n, vocab] float32, and the streams [n, m, d] behind the last layer.

        With a `tap` and its `wishes`, its rows are changed and its captures filled."""
        count = len(token_ids)
        buffers, graph = self._find(count, max(positions) + 1)
        spare = buffers.inputs.shape[1] - count
        rows = ([*token_ids, *[0] * spare], [*positions, *[0] * spare], [*slots, *[self.scratch] * spare])
        given = torch.tensor(rows, dtype=torch.long, pin_memory=buffers.inputs.is_cuda)
        buffers.inputs.copy_(given, non_blocking=True)
        if tap is not None and wishes is not None:
            self._step_watched(buffers, tap, wishes)
        elif graph is None:
            self.decoder.step(buffers)
        else:
            graph.replay()
        return buffers.logits[:count].clone(), buffers.streams[:count].clone()

    def _find(self, count: int, length: int) -> tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]:
        rows = next(size for size in ROWS if count <= size)
        context = min(next(size for size in CONTEXTS if length <= size), self.max_context)
        found = self._captured.get((rows, context))
        if found is None:
            found = self._captured[rows, context] = self._capture(rows, context)
        return found

    def _capture(self, rows: int, context: int) -> tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]:
        buffers = self.decoder.buffers(rows, context)
        if buffers.token_ids.device.type != "cuda":
            return buffers, None
        buffers.slots.fill_(self.scratch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.decoder.step(buffers)  # compiles what is compiled on first use
        torch.cuda.current_stream().wait_stream(side)
        return buffers, self._record(lambda: self.decoder.step(buffers))

    def _record(self, launches: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launches()
        self._pool = graph.pool()
        return graph

    def _step_watched(self, buffers: DecodeBuffers, tap: BatchTap, wishes: GraphPlan) -> None:
        held = self._find_watched(buffers, tap, wishes)
        held.tap.fill(tap, wishes)
        self._exit.wait()  # a copy of the rows before may still be under way
        if held.steps == 1 and buffers.token_ids.device.type == "cuda":
            held.graph = self._record(lambda: self.decoder.step(buffers, held.tap))
        held.steps += 1
        if held.graph is None:
            self.decoder.step(buffers, held.tap)
        else:
            held.graph.replay()
        if tap.requests:
            assert held.tap.buffer is not None
            tap.set_source(self._exit.take(held.tap.buffer, held.cut_for(tap.layout)))

    @property
    def last_watched(self) -> TappedGraph | None:
        """What ran the last step that was watched or changed."""
        return None if self._last is None else self._last[2]

    def _find_watched(self, buffers: DecodeBuffers, tap: BatchTap, wishes: GraphPlan) -> TappedGraph:
        if self._last is not None and self._last[0] is buffers and self._last[1] is wishes:
            return self._last[2]
        name = (buffers.rows, buffers.context, wishes.pattern)
        held = self._watched.get(name)
        if held is None:
            made = GraphTap(wishes, tap.edits, buffers.rows, buffers.token_ids.device, self._scratch)
            held = self._watched[name] = TappedGraph(made)
            while len(self._watched) > self.most_patterns:
                self._watched.popitem(last=False)
        self._watched.move_to_end(name)
        self._last = buffers, wishes, held
        return held


def site_widths(decoder: Decoder) -> dict[str, int]:
    """Numbers a row of every site that can be changed, by hook."""
    from birkhoff.hooks.sites import SITES

    c = decoder.config
    sizes = {"d": c.hidden_size, "md": c.hc_mult * c.hidden_size}
    return {site.name: sizes[site.shape] for site in SITES if site.edit}
