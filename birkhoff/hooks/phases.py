"""Which tokens of a piece belong to a phase: those of the prompt, generated ones, or both, decided by position alone.

The size of a piece never decides: chunks of a prompt, cache hits and tokens that are computed again fall on the side of
the prompt's end on which they stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from birkhoff.hooks.digest import Phase
from birkhoff.hooks.selector import PositionSelector

Phases = Literal["both", "prefill", "decode"]
PHASES: tuple[Phases, ...] = ("both", "prefill", "decode")


def covers(phases: str, phase: Phase) -> bool:
    return phases in ("both", phase)


def every_generated(phases: str, selector: PositionSelector | None) -> bool | None:
    """Whether all generated tokens are meant, or none of them; None when each has to be asked about."""
    if not covers(phases, "decode"):
        return False
    return True if selector is None else None


def offsets(
    phases: str, selector: PositionSelector | None, start: int, token_ids: Sequence[int], prompt_len: int
) -> Sequence[int]:
    """Places in the piece that starts at `start`, ascending: of these phases, and selected when there is a selector."""
    count, border = len(token_ids), max(prompt_len - start, 0)
    first = border if phases == "decode" else 0
    stop = min(border, count) if phases == "prefill" else count
    if first >= stop:
        return ()
    if selector is None:
        return range(first, stop)
    rows = np.asarray(selector.rows(start, token_ids))
    return rows[(rows >= first) & (rows < stop)].tolist()
