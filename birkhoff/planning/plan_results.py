"""What the captures and edits of a finished request produced, read from its plan: the same for every engine."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch

from birkhoff.capture.sinks.captured_rows import NoActs
from birkhoff.dtype_names import dtype_name
from birkhoff.errors import CaptureError, SiteError
from birkhoff.hooks.plan import Plan, SiteRows
from birkhoff.hooks.results import CaptureResult
from birkhoff.hooks.signals import Frame

NOTHING_CAPTURED = SiteError(
    "nothing was captured. Say what to keep: generate(..., capture=Capture({hook: layers}))."
)


def acts_of(plan: Plan | None) -> Mapping[tuple[str, int], SiteRows]:
    """Captured rows in memory. If the capture failed, the text is still complete and reading the rows raises."""
    captures = () if plan is None else plan.results.captures
    for capture in captures:
        if capture.in_memory:
            try:
                return capture.rows()
            except CaptureError as error:
                why = f"the capture failed ({error}); the answer is complete. Ask for the rows again."
                return NoActs(CaptureError(why), lost=True)
    if captures:
        names = ", ".join(repr(capture.consumer) for capture in captures)
        return NoActs(
            CaptureError(
                f"they went to {names}, not to memory. output.capture_results says what became of them."
            )
        )
    return NoActs(NOTHING_CAPTURED)


def capture_results_of(plan: Plan | None) -> dict[str, CaptureResult]:
    """The result of the request's capture at each consumer."""
    return {} if plan is None else {each.consumer: each.result() for each in plan.results.captures}


def capture_results_json(plan: Plan, timeout: float = 30.0) -> dict[str, Any]:
    """The result of each capture as JSON, with the rows of captures in memory."""
    results = {}
    for capture in plan.results.captures:
        result = capture.result(timeout).to_json()
        if capture.in_memory and result["status"] == "ok":
            result["tensors"] = [rows_json(rows) for rows in capture.rows().values()]
        results[capture.consumer] = result
    return results


def rows_json(rows: SiteRows) -> dict[str, Any]:
    """Captured rows as base64 of their little-endian bytes, with dtype, shape, positions and token ids. A row of fp8
    numbers is to be multiplied by its entry of `scale`."""
    tensor = rows.tensor.detach().cpu().contiguous()
    raw = tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return {
        "hook": rows.hook,
        "layer": rows.layer,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "positions": list(rows.positions),
        "token_ids": list(rows.token_ids),
        "data": base64.b64encode(raw).decode(),
        **({} if rows.scale is None else {"scale": rows.scale.flatten().tolist()}),
    }


def frames_of(plan: Plan | None) -> list[Frame] | None:
    """All signal frames of the request; None if it requested no signals."""
    signals = None if plan is None else plan.results.signals
    if signals is None:
        return None
    signals.take()
    return signals.frames


def plan_report(plan: Plan | None) -> dict[str, Any]:
    """What was captured and which positions were steered, as the steps recorded it.

    Positions that a capture lists one by one and that were never computed are reported by consumer."""
    if plan is None:
        return {}
    report: dict[str, Any] = {}
    captures = plan.results.captures
    if captures:
        report["capture_hash"] = captures[0].capture_hash
        missing = {capture.consumer: capture.missing for capture in captures if capture.missing}
        report |= {"positions_that_never_came": missing} if missing else {}
    return report | _steering(plan) if plan.edits else report


def _steering(plan: Plan) -> dict[str, Any]:
    """Digests of the edits per phase, the steered positions, the paths of stream edits, and what edits say about
    themselves, by kind."""
    digests = {"prefill": plan.prefill_digest, "decode": plan.decode_digest}
    report: dict[str, Any] = {
        "steering_hash": {
            phase: None if digest is None else digest.hex() for phase, digest in digests.items()
        },
        "rows_steered": len(plan.steered),
        "steered_positions": sorted(plan.steered),
    }
    paths = {site.path for edit in plan.edits for (hook, _), site in edit.sites.items() if "streams" in hook}
    if paths:
        report["paths"] = sorted(paths)
    for edit in plan.edits:
        for kind, description in edit.describe().items():
            report.setdefault(kind, []).append(description)
    return report
