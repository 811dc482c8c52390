"""Speculative decoding with the model's MTP block.

After every step the MTP block processes the streams of the accepted tokens and drafts what follows the token just
sampled. The next step computes the draft tokens together with that token. The sampler then samples as if the tokens had
come one by one, and a draft token is accepted if it equals the sample. Speculation changes when tokens arrive, never
which: a sample depends on its own row of logits and on noise hashed from the seed and the position.

The MTP state only affects acceptance. A request whose prompt was not processed by MTP from the start (speculation was
off at the time) is not drafted for. With a `SpeculationController`, drafting continues only while it is measured to be
faster.

On a GPU with recorded steps, samples and drafts are computed by a `DraftChain` in one sequence of launches (`launch`),
and `draft` only hands its drafts to the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from birkhoff.engine.draft_chain import DraftChain, PendingSamples, SampledRows
from birkhoff.engine.request import Request
from birkhoff.engine.sampler import Sampler
from birkhoff.engine.speculation_controller import SpeculationController
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

if TYPE_CHECKING:
    from birkhoff.engine.runner import ModelOutput
    from birkhoff.engine.scheduler import ScheduledChunk


@dataclass(eq=False)
class Speculator:
    """Drafts up to `depth` tokens; the state must be able to step back as many (`state.lookback`)."""

    model: Transformer
    state: State
    sampler: Sampler
    depth: int
    controller: SpeculationController | None = None
    chain: DraftChain | None = None

    def __post_init__(self) -> None:
        assert self.state.lookback >= self.depth and self.state.mtp is not None

    def prefill(
        self, chunks: Sequence[ScheduledChunk], first_rows: Sequence[int], streams: torch.Tensor
    ) -> None:
        """Run MTP prefill for tokens whose successor is known, which are tokens of prompts.

        The streams of a chunk are the rows of `streams` from its entry of `first_rows` on."""
        has_prompt = any(chunk.start < len(chunk.request.prompt_ids) for chunk in chunks)
        if self.controller is not None and not self.controller.runs_prefill(len(chunks), has_prompt):
            return
        pieces, rows = [], []
        for chunk, first in zip(chunks, first_rows):
            request = chunk.request
            count = min(chunk.stop, request.num_tokens - 1) - chunk.start
            if count > 0 and request.slot is not None and request.num_mtp_tokens == chunk.start:
                successors = request.tokens(chunk.start + 1, chunk.start + count + 1)
                pieces.append(SequenceChunk(request.slot, chunk.start, successors))
                rows.append(streams[first : first + count])
                request.num_mtp_tokens += count
        if pieces:
            batch = Batch.of(pieces, self.state.device)
            index = {id(piece): i for i, piece in enumerate(pieces)}  # the batch may reorder its pieces
            self.model.mtp_prefill(
                torch.cat([rows[index[id(piece)]] for piece in batch.chunks]), batch, self.state
            )

    def launch(
        self, chunks: Sequence[ScheduledChunk], outputs: Sequence[ModelOutput | None]
    ) -> PendingSamples | None:
        """Launch sampling and drafting of a step before its samples are known; None if it has to be done after.

        Steps without draft tokens that do not draft are sampled as if there were no speculation."""
        if self.chain is None or not self._may_launch(chunks):
            return None
        sampling = [(chunk, output) for chunk, output in zip(chunks, outputs) if output is not None]
        batch = [
            SampledRows(
                chunk.request,
                chunk.stop - 1,
                chunk.draft_tokens,
                chunk.request.num_mtp_tokens == chunk.stop - 1,
            )
            for chunk, _ in sampling
        ]
        drafts = self._drafts_for(batch)
        verifies = any(rows.draft_tokens for rows in batch)
        if not (drafts or verifies) or sum(rows.num_rows for rows in batch) > self.chain.max_rows:
            return None
        logits = torch.cat([output.logits for _, output in sampling]).float()
        streams = torch.cat([output.streams for _, output in sampling if output.streams is not None])
        return self.chain.launch(batch, logits, streams, drafts)

    def _may_launch(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a step verifies draft tokens or may draft; cheap, because plain steps pay for it."""
        return (
            self.controller is None
            or self.controller.should_draft(len(chunks))
            or any(chunk.draft_tokens for chunk in chunks)
        )

    def _drafts_for(self, batch: Sequence[SampledRows]) -> bool:
        """Whether to draft after a step with these rows, each of which yields at least one token."""
        candidates = [rows for rows in batch if _max_drafts(rows.request) > 1]
        ready = [rows for rows in candidates if rows.follows]
        if not ready or self.controller is None:
            return bool(ready)
        if self.controller.in_trial(len(candidates)) and len(ready) < len(candidates):
            return False
        return self.controller.should_draft(len(candidates))

    def _assign_drafts(self, pending: PendingSamples) -> int:
        """Give the requests of a step the tokens drafted for them, as far as the next step has rows for them."""
        assert self.chain is not None
        running = [rows for rows in pending.batch if rows.request.slot is not None]
        spare = self.chain.max_rows - len(running)
        count = 0
        for rows in running:
            request = rows.request
            if rows.follows:
                request.num_mtp_tokens = request.num_computed_tokens
                tokens = pending.draft_tokens(request)[: min(_max_drafts(request), spare)]
                request.draft_tokens = tokens
                spare -= len(tokens)
                count += len(tokens) > 0
        return count

    def _follow(self, ready: Sequence[tuple[Request, int, torch.Tensor]]) -> None:
        """Let the recorded MTP step process accepted tokens, so that it can draft later."""
        assert self.chain is not None
        batch = []
        tokens: list[int] = []
        for request, position, _ in ready:
            accepted = request.tokens(position + 1, request.num_computed_tokens + 1)
            batch.append(SampledRows(request, position, tuple(accepted[:-1]), True))
            tokens += accepted
            request.num_mtp_tokens = request.num_computed_tokens
        streams = torch.cat([streams[: rows.num_rows] for rows, (_, _, streams) in zip(batch, ready)])
        self.chain.follow(batch, tokens, streams)

    @torch.inference_mode()
    def draft(
        self,
        chunks: Sequence[ScheduledChunk],
        outputs: Sequence[ModelOutput | None],
        pending: PendingSamples | None = None,
    ) -> int:
        """Set `draft_tokens` of running requests that have room for them and that MTP has followed; returns how many
        requests got some. `pending` is what `launch` returned."""
        if pending is not None and pending.drafts:
            return self._assign_drafts(pending)
        candidates = [
            (chunk.request, chunk.stop - 1, output.streams)
            for chunk, output in zip(chunks, outputs)
            if output is not None
            and output.streams is not None
            and chunk.request.slot is not None
            and _max_drafts(chunk.request) > 0
        ]
        ready = [each for each in candidates if each[0].num_mtp_tokens == each[1]]
        if not ready:
            return 0
        drafts_now = self.controller is None or self.controller.should_draft(len(candidates))
        if self.controller is not None and self.controller.in_trial(len(candidates)):
            drafts_now &= len(ready) == len(candidates)  # a trial step drafts for all requests or none
        elif not drafts_now:
            return 0
        if self.chain is not None and len(ready) <= self.chain.max_rows // (1 + self.depth):
            self._follow(ready)  # a plain step of a trial, or one that was expected to be plain
            return 0
        accepted, batch, last_rows = self._accepted_rows(ready)
        if not drafts_now:  # a plain step of a trial: keep the MTP state without a gap
            self.model.mtp_prefill(accepted, batch, self.state)
            return 0
        hidden, streams = self.model.draft(accepted, batch, self.state)
        if len(last_rows) < batch.num_tokens:
            hidden, streams = hidden[last_rows], streams[last_rows]
        self._draft_chain([request for request, _, _ in ready], hidden, streams)
        return len(ready)

    def _accepted_rows(
        self, ready: Sequence[tuple[Request, int, torch.Tensor]]
    ) -> tuple[torch.Tensor, Batch, list[int]]:
        """What the MTP block processes after a step: streams of its tokens that stay, the tokens after them as a
        batch, and each request's last row. Marks them as processed."""
        pieces = []
        rows = []
        last_rows = []
        for request, position, streams in ready:
            count = request.num_computed_tokens - position  # the scheduled token and accepted draft tokens
            for offset, token in enumerate(request.tokens(position + 1, position + 1 + count)):
                pieces.append(SequenceChunk(request.running_slot, position + offset, [token]))
            rows.append(streams[:count])
            last_rows.append(len(pieces) - 1)
            request.num_mtp_tokens = position + count
        accepted = torch.cat(rows) if len(rows) > 1 else rows[0]
        return accepted, Batch.of(pieces, self.state.device), last_rows

    def _draft_chain(self, requests: Sequence[Request], hidden: torch.Tensor, streams: torch.Tensor) -> None:
        """Draft `depth` tokens for each request, from rows of the MTP block's output after its last token."""
        draft_tokens: list[list[int]] = [[] for _ in requests]
        for ahead in range(self.depth):
            logits = self.model.logits(hidden)
            tokens = self.sampler.draft(list(zip(requests, logits)), ahead)
            for drafts, token in zip(draft_tokens, tokens):
                drafts.append(token)
            if ahead + 1 < self.depth:  # continue from MTP's own streams, one position further
                pieces = [
                    SequenceChunk(request.running_slot, request.num_computed_tokens + ahead, [token])
                    for request, token in zip(requests, tokens)
                ]
                hidden, streams = self.model.draft(streams, Batch.of(pieces, self.state.device), self.state)
        for request, drafts in zip(requests, draft_tokens):
            request.draft_tokens = tuple(drafts[: _max_drafts(request)])


def _max_drafts(request: Request) -> int:
    """Maximum number of useful draft tokens: a step samples one token more than it verifies."""
    return 0 if request.done else request.max_tokens - len(request.output_ids) - 1
