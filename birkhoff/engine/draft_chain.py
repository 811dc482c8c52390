"""Sampling, verification and drafting of one step on the device, without the host in between.

After a step has computed one row per token and draft token, every row is sampled, the MTP block runs on all rows, and
the draft that follows the last accepted token of each request is selected, all from values that are on the device. MTP
rows after a rejected draft token are computed in vain: they store keys at positions that the next step stores again.
Further drafts continue from the selected rows. The host reads samples and drafts together: it waits once per step.

MTP steps are recorded as CUDA graphs, one per number of rows (`cuda_graphs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.engine.request import Request
from birkhoff.engine.sampler import RowSampling, Sampled, Sampler
from birkhoff.errors import LogitsError


class SampledRows(NamedTuple):
    """The rows of one request: the last token of its sequence, at `position`, and draft tokens after it.

    `follows`: the MTP block has processed all tokens before them, so it can draft."""

    request: Request
    position: int
    draft_tokens: tuple[int, ...]
    follows: bool

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_tokens)


class DraftChain:
    """Launches chains of up to `depth` drafts."""

    def __init__(self, graphs: CudaGraphs, sampler: Sampler, depth: int):
        self.graphs = graphs
        self.sampler = sampler
        self.depth = depth
        self._steps: dict[int, tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]] = {}

    @property
    def max_rows(self) -> int:
        return self.graphs.row_sizes[-1]

    def prepare(self, rows: int) -> None:
        """Record the MTP step of up to `rows` rows."""
        self._find(rows)

    def launch(
        self, batch: Sequence[SampledRows], logits: torch.Tensor, streams: torch.Tensor, drafts: bool
    ) -> PendingSamples:
        """Sample rows of `logits` [n, vocab] float32 and, with `drafts`, draft from their `streams` [n, m, d]."""
        requests = [(rows.request, rows.draft_tokens) for rows in batch]
        sampling = self.sampler.rows(requests, logits, self.depth)  # keeps tensors that are updated later
        with torch.inference_mode():
            tokens, result = sampling.sample()
            drafted = self._draft(batch, sampling, tokens, streams) if drafts else []
            return PendingSamples(batch, sampling, result, drafted)

    @torch.inference_mode()
    def follow(self, batch: Sequence[SampledRows], tokens: Sequence[int], streams: torch.Tensor) -> None:
        """Run the MTP block on rows whose samples are `tokens` without drafting, and wait for it."""
        self._launch_first(batch, torch.tensor(tokens, device=streams.device), streams)
        if streams.is_cuda:
            torch.cuda.current_stream(streams.device).synchronize()

    def _draft(
        self, batch: Sequence[SampledRows], sampling: RowSampling, tokens: torch.Tensor, streams: torch.Tensor
    ) -> list[torch.Tensor]:
        """The drafts after the last accepted token of each request, one tensor [requests] per depth."""
        buffers = self._launch_first(batch, tokens, streams)
        last_rows = _last_accepted_rows(batch, tokens, self.depth)
        draft = sampling.draft(buffers.logits[: len(tokens)], 0)[last_rows]
        drafts = [draft]
        if self.depth > 1:
            selected = buffers.inputs[:, last_rows], buffers.streams[last_rows]  # copies
            buffers = self._launch_next(*selected, draft)
            for ahead in range(1, self.depth):
                draft = sampling.draft(buffers.logits[: len(batch)], ahead, last_rows)
                drafts.append(draft)
                if ahead + 1 < self.depth:
                    buffers = self._launch_next(None, None, draft)
        return drafts

    def _launch_first(
        self, batch: Sequence[SampledRows], tokens: torch.Tensor, streams: torch.Tensor
    ) -> DecodeBuffers:
        """The MTP block on all rows; those of requests that it cannot draft for use the scratch slot."""
        count = len(tokens)
        buffers, graph = self._find(count)
        positions = [rows.position + offset for rows in batch for offset in range(rows.num_rows)]
        slots = [
            rows.request.slot if rows.follows and rows.request.slot is not None else self.graphs.scratch_slot
            for rows in batch
            for _ in range(rows.num_rows)
        ]
        self.graphs.write_inputs(buffers, tokens, positions, slots)
        buffers.streams[:count].copy_(streams)
        self._run(buffers, graph)
        return buffers

    def _launch_next(
        self, inputs: torch.Tensor | None, streams: torch.Tensor | None, draft: torch.Tensor
    ) -> DecodeBuffers:
        """The MTP block one position further: after the rows `inputs` [3, n], `streams` [n, m, d], or its own."""
        count = len(draft)
        buffers, graph = self._find(count)
        if inputs is not None and streams is not None:
            buffers.inputs[:2].zero_()
            buffers.inputs[2].fill_(self.graphs.scratch_slot)
            buffers.inputs[:, :count].copy_(inputs)
            buffers.streams[:count].copy_(streams)
        buffers.positions[:count].add_(1)
        buffers.token_ids[:count].copy_(draft)
        self._run(buffers, graph)
        return buffers

    def _run(self, buffers: DecodeBuffers, graph: torch.cuda.CUDAGraph | None) -> None:
        if graph is None:
            self.graphs.decoder.draft(buffers)
        else:
            graph.replay()

    def _find(self, count: int) -> tuple[DecodeBuffers, torch.cuda.CUDAGraph | None]:
        rows = self.graphs.round_up(count)
        if rows not in self._steps:
            decoder = self.graphs.decoder
            buffers = decoder.draft_buffers(rows)
            buffers.streams.zero_()  # of rows that are never used
            self._steps[rows] = buffers, self.graphs.record_step(buffers, lambda: decoder.draft(buffers))
        return self._steps[rows]


def _last_accepted_rows(batch: Sequence[SampledRows], tokens: torch.Tensor, depth: int) -> torch.Tensor:
    """The row [requests] of each request's last token that is not rejected: the first whose sample differs from the
    draft token after it."""
    rows: list[list[int]] = []  # per request: its first row, then the draft tokens, -1 where there is none
    first = 0
    for each in batch:
        rows.append([first, *each.draft_tokens, *[-1] * (depth - len(each.draft_tokens))])
        first += each.num_rows
    on_device = torch.tensor(rows, pin_memory=tokens.is_cuda).to(tokens.device, non_blocking=True)
    first_rows, draft_tokens = on_device[:, 0], on_device[:, 1:]
    if first == len(batch):
        return first_rows
    index = (first_rows.unsqueeze(1) + torch.arange(depth, device=tokens.device)).clamp_max(first - 1)
    matches = (tokens[index] == draft_tokens).long()
    return first_rows + matches.cumprod(1).sum(1)


class PendingSamples:
    """Samples and drafts of a step that may still be computed; reading them waits."""

    def __init__(
        self,
        batch: Sequence[SampledRows],
        sampling: RowSampling,
        result: torch.Tensor,
        drafted: Sequence[torch.Tensor],
    ):
        self.batch = batch
        self.drafts = len(drafted) > 0
        self._sampling = sampling
        self._shape = result.shape
        self._values = _HostValues([result.flatten(), *(draft.double() for draft in drafted)])
        self._samples: dict[Request, list[Sampled | LogitsError]] | None = None
        self._draft_tokens: dict[Request, tuple[int, ...]] = {}

    def samples(self, request: Request) -> list[Sampled | LogitsError]:
        """The samples of a request, up to the first that differs from its draft token."""
        return self._read()[request]

    def draft_tokens(self, request: Request) -> tuple[int, ...]:
        """The tokens drafted after the samples of a request."""
        self._read()
        return self._draft_tokens[request]

    def _read(self) -> dict[Request, list[Sampled | LogitsError]]:
        if self._samples is None:
            result, *drafted = self._values.read()
            samples = iter(self._sampling.read(result.reshape(self._shape)))
            self._samples = {}
            for index, rows in enumerate(self.batch):
                own = [next(samples) for _ in range(rows.num_rows)]
                kept = self._samples[rows.request] = []
                for sample, draft in zip(own, (*rows.draft_tokens, None)):
                    kept.append(sample)
                    if isinstance(sample, LogitsError) or sample.token != draft:
                        break
                self._draft_tokens[rows.request] = tuple(int(draft[index]) for draft in drafted)
        return self._samples


class _HostValues:
    """Float64 vectors on their way to the host, in one copy."""

    def __init__(self, vectors: Sequence[torch.Tensor]):
        self._sizes = [len(vector) for vector in vectors]
        values = torch.cat(list(vectors))
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(len(values), dtype=torch.double, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = values

    def read(self) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
        if self._copied is not None:
            self._copied.synchronize()
        return [part.numpy() for part in self._host.split(self._sizes)]
