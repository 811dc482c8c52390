"""The model's own next-but-one guess, verified with the next step: several tokens for little more than one.

After every step the MTP block reads the streams of the tokens that stayed and guesses what follows the token just
drawn. The next step computes the guesses along with it; the sampler then draws as if tokens had come one by one, and a
guess stays if it is what was drawn. So speculation changes when tokens come and never which, whatever the sampling: a
draw depends on its own row of logits and on noise that is hashed from the seed and the place.

What MTP remembers only makes its guesses better. A hole in it (a prompt read while guessing was off) costs acceptance
and nothing else. With `SpeculationController`, guessing goes on only while it is measured to pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from birkhoff.engine.request import Request
from birkhoff.engine.sampler import Sampler
from birkhoff.engine.speculation_controller import SpeculationController
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

if TYPE_CHECKING:
    from birkhoff.engine.runner import ModelOutput
    from birkhoff.engine.scheduler import ScheduledChunk


class Speculator:
    """Guesses up to `depth` tokens ahead; the state must be able to step back as many."""

    def __init__(
        self,
        model: Transformer,
        state: State,
        sampler: Sampler,
        depth: int,
        pace: SpeculationController | None = None,
    ):
        assert state.lookback >= depth and state.mtp is not None
        self.model = model
        self.state = state
        self.sampler = sampler
        self.depth = depth
        self.pace = pace

    def remember(self, work: Sequence[ScheduledChunk], firsts: Sequence[int], streams: torch.Tensor) -> None:
        """What MTP needs of tokens whose successor is known already, which are those of prompts; a piece's streams are
        rows from its first on."""
        reads_prompt = any(w.start < len(w.request.prompt_ids) for w in work)
        if self.pace is not None and not self.pace.follows(len(work), reads_prompt):
            return
        pieces, kept = [], []
        for w, first in zip(work, firsts):
            known = min(w.stop, w.request.num_tokens - 1) - w.start
            if known > 0 and w.request.slot is not None and w.request.followed == w.start:
                pieces.append(
                    SequenceChunk(w.request.slot, w.start, w.request.tokens(w.start + 1, w.start + known + 1))
                )
                kept.append(streams[first : first + known])
                w.request.followed += known
        if pieces:
            batch, order = _laid_out(pieces, self.state.device)
            self.model.mtp_prefill(torch.cat([kept[i] for i in order]), batch, self.state)

    @torch.inference_mode()
    def guess(self, work: Sequence[ScheduledChunk], ran: Sequence[ModelOutput | None]) -> int:
        """Guesses for everybody who goes on and can use them, and whom MTP has followed; how many requests got some."""
        all_going = [
            (w.request, w.stop - 1, made.streams)
            for w, made in zip(work, ran)
            if made is not None and w.request.slot is not None and self._room(w.request) > 0
        ]
        going = [each for each in all_going if each[0].followed == each[1]]
        if not going:
            return 0
        guesses_now = self.pace is None or self.pace.draft_tokens(len(all_going))
        if self.pace is not None and self.pace.trying(len(all_going)):
            guesses_now &= len(going) == len(all_going)  # a trial is one of all or none
        elif not guesses_now:
            return 0
        pieces = []
        rows = []
        last = []
        for request, base, streams in going:
            kept = request.computed - base  # the token that was computed for sure and the guesses that stayed
            for offset, token in enumerate(request.tokens(base + 1, base + 1 + kept)):
                pieces.append(SequenceChunk(_slot(request), base + offset, [token]))
            rows.append(streams[:kept])
            last.append(len(pieces) - 1)
            request.followed = base + kept
        batch = Batch.of(pieces, self.state.device)
        read = torch.cat(rows) if len(rows) > 1 else rows[0]
        if not guesses_now:  # between two turns of a trial: no hole in what MTP remembers
            self.model.mtp_prefill(read, batch, self.state)
            return 0
        draft_tokens: list[list[int]] = [[] for _ in going]
        hidden, streams = self.model.draft(read, batch, self.state)
        if len(last) < len(pieces):
            hidden, streams = hidden[last], streams[last]
        for ahead in range(self.depth):
            logits = self.model.logits(hidden)
            drawn = self.sampler.guess([(request, row) for (request, _, _), row in zip(going, logits)], ahead)
            for own, token in zip(draft_tokens, drawn):
                own.append(token)
            if ahead + 1 < self.depth:  # on from its own streams, one position further
                pieces = [
                    SequenceChunk(_slot(r), r.computed + ahead, [token])
                    for (r, _, _), token in zip(going, drawn)
                ]
                hidden, streams = self.model.draft(streams, Batch.of(pieces, self.state.device), self.state)
        for (request, _, _), own in zip(going, draft_tokens):
            request.draft_tokens = tuple(own[: self._room(request)])
        return len(going)

    def _room(self, request: Request) -> int:
        """How many guesses could be of use: a step draws one token more than it verifies."""
        return 0 if request.done else request.max_tokens - len(request.output_ids) - 1


def _laid_out(pieces: list[SequenceChunk], device: torch.device) -> tuple[Batch, list[int]]:
    """A batch, and in which order its rows take the pieces."""
    batch = Batch.of(pieces, device)
    place = {id(piece): number for number, piece in enumerate(pieces)}
    return batch, [place[id(piece)] for piece in batch.chunks]


def _slot(request: Request) -> int:
    assert request.slot is not None
    return request.slot
