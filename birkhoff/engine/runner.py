"""Runs one step of work through the model: pieces in, rows of logits out for each piece that samples.

A token that was only guessed is a row of its own, as if it came from another sequence in the same place: positions say
what each row sees, and rings keep enough of the past that a guess which does not stay has destroyed nothing.

A replayed step is only launched here; whoever reads its logits waits for it. While it runs, the rows captured by the
step before are handed to whoever wants them. A request that ends, by whatever way, is given all of its rows first.

On a CPU a step that only decodes is split in two when there are rows and cores enough: compiled kernels run one row
after the other without the interpreter's lock, so two halves of a batch are two threads' work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request
from birkhoff.engine.scheduler import ScheduledChunk
from birkhoff.engine.speculation import Speculator
from birkhoff.hooks.batch_tap import BatchTap, RowObserver, StepStaging, arm
from birkhoff.hooks.graph_tap import GraphPlan
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.tap import NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import Snapshot, State
from birkhoff.model.transformer import Transformer

SPLIT_ROWS = 4


@dataclass(frozen=True)
class ModelOutput:
    """What a step made of one piece that samples: logits [rows, vocab] float32 of its last token and of each guess
    behind it, and the streams [rows, m, d] that left the last layer there."""

    logits: torch.Tensor
    streams: torch.Tensor


class Runner:
    """Holds the model and its state. With `invariant`, every request is run by itself."""

    def __init__(self, model: Transformer, state: State, invariant: bool = False):
        self.model = model
        self.state = state
        self.invariant = invariant
        self.prefix: PrefixCache | None = None
        self.speculator: Speculator | None = None
        self.graphs: CudaGraphs | None = None  # on a GPU, for steps that only decode
        self.passed: dict[
            Request, list[Snapshot]
        ] = {}  # what the last step saw at the page borders it passed
        self._stagings = (StepStaging(state.device), StepStaging(state.device))
        self._helper = ThreadPoolExecutor(1, "birkhoff-decode")  # starts no thread before it is needed
        self._given: dict[int, list[int]] = {}  # pages the state's table already knows, by slot
        self._owed: list[Request] = []  # whose captured rows of the last step are on their way

    @torch.inference_mode()
    def run(self, work: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        """One for each piece; None for a piece with tokens still to come."""
        for item in work:
            self._give_pages(item)
        self.passed.clear()
        try:
            self._watch(work)
            return self._run(work)
        finally:
            self.state.watched.clear()

    def _run(self, work: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
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

    def _watch(self, work: Sequence[ScheduledChunk]) -> None:
        if self.prefix is not None:
            for item in work:
                if item.stop - item.start > 1:
                    self.passed[item.request] = self.prefix.watch(item.request, item.start, item.stop)

    def _splits(self, work: Sequence[ScheduledChunk]) -> bool:
        decoding = len(work) >= SPLIT_ROWS and all(w.stop - w.start == 1 for w in work)
        return decoding and self.model.numerics.kernels.name == "cpu" and torch.get_num_threads() > 1

    @torch.inference_mode()
    def _second_half(self, work: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        return self._forward(work, self._stagings[1])

    def _give_pages(self, item: ScheduledChunk) -> None:
        request = item.request
        assert request.slot is not None
        if self._given.get(request.slot) != request.pages:
            self.state.give_pages(request.slot, request.pages)
            self._given[request.slot] = list(request.pages)

    def _arm(
        self, work: Sequence[ScheduledChunk], firsts: Sequence[int], num_rows: int, staging: StepStaging
    ) -> BatchTap | None:
        """The tap of this step, when some request of it has a plan that wants something of it."""
        spans = [
            Span(w.request.plan, first, w.start, w.tokens, len(w.request.prompt_ids))
            for w, first in zip(work, firsts)
            if w.request.plan is not None
            and not (w.request.plan.rests and w.start >= len(w.request.prompt_ids))
        ]
        return arm(staging, spans, num_rows) if spans else None

    def _forward(
        self, work: Sequence[ScheduledChunk], staging: StepStaging | None = None
    ) -> list[ModelOutput | None]:
        seen = [(w.request.plan, w.request.plan.seen) for w in work if w.request.plan is not None]
        try:
            tap, ran = self._compute(work, staging or self._stagings[0])
        except BaseException:
            for (
                plan,
                stop,
            ) in seen:  # nothing was delivered: whoever computes these tokens again wants their rows
                plan.seen = stop
            raise
        self._hand_over()
        self._deliver(work, tap)
        return ran

    def _compute(
        self, work: Sequence[ScheduledChunk], staging: StepStaging
    ) -> tuple[BatchTap | None, list[ModelOutput | None]]:
        if self.graphs is not None and self._decodes(work):
            tap = self._arm(work, range(len(work)), len(work), staging)
            wishes = None if tap is None else self.graphs.sorted_out(tap)
            if tap is None or wishes is not None:
                return tap, self._replay(work, self.graphs, tap, wishes)
            batch, firsts = _flattened(work, self.state.device)
        else:
            batch, firsts = _flattened(work, self.state.device)
            tap = self._arm(work, firsts, batch.num_tokens, staging)
        hidden, streams = self.model.run(batch, self.state, tap or NoTap())
        if self.speculator is not None:
            self.speculator.remember(work, firsts, streams)
        sampling = [(w, first + w.stop - w.start - 1) for w, first in zip(work, firsts) if w.samples]
        if not sampling:
            return tap, [None] * len(work)
        rows = [row + guess for w, row in sampling for guess in range(1 + len(w.draft_tokens))]
        counts = [1 + len(w.draft_tokens) for w, _ in sampling]
        logits = self.model.logits(hidden[rows]).split(counts)
        streams = streams[rows].split(counts)
        ran = iter(map(ModelOutput, logits, streams))
        return tap, [next(ran) if w.samples else None for w in work]

    def _decodes(self, work: Sequence[ScheduledChunk]) -> bool:
        """One token each, none of them a guess, and nobody who wants the streams."""
        single = all(w.stop - w.start == 1 and not w.draft_tokens for w in work)
        return single and self.speculator is None and self.graphs is not None and self.graphs.takes(len(work))

    def _replay(
        self,
        work: Sequence[ScheduledChunk],
        graphs: CudaGraphs,
        tap: BatchTap | None,
        wishes: GraphPlan | None,
    ) -> list[ModelOutput | None]:
        slots: list[int] = [w.request.slot for w in work]  # type: ignore[misc]
        logits, streams = graphs.step(
            [w.tokens[0] for w in work], [w.start for w in work], slots, tap, wishes
        )
        return [
            ModelOutput(*row) if w.samples else None
            for w, row in zip(work, zip(logits.split(1), streams.split(1)))
        ]

    def _hand_over(self) -> None:
        """Rows of the step before; those of requests that have ended since were handed over then."""
        owed = self._owed
        self._owed = []
        for request in owed:
            request.settle_rows()

    def _deliver(self, work: Sequence[ScheduledChunk], tap: BatchTap | None) -> None:
        """Captured rows to whoever wants them; those on their way later, those of guesses when it is known that they
        stay."""
        planned = {
            w.request.plan: w.request for w in work if w.request.plan is not None and w.request.plan.jobs
        }
        witness = self.prefix.keep_rows(planned) if self.prefix is not None and planned else None
        if tap is not None and tap.is_pending:
            for plan, request in planned.items():
                request.settle = _deliverer(plan, tap, witness)
                self._owed.append(request)
            return
        waiting = {w.request.plan: w for w in work if w.draft_tokens and w.request.plan is not None}
        for plan, w in waiting.items():
            w.request.settle = _settler(plan, w, tap, witness)
        if tap is not None:
            tap.deliver(waiting, witness)


def _flattened(work: Sequence[ScheduledChunk], device: torch.device) -> tuple[Batch, list[int]]:
    """The batch of a step, and the first row of each piece of work."""
    parts = [_pieces(w) for w in work]
    batch = Batch.of([piece for pieces in parts for piece in pieces], device)
    row_of = {id(piece): row for piece, row in zip(batch.chunks, batch.offsets)}
    return batch, [row_of[id(pieces[0])] for pieces in parts]


def _pieces(work: ScheduledChunk) -> list[SequenceChunk]:
    assert work.request.slot is not None
    if not work.draft_tokens:
        return [SequenceChunk(work.request.slot, work.start, work.tokens)]
    return [
        SequenceChunk(work.request.slot, work.start + offset, [token])
        for offset, token in enumerate(work.tokens)
    ]


def _deliverer(plan: Plan, tap: BatchTap, witness: RowObserver | None) -> Callable[[int], None]:
    return lambda stop: tap.deliver_plan(plan, None, witness)  # nothing of it was a guess


def _settler(
    plan: Plan, work: ScheduledChunk, tap: BatchTap | None, witness: RowObserver | None
) -> Callable[[int], None]:
    def settle(stop: int) -> None:
        if tap is not None:
            tap.deliver_plan(plan, stop, witness)
        plan.seen = min(plan.seen, stop)
        for position in range(stop, work.stop + len(work.draft_tokens)):
            plan.steered.discard(position)

    return settle
