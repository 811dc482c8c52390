"""Response fields about the run itself: timings, steering, capture results and signals, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.dtype_names import dtype_name
from birkhoff.engine.request import Request
from birkhoff.hooks.plan import SiteRows
from birkhoff.output import interp_of, timings_of
from birkhoff.planning.plan_results import frames_of
from birkhoff.server.capture_index import CaptureIndex
from birkhoff.server.generation import GenerationCall, generation_warnings

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
    warnings = [
        *generation.warnings,
        *(warning for request in (*choices, *twins) for warning in generation_warnings(request)),
    ]
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
            result["tensors"] = [_tensor_json(*key, rows) for key, rows in capture.rows().items()]
        results[capture.consumer] = result
    return results


def _tensor_json(hook: str, layer: int, rows: SiteRows) -> dict[str, Any]:
    """Captured rows as base64 of their little-endian bytes, with dtype, shape, positions and token ids."""
    tensor = rows.tensor.detach().cpu().contiguous()
    raw = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {
        "hook": hook,
        "layer": layer,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "positions": list(rows.positions),
        "token_ids": list(rows.token_ids),
        "data": base64.b64encode(raw).decode(),
    }
