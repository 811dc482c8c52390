"""Linear layers and the one rule about rounding their inputs (spec 4).

A layer's `role` is how the release stores it: "fp8" and "fp4" weights meet inputs rounded to FP8 when numerics are
"released"; "bf16" weights compute in the model's dtype; "f32" weights (compressors, gate, head) compute in float32
whatever the model's dtype. A weight is held either as numbers or packed as the file has it (codes and scales), in
which case it is unpacked exactly when used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from birkhoff.kernels import quant
from birkhoff.kernels.norm import rms_norm

Role = Literal["fp8", "fp4", "bf16", "f32"]
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class Destination:
    """Where one tensor of a checkpoint goes. `value` is dequantised, `codes` and `scale` are kept as stored."""

    name: str
    tensor: torch.Tensor
    kind: Literal["value", "codes", "scale", "ids"] = "value"


@dataclass(frozen=True)
class Numerics:
    """How much of the release's rounding is reproduced, and in which dtype the model computes."""

    dtype: torch.dtype = torch.float32
    released: bool = False

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """What enters an FP8 or FP4 linear layer."""
        return quant.fp8_round(x, ACTIVATION_GROUP) if self.released else x

    def round_key(self, key: torch.Tensor, rope_dim: int) -> torch.Tensor:
        """What enters the key cache: FP8 in groups of 64, the rotary channels as they are."""
        if not self.released or key.shape[-1] == rope_dim:
            return key
        return torch.cat((quant.fp8_round(key[..., :-rope_dim], 64), key[..., -rope_dim:]), dim=-1)

    def round_index(self, x: torch.Tensor) -> torch.Tensor:
        """Indexer queries and keys: Hadamard, then FP4 in groups of 32."""
        return quant.fp4_round(quant.hadamard(x), 32) if self.released else x


class Linear(nn.Module):
    """`y = x W^T`, no bias."""

    def __init__(self, fan_in: int, fan_out: int, role: Role, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.role, self.numerics, self.packed = role, numerics, packed and role in ("fp8", "fp4")
        if self.packed:
            codes, scale = _packed_shapes(fan_out, fan_in, role)
            kind = torch.float8_e4m3fn if role == "fp8" else torch.int8
            self.register_buffer("codes", torch.empty(codes, dtype=kind))
            self.register_buffer("scale", torch.empty(scale, dtype=torch.uint8))
        else:
            dtype = torch.float32 if role == "f32" else numerics.dtype
            self.weight = nn.Parameter(torch.empty(fan_out, fan_in, dtype=dtype))

    def dense(self) -> torch.Tensor:
        """The weight as numbers [out, in]."""
        if not self.packed:
            return self.weight
        unpack = quant.dequant_fp8 if self.role == "fp8" else quant.dequant_fp4
        return unpack(self.codes, self.scale).to(self.numerics.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.role in ("fp8", "fp4"):
            x = self.numerics.round_input(x)
        weight = self.dense()
        return F.linear(x.to(weight.dtype), weight)

    def destinations(self, name: str) -> Iterator[Destination]:
        if self.packed:
            yield Destination(f"{name}.weight", self.codes, "codes")
            yield Destination(f"{name}.scale", self.scale, "scale")
        else:
            yield Destination(f"{name}.weight", self.weight)


def _packed_shapes(fan_out: int, fan_in: int, role: Role) -> tuple[tuple[int, int], tuple[int, int]]:
    if role == "fp8":
        return (fan_out, fan_in), (-(-fan_out // 128), -(-fan_in // 128))
    return (fan_out, fan_in // 2), (fan_out, fan_in // 32)


class RMSNorm(nn.Module):
    """Weighted RMSNorm; the weight is kept in float32."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def destinations(self, name: str) -> Iterator[Destination]:
        yield Destination(f"{name}.weight", self.weight)
