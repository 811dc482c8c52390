"""The kinds of dictionaries that can be trained: which features a row keeps, and the gradients of that choice.

    topk        the k largest features of a row                     a top-k dictionary
    batchtopk   the n * k largest features of n rows                a JumpReLU with one threshold
    matryoshka  as batchtopk; every prefix of the features must      a JumpReLU with one threshold
                reconstruct the row by itself
    jumprelu    features above a threshold of their own, trained     a JumpReLU
                with the penalty (l0 / k - 1)^2 on the number kept
    gated       a gate chooses, with an L1 penalty whose weight is   a gated dictionary
                adjusted until k features are kept on average

k is the number of features per row for all of them, exactly or on average. To add a kind, derive from `DictionaryKind`
and enter it in `ARCHITECTURES`: the trainer calls `start` once, `choose` for every batch, `gradients` with the gradient
of every kept value, `adjust` after the update, and `export` at the end. All numbers here are those of centred and
scaled rows, whose squares sum to their width on average, so that defaults do not depend on the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from birkhoff.sae.train import TrainOptions

SCAN = 1 << 29  # numbers that are searched at a time: PyTorch's index of a GPU tensor has 31 bits
SAMPLE_VALUES = 1 << 22  # pre-activations that determine the first level
Tensors = Mapping[str, torch.Tensor]
Scalars = MutableMapping[str, float]  # what persists from step to step besides tensors


@dataclass(frozen=True, eq=False)
class Code:
    """The kept (row, feature) pairs of a batch, by row; `values` are what the decoder multiplies."""

    rows: torch.Tensor  # [pairs]
    features: torch.Tensor  # [pairs]
    z: torch.Tensor  # [pairs] float32, pre-activations
    values: torch.Tensor  # [pairs] float32

    def part(self, which: torch.Tensor) -> Code:
        return Code(self.rows[which], self.features[which], self.z[which], self.values[which])


@dataclass(frozen=True, eq=False)
class BatchLoss:
    """Some rows of a batch and how their losses are weighed: they are means over the `total_rows` of the batch, and
    times `width` where they do not grow with it. `by_value` is the gradient of the reconstruction's loss by the values
    of the code; `value_gradients` computes it for other values of the same pairs."""

    code: Code
    by_value: torch.Tensor
    weights: Tensors
    scalars: Scalars
    rows: int
    total_rows: int
    width: int
    value_gradients: Callable[[torch.Tensor], torch.Tensor]


class DictionaryKind(ABC):
    """One kind of dictionary. `scalars` are numbers that persist from step to step and are part of a checkpoint."""

    name: ClassVar[str]
    has_sparsity: ClassVar[bool] = False  # whether `sparsity` weighs a penalty
    dead_bias: ClassVar[bool] = True  # whether `dead_values` depend on the encoder bias
    parameters: ClassVar[tuple[str, ...]] = ()  # one number per feature, besides the biases

    def __init__(self, options: TrainOptions):
        self.options = options

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Numbers of features that have to reconstruct a row by themselves; the last is all of them."""
        return (self.options.features,)

    def start(self, weights: Tensors, z: torch.Tensor, scalars: Scalars) -> Tensors:
        """Parameters at the start, by name, given pre-activations z [n, F] of a few rows."""
        return {}

    @abstractmethod
    def choose(self, z: torch.Tensor, weights: Tensors, scalars: Scalars) -> Code:
        """The pairs of a batch with pre-activations z [n, F]."""

    def gradients(self, batch: BatchLoss) -> dict[str, torch.Tensor]:
        """For each pair, its part in the gradient of the encoder row (as a factor of the input row), of the encoder
        bias, and of the parameters, by name."""
        kept = torch.where(batch.code.values > 0, batch.by_value, 0.0)
        return {"encoder": kept, "encoder_bias": kept}

    def dead_values(self, z: torch.Tensor, weights: Tensors, dead: torch.Tensor) -> torch.Tensor:
        """What the auxiliary loss multiplies the decoder rows of dead features by, [n, dead], where it is positive;
        z [n, F] are all pre-activations. It is z, or z without the encoder bias if `dead_bias` is false."""
        return z[:, dead]

    def adjust(self, l0: float, scalars: Scalars) -> None:  # noqa: B027  most kinds have nothing to adjust
        """Called after every batch with the number of features per row."""

    @abstractmethod
    def export(self, weights: Tensors, level: float, unit: float) -> dict[str, Any]:
        """Arguments of `Sae`. `level` keeps k features per row on average; features are divided by `unit`."""


class TrainTopK(DictionaryKind):
    name = "topk"

    def choose(self, z: torch.Tensor, weights: Tensors, scalars: Scalars) -> Code:
        k = self.options.k
        values, features = z.topk(k, dim=1, sorted=False)
        rows = torch.arange(len(z), device=z.device).repeat_interleave(k)
        flat = values.flatten().float()
        return Code(rows, features.flatten(), flat, flat).part((flat > 0).nonzero().squeeze(1))

    def export(self, weights: Tensors, level: float, unit: float) -> dict[str, Any]:
        return {"activation": "topk", "k": self.options.k, "rectified": True}


class TrainBatchTopK(DictionaryKind):
    name = "batchtopk"

    def start(self, weights: Tensors, z: torch.Tensor, scalars: Scalars) -> Tensors:
        scalars["level"] = start_level(z, self.options.k)
        return {}

    def choose(self, z: torch.Tensor, weights: Tensors, scalars: Scalars) -> Code:
        code, scalars["level"] = largest_pairs(z, self.options.k * len(z), 0.9 * scalars["level"])
        return code

    def export(self, weights: Tensors, level: float, unit: float) -> dict[str, Any]:
        return {"activation": "jumprelu", "threshold": max(level, 0.0) / unit}


class TrainMatryoshka(TrainBatchTopK):
    name = "matryoshka"

    @property
    def prefixes(self) -> tuple[int, ...]:
        if self.options.prefixes is not None:
            return self.options.prefixes
        features = self.options.features
        return tuple(sorted({max(1, features >> shift) for shift in range(5)}))


class TrainJumpRelu(DictionaryKind):
    """Thresholds are trained with a rectangular kernel of width `bandwidth`: pairs within it get a gradient."""

    name = "jumprelu"
    has_sparsity = True
    parameters = ("log_threshold",)
    bandwidth: ClassVar[float] = 0.2  # pre-activations have a standard deviation of about 1

    def start(self, weights: Tensors, z: torch.Tensor, scalars: Scalars) -> Tensors:
        level = max(start_level(z, self.options.k), self.bandwidth)
        return {"log_threshold": torch.full_like(weights["encoder_bias"], level).log_()}

    def choose(self, z: torch.Tensor, weights: Tensors, scalars: Scalars) -> Code:
        threshold = weights["log_threshold"].exp()
        rows, features = pairs_above(z, (threshold - self.bandwidth / 2).clamp_(min=0))
        values = z[rows, features].float()
        return Code(rows, features, values, torch.where(values > threshold[features], values, 0.0))

    def gradients(self, batch: BatchLoss) -> dict[str, torch.Tensor]:
        code = batch.code
        threshold = batch.weights["log_threshold"].exp()[code.features]
        within = (code.z - threshold).abs() < self.bandwidth / 2
        excess = (code.values > 0).sum() / (batch.rows * self.options.k) - 1
        penalty = (
            2 * self.options.sparsity_weight * batch.width * excess / (self.options.k * batch.total_rows)
        )
        by_step = batch.by_value * threshold + penalty  # of the step function at the threshold
        by_log = torch.where(within, -by_step * threshold / self.bandwidth, 0.0)
        return super().gradients(batch) | {"log_threshold": by_log}

    def export(self, weights: Tensors, level: float, unit: float) -> dict[str, Any]:
        return {"activation": "jumprelu", "threshold": weights["log_threshold"].exp() / unit}


class TrainGated(DictionaryKind):
    """f = max(exp(log_scale) (z - c) + magnitude_bias, 0) where z > 0; c is the encoder bias, so that z - c is the part
    that depends on the row. The gate is trained by the L1 penalty of max(z, 0) and by its own reconstruction of the
    row from max(z, 0), which does not train the decoder.

    No row opens the gate of a dead feature: z <= 0, and the auxiliary loss of max(z, 0) would have no gradient. So it
    reads z without the bias, and the encoder row grows along what the others leave over until its gate opens there.
    Otherwise a direction that was lost once would never be learnt again; and where all rows have as many active
    directions, the decoder bias and all other features turn to make up for it."""

    name = "gated"
    has_sparsity = True
    dead_bias = False
    parameters = ("log_scale", "magnitude_bias")
    gain: ClassVar[float] = 0.02  # how fast the weight of the penalty follows the number of features kept

    def start(self, weights: Tensors, z: torch.Tensor, scalars: Scalars) -> Tensors:
        bias = weights["encoder_bias"]
        scalars["penalty"] = 1.0
        level = max(start_level(z, self.options.k), 0.0)
        zero = torch.zeros_like(bias)
        return {"encoder_bias": bias - level, "log_scale": zero, "magnitude_bias": zero.clone()}

    def choose(self, z: torch.Tensor, weights: Tensors, scalars: Scalars) -> Code:
        rows, features = pairs_above(z, torch.zeros_like(weights["encoder_bias"]))
        values = z[rows, features].float()
        inner = (values - weights["encoder_bias"][features]) * weights["log_scale"].exp()[features]
        return Code(rows, features, values, (inner + weights["magnitude_bias"][features]).clamp_(min=0))

    def gradients(self, batch: BatchLoss) -> dict[str, torch.Tensor]:
        code, weights = batch.code, batch.weights
        penalty = 2 * self.options.sparsity_weight * batch.scalars["penalty"] / batch.total_rows
        by_gate = batch.value_gradients(code.z) + penalty
        by_magnitude = torch.where(code.values > 0, batch.by_value, 0.0)
        scale = weights["log_scale"].exp()[code.features]
        inner = (code.z - weights["encoder_bias"][code.features]) * scale
        return {
            "encoder": by_gate + by_magnitude * scale,
            "encoder_bias": by_gate,
            "log_scale": by_magnitude * inner,
            "magnitude_bias": by_magnitude,
        }

    def dead_values(self, z: torch.Tensor, weights: Tensors, dead: torch.Tensor) -> torch.Tensor:
        return z[:, dead] - weights["encoder_bias"][dead].to(z.dtype)

    def adjust(self, l0: float, scalars: Scalars) -> None:
        scalars["penalty"] *= 1 + self.gain * min(l0 / self.options.k - 1, 1.0)

    def export(self, weights: Tensors, level: float, unit: float) -> dict[str, Any]:
        scale = weights["log_scale"].exp()
        shift = (weights["magnitude_bias"] - scale * weights["encoder_bias"]) / unit
        return {"activation": "gated", "scale": scale, "shift": shift}


ARCHITECTURES: dict[str, type[DictionaryKind]] = {
    each.name: each for each in (TrainBatchTopK, TrainTopK, TrainJumpRelu, TrainGated, TrainMatryoshka)
}


def start_level(z: torch.Tensor, k: int) -> float:
    """The value above which k features of a row are on average, found on a few rows."""
    z = z[: max(1, SAMPLE_VALUES // z.shape[1])]
    return z.flatten().float().topk(min(z.numel(), k * len(z)), sorted=False).values.min().item()


def pairs_above(z: torch.Tensor, least: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and features of the numbers of z [n, F] above `least`, a number or one for each feature; by row."""
    found = []
    count = max(1, SCAN // z.shape[1])
    for first in range(0, len(z), count):
        rows, features = (z[first : first + count] > least).nonzero(as_tuple=True)
        found.append((rows + first, features))
    rows, features = (torch.cat(parts) for parts in zip(*found))
    return rows, features


def largest_pairs(z: torch.Tensor, count: int, guess: float = 0.0) -> tuple[Code, float]:
    """The `count` largest numbers of z, those that are positive, as a code; and the smallest of them. Fastest if that
    is a little larger than `guess`, on which the result does not depend."""
    guess = max(guess, 0.0)
    while True:
        rows, features = pairs_above(z, guess)
        if len(rows) >= count or guess == 0.0:
            break
        guess = guess / 2 if guess > 1e-3 else 0.0
    values = z[rows, features].float()
    code = Code(rows, features, values, values)
    if len(values) <= count:
        return code, values.min().item() if len(values) else 0.0
    level = values.topk(count, sorted=False).values.min()
    return code.part((values >= level).nonzero().squeeze(1)), level.item()
