"""Decoding steps replayed as CUDA graphs: one per number of rows and length of context, captured when first needed.

Rows come in a few sizes; a step of fewer is filled up with rows of a scratch slot that belongs to no request, at
position 0, where they complete nothing and are read by nobody. Contexts come in a few sizes too, since they decide how
much room attention and indexers need; what the rows are is data. Between replays the host writes token ids, positions
and slots, and reads nothing but what it asks of the logits.

A step that is watched or changed has graphs of its own, one for each pattern of what is done where (`hooks/still.py`).
The first step of a pattern is launched piece by piece, the second is recorded: what comes once is not worth a graph.
Captured rows leave on a stream of their own into page-locked memory while the next kernels already run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from birkhoff.hooks.live import LiveTap
from birkhoff.hooks.plan import Key
from birkhoff.hooks.still import Pattern, StillTap, Wishes, sort_out
from birkhoff.model.desk import Desk
from birkhoff.model.device import Decoder
from birkhoff.model.tapped import tapped_step

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (2048, 8192, 32768, 131072, 1 << 30)
MOST_PATTERNS = 32  # kept at a time; the one unused longest goes


@dataclass(eq=False)
class Watched:
    """A pattern's tap for one size of step, how often it was used, and its graph once it has one."""

    tap: StillTap
    steps: int = 0
    graph: torch.cuda.CUDAGraph | None = None


class Graphs:
    """`scratch` is a slot of the decoder's state that no request is given. Off a GPU steps run without a graph."""

    def __init__(self, decoder: Decoder, scratch: int, max_context: int, most_patterns: int = MOST_PATTERNS):
        self.decoder, self.scratch, self.max_context = decoder, scratch, max_context
        self.most_patterns, self.widths = most_patterns, site_widths(decoder)
        self._captured: dict[tuple[int, int], tuple[Desk, torch.cuda.CUDAGraph | None]] = {}
        self._watched: OrderedDict[tuple[int, int, Pattern], Watched] = OrderedDict()
        self._exit = Exit()
        self._pool: Any = None  # memory that all graphs share

    def takes(self, rows: int) -> bool:
        return rows <= ROWS[-1]

    def sorted_out(self, tap: LiveTap) -> Wishes | None:
        """What a tap wants, when a replayed step can do all of it."""
        return sort_out(tap, self.widths)

    def step(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        tap: LiveTap | None = None,
        wishes: Wishes | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token per sequence -> logits [n, vocab] float32, and the streams [n, m, d] behind the last layer.

        With a `tap` and its `wishes`, its rows are changed and its captures filled."""
        count = len(token_ids)
        desk, graph = self._find(count, max(positions) + 1)
        spare = desk.rows - count
        device = desk.token_ids.device
        rows = ([*token_ids, *[0] * spare], [*positions, *[0] * spare], [*slots, *[self.scratch] * spare])
        given = torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True)
        for held, values in zip((desk.token_ids, desk.positions, desk.slots), given):
            held.copy_(values)
        if tap is not None and wishes is not None:
            self._step_watched(desk, tap, wishes)
        elif graph is None:
            self.decoder.step(desk)
        else:
            graph.replay()
        return desk.logits[:count].clone(), desk.streams[:count].clone()

    def _find(self, count: int, length: int) -> tuple[Desk, torch.cuda.CUDAGraph | None]:
        rows = next(size for size in ROWS if count <= size)
        context = min(next(size for size in CONTEXTS if length <= size), self.max_context)
        found = self._captured.get((rows, context))
        if found is None:
            found = self._captured[rows, context] = self._capture(rows, context)
        return found

    def _capture(self, rows: int, context: int) -> tuple[Desk, torch.cuda.CUDAGraph | None]:
        desk = self.decoder.desk(rows, context)
        if desk.token_ids.device.type != "cuda":
            return desk, None
        desk.slots.fill_(self.scratch)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.decoder.step(desk)  # compiles what is compiled on first use
        torch.cuda.current_stream().wait_stream(side)
        return desk, self._record(lambda: self.decoder.step(desk))

    def _record(self, launches: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            launches()
        self._pool = graph.pool()
        return graph

    def _step_watched(self, desk: Desk, tap: LiveTap, wishes: Wishes) -> None:
        name = (desk.rows, desk.context, wishes.pattern)
        held = self._watched.get(name)
        if held is None:
            made = StillTap(wishes, tap.changes, desk.rows, desk.token_ids.device)
            held = self._watched[name] = Watched(made)
            while len(self._watched) > self.most_patterns:
                self._watched.popitem(last=False)
        self._watched.move_to_end(name)
        held.tap.fill(tap, wishes)
        self._exit.wait()  # a copy of the rows before may still be under way
        if held.steps == 1 and desk.token_ids.device.type == "cuda":
            held.graph = self._record(lambda: tapped_step(self.decoder, desk, held.tap))
        held.steps += 1
        if held.graph is None:
            tapped_step(self.decoder, desk, held.tap)
        else:
            held.graph.replay()
        wanted = [(want.key, want.after, len(want.rows)) for want in tap.wanted]
        tap.hand_over(self._exit.take(held.tap, wanted))


class Exit:
    """Captured rows on their way to the host, on a stream of their own, through page-locked memory that stays."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._arrived: torch.cuda.Event | None = None
        self._pinned: dict[tuple[Key, bool, torch.Size], torch.Tensor] = {}

    def wait(self) -> None:
        """Whatever the current stream is given from now on may write over what `take` was asked for."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)

    def take(
        self, tap: StillTap, wanted: Sequence[tuple[Key, bool, int]]
    ) -> Callable[[], dict[tuple[Key, bool], torch.Tensor]]:
        """Begin to copy the first rows of these sites; the answer waits for them and gives them out."""
        staged = {(key, after): tap.staged(key, after)[:count] for key, after, count in wanted}
        if not staged or next(iter(staged.values())).device.type != "cuda":
            copies = {name: rows.clone() for name, rows in staged.items()}
            return lambda: copies
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        landed = {}
        with torch.cuda.stream(self._stream):
            for (key, after), rows in staged.items():
                name = (key, after, rows.shape)
                if name not in self._pinned:
                    self._pinned[name] = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
                landed[key, after] = self._pinned[name].copy_(rows, non_blocking=True)
            arrived = self._arrived = torch.cuda.Event()
            arrived.record(self._stream)

        @cache
        def give_out() -> dict[tuple[Key, bool], torch.Tensor]:
            arrived.synchronize()
            return {name: rows.clone() for name, rows in landed.items()}

        return give_out


def site_widths(decoder: Decoder) -> dict[str, int]:
    """Numbers a row of every site that can be changed, by hook."""
    from birkhoff.hooks.sites import SITES

    c = decoder.config
    sizes = {"d": c.hidden_size, "md": c.hc_mult * c.hidden_size}
    return {site.name: sizes[site.shape] for site in SITES if site.edit}
