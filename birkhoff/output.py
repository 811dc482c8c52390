"""Results of the API: the output of one request, and a stream of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from birkhoff.capture.sinks.captured_rows import NoActs
from birkhoff.engine.request import FinishReason, Request, TokenEvent, TokenLogprob
from birkhoff.errors import RequestError
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.results import CaptureResult
from birkhoff.hooks.signals import Frame
from birkhoff.planning.plan_results import (
    NOTHING_CAPTURED,
    acts_of,
    capture_results_of,
    frames_of,
    plan_report,
)


@dataclass
class Output:
    """The output of one request. `message` is set for chats: reasoning, content and tool calls; `text` is the content.

    `acts[hook, layer]` are captured rows in memory; `capture_results` has the result of each consumer; `interp` reports
    hashes and the positions that were steered; `baseline` is the unsteered twin, if requested.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None = None
    acts: Mapping[tuple[str, int], SiteRows] = field(default_factory=lambda: NoActs(NOTHING_CAPTURED))
    capture_results: dict[str, CaptureResult] = field(default_factory=dict)
    interp: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float | int | None] = field(default_factory=dict)
    message: Any = None
    error: Exception | None = None
    signals: list[Frame] | None = None
    baseline: Output | None = None

    @classmethod
    def of(cls, request: Request, message: Any = None) -> Output:
        assert request.finish_reason is not None
        return cls(
            text=request.sink.text if request.sink else "",  # type: ignore[attr-defined]
            token_ids=list(request.output_ids),
            prompt_token_ids=list(request.prompt_ids),
            finish_reason=request.finish_reason,
            logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
            acts=acts_of(request.plan),
            capture_results=capture_results_of(request.plan),
            interp=interp_of(request),
            timings=timings_of(request),
            message=message,
            error=request.error,
            signals=frames_of(request.plan),
        )


def interp_of(request: Request) -> dict[str, Any]:
    """What was captured and which positions were steered, and what was taken from caches or drafted."""
    report = plan_report(request.plan)
    if request.cached_tokens or request.drafted:
        report["reuse"] = _reuse(request)
    return report


def _reuse(request: Request) -> dict[str, int]:
    """Counts of the prefix cache and of speculative decoding for this request."""
    return {
        "cached_tokens": request.cached_tokens or 0,
        "pages_shared": request.shared_pages,
        "drafted": request.drafted,
        "accepted": request.accepted,
    }


def timings_of(request: Request) -> dict[str, float | int | None]:
    """Milliseconds per stage, token counts, and the decode rate after the first token."""
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
    """Iterator over the token events of one request; `output` is its `Output` after the last event.

    Closing it, leaving its `with` block or dropping the last reference cancels the request."""

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
        self._cancel(self._request)  # also a request that was never submitted
        with suppress(ValueError):  # another thread is reading and will see the end
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
