"""Directions from two sets of rows, and how well they separate the sets at each site.

Rows are [n, d], or [n, m, d] at hooks with streams. `mean_difference` is the difference of the means, with its
natural norm; `principal_direction` is the first principal axis of the paired differences, a unit vector pointing to
the positives. `separate` measures a direction on held-out rows: d' (difference of mean projections over their
pooled deviation) and AUC (the chance that a positive row projects higher than a negative one, ties counting half).
0.5 is chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from birkhoff.errors import SteeringError, quoted

FOLDS = 5
METHODS = ("mean_diff", "pca")


@dataclass(frozen=True)
class Separation:
    """How well one direction separates two sets of rows; `stream` is None for the whole row."""

    hook: str
    layer: int
    stream: int | None
    d_prime: float
    auc: float
    norm: float  # of the difference of means
    row_norm: float  # of the rows, on average

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def direction(positive: torch.Tensor, negative: torch.Tensor, how: str = "mean_diff") -> torch.Tensor:
    """A vector with the shape of a row, pointing from negative to positive."""
    positive, negative = _checked(positive, negative)
    if how == "mean_diff":
        return mean_difference(positive, negative)
    if how == "pca":
        return principal_direction(positive, negative)
    raise SteeringError(f"how is {quoted(how)}, expected one of {', '.join(METHODS)}.")


def mean_difference(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    return positive.float().mean(0) - negative.float().mean(0)


def principal_direction(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """The first principal axis of the paired differences, not centred, since their common part is the direction."""
    if len(positive) != len(negative):
        raise SteeringError(
            f"pca takes pairs, and there are {len(positive)} positive and {len(negative)} negative rows. Give as many "
            "of each, or use mean_diff."
        )
    shape = positive.shape[1:]
    between = (positive.float() - negative.float()).flatten(1)
    axis = torch.linalg.svd(between, full_matrices=False).Vh[0]
    pointed: torch.Tensor = axis if between.mean(0) @ axis >= 0 else -axis
    return pointed.view(shape)


def d_prime(positive: torch.Tensor, negative: torch.Tensor) -> float:
    """d' of two sets of numbers: difference of means over the root mean of their variances; 0 if neither varies."""
    spread = ((positive.var(unbiased=False) + negative.var(unbiased=False)) / 2).sqrt().item()
    gap = (positive.mean() - negative.mean()).item()
    return gap / spread if spread > 0 else 0.0


def auc(positive: torch.Tensor, negative: torch.Tensor) -> float:
    """The probability that a number of the first set exceeds one of the second, ties counting half."""
    ordered = torch.sort(negative).values
    below = torch.searchsorted(ordered, positive.contiguous())
    equal = torch.searchsorted(ordered, positive.contiguous(), right=True) - below
    return ((below + equal / 2).sum() / (len(positive) * len(negative))).item()


def separate(
    hook: str, layer: int, positive: torch.Tensor, negative: torch.Tensor, how: str = "mean_diff"
) -> list[Separation]:
    """One entry for the whole row and, with streams, one for each stream.

    Every row is scored along a direction computed without its fold, so that chance level is 0.5."""
    positive, negative = (rows.float() for rows in _checked(positive, negative))
    parts: list[tuple[int | None, torch.Tensor, torch.Tensor]] = [
        (None, positive.flatten(1), negative.flatten(1))
    ]
    if positive.ndim == 3:
        parts += [(stream, positive[:, stream], negative[:, stream]) for stream in range(positive.shape[1])]
    return [_separation(hook, layer, stream, up, down, how) for stream, up, down in parts]


def _separation(
    hook: str, layer: int, stream: int | None, up: torch.Tensor, down: torch.Tensor, how: str
) -> Separation:
    folds = max(2, min(FOLDS, len(up), len(down)))
    high, low = torch.empty(len(up)), torch.empty(len(down))
    for fold in range(folds):
        up_held = torch.arange(len(up)) % folds == fold
        down_held = torch.arange(len(down)) % folds == fold
        axis = direction(up[~up_held], down[~down_held], how)
        axis = axis / axis.norm().clamp(min=torch.finfo(torch.float32).tiny)
        high[up_held], low[down_held] = up[up_held] @ axis, down[down_held] @ axis
    rows = torch.cat([up, down]).norm(dim=1).mean().item()
    gap = mean_difference(up, down).norm().item()
    return Separation(hook, layer, stream, d_prime(high, low), auc(high, low), gap, rows)


def best(separations: Sequence[Separation]) -> Separation:
    """The entry with the largest d'."""
    return max(separations, key=lambda entry: entry.d_prime)


def _checked(positive: torch.Tensor, negative: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    for name, rows in (("positive", positive), ("negative", negative)):
        if rows.ndim not in (2, 3) or len(rows) < 2:
            raise SteeringError(
                f"{name} has rows of shape {tuple(rows.shape)}, expected [rows, width] or [rows, streams, width] with "
                "at least two rows. Give more texts."
            )
        if not rows.isfinite().all():
            raise SteeringError(f"{name} holds a number that is not finite. Look at the text it came from.")
    if positive.shape[1:] != negative.shape[1:]:
        raise SteeringError(
            f"positive rows are {tuple(positive.shape[1:])} and negative ones {tuple(negative.shape[1:])}. Take both "
            "from one hook."
        )
    return positive, negative
