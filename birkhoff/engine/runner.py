"""Runs the scheduled chunks of one step through the model and returns logits for each chunk that samples.

A draft token is a row of its own, as if it came from another sequence at the same position: positions decide what each
row attends to, and the rings keep enough of the past that a rejected draft token overwrites nothing that is needed.

A CUDA graph step is only launched here; reading its logits waits for it. While it runs, the rows captured by the
previous step are delivered. A request that ends for any reason receives all of its rows first.

On a CPU without native kernels a decode step with enough rows and cores is split into two threads: the compiled loops
process one row after the other and release the interpreter lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, overload

import numpy as np
import torch

from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.engine.prefix import PrefixCache
from birkhoff.engine.request import Request
from birkhoff.engine.scheduler import ScheduledChunk
from birkhoff.engine.speculation import Speculator
from birkhoff.hooks.batch_tap import BatchTap, RowObserver
from birkhoff.hooks.graph_tap import GraphPlan
from birkhoff.hooks.plan import Span
from birkhoff.hooks.step_hooks import StepHooks
from birkhoff.kernels.row_index import to_device
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import Snapshot, State
from birkhoff.model.transformer import Transformer
from birkhoff.offload.read_gate import ReadGate

SPLIT_ROWS = 4  # minimum rows of a step that is split into two threads


@dataclass(frozen=True)
class ModelOutput:
    """Output for one chunk that samples: logits [rows, vocab] float32 of its last token and of each draft token, and
    the streams [rows, m, d] after the last layer, which speculation reads."""

    logits: torch.Tensor
    streams: torch.Tensor | None = None


class StepRunner(Protocol):
    """What the engine needs of a runner: `Runner` for our own model, others for models that are not ours."""

    def run(self, chunks: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        """One output per chunk; None for a chunk that does not reach the end of its sequence."""
        ...

    def close(self) -> None: ...


class Runner:
    """Holds the model and its state. With `batch_invariant` every request is run by itself."""

    def __init__(self, model: Transformer, state: State, batch_invariant: bool = False):
        self.model = model
        self.state = state
        self.batch_invariant = batch_invariant
        self.prefix: PrefixCache | None = None
        self.speculator: Speculator | None = None
        self.graphs: CudaGraphs | None = None  # on a GPU, for decode steps
        self.read_gate: ReadGate | None = None  # while experts are being read: graphs would not wait for them
        # Taken by the last step at page boundaries.
        self.boundary_snapshots: dict[Request, list[Snapshot]] = {}
        self.hooks = (StepHooks(state.device), StepHooks(state.device))  # the second for the second thread
        self._second_thread = ThreadPoolExecutor(1, "birkhoff-decode")  # starts its thread on first use
        self._page_tables: dict[int, list[int]] = {}  # by slot: the pages in the state's page table

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        """One output per chunk; None for a chunk that does not reach the end of its sequence."""
        for chunk in chunks:
            self._update_page_table(chunk.request)
        self.boundary_snapshots.clear()
        try:
            self._request_snapshots(chunks)
            with nullcontext() if self.read_gate is None else self.read_gate.step():
                return self._run(chunks)
        finally:
            self.state.watched.clear()

    def _run(self, chunks: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        if self.batch_invariant:
            return [self._forward([chunk])[0] for chunk in chunks]
        if self._can_split(chunks):
            half = len(chunks) // 2
            second = self._second_thread.submit(self._forward_second_half, chunks[half:])
            try:
                first = self._forward(chunks[:half])
            finally:
                second.exception()  # wait: both halves must be done before the state is used again
            return first + second.result()
        decoding = self._replayable(chunks)
        if decoding and len(decoding) < len(chunks):
            return self._forward_parts(chunks, decoding)
        return self._forward(chunks)

    def replays(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether one CUDA graph runs all of these chunks."""
        return not self.batch_invariant and len(self._replayable(chunks)) == len(chunks)

    @torch.inference_mode()
    def replay_ahead(
        self, requests: Sequence[Request], positions: Sequence[int], tokens: torch.Tensor
    ) -> torch.Tensor | None:
        """Launch a decode step whose token ids [n] are on the device -> logits [n, vocab]; None if what is captured or
        edited depends on the tokens, or if a graph cannot run it."""
        assert self.graphs is not None
        for request in requests:
            self._update_page_table(request)
        self.boundary_snapshots.clear()
        slots: list[int] = [request.slot for request in requests]  # type: ignore[misc]
        spans = [
            Span(request.plan, row, position, _NextToken(request, position), len(request.prompt_ids))
            for row, (request, position) in enumerate(zip(requests, positions))
            if request.plan is not None
        ]
        hooks = self.hooks[0]
        try:
            tap = hooks.begin(spans, len(requests))
            plan = None if tap is None else self.graphs.plan(tap)
            if tap is not None and plan is None:
                raise _TokenUnread
            logits, _ = self.graphs.step(tokens, positions, slots, tap, plan)
        except _TokenUnread:
            hooks.fail()
            return None
        except BaseException:
            hooks.fail()
            raise
        hooks.end((), self._row_observer(requests), ahead=True)
        return logits

    def _forward_parts(
        self, chunks: Sequence[ScheduledChunk], first_part: set[int]
    ) -> list[ModelOutput | None]:
        """Mixed prefill/decode on a GPU: the decode graph, then the prefill chunks while the graph runs.

        In one batch, the decoding rows would pass through the prefill kernels and delay them."""
        outputs: dict[int, ModelOutput | None] = {}
        rest = [i for i in range(len(chunks)) if i not in first_part]
        for part in (sorted(first_part), rest):
            outputs.update(zip(part, self._forward([chunks[i] for i in part])))
        return [outputs[i] for i in range(len(chunks))]

    def _replayable(self, chunks: Sequence[ScheduledChunk]) -> set[int]:
        """Indices of the chunks that one CUDA graph can run."""
        if self.graphs is None:
            return set()
        singles = {i for i, chunk in enumerate(chunks) if self._can_replay([chunk])}
        return singles if self.graphs.fits(sum(_num_rows(chunks[i]) for i in singles)) else set()

    def close(self) -> None:
        self._second_thread.shutdown()

    def _request_snapshots(self, chunks: Sequence[ScheduledChunk]) -> None:
        if self.prefix is not None:
            for chunk in chunks:
                if chunk.stop - chunk.start > 1:
                    self.boundary_snapshots[chunk.request] = self.prefix.request_snapshots(
                        chunk.request, chunk.start, chunk.stop
                    )

    def _can_split(self, chunks: Sequence[ScheduledChunk]) -> bool:
        decoding = len(chunks) >= SPLIT_ROWS and all(chunk.stop - chunk.start == 1 for chunk in chunks)
        # Native layers use several threads themselves.
        loops = self.model.numerics.kernels.name == "cpu" and self.model.compiled is None
        return decoding and loops and torch.get_num_threads() > 1

    @torch.inference_mode()
    def _forward_second_half(self, chunks: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        return self._forward(chunks, self.hooks[1])

    def _update_page_table(self, request: Request) -> None:
        assert request.slot is not None
        if self._page_tables.get(request.slot) != request.pages:
            self.state.give_pages(request.slot, request.pages)
            self._page_tables[request.slot] = list(request.pages)

    def _forward(
        self, chunks: Sequence[ScheduledChunk], hooks: StepHooks | None = None
    ) -> list[ModelOutput | None]:
        hooks = hooks or self.hooks[0]
        try:
            outputs = self._compute(chunks, hooks)
        except BaseException:
            hooks.fail()
            raise
        observer = self._row_observer([chunk.request for chunk in chunks])
        drafted = [
            chunk.request.plan for chunk in chunks if chunk.draft_tokens and chunk.request.plan is not None
        ]
        hooks.end(drafted, observer)
        return outputs

    def _row_observer(self, requests: Sequence[Request]) -> RowObserver | None:
        """Keeps the captured rows of these requests in the prefix cache."""
        watched = {
            request.plan: request for request in requests if request.plan is not None and request.plan.jobs
        }
        return self.prefix.row_observer(watched) if self.prefix is not None and watched else None

    def _compute(self, chunks: Sequence[ScheduledChunk], hooks: StepHooks) -> list[ModelOutput | None]:
        if self.graphs is not None and self._can_replay(chunks):
            first_rows = [0, *itertools.accumulate(_num_rows(chunk) for chunk in chunks)]
            tap = hooks.begin(_spans(chunks, first_rows), first_rows[-1])
            plan = None if tap is None else self.graphs.plan(tap)
            if tap is None or plan is not None:
                return self._replay(chunks, first_rows, self.graphs, tap, plan)
            batch, first_rows = _make_batch(chunks, self.state.device)
        else:
            batch, first_rows = _make_batch(chunks, self.state.device)
            hooks.begin(_spans(chunks, first_rows), batch.num_tokens)
        hidden, streams = self.model.run(batch, self.state, hooks.tap)
        if self.speculator is not None:
            self.speculator.prefill(chunks, first_rows, streams)
        sampling = [
            (chunk, first + chunk.stop - chunk.start - 1)
            for chunk, first in zip(chunks, first_rows)
            if chunk.samples
        ]
        if not sampling:
            return [None] * len(chunks)
        rows = [last + offset for chunk, last in sampling for offset in range(1 + len(chunk.draft_tokens))]
        counts = [1 + len(chunk.draft_tokens) for chunk, _ in sampling]
        index = to_device(np.array(rows), hidden.device)
        logits = self.model.logits(hidden[index]).split(counts)
        outputs = iter(map(ModelOutput, logits, streams[index].split(counts)))
        return [next(outputs) if chunk.samples else None for chunk in chunks]

    def _can_replay(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a CUDA graph can run the step: one token and its draft tokens per request, and rows that a
        recorded step can capture."""
        if self.read_gate is not None and not self.read_gate.complete:
            return False
        single = all(
            chunk.stop - chunk.start == 1 and not _is_unrecordable(chunk.request) for chunk in chunks
        )
        return single and self.graphs is not None and self.graphs.fits(sum(map(_num_rows, chunks)))

    def _replay(
        self,
        chunks: Sequence[ScheduledChunk],
        first_rows: Sequence[int],
        graphs: CudaGraphs,
        tap: BatchTap | None,
        plan: GraphPlan | None,
    ) -> list[ModelOutput | None]:
        rows = [
            (token, chunk.start + offset, chunk.request.slot)
            for chunk in chunks
            for offset, token in enumerate(chunk.tokens)
        ]
        token_ids, positions, slots = zip(*rows)
        logits, streams = graphs.step(token_ids, positions, slots, tap, plan)
        if self.speculator is not None:
            self.speculator.prefill(chunks, first_rows, streams)
        counts = [_num_rows(chunk) for chunk in chunks]
        return [
            ModelOutput(*own_rows) if chunk.samples else None
            for chunk, own_rows in zip(chunks, zip(logits.split(counts), streams.split(counts)))
        ]


class _TokenUnread(Exception):
    """A token was asked for that is still on the device, or a step cannot be launched without it."""


class _NextToken(Sequence[int]):
    """The token of a request at a position, as the only element; it can be read once its step was committed."""

    def __init__(self, request: Request, position: int):
        self._request = request
        self._index = position - len(request.prompt_ids)

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        output_ids = self._request.output_ids
        if self._index >= len(output_ids):
            raise _TokenUnread
        return [output_ids[self._index]][index]


def _is_unrecordable(request: Request) -> bool:
    return request.plan is not None and request.plan.unrecordable


def _num_rows(chunk: ScheduledChunk) -> int:
    return chunk.stop - chunk.start + len(chunk.draft_tokens)


def _spans(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int]) -> list[Span]:
    """The rows of the chunks whose requests capture or edit something."""
    return [
        Span(chunk.request.plan, first, chunk.start, chunk.tokens, len(chunk.request.prompt_ids))
        for chunk, first in zip(chunks, first_rows)
        if chunk.request.plan is not None
    ]


def _make_batch(chunks: Sequence[ScheduledChunk], device: torch.device) -> tuple[Batch, list[int]]:
    """The batch of a step, and the first row of each chunk."""
    parts = [_sequence_chunks(chunk) for chunk in chunks]
    batch = Batch.of([part for group in parts for part in group], device)
    row_of = {id(part): row for part, row in zip(batch.chunks, batch.offsets)}
    return batch, [row_of[id(group[0])] for group in parts]


def _sequence_chunks(chunk: ScheduledChunk) -> list[SequenceChunk]:
    """The chunk as one piece, or one piece per token when it has draft tokens."""
    assert chunk.request.slot is not None
    if not chunk.draft_tokens:
        return [SequenceChunk(chunk.request.slot, chunk.start, chunk.tokens)]
    return [
        SequenceChunk(chunk.request.slot, chunk.start + offset, [token])
        for offset, token in enumerate(chunk.tokens)
    ]
