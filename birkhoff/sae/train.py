"""Training of dictionaries on rows of activations, on a CPU or a GPU; kinds of dictionaries are in `architectures.py`.

Rows are centred and scaled by constants computed at the start, which are folded in at the end: the resulting `Sae`
has unit decoder rows and features in the units of the rows. A feature that has not fired for `dead_after` rows is also
trained on the residual of the others.

Only a few features of a row are nonzero, so gradients are computed explicitly for those instead of by autograd: the
only dense product of a step is the encoder's. Decoding gathers the decoder rows of a row's features; a matrix is
updated by its Adam step while its gradient, a weighted sum of a few rows, is being computed (`kernels/sparse`). Weights
and moments are float32; with `products="bfloat16"` products read rounded copies. Training is deterministic: the same
rows and seed give the same dictionary on the same device, also across `state`/`restored`.

With `targets` the dictionary reconstructs other rows than it reads (a transcoder). A row may be made of several
`parts` (sites side by side), each of which is scaled by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.nn.functional import linear

from birkhoff.errors import OptionError, SaeError, quoted
from birkhoff.kernels.sparse import AdamStep, RowGradient, RowParameters, adam, kernels_for
from birkhoff.option_checks import check_float, check_int
from birkhoff.sae.architectures import ARCHITECTURES, BatchLoss, Code, largest_pairs
from birkhoff.sae.dictionary import Sae

KINDS = tuple(ARCHITECTURES)
PRODUCTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATRICES = ("encoder", "decoder")
START_ROWS = 1024  # rows of the sample that determine the first thresholds
AUX_FEATURES = 512  # dead features that reconstruct the residual of a row, at most
_TINY = 1e-8


@dataclass(frozen=True)
class TrainOptions:
    """Training options. `steps` is the number of batches; the learning rate falls to zero over the last of them."""

    features: int
    k: int = 32  # features per row; on average for all kinds but topk
    kind: str = "batchtopk"
    steps: int = 1000
    rate: float | None = None  # peak learning rate; None: `default_rate`
    warmup: float = 0.05  # share of the steps over which the rate rises
    decay: float = 0.3  # share of the steps over which it falls
    aux_weight: float = 1 / 32
    dead_after: int = 100_000  # rows without firing
    seed: int = 0
    products: str = "float32"  # or bfloat16; weights and sums are float32 in any case
    accumulate: int = 1  # parts of a batch that are computed one after the other, to save memory
    sparsity: float | None = None  # weight of the penalty of jumprelu and gated; None: 1
    prefixes: tuple[int, ...] | None = None  # of matryoshka; None: F/16, F/8, F/4, F/2, F

    def __post_init__(self) -> None:
        for name in ("features", "k", "steps", "dead_after", "accumulate"):
            check_int(name, getattr(self, name))
        if self.kind not in KINDS:
            raise OptionError(f"kind is {quoted(self.kind)}, expected one of {', '.join(KINDS)}.")
        if self.k > self.features:
            raise OptionError(f"k is {self.k}, but there are only {self.features} features. Lower k.")
        for name, most in (("warmup", 1.0), ("decay", 1.0), ("aux_weight", math.inf)):
            check_float(name, getattr(self, name), 0.0, most)
        if self.rate is not None and not 0 < check_float("rate", self.rate, 0.0, math.inf) < math.inf:
            raise OptionError(f"rate is {self.rate}, expected a positive number.")
        check_int("seed", self.seed, None)
        if self.products not in PRODUCTS:
            raise OptionError(f"products is {quoted(self.products)}, expected {' or '.join(PRODUCTS)}.")
        if self.sparsity is not None:
            check_float("sparsity", self.sparsity, 0.0, math.inf)
            if not ARCHITECTURES[self.kind].has_sparsity:
                raise OptionError(
                    f"sparsity is for kinds with a penalty (jumprelu, gated); {self.kind} keeps k features. Leave it "
                    "out."
                )
        self._check_prefixes()

    def _check_prefixes(self) -> None:
        if self.prefixes is None:
            return
        prefixes = tuple(check_int("prefixes", each, 1, self.features) for each in self.prefixes)
        object.__setattr__(self, "prefixes", prefixes)
        if self.kind != "matryoshka":
            raise OptionError(f"prefixes are for kind matryoshka, not {self.kind}. Leave them out.")
        if prefixes != tuple(sorted(set(prefixes))) or prefixes[-1:] != (self.features,):
            raise OptionError(
                f"prefixes are {list(prefixes)}, expected ascending numbers of features that end with {self.features}."
            )

    @property
    def sparsity_weight(self) -> float:
        return 1.0 if self.sparsity is None else self.sparsity

    def rate_at(self, step: int, width: int) -> float:
        """Learning rate of a step for rows of `width` numbers."""
        peak = default_rate(self.features, width) if self.rate is None else self.rate
        rising = min(1.0, (step + 1) / max(1.0, self.warmup * self.steps))
        falling = min(1.0, (self.steps - step) / max(1.0, self.decay * self.steps))
        return peak * rising * falling


def default_rate(features: int, width: int) -> float:
    """Peak learning rate for a dictionary of this size. Adam moves every number of a unit row by the rate, so a row
    turns by the rate times the square root of its width; and more features share a row. 2e-3 up to 4,096 features of
    1,024 numbers, 1.25e-4 for 65,536 of 16,384."""
    return 2e-3 * math.sqrt(1024 / max(width, 1024) * 4096 / max(features, 4096))


@dataclass(frozen=True)
class StepReport:
    """Statistics of one batch: explained variance, features per row, dead features after it."""

    step: int
    explained: float
    l0: float
    dead: int


@dataclass(frozen=True, eq=False)
class RowScale:
    """Rows are trained on as `(row - centre) * scale`; `scale` has a number per column, equal within a part."""

    centre: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, sample: torch.Tensor, parts: Sequence[int] | None) -> RowScale:
        """Scaled parts of the sample have squares that sum to their width, on average."""
        width = sample.shape[1]
        parts = [width] if parts is None else list(parts)
        if sum(parts) != width:
            raise SaeError(
                f"parts are {parts}, together {sum(parts)} numbers, but rows have {width}. Give the widths."
            )
        centre = sample.mean(0)
        scales = []
        for part in (sample - centre).split(parts, dim=1):
            spread = part.pow(2).sum(1).mean().item()
            if spread <= 0:
                raise SaeError(
                    "all rows of the sample are the same, so there is nothing to learn. Check the capture."
                )
            scales.append(sample.new_full((part.shape[1],), math.sqrt(part.shape[1] / spread)))
        return cls(centre, torch.cat(scales))

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows - self.centre) * self.scale


@dataclass(eq=False)
class _BatchSums:
    """What the parts of a batch add up to before the update."""

    codes: list[Code] = field(default_factory=list)
    slope_index: list[torch.Tensor] = field(default_factory=list)  # for each pair, its row of the slopes
    slopes: list[torch.Tensor] = field(default_factory=list)
    by_value: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    bias: torch.Tensor | float = 0.0
    residual: torch.Tensor | float = 0.0  # sum of squares
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # of dead features


class Trainer:
    """Call `step(rows)` for every batch, then `finish(rows)`. Matrices are `[F, d]`, one row per feature."""

    def __init__(
        self,
        options: TrainOptions,
        sample: torch.Tensor,
        targets: torch.Tensor | None = None,
        parts: Sequence[int] | None = None,
        target_parts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ):
        """`sample` [n, d], a few thousand rows, determines centre and scale; with `targets` [n, e] the dictionary
        reconstructs those. `parts` are the widths of the sites that a row consists of, by default one."""
        self._prepare(options, device)
        sample = checked_rows(sample.to(self.device))
        self.input = RowScale.of(sample, parts)
        if targets is None:
            self.output = self.input
        else:
            self.output = RowScale.of(checked_rows(targets.to(self.device), count=len(sample)), target_parts)
        generator = torch.Generator(self.device).manual_seed(options.seed)

        def unit_rows(width: int) -> torch.Tensor:
            rows = torch.randn(options.features, width, generator=generator, device=self.device)
            return rows.div_(rows.norm(dim=1, keepdim=True))

        decoder = unit_rows(len(self.output.centre))
        self.weights = {
            # Starting from the decoder's transpose keeps most features alive.
            "encoder": decoder.clone() if targets is None else unit_rows(sample.shape[1]),
            "encoder_bias": torch.zeros(options.features, device=self.device),
            "decoder": decoder,
            "decoder_bias": torch.zeros(len(self.output.centre), device=self.device),
        }
        self._round()
        z = self._pre_activations(self.input(sample[:START_ROWS]))
        self.weights |= self.architecture.start(self.weights, z, self.scalars)
        self._first = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
        self._second = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}

    def _prepare(self, options: TrainOptions, device: torch.device | str) -> None:
        self.options = options
        self.device = torch.device(device)
        self.architecture = ARCHITECTURES[options.kind](options)
        self.scalars: dict[str, float] = {}
        self.done = 0
        self.rows_seen = 0
        self.silent_rows = torch.zeros(options.features, dtype=torch.long, device=self.device)
        self._kernels = kernels_for(self.device)
        self._dtype = PRODUCTS[options.products]
        self._group_of = _prefix_groups(self.architecture.prefixes, options.features, self.device)

    def _round(self) -> None:
        """Make the copies that products read."""
        rounded = self._dtype != torch.float32
        self._rounded = {name: self.weights[name].to(self._dtype) if rounded else None for name in MATRICES}

    def _matrix(self, name: str) -> RowParameters:
        return RowParameters(
            self.weights[name],
            self._first[name],
            self._second[name],
            self._rounded[name],
            unit=name == "decoder",
        )

    def _table(self, name: str) -> torch.Tensor:
        rounded = self._rounded[name]
        return self.weights[name] if rounded is None else rounded

    @property
    def dead(self) -> torch.Tensor:
        return self.silent_rows >= self.options.dead_after

    def step(self, rows: torch.Tensor, targets: torch.Tensor | None = None) -> StepReport:
        """Train on one batch [n, d]; `targets` [n, e] if the trainer was made with some."""
        x = self.input(self._checked(rows, self.input))
        y = x if targets is None else self.output(self._checked(targets, self.output, len(x)))
        if (targets is None) != (self.input is self.output):
            raise SaeError("rows and targets come together: give them to the trainer and to every step.")
        batch = _BatchSums()
        dead = self.dead.nonzero().squeeze(1) if self.options.aux_weight else None
        first = 0
        for part, target in zip(x.chunk(self.options.accumulate), y.chunk(self.options.accumulate)):
            self._add_part(batch, part, target, first, len(x), dead)
            first += len(part)
        fired, kept = self._update(batch, x)
        self.silent_rows = torch.where(fired, 0, self.silent_rows + len(x))
        self.done += 1
        self.rows_seen += len(x)
        total = (y - y.mean(0)).pow(2).sum()
        numbers = torch.stack([total, torch.as_tensor(batch.residual), kept / len(x)]).tolist()
        explained = 1 - numbers[1] / numbers[0] if numbers[0] > 0 else 0.0
        self.architecture.adjust(numbers[2], self.scalars)
        return StepReport(self.done, explained, numbers[2], int(self.dead.sum()))

    def _checked(self, rows: torch.Tensor, scale: RowScale, count: int | None = None) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            rows = rows.to(self.device, non_blocking=True)
        return checked_rows(rows, len(scale.centre), count)

    def _pre_activations(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.to(self._dtype), self._table("encoder"), self.weights["encoder_bias"].to(self._dtype))

    def _add_part(
        self,
        batch: _BatchSums,
        x: torch.Tensor,
        y: torch.Tensor,
        first: int,
        total_rows: int,
        dead: torch.Tensor | None,
    ) -> None:
        """Add the gradients of the mean over `total_rows` rows of |y - y^|^2, and of the kind's other losses, for some
        of them, the first of which is row `first` of the batch."""
        z = self._pre_activations(x)
        code = self.architecture.choose(z, self.weights, self.scalars)
        table = self._table("decoder")
        residuals, at = self._residuals(y, code, code.values)
        slopes = self._slopes(residuals, total_rows)
        by_value = self._kernels.pair_dots(slopes, at, table, code.features)

        def value_gradients(values: torch.Tensor) -> torch.Tensor:
            others, _ = self._residuals(y, code, values)
            slopes = self._slopes(others, total_rows)
            return self._kernels.pair_dots(slopes, at, table, code.features)

        loss = BatchLoss(
            code, by_value, self.weights, self.scalars, len(x), total_rows, y.shape[1], value_gradients
        )
        gradients = self.architecture.gradients(loss)
        batch.codes.append(Code(code.rows + first, code.features, code.z, code.values))
        batch.slope_index.append(at + sum(map(len, batch.slopes)))
        batch.slopes.append(slopes)
        batch.by_value.append(by_value)
        batch.gradients.append(gradients)
        batch.bias = batch.bias + slopes[: len(y)].sum(0, dtype=torch.float32)
        left = residuals[-1]
        batch.residual = batch.residual + left.pow(2).sum()
        if dead is not None and len(dead):
            self._add_auxiliary(batch, x, z, left, dead, len(x) / total_rows)

    def _residuals(
        self, y: torch.Tensor, code: Code, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """y minus its reconstruction by each prefix of the features, [prefixes, n, d]; and for each pair the row of the
        slopes, stacked in the same order, that its feature belongs to."""
        n, groups = len(y), len(self.architecture.prefixes)
        at = code.rows if self._group_of is None else self._group_of[code.features] * n + code.rows
        order = None if self._group_of is None else at.argsort(stable=True)
        index, sorted_at = (code.features, at) if order is None else (code.features[order], at[order])
        weights = values if order is None else values[order]
        sums = self._kernels.weighted_rows(
            _starts(sorted_at, groups * n), index, weights, self._table("decoder")
        )
        by_prefix = sums.view(groups, n, -1)
        if groups > 1:
            by_prefix = by_prefix.cumsum(0)
        return (y - self.weights["decoder_bias"]) - by_prefix, at

    def _slopes(self, residuals: torch.Tensor, rows: int) -> torch.Tensor:
        """Gradients of the loss by what each group of features adds to the reconstruction, [prefixes * n, d]. A group
        is part of its own prefix and of the longer ones."""
        groups = len(residuals)
        if groups > 1:
            residuals = residuals.flip(0).cumsum(0).flip(0)
        return (residuals * (-2.0 / (rows * groups))).flatten(0, 1).to(self._dtype)

    def _add_auxiliary(
        self,
        batch: _BatchSums,
        x: torch.Tensor,
        z: torch.Tensor,
        left: torch.Tensor,
        dead: torch.Tensor,
        share: float,
    ) -> None:
        """Add the gradients of the auxiliary loss mean |r - r^|^2 / mean |r|^2, where r is the residual and r^ its
        reconstruction by the strongest dead features of each row."""
        width = left.shape[1]
        count = min(len(dead), max(1, width // 2), AUX_FEATURES)
        some, where = self.architecture.dead_values(z, self.weights, dead).topk(count, dim=1)
        values = z.new_zeros(len(x), len(dead)).scatter_(1, where, some.clamp(min=0))
        decoder = self._table("decoder")[dead]
        weight = self.options.aux_weight * width * share / left.pow(2).sum().clamp(min=_TINY)
        slope = ((values @ decoder).float() - left) * (2.0 * weight)
        slope = slope.to(self._dtype)
        by_value = (slope @ decoder.T) * (values > 0)
        added = {
            "decoder": (values.T @ slope).float(),
            "encoder": (by_value.T @ x.to(self._dtype)).float(),
            "features": dead,
        }
        if self.architecture.dead_bias:
            added["encoder_bias"] = by_value.sum(0, dtype=torch.float32)
        for name, tensor in added.items():
            known = batch.extra.get(name)
            batch.extra[name] = tensor if known is None or name == "features" else known + tensor

    def _update(self, batch: _BatchSums, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adam step. Decoder rows stay unit vectors; gradients are projected to the tangent space first. Returns which
        features fired [F], and the number of pairs."""
        features = torch.cat([code.features for code in batch.codes])
        order = features.argsort(stable=True)
        starts = _starts(features[order], self.options.features)

        def by_feature(parts: Iterable[torch.Tensor]) -> torch.Tensor:
            return torch.cat(list(parts))[order]

        def sums(weights: torch.Tensor) -> torch.Tensor:
            return self._kernels.segment_sums(starts, weights)

        rows = by_feature(code.rows for code in batch.codes)
        values = by_feature(code.values for code in batch.codes)
        by_value = by_feature(batch.by_value)
        extra = batch.extra
        along = sums(values * by_value)
        dead = extra.get("features")
        if dead is not None:
            along[dead] += (extra["decoder"] * self.weights["decoder"][dead]).sum(1)
        width = max(len(self.input.centre), len(self.output.centre))
        step = AdamStep(self.options.rate_at(self.done, width), self.done + 1)
        gradients = {name: by_feature(part[name] for part in batch.gradients) for name in batch.gradients[0]}
        plain = {"decoder_bias": torch.as_tensor(batch.bias)}
        for name in ("encoder_bias", *self.architecture.parameters):
            plain[name] = sums(gradients[name])
            if dead is not None and name in extra:
                plain[name][dead] += extra[name]
        for name, gradient in plain.items():
            adam(self.weights[name], self._first[name], self._second[name], gradient, step)
        slopes = torch.cat(batch.slopes) if len(batch.slopes) > 1 else batch.slopes[0]
        sparse = {
            "encoder": (rows, gradients["encoder"], x.to(self._dtype), None),
            "decoder": (by_feature(batch.slope_index), values, slopes, along),
        }
        for name, (index, weights, table, projected) in sparse.items():
            row_gradient = RowGradient(starts, index, weights, table, projected, dead, extra.get(name))
            self._kernels.adam_rows(self._matrix(name), row_gradient, step)
        fired = sums((values > 0).float()) > 0
        return fired, (values > 0).sum()

    def finish(self, rows: Iterable[torch.Tensor], **site: Any) -> Sae:
        """The trained dictionary, with the threshold that keeps k features per row of `rows` on average, and the
        largest activation of each feature there. `site` is passed to `Sae`: hook, layer, view, metadata."""
        levels = []
        largest = torch.zeros(self.options.features, device=self.device)
        count = 0
        scalars = dict(self.scalars)
        for batch in rows:
            z = self._pre_activations(self.input(self._checked(batch, self.input)))
            code = self.architecture.choose(z, self.weights, scalars)
            level = largest_pairs(z, self.options.k * len(z), scalars.get("level", 0.0))[1]
            levels.append(level * len(z))
            largest.scatter_reduce_(0, code.features, code.values, "amax")
            count += len(z)
        if not count:
            raise SaeError(
                "there are no rows to find the threshold on. Pass some of the training rows to finish()."
            )
        w = self.weights
        unit = self.output.scale.mean().item()  # of features; rows have the same if there is one part
        encoder = w["encoder"] * (self.input.scale / unit)
        encoder_bias = w["encoder_bias"] / unit - encoder @ self.input.centre
        arguments: dict[str, Any] = {"x_max": largest / unit, **site}
        arguments |= self.architecture.export(w, sum(levels) / count, unit)
        bias = w["decoder_bias"] / self.output.scale + self.output.centre
        return Sae(encoder, encoder_bias, w["decoder"] * (unit / self.output.scale), bias, **arguments)

    def state(self) -> dict[str, torch.Tensor]:
        """Everything that determines the following steps, as tensors."""
        tensors = {f"weights.{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"first.{name}": tensor for name, tensor in self._first.items()}
        tensors |= {f"second.{name}": tensor for name, tensor in self._second.items()}
        tensors |= {
            f"scalar.{name}": torch.tensor(value, dtype=torch.float64) for name, value in self.scalars.items()
        }
        tensors |= {"input.centre": self.input.centre, "input.scale": self.input.scale}
        if self.output is not self.input:
            tensors |= {"output.centre": self.output.centre, "output.scale": self.output.scale}
        counts = torch.tensor([self.done, self.rows_seen])
        return {**tensors, "silent_rows": self.silent_rows, "counts": counts}

    @classmethod
    def restored(
        cls, options: TrainOptions, state: Mapping[str, torch.Tensor], device: torch.device | str = "cpu"
    ) -> Trainer:
        """A trainer that continues from `state`."""
        trainer = object.__new__(cls)
        trainer._prepare(options, device)
        names = ("encoder", "encoder_bias", "decoder", "decoder_bias", *trainer.architecture.parameters)
        features = state["weights.encoder"].shape[0]
        if features != options.features:
            raise SaeError(
                f"the state is of {features} features, the options ask for {options.features}. Begin anew, or use the "
                "options it was begun with."
            )
        missing = [name for name in names if f"weights.{name}" not in state]
        if missing:
            raise SaeError(
                f"the state has no {', '.join(missing)}: it is of another kind than {options.kind}. Begin anew, or use "
                "the options it was begun with."
            )

        def tensor(name: str) -> torch.Tensor:
            return state[name].to(trainer.device, copy=True)

        trainer.done, trainer.rows_seen = (int(count) for count in state["counts"])
        trainer.scalars = {
            name.removeprefix("scalar."): float(value)
            for name, value in state.items()
            if name.startswith("scalar.")
        }
        trainer.input = RowScale(tensor("input.centre"), tensor("input.scale"))
        trainer.output = trainer.input
        if "output.centre" in state:
            trainer.output = RowScale(tensor("output.centre"), tensor("output.scale"))
        trainer.silent_rows = tensor("silent_rows")
        trainer.weights = {name: tensor(f"weights.{name}") for name in names}
        trainer._first = {name: tensor(f"first.{name}") for name in names}
        trainer._second = {name: tensor(f"second.{name}") for name in names}
        trainer._round()
        return trainer

    def describe(self) -> dict[str, Any]:
        return asdict(self.options)


def training_bytes(options: TrainOptions, width: int, batch_rows: int) -> int:
    """Memory of a trainer on rows of `width`: weights, moments and copies; pre-activations; and some tensors of the
    size of a batch."""
    products = PRODUCTS[options.products].itemsize
    matrices = 2 * options.features * width * (12 + (products if products < 4 else 0))
    part = -(-batch_rows // options.accumulate)
    pre_activations = part * options.features * (2 * products + 1)
    return matrices + pre_activations + 12 * batch_rows * width * 4


def checked_rows(rows: torch.Tensor, width: int | None = None, count: int | None = None) -> torch.Tensor:
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
    if count is not None and len(rows) != count:
        raise SaeError(f"there are {len(rows)} targets for {count} rows, expected one each.")
    rows = rows.float()
    if not rows.isfinite().all():
        raise SaeError("a row holds a number that is not finite. Look at the capture it came from.")
    return rows


def _starts(groups: torch.Tensor, count: int) -> torch.Tensor:
    """Where each of `count` groups starts in an ascending list of groups, and the end: [count + 1]."""
    return torch.searchsorted(groups, torch.arange(count + 1, device=groups.device))


def _prefix_groups(prefixes: Sequence[int], features: int, device: torch.device) -> torch.Tensor | None:
    """For each feature, the first prefix that it is part of; None if there is one prefix."""
    if len(prefixes) == 1:
        return None
    ends = torch.tensor(prefixes, device=device)
    return torch.searchsorted(ends, torch.arange(features, device=device), right=True)
