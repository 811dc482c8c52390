"""Training of dictionaries on rows of activations: TopK and BatchTopK, with an auxiliary loss for dead features.

Rows are centred and scaled by constants computed at the start, which are folded in at the end: the resulting `Sae`
has unit decoder rows and features in the units of the rows. BatchTopK keeps the n*k largest features of a batch in
training and is exported as a JumpReLU with one threshold, so that features of a row do not depend on the batch. A
feature that has not fired for `dead_after` rows is also trained on the residual of the others.

Only a few features of a row are nonzero, so gradients are computed explicitly for those instead of by autograd: the
only dense product of a step is the encoder's. (`reference_gradients` in the tests is the dense twin.) Training is
deterministic: the same rows and seed give the same dictionary, also across `state`/`restored`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from birkhoff.errors import OptionError, SaeError, quoted
from birkhoff.option_checks import check_float, check_int
from birkhoff.sae.dictionary import Sae

KINDS = ("batchtopk", "topk")
_BETAS, _TINY = (0.9, 0.999), 1e-8


@dataclass(frozen=True)
class TrainOptions:
    """Training options. `steps` is the number of batches; the learning rate falls to zero over the last of them."""

    features: int
    k: int = 32
    kind: str = "batchtopk"
    steps: int = 1000
    rate: float = 1e-3
    warmup: float = 0.05  # share of the steps over which the rate rises
    decay: float = 0.3  # share of the steps over which it falls
    aux_weight: float = 1 / 32
    dead_after: int = 100_000  # rows without firing
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("features", "k", "steps", "dead_after"):
            check_int(name, getattr(self, name))
        if self.kind not in KINDS:
            raise OptionError(f"kind is {quoted(self.kind)}, expected one of {', '.join(KINDS)}.")
        if self.k > self.features:
            raise OptionError(f"k is {self.k}, but there are only {self.features} features. Lower k.")
        for name, most in (("rate", math.inf), ("warmup", 1.0), ("decay", 1.0), ("aux_weight", math.inf)):
            check_float(name, getattr(self, name), 0.0, most)
        if not math.isfinite(self.rate) or self.rate == 0:
            raise OptionError(f"rate is {self.rate}, expected a positive number.")
        check_int("seed", self.seed, None)

    def rate_at(self, step: int) -> float:
        rising = min(1.0, (step + 1) / max(1.0, self.warmup * self.steps))
        falling = min(1.0, (self.steps - step) / max(1.0, self.decay * self.steps))
        return self.rate * rising * falling


@dataclass(frozen=True)
class StepReport:
    """Statistics of one batch: explained variance, features per row, dead features after it."""

    step: int
    explained: float
    l0: float
    dead: int


class Trainer:
    """Call `step(rows)` for every batch, then `finish(rows)`. Matrices are `[F, d]`, one row per feature."""

    def __init__(self, options: TrainOptions, sample: torch.Tensor):
        """`sample` [n, d], a few thousand rows, determines centre and scale."""
        sample = checked_rows(sample)
        self.options = options
        self.done = 0
        self.rows_seen = 0
        width = sample.shape[1]
        self.centre = sample.mean(0)
        spread = (sample - self.centre).pow(2).sum(1).mean().item()
        if spread <= 0:
            raise SaeError(
                "all rows of the sample are the same, so there is nothing to learn. Check the capture."
            )
        self.factor = math.sqrt(width / spread)
        generator = torch.Generator().manual_seed(options.seed)
        decoder = torch.randn(options.features, width, generator=generator)
        decoder /= decoder.norm(dim=1, keepdim=True)
        self.weights: dict[str, torch.Tensor] = {
            "encoder": decoder.clone(),  # starting from the decoder's transpose keeps most features alive
            "encoder_bias": torch.zeros(options.features),
            "decoder": decoder,
            "decoder_bias": torch.zeros(width),
        }
        self._first = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self._second = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self.silent_rows = torch.zeros(options.features, dtype=torch.long)
        self._level = 0.0  # smallest kept value of the last batch, a starting point for the next search

    @property
    def dead(self) -> torch.Tensor:
        return self.silent_rows >= self.options.dead_after

    def step(self, rows: torch.Tensor) -> StepReport:
        """Train on one batch [n, d]."""
        x = (checked_rows(rows, len(self.centre)) - self.centre) * self.factor
        z = self._pre_activations(x)
        kept = self._kept(z)
        gradients, left = self._reconstruction(x, z, kept)
        fired = kept.any(0)
        self.silent_rows = torch.where(fired, 0, self.silent_rows + len(x))
        if bool(self.dead.any()) and self.options.aux_weight:
            self._add_auxiliary(x, z, left, gradients)
        self._update(gradients)
        self.done += 1
        self.rows_seen += len(x)
        total = (x - x.mean(0)).pow(2).sum().item()
        explained = 1 - left.pow(2).sum().item() / total if total > 0 else 0.0
        return StepReport(self.done, explained, kept.sum().item() / len(x), int(self.dead.sum()))

    def _pre_activations(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weights["encoder"], self.weights["encoder_bias"])

    def _kept(self, z: torch.Tensor) -> torch.Tensor:
        """Mask [n, F] of the features that are kept, all of them positive."""
        k = self.options.k
        if self.options.kind == "topk":
            least = z.topk(k, dim=1).values[:, -1:]
            return (z >= least) & (z > 0)
        self._level = _kth_largest(z, k * len(z), self._level / 2)
        return z >= max(self._level, torch.finfo(z.dtype).tiny)

    def _reconstruction(
        self, x: torch.Tensor, z: torch.Tensor, kept: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Gradients of mean |x - x^|^2 / d, and the residual x - x^."""
        rows, features = kept.nonzero(as_tuple=True)
        values = z[rows, features]
        decoder = self.weights["decoder"]
        n, count = z.shape
        left = x - self.weights["decoder_bias"] - _weighted_sums(rows, features, values, decoder, n)
        slope = left * (-2.0 / x.numel())  # of x^, [n, d]
        by_value = (slope @ decoder.T)[rows, features]
        order = features.argsort(stable=True)
        rows = rows[order]
        features = features[order]
        values = values[order]
        by_value = by_value[order]
        return {
            "encoder": _weighted_sums(features, rows, by_value, x, count),
            "encoder_bias": torch.zeros(count).index_add_(0, features, by_value),
            "decoder": _weighted_sums(features, rows, values, slope, count),
            "decoder_bias": slope.sum(0),
        }, left

    def _add_auxiliary(
        self, x: torch.Tensor, z: torch.Tensor, left: torch.Tensor, gradients: dict[str, torch.Tensor]
    ) -> None:
        """Add the gradients of the auxiliary loss mean |r - r^|^2 / mean |r|^2, where r is the residual and r^ its
        reconstruction by the strongest dead features of each row."""
        dead = self.dead.nonzero().squeeze(1)
        count = min(len(dead), max(1, x.shape[1] // 2))
        some, where = z[:, dead].topk(count, dim=1)
        values = torch.zeros(len(x), len(dead)).scatter_(1, where, some.clamp(min=0))
        decoder = self.weights["decoder"][dead]
        weight = self.options.aux_weight / max(left.pow(2).sum().item(), _TINY)
        slope = (values @ decoder - left) * (2.0 * weight)
        by_value = (slope @ decoder.T) * (values > 0)
        gradients["decoder"].index_add_(0, dead, values.T @ slope)
        gradients["encoder"].index_add_(0, dead, by_value.T @ x)
        gradients["encoder_bias"].index_add_(0, dead, by_value.sum(0))

    def _update(self, gradients: dict[str, torch.Tensor]) -> None:
        """Adam step. Decoder rows stay unit vectors; gradients are projected to the tangent space first."""
        decoder = self.weights["decoder"]
        slope = gradients["decoder"]
        slope -= (slope * decoder).sum(1, keepdim=True) * decoder
        rate, count = self.options.rate_at(self.done), self.done + 1
        for name, tensor in self.weights.items():
            first = self._first[name]
            second = self._second[name]
            gradient = gradients[name]
            first.lerp_(gradient, 1 - _BETAS[0])
            second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
            size = (second / (1 - _BETAS[1] ** count)).sqrt_().add_(_TINY)
            tensor.addcdiv_(first, size, value=-rate / (1 - _BETAS[0] ** count))
        decoder /= decoder.norm(dim=1, keepdim=True)

    def finish(self, rows: Iterable[torch.Tensor], **site: Any) -> Sae:
        """The trained dictionary, with the threshold that keeps k features per row of `rows` on average, and the
        largest activation of each feature there. `site` is passed to `Sae`: hook, layer, view, metadata."""
        levels = []
        largest = torch.zeros(self.options.features)
        count = 0
        for batch in rows:
            x = (checked_rows(batch, len(self.centre)) - self.centre) * self.factor
            z = self._pre_activations(x)
            kept = self._kept(z)
            levels.append(_kth_largest(z, self.options.k * len(z), self._level / 2) * len(z))
            largest = torch.maximum(largest, torch.where(kept, z, 0.0).amax(0))
            count += len(z)
        if not count:
            raise SaeError(
                "there are no rows to find the threshold on. Pass some of the training rows to finish()."
            )
        w = self.weights
        encoder_bias = w["encoder_bias"] / self.factor - w["encoder"] @ self.centre
        arguments: dict[str, Any] = {"x_max": largest / self.factor, **site}
        if self.options.kind == "topk":
            arguments |= {"activation": "topk", "k": self.options.k, "rectified": True}
        else:
            arguments |= {"activation": "jumprelu", "threshold": max(sum(levels) / count, 0.0) / self.factor}
        bias = w["decoder_bias"] / self.factor + self.centre
        return Sae(w["encoder"], encoder_bias, w["decoder"], bias, **arguments)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that determines the following steps, as tensors."""
        tensors = {f"weights.{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"first.{name}": tensor for name, tensor in self._first.items()}
        tensors |= {f"second.{name}": tensor for name, tensor in self._second.items()}
        counts = torch.tensor([self.done, self.rows_seen])
        scale = torch.tensor([self.factor], dtype=torch.float64)
        return {
            **tensors,
            "silent_rows": self.silent_rows,
            "centre": self.centre,
            "factor": scale,
            "counts": counts,
        }

    @classmethod
    def restored(cls, options: TrainOptions, state: Mapping[str, torch.Tensor]) -> Trainer:
        """A trainer that continues from `state`."""
        trainer = object.__new__(cls)
        trainer.options = options
        trainer.done, trainer.rows_seen = (int(count) for count in state["counts"])
        trainer.centre = state["centre"]
        trainer.factor = float(state["factor"])
        trainer.silent_rows = state["silent_rows"].clone()
        trainer._level = 0.0
        for name, kind in (("weights", "weights"), ("_first", "first"), ("_second", "second")):
            parts = ("encoder", "encoder_bias", "decoder", "decoder_bias")
            setattr(trainer, name, {part: state[f"{kind}.{part}"].clone() for part in parts})
        if trainer.weights["encoder"].shape[0] != options.features:
            raise SaeError(
                f"the state is of {trainer.weights['encoder'].shape[0]} features, the options ask for "
                f"{options.features}. Begin anew, or use the options it was begun with."
            )
        return trainer

    def describe(self) -> dict[str, Any]:
        return asdict(self.options)


def checked_rows(rows: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Rows [n, d] as float32; other shapes and numbers that are not finite are refused."""
    if not isinstance(rows, torch.Tensor) or rows.ndim != 2 or not len(rows):
        shape = tuple(rows.shape) if isinstance(rows, torch.Tensor) else quoted(rows)
        raise SaeError(
            f"rows are {shape}, expected a tensor [rows, width]. Choose a view for rows with streams."
        )
    if width is not None and rows.shape[1] != width:
        raise SaeError(
            f"rows have {rows.shape[1]} numbers, the dictionary {width}. Use rows of one site and view."
        )
    rows = rows.float()
    if not rows.isfinite().all():
        raise SaeError("a row holds a number that is not finite. Look at the capture it came from.")
    return rows


def _kth_largest(z: torch.Tensor, count: int, above: float = 0.0) -> float:
    """The `count`-th largest value of z; fastest if it is a little larger than `above`."""
    flat = z.flatten()
    values = flat[flat > above] if above > 0 else flat
    values = values if len(values) >= count else flat
    return values.kthvalue(max(1, len(values) - count + 1)).values.item()


def _weighted_sums(
    into: torch.Tensor, which: torch.Tensor, weights: torch.Tensor, table: torch.Tensor, count: int
) -> torch.Tensor:
    """`out[into[j]] += weights[j] * table[which[j]]` for `count` rows of out; `into` is ascending. A sparse product."""
    starts = torch.zeros(count, dtype=torch.long)
    starts[1:] = torch.bincount(into, minlength=count).cumsum(0)[:-1]
    return torch.nn.functional.embedding_bag(which, table, starts, mode="sum", per_sample_weights=weights)
