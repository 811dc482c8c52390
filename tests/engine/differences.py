"""When two runs of one prompt may differ: only where two choices are equal within float32 precision.

Runs in other batches add the same numbers in another order. That can change a choice (of a token, of experts, of index
entries) only when the two best options differ by less than the rounding error; everything after such a choice may
differ. `explain_difference` recomputes the position with another implementation of the model and returns the margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.oracle import oracle_choices

CLOSE = 1e-4


@dataclass(frozen=True)
class Difference:
    """The smallest margin of a choice up to the first token that differs."""

    index: int  # in the output
    what: str
    margin: float


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def explain_difference(
    oracle, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]
) -> Difference | None:
    """None when the outputs are equal; otherwise the smallest margin among the two tokens and every preceding choice of
    experts and index entries. The caller compares it with `CLOSE`."""
    index = first_difference(a, b)
    if index is None:
        return None
    if index == min(len(a), len(b)):
        return Difference(index, "one output ends before the other", torch.inf)
    tokens = torch.tensor([*prompt, *a[:index]])
    with torch.no_grad(), oracle_choices(oracle) as choices:
        logits = oracle(tokens.unsqueeze(0), use_cache=False).logits[0, -1]
    # The margin of the two tokens that were chosen, not of the two best: a third token above both is an error.
    best = logits.max()
    margins = {"token": float(best - torch.minimum(logits[a[index]], logits[b[index]]))}
    margins |= {f"{kind} {layer}": float(choice.margin.min()) for (kind, layer), choice in choices.items()}
    what = min(margins, key=lambda name: margins[name])
    return Difference(index, what, margins[what])


def assert_same_tokens(
    oracle, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], label: str = ""
) -> None:
    diff = explain_difference(oracle, prompt, a, b)
    if diff is not None:
        print(f"{label}: differs at output {diff.index}, where {diff.what} has a margin of {diff.margin:.1e}")
        assert diff.margin < CLOSE, f"{label}: token {diff.index} differs and no call was close: {diff}"
