"""Sparse products and the Adam step of training in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 1 << 16  # pairs at a time in `pair_dots`
TINY = 1e-8


@dataclass(frozen=True, eq=False)
class RowParameters:
    """A matrix [rows, width] in float32 with the moments of Adam. `rounded` is its copy in bfloat16, if products use
    one. With `unit` every row is scaled to length 1 after a step."""

    weights: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    rounded: torch.Tensor | None = None
    unit: bool = False

    @property
    def table(self) -> torch.Tensor:
        """What products read."""
        return self.weights if self.rounded is None else self.rounded


@dataclass(frozen=True, eq=False)
class RowGradient:
    """The gradient of a matrix: row i is the weighted sum of the rows of `table` in group i, plus `extra[j]` if
    `extra_rows[j]` is i, minus `along[i]` times the row itself."""

    starts: torch.Tensor  # [rows + 1]
    index: torch.Tensor  # [pairs], rows of the table
    weights: torch.Tensor  # [pairs]
    table: torch.Tensor  # [any, width]
    along: torch.Tensor | None = None  # [rows]
    extra_rows: torch.Tensor | None = None  # [some], all different
    extra: torch.Tensor | None = None  # [some, width]


@dataclass(frozen=True)
class AdamStep:
    """`rate` and the number of steps so far, this one included."""

    rate: float
    count: int
    betas: tuple[float, float] = (0.9, 0.999)

    @property
    def scaled_rate(self) -> float:
        return self.rate / (1 - self.betas[0] ** self.count)

    @property
    def correction(self) -> float:
        """Factor of the second moment."""
        return 1 / (1 - self.betas[1] ** self.count)


def weighted_rows(
    starts: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    if not len(index):
        return table.new_zeros(len(starts) - 1, table.shape[1], dtype=torch.float32)
    return torch.nn.functional.embedding_bag(
        index, table.float(), starts[:-1], mode="sum", per_sample_weights=weights
    )


def pair_dots(
    left: torch.Tensor, left_index: torch.Tensor, right: torch.Tensor, right_index: torch.Tensor
) -> torch.Tensor:
    parts = zip(left_index.split(BLOCK), right_index.split(BLOCK))
    dots = [torch.linalg.vecdot(left[i].float(), right[j].float()) for i, j in parts]
    return torch.cat(dots) if dots else left.new_zeros(0, dtype=torch.float32)


def segment_sums(starts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    groups = torch.repeat_interleave(
        torch.arange(len(starts) - 1, device=starts.device), starts.diff(), output_size=len(weights)
    )
    return weights.new_zeros(len(starts) - 1).index_add_(0, groups, weights)


def adam_rows(rows: RowParameters, gradient: RowGradient, step: AdamStep) -> None:
    slope = weighted_rows(gradient.starts, gradient.index, gradient.weights, gradient.table)
    if gradient.extra is not None and gradient.extra_rows is not None:
        slope.index_add_(0, gradient.extra_rows, gradient.extra.float())
    if gradient.along is not None:
        slope.addcmul_(gradient.along[:, None], rows.weights, value=-1)
    adam(rows.weights, rows.first, rows.second, slope, step)
    if rows.unit:
        rows.weights.div_(rows.weights.norm(dim=1, keepdim=True))
    if rows.rounded is not None:
        rows.rounded.copy_(rows.weights)


def adam(
    weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor, slope: torch.Tensor, step: AdamStep
) -> None:
    """One Adam step in place with a dense gradient."""
    first.lerp_(slope, 1 - step.betas[0])
    second.mul_(step.betas[1]).addcmul_(slope, slope, value=1 - step.betas[1])
    weights.addcdiv_(first, (second * step.correction).sqrt_().add_(TINY), value=-step.scaled_rate)
