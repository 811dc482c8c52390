"""Whether two implementations compute the same model, checked in the run that times them.

Two checks. Logits of a whole prompt, position by position: nearly all must agree to 1e-4; the exceptions are positions
where a near tie between two experts or entries was resolved differently. And the tokens of greedy decoding through both
caches: they must be equal up to a step at which the two best tokens were closer than the drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from birkhoff.bench.report import significant

TOLERANCE = 1e-4
MAY_DIFFER = 0.01  # share of positions at which a near tie may be resolved differently
NEAR_TIE = 1e-3


def compare_logits(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, Any]:
    """Compare logits ours, theirs [T, vocab]."""
    drift = (ours - theirs).abs().amax(-1)
    beyond = (drift > TOLERANCE).float().mean().item()
    same = ours.argmax(-1) == theirs.argmax(-1)
    return {
        "positions": len(drift),
        "drift_median": significant(drift.median().item()),
        "drift_most": significant(drift.max().item()),
        "share_beyond_tolerance": significant(beyond),
        "greedy_same": significant(same.float().mean().item()),
        "passed": beyond <= MAY_DIFFER,
    }


def compare_tokens(ours: Sequence[int], theirs: Sequence[int], logits: torch.Tensor) -> dict[str, Any]:
    """Compare two greedy answers; `logits` [steps, vocab] are those of `theirs`, to judge the first difference."""
    first = next((step for step, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
    if first is None:
        return {"steps": len(theirs), "same_for": len(theirs), "passed": len(ours) == len(theirs)}
    margin = (logits[first, theirs[first]] - logits[first, ours[first]]).item()
    return {
        "steps": len(theirs),
        "same_for": first,
        "margin": significant(margin),
        "passed": margin < NEAR_TIE,
    }
