"""What an answer says about the inside of the model: what was captured, steered and measured, in wire form."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.dtype_names import dtype_name
from birkhoff.engine.request import Request
from birkhoff.hooks.plan import SiteRows
from birkhoff.output import frames_of, interp_of, timings_of
from birkhoff.server.calls import GenerationCall
from birkhoff.server.capture_index import CaptureIndex


def findings(
    requests: Sequence[Request], call: GenerationCall, shelf: CaptureIndex, streamed: bool = False
) -> dict[str, Any]:
    """`timings`, `interp`, `capture_results` and `signals` of an ended call; of several choices, the first one's.

    Waits for files when the call asked to, so it must not run on the event loop."""
    first = requests[0]
    found: dict[str, Any] = {
        "timings": {key: value for key, value in timings_of(first).items() if value is not None}
    }
    interp = interp_of(first)
    if interp:
        found["interp"] = interp
    if call.capture is not None:
        found["capture_results"] = captured(first, shelf, call.capture_wait)
    if call.signals and not streamed:
        found["signals"] = frames_of(first) or []
    return found


def captured(request: Request, shelf: CaptureIndex, wait: bool) -> dict[str, Any]:
    """By consumer, what became of the rows; those that were kept in memory come along."""
    found = {}
    for capture in request.results.captures:
        result = capture.result(30.0 if wait else 0.0).to_json()
        if not capture.in_memory:
            result["id"] = shelf.put(capture)
        elif result["status"] == "ok":
            result["tensors"] = [tensor_json(*key, rows) for key, rows in capture.rows().items()]
        found[capture.consumer] = result
    return found


def tensor_json(hook: str, layer: int, rows: SiteRows) -> dict[str, Any]:
    """Rows as base64 of their little-endian bytes, with everything a reader needs."""
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
