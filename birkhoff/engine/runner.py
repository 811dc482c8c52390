"""Runs one step of work through the model: pieces in, one row of logits out for each piece that samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from birkhoff.engine.scheduler import Work
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, Piece
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer


class Runner:
    """Holds the model and its state. With `invariant`, every request is run by itself."""

    def __init__(self, model: Transformer, state: State, invariant: bool = False):
        self.model, self.state, self.invariant = model, state, invariant
        self._given: dict[int, list[int]] = {}  # pages the state's table already knows, by slot

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """Logits [vocab] float32 of each piece's last token, or None for a piece with tokens still to come."""
        for item in work:
            self._give_pages(item)
        if self.invariant:
            return [self._forward([item])[0] for item in work]
        return self._forward(work)

    def _give_pages(self, item: Work) -> None:
        request = item.request
        assert request.slot is not None
        if self._given.get(request.slot) != request.pages:
            self.state.give_pages(request.slot, request.pages)
            self._given[request.slot] = list(request.pages)

    def _forward(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        pieces = [Piece(w.request.slot, w.start, w.request.tokens(w.start, w.stop)) for w in work]  # type: ignore[arg-type]
        batch = Batch.of(pieces, self.state.device)
        hidden, _ = self.model.run(batch, self.state, NoTap())
        row_of = {piece.slot: row for piece, row in zip(batch.pieces, batch.last_rows())}
        sampling = [w for w in work if w.samples]
        if not sampling:
            return [None] * len(work)
        rows = [row_of[w.request.slot] for w in sampling]  # type: ignore[index]
        logits = iter(self.model.logits(hidden[rows]))
        return [next(logits) if w.samples else None for w in work]
