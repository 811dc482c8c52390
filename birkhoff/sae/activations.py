"""The activation functions of dictionaries: from pre-activations z to features.

    relu       max(z, 0)
    jumprelu   z where z > threshold, else 0                      one threshold per feature
    topk       the k largest z of a row, ties to the lowest index   `rectified` also drops what is below zero
    batchtopk  z where z > threshold, else 0                      the one threshold found while training
    gated      magnitude where z > 0, else 0                      max(scale * z + shift, 0)

Each works on `[n, F]` or on any subset of columns, except topk, which needs the whole row (`whole_row`). NaN stays NaN:
an activation never turns a broken row into zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self

import torch

from birkhoff.errors import SaeError, quoted
from birkhoff.option_checks import check_int

FAMILIES = ("relu", "jumprelu", "topk", "batchtopk", "gated")


class Activation(Protocol):
    name: ClassVar[str]
    whole_row: ClassVar[bool]

    def __call__(self, z: torch.Tensor) -> torch.Tensor: ...

    def part(self, features: torch.Tensor | slice) -> Self:
        """The same activation for a subset of the columns."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its per-feature parameters, by name."""
        ...

    def to(self, device: torch.device | str) -> Self: ...


class _PerFeature:
    """Shared by the activations that treat every column independently."""

    whole_row: ClassVar[bool] = False

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}

    def part(self, features: torch.Tensor | slice) -> Self:
        return replace(self, **{name: value[features] for name, value in self.tensors().items()})  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        return replace(self, **{name: value.to(device) for name, value in self.tensors().items()})  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Relu(_PerFeature):
    name: ClassVar[str] = "relu"

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return z.clamp(min=0)


@dataclass(frozen=True, eq=False)
class JumpRelu(_PerFeature):
    threshold: torch.Tensor  # [F]

    name: ClassVar[str] = "jumprelu"

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return torch.where(z <= self.threshold, 0.0, z)  # NaN <= threshold is false, so NaN stays NaN


@dataclass(frozen=True, eq=False)
class BatchTopK(JumpRelu):
    """Its thresholds are all equal unless decoder norms were folded in."""

    name: ClassVar[str] = "batchtopk"


@dataclass(frozen=True, eq=False)
class Gated(_PerFeature):
    """z is the gate's pre-activation, bias included; the magnitude is computed from it with `scale` and `shift`."""

    scale: torch.Tensor  # [F]
    shift: torch.Tensor  # [F]

    name: ClassVar[str] = "gated"

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return torch.where(z <= 0, 0.0, (z * self.scale + self.shift).clamp(min=0))


@dataclass(frozen=True, eq=False)
class TopK:
    k: int
    rectified: bool = False

    name: ClassVar[str] = "topk"
    whole_row: ClassVar[bool] = True

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return self.finish(torch.where(largest(z, self.k), z, 0.0))

    def finish(self, kept: torch.Tensor) -> torch.Tensor:
        """Apply rectification to the k largest values."""
        return kept.clamp(min=0) if self.rectified else kept

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def part(self, features: torch.Tensor | slice) -> Self:
        raise AssertionError("top-k of some columns differs from top-k of the row")

    def to(self, device: torch.device | str) -> Self:
        return self


def largest(z: torch.Tensor, k: int) -> torch.Tensor:
    """Mask of the k largest values of each row `[.., F]`, the first of equal ones; exactly k also with NaN."""
    if k >= z.shape[-1]:
        return torch.ones_like(z, dtype=torch.bool)
    z = torch.where(z.isnan(), float("-inf"), z)
    kth = z.topk(k, dim=-1).values[..., -1:]
    above, equal = z > kth, z == kth
    room = k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def make(
    name: Any, features: int, threshold: Any, k: Any, scale: Any, shift: Any, rectified: Any
) -> Activation:
    """The activation of a dictionary with `features` features; parameters are checked."""
    if name not in FAMILIES:
        raise SaeError(f"activation is {quoted(name)}, expected one of {', '.join(FAMILIES)}.")
    needs = {
        "jumprelu": ("threshold",),
        "batchtopk": ("threshold",),
        "topk": ("k",),
        "gated": ("scale", "shift"),
    }
    parameters = {"threshold": threshold, "k": k, "scale": scale, "shift": shift}
    for parameter, value in parameters.items():
        needed = parameter in needs.get(name, ())
        if needed and value is None:
            raise SaeError(f"a {name} dictionary needs {parameter}=, and none was given.")
        if not needed and value is not None:
            raise SaeError(
                f"a {name} dictionary has no {parameter}. Leave it out, or name the activation that has."
            )
    if type(rectified) is not bool or (rectified and name != "topk"):
        raise SaeError(f"rectified is {quoted(rectified)}, expected True or False, and True for topk alone.")
    if name == "topk":
        return TopK(check_int("k", k, 1, features, SaeError), rectified)
    if name == "gated":
        return Gated(per_feature(scale, features, "scale"), per_feature(shift, features, "shift"))
    if name == "relu":
        return Relu()
    thresholds = per_feature(threshold, features, "threshold")
    return JumpRelu(thresholds) if name == "jumprelu" else BatchTopK(thresholds)


def per_feature(value: Any, features: int, name: str) -> torch.Tensor:
    """One number per feature, or one for all, as float32 `[F]`."""
    try:
        tensor = torch.as_tensor(value).detach().float().cpu().clone()
    except (TypeError, ValueError, RuntimeError):
        raise SaeError(f"{name} is {quoted(value)}, expected one number per feature.") from None
    if tensor.ndim == 0:
        tensor = tensor.expand(features).clone()
    if tuple(tensor.shape) != (features,):
        raise SaeError(
            f"{name} has shape {tuple(tensor.shape)}, expected ({features},): one number per feature."
        )
    if not tensor.isfinite().all():
        bad = int((~tensor.isfinite()).nonzero()[0, 0])
        raise SaeError(f"{name}[{bad}] is {float(tensor[bad])}, expected finite numbers.")
    return tensor
