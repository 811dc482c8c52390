"""What an answer says about the inside of the model: what was captured, steered and measured, in wire form."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.capture.planner import DispatchSink
from birkhoff.capture.sinks.job import CaptureJob, MemorySink
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.request import Request
from birkhoff.hooks.signals import SignalJob
from birkhoff.output import interp_of, timings_of
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
        found["signals"] = [frame for job in jobs(first, SignalJob) for frame in job.frames]
    return found


def captured(request: Request, shelf: CaptureIndex, wait: bool) -> dict[str, Any]:
    """By consumer, what became of the rows; those that were kept in memory come along."""
    found = {}
    for job in jobs(request, CaptureJob):
        consumer, keeper = job.resolved.consumer, job.keeper
        result = (
            keeper.results(0.0 if not wait else 30.0)
            if isinstance(keeper, DispatchSink)
            else keeper.results()
        )
        told = result[consumer].to_json()
        if isinstance(keeper, MemorySink) and told["status"] == "ok":
            told["tensors"] = [
                tensor_json(hook, layer, rows) for (hook, layer), rows in keeper.acts().items()
            ]
        if isinstance(keeper, DispatchSink):
            told["id"] = shelf.put(keeper, consumer)
        found[consumer] = told
    return found


def tensor_json(hook: str, layer: int, rows: Any) -> dict[str, Any]:
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


def jobs(request: Request, kind: type) -> list[Any]:
    return [job for job in (request.plan.jobs if request.plan is not None else ()) if isinstance(job, kind)]
