"""Prometheus metrics. No label contains a prompt, key or user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from birkhoff.capture.sinks.dispatcher import Counters
from birkhoff.engine.request import Request
from birkhoff.errors import LogitsError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"birkhoff_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str, *labels: str) -> Gauge:
            return Gauge(f"birkhoff_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"birkhoff_{name}", help, buckets=buckets, registry=registry)

        self.http_requests = counter("http_requests", "HTTP requests by route and status.", "route", "status")
        self.rejected = counter("rejected", "Requests refused before they ran, by reason.", "reason")
        self.cancelled = counter("cancelled", "Requests cancelled before they finished, by cause.", "cause")
        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of admitted requests; a prompt with several choices counts once."
        )
        self.generated_tokens = counter("generated_tokens", "Generated tokens.")
        self.cached_tokens = counter("cached_tokens", "Those of prompt_tokens that were in the prefix cache.")
        self.shared_pages = counter("shared_pages", "Pages of the prefix cache that held cached_tokens.")
        self.drafted = counter("drafted_tokens", "Tokens drafted by speculative decoding.")
        self.accepted = counter("accepted_tokens", "Drafted tokens that were accepted.")
        self.steered_requests = counter("steered_requests", "Requests with edited activations.")
        self.nan_events = counter("nan_events", "Requests that failed because logits were not finite.")
        self.failed_requests = counter("failed_requests", "Requests that failed.")
        self.running = gauge("running", "Requests in a slot.")
        self.waiting = gauge("waiting", "Requests waiting for a slot.")
        self.slots_free = gauge("slots_free", "Free slots.")
        self.prefix_pages = gauge("prefix_pages", "Pages in the prefix cache.")
        self.prefix_bytes = gauge("prefix_bytes", "Bytes of snapshots and captured rows in the prefix cache.")
        self.prefix_evictions = gauge("prefix_evictions", "Pages evicted from the prefix cache since start.")
        self.prefix_disk_bytes = gauge("prefix_disk_bytes", "Bytes of pages in context_root.")
        self.prefix_disk_pages = gauge(
            "prefix_disk_pages",
            "Pages for context_root since start: written; refused when read because they were damaged; failed to be "
            "written; too_large for context_bytes.",
            "state",
        )
        self.prefix_rows_too_large = gauge(
            "prefix_rows_too_large",
            "Captured rows since start that were not kept because they exceed the row cache.",
        )
        self.capture_rows = gauge(
            "capture_rows",
            "Rows for capture consumers since start: submitted, delivered and dropped.",
            "consumer",
            "state",
        )
        self.capture_blocked_seconds = gauge(
            "capture_blocked_seconds", "Time the engine waited for a full capture queue.", "consumer"
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Time from submission to the first token."
        )
        self.time_per_token = histogram(
            "time_per_token_seconds", "Mean time between output tokens of a request.", _TOKEN_SECONDS
        )
        self.queue_seconds = histogram("queue_seconds", "Time from submission to admission to a slot.")
        self.request_seconds = histogram("request_seconds", "Time from submission to the last token.")

    def record_prompt(self, request: Request) -> None:
        """Count the prompt of a request that has its first token, or has ended without one: call it for one choice of
        a prompt."""
        self.prompt_tokens.inc(len(request.prompt_ids) if request.timings.admitted is not None else 0)
        self.cached_tokens.inc(request.cached_tokens or 0)
        self.shared_pages.inc(request.shared_pages)

    def record_request(self, request: Request) -> None:
        """Count one finished request; its tokens are counted as they come."""
        times, tokens = request.timings, len(request.output_ids)
        self.drafted.inc(request.drafted)
        self.accepted.inc(request.accepted)
        if request.plan is not None and request.plan.edits:
            self.steered_requests.inc()
        if request.error is not None:
            self.failed_requests.inc()
            if isinstance(request.error, LogitsError):
                self.nan_events.inc()
        if times.admitted is not None:
            self.queue_seconds.observe(times.admitted - times.submitted)
        if times.finished is not None:
            self.request_seconds.observe(times.finished - times.submitted)
        if times.first_token is not None:
            self.time_to_first_token.observe(times.first_token - times.submitted)
            if times.finished is not None and tokens > 1:
                self.time_per_token.observe((times.finished - times.first_token) / (tokens - 1))

    def record_prefix_cache(self, prefix: dict[str, Any] | None) -> None:
        """Set the gauges of the prefix cache; does nothing if it is disabled."""
        if prefix is not None:
            self.prefix_pages.set(prefix["pages"])
            self.prefix_bytes.set(prefix["snapshot_bytes"] + prefix["row_bytes"])
            self.prefix_evictions.set(prefix["evictions"])
            self.prefix_rows_too_large.set(prefix["rows_too_large"])
            disk = prefix["disk"]
            if disk is not None:
                self.prefix_disk_bytes.set(disk["bytes"])
                for state, key in (
                    ("written", "written"),
                    ("refused", "refused"),
                    ("failed", "failures"),
                    ("too_large", "too_large"),
                ):
                    self.prefix_disk_pages.labels(state).set(disk[key])

    def record_captures(self, counters: Mapping[str, Counters]) -> None:
        """Set the gauges of the capture queues."""
        for consumer, count in counters.items():
            self.capture_rows.labels(consumer, "submitted").set(count.submitted_rows)
            self.capture_rows.labels(consumer, "delivered").set(count.delivered_rows)
            self.capture_rows.labels(consumer, "dropped").set(count.dropped_rows)
            self.capture_blocked_seconds.labels(consumer).set(count.blocked_seconds)

    def render(self) -> bytes:
        """All metrics in the Prometheus text format."""
        return generate_latest(self.registry)
