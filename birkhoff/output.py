"""Results of the API: the output of one request, and a stream of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from birkhoff import notebook
from birkhoff.capture.sinks.captured_rows import NoActs
from birkhoff.engine.request import FinishReason, Request, TokenEvent, TokenLogprob
from birkhoff.errors import OptionError, RequestError, quoted
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.results import CaptureResult
from birkhoff.hooks.signals import Frame, signal_number
from birkhoff.planning.plan_results import (
    NOTHING_CAPTURED,
    acts_of,
    capture_results_of,
    frames_of,
    plan_report,
)
from birkhoff.records import Tabular

TokenEvents = Generator[TokenEvent, None, None]


@dataclass(repr=False)
class Output(Tabular):
    """The output of one request. `message` is set for chats: reasoning, content and tool calls; `text` is the content.

    `acts[hook, layer]` are captured rows in memory; `capture_results` has the result of each consumer; `interp` reports
    hashes and the positions that were steered; `baseline` is the unsteered twin, if requested. `error` says why if the
    finish reason is "error", for example after an edit so strong that the logits became infinite. In a notebook its
    tokens are coloured by a signal; `show` chooses which.
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
    tokenizer: Any = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> list[str] | None:
        """The text of each generated token; None for a model without a tokenizer."""
        tokenizer = self.tokenizer
        return None if tokenizer is None else [tokenizer.decode([token]) for token in self.token_ids]

    def values(self, signal: str) -> list[float | None]:
        """One number of a signal for each generated token, None where there is none.

        "logprob" needs `logprobs`; every other signal must have been requested. Of a signal with several numbers per
        token: "stream_norm" is the mean norm of the last streams, "res_mix" how much of a stream goes to others (mean
        over sublayers), "head_mix" and "experts" the entropy of their weights in nats, anything else the mean."""
        if signal == "logprob":
            if self.logprobs is None:
                raise OptionError("there are no logprobs. Ask for them: generate(..., logprobs=0).")
            return [entry.logprob for entry in self.logprobs]
        frames = {frame["position"]: frame for frame in self.signals or ()}
        known = sorted({name for frame in frames.values() for name in frame} - {"position", "token_id"})
        if signal not in known:
            raise OptionError(
                f"signal is {quoted(signal)}, this output has {', '.join(known) or 'none'}"
                f"{' and logprob' if self.logprobs is not None else ''}. Ask for it: generate(..., signals=[name])."
            )
        start = len(self.prompt_token_ids)
        return [
            signal_number(signal, frames[start + index][signal]) if start + index in frames else None
            for index in range(len(self.token_ids))
        ]

    def show(self, signal: str | Sequence[float | None] | None = None) -> notebook.Html:
        """The answer as HTML, its tokens coloured by a signal (see `values`) or by one number per token. By default by
        the first signal the output has, then by logprob."""
        if signal is None:
            found = [
                name
                for frame in (self.signals or ())[:1]
                for name in frame
                if name not in ("position", "token_id")
            ]
            found += ["logprob"] if self.logprobs else []
            signal = next((name for name in found if name != "blocks"), None)
        values = self.values(signal) if isinstance(signal, str) else signal
        if values is not None and len(values) != len(self.token_ids):
            raise OptionError(
                f"there are {len(values)} numbers for {len(self.token_ids)} tokens. Give one for each."
            )
        label = signal if isinstance(signal, str) else ""
        texts = self.tokens or [str(token) for token in self.token_ids]
        speed = self.timings.get("tokens_per_second")
        facts = {
            "tokens": f"{len(self.prompt_token_ids)} in, {len(self.token_ids)} out",
            "finished": self.finish_reason,
            "tokens per second": None if speed is None else f"{speed:.1f}",
            "steered positions": self.interp.get("rows_steered"),
            "captured": self._captured,
            "error": self.error,
        }
        return notebook.Html(notebook.tokens(texts, values, label) + notebook.facts("", facts))

    def records(self) -> list[dict[str, Any]]:
        """A row for each generated token: position, id, text, and its logprob and signals if there are any."""
        names = dict.fromkeys(name for frame in self.signals or () for name in frame)
        columns = {
            name: self.values(name) for name in names if name not in ("position", "token_id", "blocks")
        }
        if self.logprobs is not None:
            columns["logprob"] = self.values("logprob")
        start, texts = len(self.prompt_token_ids), self.tokens
        return [
            {
                "position": start + index,
                "token_id": token,
                **({} if texts is None else {"token": texts[index]}),
                **{name: values[index] for name, values in columns.items()},
            }
            for index, token in enumerate(self.token_ids)
        ]

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 80 else f"{self.text[:79]}…"
        counts = f"{len(self.prompt_token_ids)} tokens in, {len(self.token_ids)} out"
        more = "" if self.error is None else f", error {self.error}"
        more += "" if self._captured is None else f", {self._captured}"
        return f"Output({text!r}, {counts}, finished: {self.finish_reason}{more})"

    @property
    def _captured(self) -> str | None:
        """The captured rows in a line, or why there are none although they were asked for."""
        if not isinstance(self.acts, NoActs):
            return repr(self.acts)
        return None if self.acts.reason is NOTHING_CAPTURED else str(self.acts.reason)

    def _repr_html_(self) -> str:
        return str(self.show())

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
            interp=interp_of(request) | {"reuse": _reuse(request)},
            timings=timings_of(request),
            message=message,
            error=request.error,
            signals=frames_of(request.plan),
            tokenizer=getattr(request.sink, "tokenizer", None),
        )


def interp_of(request: Request) -> dict[str, Any]:
    """What was captured and which positions were steered, and what was taken from caches or drafted, if any."""
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

    prompt_computed = t.finished if request.prompt_only else t.first_token
    decode_ms = between(t.first_token, t.finished)
    later = len(request.output_ids) - 1
    return {
        "queue_ms": between(t.submitted, t.admitted),
        "prefill_ms": between(t.admitted, prompt_computed),
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

    def __init__(self, request: Request, events: TokenEvents, cancel: Callable[[Request], None]) -> None:
        self._request = request
        self._events = events
        self._cancel = cancel

    def __iter__(self) -> Stream:
        return self

    def __repr__(self) -> str:
        state = self._request.finish_reason or "running"
        return f"Stream({len(self._request.output_ids)} tokens so far, {state}; iterate over its events)"

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
