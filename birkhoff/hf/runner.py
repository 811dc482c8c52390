"""Runs scheduled chunks through a model of Transformers.

Chunks of similar length run together as one padded batch: single tokens of all decoding requests, then prefill chunks.
The cache is ours (`slot_cache.py`), indexed by slot and position, so requests of any length share a batch and the
scheduler admits and ends them at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from birkhoff.engine.runner import ModelOutput
from birkhoff.engine.scheduler import ScheduledChunk
from birkhoff.hf.model import HfModel
from birkhoff.hf.slot_cache import CacheStep, SlotCache
from birkhoff.hooks.plan import Span
from birkhoff.hooks.step_hooks import StepHooks

MAX_PADDING = 2  # a batch computes at most this many times its tokens


class HfRunner:
    """With `batch_invariant` every request is run by itself."""

    def __init__(self, model: HfModel, max_requests: int, max_context: int, batch_invariant: bool = False):
        self.model = model
        self.batch_invariant = batch_invariant
        self.hooks = StepHooks(model.device)
        self.cache = SlotCache(len(model.layers), max_requests, max_context)

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        """One output per chunk; None for a chunk that does not reach the end of its sequence."""
        outputs: dict[ScheduledChunk, ModelOutput | None] = {}
        for group in self._groups(chunks):
            outputs |= zip(group, self._forward(group))
        return [outputs[chunk] for chunk in chunks]

    def close(self) -> None:
        pass

    def _groups(self, chunks: Sequence[ScheduledChunk]) -> Iterator[list[ScheduledChunk]]:
        group: list[ScheduledChunk] = []
        tokens = 0
        for chunk in sorted(chunks, key=_length):
            longest = _length(chunk)
            padded = longest * (len(group) + 1)
            alone = self.batch_invariant or not self.model.family.cached
            if group and (alone or padded > MAX_PADDING * (tokens + longest)):
                yield group
                group, tokens = [], 0
            group.append(chunk)
            tokens += longest
        yield group

    def _forward(self, chunks: Sequence[ScheduledChunk]) -> list[ModelOutput | None]:
        if not self.model.family.cached:
            chunks = [replace(chunk, start=0) for chunk in chunks]  # the rows before are computed again
        width = max(map(_length, chunks))
        ids = torch.zeros(len(chunks), width, dtype=torch.long)
        positions = torch.zeros(len(chunks), width, dtype=torch.long)
        spans: list[Span] = []
        batch: list[int] = []
        column: list[int] = []
        for row, chunk in enumerate(chunks):
            count = _length(chunk)
            tokens = chunk.tokens
            ids[row, :count] = torch.tensor(tokens)
            positions[row, :count] = torch.arange(chunk.start, chunk.stop)
            batch += [row] * count
            column += range(count)
            request = chunk.request
            if request.plan is not None:
                spans.append(Span(request.plan, row * width, chunk.start, tokens, len(request.prompt_ids)))
        self.hooks.begin(spans, len(chunks) * width)
        try:
            hidden = self._run(chunks, ids, positions, torch.tensor(batch), torch.tensor(column))
            last = [_length(chunk) - 1 for chunk in chunks]
            sampling = [row for row, chunk in enumerate(chunks) if chunk.samples]
            logits = (
                self.model.logits(hidden[sampling, [last[row] for row in sampling]]) if sampling else None
            )
        except BaseException:
            self.hooks.fail()
            raise
        self.hooks.end()
        rows = iter(()) if logits is None else iter(logits.split(1))
        return [ModelOutput(next(rows)) if chunk.samples else None for chunk in chunks]

    def _run(
        self,
        chunks: Sequence[ScheduledChunk],
        ids: torch.Tensor,
        positions: torch.Tensor,
        batch: torch.Tensor,
        column: torch.Tensor,
    ) -> torch.Tensor:
        device = self.model.device
        if not self.model.family.cached:
            return self.model.run(ids.to(device), tap=self.hooks.tap)
        slots: list[int] = [chunk.request.slot for chunk in chunks]  # type: ignore[misc]
        length = max(chunk.stop for chunk in chunks)
        step = CacheStep(
            torch.tensor(slots, device=device),
            batch.to(device),
            column.to(device),
            positions[batch, column].to(device),
            length,
            slots == list(range(len(slots))),
        )
        self.cache.begin(step)
        positions = positions.to(device)
        mask = self.model.masks(positions, length)
        return self.model.run(ids.to(device), positions, mask, self.cache, self.hooks.tap)


def _length(chunk: ScheduledChunk) -> int:
    return chunk.stop - chunk.start
