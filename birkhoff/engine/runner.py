"""Runs one step of work through the model: pieces in, one row of logits out for each piece that samples.

On a CPU a step that only decodes is split in two when there are rows and cores enough: compiled kernels run one row
after the other without the interpreter's lock, so two halves of a batch are two threads' work.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request
from birkhoff.engine.scheduler import Work
from birkhoff.hooks.live import LiveTap, Staging, arm
from birkhoff.hooks.plan import Span
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, Piece
from birkhoff.model.state import Snapshot, State
from birkhoff.model.transformer import Transformer

SPLIT_ROWS = 4


class Runner:
    """Holds the model and its state. With `invariant`, every request is run by itself."""

    def __init__(self, model: Transformer, state: State, invariant: bool = False):
        self.model, self.state, self.invariant = model, state, invariant
        self.prefix: PrefixCache | None = None
        self.passed: dict[Request, list[Snapshot]] = {}  # what the last step saw at the page borders it passed
        self._stagings = (Staging(state.device), Staging(state.device))
        self._helper = ThreadPoolExecutor(1, "birkhoff-decode")  # starts no thread before it is needed
        self._given: dict[int, list[int]] = {}  # pages the state's table already knows, by slot

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        """Logits [vocab] float32 of each piece's last token, or None for a piece with tokens still to come."""
        for item in work:
            self._give_pages(item)
        self.passed.clear()
        try:
            self._watch(work)
            return self._run(work)
        finally:
            self.state.watched.clear()

    def _run(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        if self.invariant:
            return [self._forward([item])[0] for item in work]
        if self._splits(work):
            half = len(work) // 2
            other = self._helper.submit(self._second_half, work[half:])
            try:
                first = self._forward(work[:half])
            finally:
                other.exception()  # both halves have ended before anybody looks at the state
            return first + other.result()
        return self._forward(work)

    def close(self) -> None:
        self._helper.shutdown()

    def _watch(self, work: Sequence[Work]) -> None:
        if self.prefix is not None:
            for item in work:
                if item.stop - item.start > 1:
                    self.passed[item.request] = self.prefix.watch(item.request, item.start, item.stop)

    def _splits(self, work: Sequence[Work]) -> bool:
        decoding = len(work) >= SPLIT_ROWS and all(w.stop - w.start == 1 for w in work)
        return decoding and self.model.numerics.kernels.name == "cpu" and torch.get_num_threads() > 1

    @torch.inference_mode()
    def _second_half(self, work: Sequence[Work]) -> list[torch.Tensor | None]:
        return self._forward(work, self._stagings[1])

    def _give_pages(self, item: Work) -> None:
        request = item.request
        assert request.slot is not None
        if self._given.get(request.slot) != request.pages:
            self.state.give_pages(request.slot, request.pages)
            self._given[request.slot] = list(request.pages)

    def _arm(self, work: Sequence[Work], batch: Batch, staging: Staging) -> LiveTap | None:
        """The tap of this step, when some request of it has a plan that wants something of it."""
        planned = [w for w in work if w.request.plan is not None]
        if not planned:
            return None
        row_of = {piece.slot: row for piece, row in zip(batch.pieces, batch.offsets)}
        spans = []
        for w in planned:
            request = w.request
            assert request.plan is not None and request.slot is not None
            tokens = request.tokens(w.start, w.stop)
            spans.append(Span(request.plan, row_of[request.slot], w.start, tokens, len(request.prompt_ids)))
        return arm(staging, spans, len(batch.token_ids))

    def _forward(self, work: Sequence[Work], staging: Staging | None = None) -> list[torch.Tensor | None]:
        pieces = [Piece(w.request.slot, w.start, w.request.tokens(w.start, w.stop)) for w in work]  # type: ignore[arg-type]
        batch = Batch.of(pieces, self.state.device)
        tap = self._arm(work, batch, staging or self._stagings[0])
        hidden, _ = self.model.run(batch, self.state, tap or NoTap())
        if tap is not None:
            tap.deliver()
        row_of = {piece.slot: row for piece, row in zip(batch.pieces, batch.last_rows())}
        sampling = [w for w in work if w.samples]
        if not sampling:
            return [None] * len(work)
        rows = [row_of[w.request.slot] for w in sampling]  # type: ignore[index]
        logits = iter(self.model.logits(hidden[rows]))
        return [next(logits) if w.samples else None for w in work]
