"""Asynchronous scheduling of GPU decode steps: the next step is launched before the results of the last one are read.

The tokens sampled by a step stay on the device and are the inputs of the next one; meanwhile the host appends the
tokens of the step before, detokenizes and delivers them. A request that turns out to have ended was computed one token
too far: that token is discarded like a rejected draft token, which is why the state can step back by one.

A step runs ahead only if the host decides nothing between two steps: no token mask, no penalties, no free slot for a
waiting request, pages without preemption, and edits and captures that do not depend on the tokens. Otherwise the
results are read first. Captured rows are delivered after the following step was launched; by then the host knows their
tokens. The row of a token that was computed too far is discarded with it.

Prompts that want one token, as when their activations are read, have ended with the step that computes them. Nothing
else depends on that token, so it is read after the next prompts were launched, and what the host does with a prompt's
rows costs the device no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from birkhoff.engine.request import Request
from birkhoff.engine.runner import ModelOutput, Runner
from birkhoff.engine.sampler import PendingSample, Sampler
from birkhoff.engine.scheduler import ScheduledChunk, Scheduler
from birkhoff.engine.speculation_controller import SpeculationController


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step on the device: the last position that it computes for each request, and the tokens it samples."""

    requests: list[Request]
    positions: list[int]
    sample: PendingSample


@dataclass(eq=False)
class RunAhead:
    """`controller` decides whether steps of a batch size draft; only those that do not can run ahead."""

    scheduler: Scheduler
    runner: Runner
    sampler: Sampler
    controller: SpeculationController | None = None
    steps: int = 0  # launched before the results of the previous step were read

    def accepts(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether a step of these chunks can be left on the device while the next one is launched."""
        return (
            self._plain(len(chunks))
            and self.runner.replays(chunks)
            and all(
                chunk.samples and not chunk.draft_tokens and self._independent(chunk.request)
                for chunk in chunks
            )
        )

    def ends(self, chunks: Sequence[ScheduledChunk]) -> bool:
        """Whether each request that gets a token in this step of prompts ends with it, whichever it is."""
        sampling = [chunk.request for chunk in chunks if chunk.samples]
        return bool(sampling) and all(
            request.max_tokens == 1 and self.sampler.samples_on_device(request) for request in sampling
        )

    def launch(self, chunks: Sequence[ScheduledChunk], outputs: Sequence[ModelOutput | None]) -> LaunchedStep:
        """Start sampling for a step that `accepts` or `ends`."""
        sampling = [(chunk, output.logits) for chunk, output in zip(chunks, outputs) if output is not None]
        requests = [chunk.request for chunk, _ in sampling]
        sample = self.sampler.launch(requests, [logits for _, logits in sampling], ahead=0)
        return LaunchedStep(requests, [chunk.stop - 1 for chunk, _ in sampling], sample)

    def following(self, step: LaunchedStep) -> LaunchedStep | None:
        """Launch the step after `step`, whose results have not been read; None if they must be read first."""
        if self.scheduler.waiting and self.scheduler.slots.num_free:
            return None
        rows = [
            row
            for row, request in enumerate(step.requests)
            if not request.done and len(request.output_ids) + 1 < request.max_tokens
        ]
        requests = [step.requests[row] for row in rows]
        if not rows or not self._plain(len(rows)):
            return None
        if not all(
            self.scheduler.allocate_without_preemption(request, request.num_tokens + 1)
            for request in requests
        ):
            return None
        tokens = step.sample.tokens
        if len(rows) < len(step.requests):
            tokens = step.sample.select(rows)
        positions = [step.positions[row] + 1 for row in rows]
        logits = self.runner.replay_ahead(requests, positions, tokens)
        if logits is None:
            return None
        self.steps += 1
        return LaunchedStep(requests, positions, self.sampler.launch(requests, [logits], ahead=1))

    def _plain(self, count: int) -> bool:
        """Whether steps of this many requests neither draft nor are measured against drafting."""
        controller = self.controller
        return controller is None or not (controller.should_draft(count) or controller.in_trial(count))

    def _independent(self, request: Request) -> bool:
        plan = request.plan
        free = plan is None or plan.idle_after_prompt or plan.runs_ahead
        return free and self.sampler.samples_on_device(request)
