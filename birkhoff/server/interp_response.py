"""Response fields about the run itself: timings, steering, capture results and signals, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from birkhoff.engine.request import Request
from birkhoff.output import interp_of, timings_of
from birkhoff.planning.plan_results import frames_of, rows_json
from birkhoff.server.capture_index import CaptureIndex
from birkhoff.server.generation import GenerationCall, call_warnings

CAPTURE_WAIT_SECONDS = 30.0


def response_extras(
    choices: Sequence[Request],
    generation: GenerationCall,
    capture_index: CaptureIndex,
    twins: Sequence[Request] = (),
    streamed: bool = False,
) -> dict[str, Any]:
    """`timings`, `interp`, `capture_results`, `signals` and `warnings` of a finished call.

    All but `warnings` describe the first choice. Waits for files if the call has `capture_wait`, so it must not run on
    the event loop. `signals` is left out of streamed responses, which carry them in their chunks."""
    first = choices[0]
    extras: dict[str, Any] = {
        "timings": {key: value for key, value in timings_of(first).items() if value is not None}
    }
    interp = interp_of(first)
    if interp:
        extras["interp"] = interp
    if generation.capture is not None:
        extras["capture_results"] = capture_results(first, capture_index, generation.capture_wait)
    if generation.signals and not streamed:
        extras["signals"] = frames_of(first.plan) or []
    warnings = call_warnings(generation, (*choices, *twins))
    if warnings:
        extras["warnings"] = warnings
    return extras


def capture_results(request: Request, capture_index: CaptureIndex, wait: bool) -> dict[str, Any]:
    """Capture result of each consumer. Rows captured to memory are included; files get an id in the index."""
    results = {}
    for capture in request.results.captures:
        result = capture.result(CAPTURE_WAIT_SECONDS if wait else 0.0).to_json()
        if not capture.in_memory:
            result["id"] = capture_index.put(capture)
        elif result["status"] == "ok":
            result["tensors"] = [rows_json(rows) for rows in capture.rows().values()]
        results[capture.consumer] = result
    return results
