"""Numbers for Prometheus: some twenty-five series with names of our own, no prompt, key or user in any label."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from birkhoff.engine.request import Request
from birkhoff.errors import LogitsError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def count(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"birkhoff_{name}", what, labels, registry=registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"birkhoff_{name}", what, registry=registry)

        def spread(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"birkhoff_{name}", what, buckets=buckets, registry=registry)

        self.calls = count("http_requests", "Calls by route and status.", "route", "status")
        self.rejected = count("rejected", "Calls that were refused before they ran, by reason.", "reason")
        self.cancelled = count("cancelled", "Answers that were ended early, by cause.", "cause")
        self.prompt_tokens = count("prompt_tokens", "Tokens of prompts that were run.")
        self.generated_tokens = count("generated_tokens", "Tokens that were sampled.")
        self.cached_tokens = count("cached_tokens", "Tokens of prompts that were known and not run.")
        self.shared_pages = count("shared_pages", "Pages of past prompts that were used again.")
        self.drafted = count("drafted_tokens", "Tokens that were guessed ahead.")
        self.accepted = count("accepted_tokens", "Guessed tokens that stayed.")
        self.steered = count("steered_requests", "Answers whose activations were edited.")
        self.captures = count("captures", "Captures by how they ended.", "status")
        self.capture_bytes = count("capture_bytes", "Bytes of captured rows.")
        self.not_finite = count("nan_events", "Answers that ended because logits were not numbers.")
        self.failed = count("failed_requests", "Answers that ended in an error.")
        self.running = gauge("running", "Answers in a slot.")
        self.waiting = gauge("waiting", "Answers that wait for a slot.")
        self.slots_free = gauge("slots_free", "Slots that are free.")
        self.prefix_pages = gauge("prefix_pages", "Pages of past prompts that are kept.")
        self.prefix_bytes = gauge(
            "prefix_bytes", "Bytes that are kept beside those pages: states and captured rows."
        )
        self.prefix_evictions = gauge("prefix_evictions", "Pages that had to go since the start.")
        self.first_token = spread("time_to_first_token_seconds", "From submission to the first token.")
        self.per_token = spread(
            "time_per_token_seconds", "Between tokens of one answer, on average.", _TOKEN_SECONDS
        )
        self.queue = spread("queue_seconds", "From submission to a slot.")
        self.whole = spread("request_seconds", "From submission to the end.")

    def ended(self, request: Request) -> None:
        """Count one answer that is over."""
        times, tokens = request.timings, len(request.output_ids)
        self.prompt_tokens.inc(len(request.prompt_ids) if times.admitted is not None else 0)
        self.generated_tokens.inc(tokens)
        self.cached_tokens.inc(request.cached_tokens or 0)
        self.shared_pages.inc(request.shared_pages)
        self.drafted.inc(request.drafted)
        self.accepted.inc(request.accepted)
        if request.plan is not None and request.plan.edits:
            self.steered.inc()
        if request.error is not None:
            self.failed.inc()
            if isinstance(request.error, LogitsError):
                self.not_finite.inc()
        if times.admitted is not None:
            self.queue.observe(times.admitted - times.submitted)
        if times.finished is not None:
            self.whole.observe(times.finished - times.submitted)
        if times.first_token is not None:
            self.first_token.observe(times.first_token - times.submitted)
            if times.finished is not None and tokens > 1:
                self.per_token.observe((times.finished - times.first_token) / (tokens - 1))

    def held(self, prefix: dict[str, Any] | None) -> None:
        """Note what the prefix cache holds, when there is one."""
        if prefix is not None:
            self.prefix_pages.set(prefix["pages"])
            self.prefix_bytes.set(prefix["snapshot_bytes"] + prefix["row_bytes"])
            self.prefix_evictions.set(prefix["evictions"])

    def text(self) -> bytes:
        return generate_latest(self.registry)
