"""Decoding steps replayed as CUDA graphs: one per number of rows and length of context, captured when first needed.

Rows come in a few sizes; a step of fewer is filled up with rows of a scratch slot that belongs to no request, at
position 0, where they complete nothing and are read by nobody. Contexts come in a few sizes too, since they decide how
much room attention and indexers need; what the rows are is data. Between replays the host writes token ids, positions
and slots, and reads nothing but what it asks of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.model.desk import Desk
from birkhoff.model.device import Decoder

ROWS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (2048, 8192, 32768, 131072, 1 << 30)


class Graphs:
    """`scratch` is a slot of the decoder's state that no request is given. Off a GPU steps run without a graph."""

    def __init__(self, decoder: Decoder, scratch: int, max_context: int):
        self.decoder, self.scratch, self.max_context = decoder, scratch, max_context
        self._captured: dict[tuple[int, int], tuple[Desk, torch.cuda.CUDAGraph | None]] = {}
        self._pool: Any = None  # memory that all graphs share

    def takes(self, rows: int) -> bool:
        return rows <= ROWS[-1]

    def step(
        self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token per sequence -> logits [n, vocab] float32, and the streams [n, m, d] behind the last layer."""
        count = len(token_ids)
        desk, graph = self._find(count, max(positions) + 1)
        spare = desk.rows - count
        device = desk.token_ids.device
        rows = ([*token_ids, *[0] * spare], [*positions, *[0] * spare], [*slots, *[self.scratch] * spare])
        given = torch.tensor(rows, dtype=torch.long).to(device, non_blocking=True)
        for held, values in zip((desk.token_ids, desk.positions, desk.slots), given):
            held.copy_(values)
        if graph is None:
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.decoder.step(desk)
        self._pool = graph.pool()
        return desk, graph
