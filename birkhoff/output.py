"""What comes back: the answer of one request, whole or as it comes, and the record of a traced forward pass."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from birkhoff.capture.sinks.captured_rows import CapturedRows, NoActs
from birkhoff.capture.sinks.job import CaptureJob, MemorySink
from birkhoff.capture.sinks.result import CaptureResult
from birkhoff.engine.request import FinishReason, Request, TokenEvent, TokenLogprob
from birkhoff.errors import CaptureError, RequestError, SiteError
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.signals import Frame, SignalJob
from birkhoff.sae.feature_edits import ResolvedSae

_UNASKED = SiteError(
    "nothing was captured. Say what to keep: generate(..., capture=Capture({hook: layers}))."
)


@dataclass
class Output:
    """One answer. `message` is set for chats: reasoning, content and tool calls apart; `text` is then the content."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    acts: Mapping[tuple[str, int], CapturedRows] = field(default_factory=lambda: NoActs(_UNASKED))
    capture_results: dict[str, CaptureResult] = field(default_factory=dict)
    interp: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float | int | None] = field(default_factory=dict)
    message: Any = None
    error: Exception | None = None
    signals: list[Frame] | None = None
    baseline: Output | None = None  # the unsteered twin, when it was asked for

    @classmethod
    def of(cls, request: Request, message: Any = None) -> Output:
        assert request.finish_reason is not None
        return cls(
            text=request.sink.text if request.sink else "",  # type: ignore[attr-defined]
            token_ids=list(request.output_ids),
            prompt_token_ids=list(request.prompt_ids),
            finish_reason=request.finish_reason,
            logprobs=list(request.logprobs) if request.options.logprobs is not None else None,
            acts=_acts(request),
            capture_results=_capture_results(request),
            interp=interp_of(request),
            timings=timings_of(request),
            message=message,
            error=request.error,
            signals=_signals(request),
        )


def _acts(request: Request) -> Mapping[tuple[str, int], CapturedRows]:
    """What the request's capture kept in memory. A failed capture leaves the answer whole: asking for rows tells."""
    jobs = _captures(request)
    for job in jobs:
        if isinstance(job.keeper, MemorySink):
            try:
                return job.keeper.acts()
            except CaptureError as error:
                why = f"the capture failed ({error}); the answer is complete. Ask for the rows again."
                return NoActs(CaptureError(why), lost=True)
    if jobs:
        names = ", ".join(repr(job.resolved.consumer) for job in jobs)
        return NoActs(
            CaptureError(
                f"they went to {names}, not to memory. output.capture_results says what became of them."
            )
        )
    return NoActs(_UNASKED)


def _signals(request: Request) -> list[Frame] | None:
    """All frames of the request, when it asked for any."""
    for job in request.plan.jobs if request.plan is not None else ():
        if isinstance(job, SignalJob):
            job.take()
            return job.frames
    return None


def _captures(request: Request) -> list[CaptureJob]:
    return [
        job for job in (request.plan.jobs if request.plan is not None else ()) if isinstance(job, CaptureJob)
    ]


def interp_of(request: Request) -> dict[str, Any]:
    """What was captured and which tokens were steered: exact positions, counted by the engine and not by the request's
    wording. Places that a capture asked for one by one and that never came are listed by consumer."""
    found: dict[str, Any] = {}
    captures = _captures(request)
    if captures:
        found["capture_hash"] = captures[0].capture_hash
        missing = {job.resolved.consumer: job.missing for job in captures if job.missing}
        found |= {"positions_that_never_came": missing} if missing else {}
    if request.plan is not None and request.plan.edits:
        found |= _steering(request.plan)
    if request.cached_tokens or request.drafted:
        found["reuse"] = _reuse(request)
    return found


def _reuse(request: Request) -> dict[str, int]:
    """What was not computed for this request alone, and what was guessed for it."""
    return {
        "cached_tokens": request.cached_tokens or 0,
        "pages_shared": request.shared_pages,
        "drafted": request.drafted,
        "accepted": request.accepted,
    }


def _steering(plan: Plan) -> dict[str, Any]:
    """What was done to which tokens: both hashes, who saw edits of the streams, and what became of errors of
    dictionaries."""
    hashes = {"prefill": plan.prefill_digest, "decode": plan.decode_digest}
    found: dict[str, Any] = {
        "steering_hash": {
            phase: None if digest is None else digest.hex() for phase, digest in hashes.items()
        },
        "rows_steered": len(plan.steered),
        "steered_positions": sorted(plan.steered),
    }
    streams = {
        site.path for edit in plan.edits for (hook, _), site in edit.sites.items() if "streams" in hook
    }
    if streams:
        found["paths"] = sorted(streams)
    features = [edit.describe() for edit in plan.edits if isinstance(edit, ResolvedSae)]
    if features:
        found["features"] = features
    return found


def _capture_results(request: Request) -> dict[str, CaptureResult]:
    """What became of rows that went elsewhere, by consumer; waits until files are durable."""
    found: dict[str, CaptureResult] = {}
    for job in _captures(request):
        found |= job.keeper.results()
    return found


def timings_of(request: Request) -> dict[str, float | int | None]:
    """Milliseconds of each stage, and the rate of decoding after the first token."""
    t = request.timings

    def between(start: float | None, stop: float | None) -> float | None:
        return None if start is None or stop is None else (stop - start) * 1e3

    decode_ms = between(t.first_token, t.finished)
    later = len(request.output_ids) - 1
    return {
        "queue_ms": between(t.submitted, t.admitted),
        "prefill_ms": between(t.admitted, t.first_token),
        "decode_ms": decode_ms,
        "prompt_tokens": len(request.prompt_ids),
        "output_tokens": len(request.output_ids),
        "tokens_per_second": later / decode_ms * 1e3 if decode_ms and later > 0 else None,
        "preemptions": t.preemptions,
        **_reuse(request),
    }


class Stream:
    """The events of one running answer, in order, and the answer itself once it has ended.

    Closing (also by leaving a `with` block) cancels; a stream that is thrown away does the same."""

    def __init__(
        self, request: Request, events: Generator[TokenEvent, None, None], cancel: Callable[[Request], None]
    ) -> None:
        self._request = request
        self._events = events
        self._cancel = cancel

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> TokenEvent:
        return next(self._events)

    def close(self) -> None:
        self._cancel(self._request)  # also one that was never read and has not reached the engine
        with suppress(ValueError):  # another thread is reading: it meets the end by itself
            self._events.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def output(self) -> Output:
        if not self._request.done:
            raise RequestError(
                "this stream has not ended yet. Read it to its end or close it, then ask for its output."
            )
        return Output.of(self._request)


class Trace:
    """Every asked-for site of one forward pass: `trace[hook, layer]` is `[T, *row_shape]`, `trace.logits` `[T, vocab]`.

    Hooks that fire once per model sit at the last layer."""

    def __init__(self, logits: torch.Tensor, tensors: dict[tuple[str, int], torch.Tensor]):
        self.logits = logits
        self._tensors = tensors

    @property
    def sites(self) -> set[tuple[str, int]]:
        return set(self._tensors)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, key: tuple[str, int]) -> torch.Tensor:
        if key not in self._tensors:
            hooks = sorted({hook for hook, _ in self._tensors})
            raise SiteError(
                f"{key} was not traced. This trace holds {', '.join(hooks) or 'nothing'}; "
                "ask with trace[hook, layer] and a layer the model has."
            )
        return self._tensors[key]
