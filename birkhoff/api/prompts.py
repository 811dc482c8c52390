"""Captures as users pass them: one for all prompts, or one per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from birkhoff.capture.planner import CaptureRequestSpec
from birkhoff.capture.spec.request import Capture
from birkhoff.errors import OptionError, quoted

Captures = CaptureRequestSpec | Sequence[CaptureRequestSpec | None] | None


def per_prompt(capture: Captures, prompts: int) -> list[CaptureRequestSpec | None]:
    """One capture for each of `prompts` prompts: the same for all, or the items of a list of that length."""
    if capture is None or isinstance(capture, (Capture, Mapping)):
        return [capture] * prompts
    if not isinstance(capture, Sequence) or not all(
        item is None or isinstance(item, (Capture, Mapping)) for item in capture
    ):
        raise OptionError(
            f"capture is {quoted(capture)}, expected a Capture or a list with one for each prompt."
        )
    if len(capture) != prompts:
        raise OptionError(
            f"capture has {len(capture)} entries for {prompts} prompts. Give one Capture, or one each."
        )
    return list(capture)
