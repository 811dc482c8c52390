"""What an `Engine` says about captures: their limits, projections, consumers and cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from birkhoff.capture.planner import CapturePlanner, CaptureRequestSpec, CaptureRules
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.dispatcher import Counters
from birkhoff.capture.spec.estimate import Estimate
from birkhoff.capture.spec.projections import Projections
from birkhoff.text.prompts import Prompt

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


class CaptureLimits:
    """The part of `Engine` that configures captures and estimates them."""

    _capture_planner: CapturePlanner

    def _of_engine(self) -> Engine:
        return cast("Engine", self)

    @property
    def projections(self) -> Projections:
        """Named matrices that captures can multiply rows with: `engine.projections["probe"] = matrix`."""
        return self._capture_planner.rules.projections

    @property
    def capture_max_request_bytes(self) -> int | None:
        """Maximum bytes that the captures of one request may store; None for no limit."""
        return self._capture_planner.rules.max_request_bytes

    @capture_max_request_bytes.setter
    def capture_max_request_bytes(self, limit: int | None) -> None:
        self._capture_planner.rules.max_request_bytes = limit

    @property
    def capture_inline_max_bytes(self) -> int | None:
        """Maximum bytes of the rows in `output.acts`; None for no limit beyond `capture_max_request_bytes`."""
        return self._capture_planner.rules.max_inline_bytes

    @capture_inline_max_bytes.setter
    def capture_inline_max_bytes(self, limit: int | None) -> None:
        self._capture_planner.rules.max_inline_bytes = limit

    @property
    def capture_rules(self) -> CaptureRules:
        """Capture limits and projections, for another planner that shares them."""
        return self._capture_planner.rules

    def estimate(
        self, capture: CaptureRequestSpec, prompt: Prompt, max_tokens: int = 1
    ) -> dict[str, Estimate]:
        """Upper bound of what a capture would store, by consumer, without running the model."""
        return self._capture_planner.estimate(
            capture, tuple(self._of_engine().prompt_ids(prompt)), max_tokens
        )

    def add_consumer(self, name: str, consumer: Consumer) -> None:
        """Register a consumer of captured rows: `capture={name: {"hooks": …}}`. It is shut down with the engine."""
        self._capture_planner.add_consumer(name, consumer)

    @property
    def capture_roots(self) -> dict[str, Path]:
        """Directory of every consumer that writes files, by consumer name."""
        return self._capture_planner.file_roots

    def device_captures(self) -> CapturePlanner | None:
        """A planner with this engine's limits for rows that stay on the device; None if other processes have them."""
        if type(self._capture_planner) is not CapturePlanner:
            return None
        engine = self._of_engine()
        layers = engine.config.num_hidden_layers
        return CapturePlanner(engine.schema, layers, engine.name, rules=self.capture_rules, on_device=True)

    @property
    def capture_counters(self) -> dict[str, Counters]:
        """Rows submitted, delivered and dropped since the engine was loaded, by capture consumer."""
        return self._capture_planner.queue_counters
