"""When two runs of one prompt may differ: only where two choices are equal within float32 precision.

Runs in other company add the same numbers in another order. That can turn a choice (of a token, of experts, of index
entries) only when the two best options lie closer together than rounding; everything behind such a place legitimately
differs. `excuse` looks the place up in another implementation of the model and says how close the call was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.oracle import oracle_choices

CLOSE = 1e-4


@dataclass(frozen=True)
class Excuse:
    """The closest call up to the first token that differs."""

    place: int  # in the output
    what: str
    margin: float


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for place, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def excuse(oracle, prompt: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Excuse | None:
    """None when the outputs are the same; otherwise the smallest margin among the two tokens and every choice of
    experts and entries that led there. The caller has to hold it against `CLOSE`."""
    place = first_difference(a, b)
    if place is None:
        return None
    if place == min(len(a), len(b)):
        return Excuse(place, "one output ends before the other", torch.inf)
    tokens = torch.tensor([*prompt, *a[:place]])
    with torch.no_grad(), oracle_choices(oracle) as choices:
        logits = oracle(tokens.unsqueeze(0), use_cache=False).logits[0, -1]
    # Not the two best, but the two that were taken: a third one in front of both is no excuse.
    best = logits.max()
    margins = {"token": float(best - torch.minimum(logits[a[place]], logits[b[place]]))}
    margins |= {f"{kind} {layer}": float(choice.margin.min()) for (kind, layer), choice in choices.items()}
    what = min(margins, key=lambda name: margins[name])
    return Excuse(place, what, margins[what])


def assert_same_tokens(
    oracle, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], label: str = ""
) -> None:
    found = excuse(oracle, prompt, a, b)
    if found is not None:
        print(
            f"{label}: differs at output {found.place}, where {found.what} has a margin of {found.margin:.1e}"
        )
        assert found.margin < CLOSE, f"{label}: token {found.place} differs and no call was close: {found}"
