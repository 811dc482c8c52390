"""Linear layers and the one rule about rounding their inputs (spec 4).

A layer's `role` is how the release stores it: "fp8" and "fp4" weights meet inputs rounded to FP8 when numerics are
"released"; "bf16" weights compute in the model's dtype; "f32" weights (compressors, gate, head) compute in float32
whatever the model's dtype. A weight is held either as numbers or packed as the file has it (codes and scales, and
bfloat16 for "f32"), in which case it is unpacked exactly when used, or read as it is by kernels that can.

One layer may hold several of the file's matrices, stacked, when they always read the same input. `SharedInput` goes
further: it lets different layers with one input run as one product, by making their weights views of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from birkhoff.kernels import quant
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.select import KernelSet, select

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
    """In which dtype the model computes, how much of the release's rounding it reproduces, and with which kernels."""

    dtype: torch.dtype = torch.float32
    released: bool = False
    kernels: KernelSet = field(default_factory=lambda: select("reference"))

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
    """`y = x W^T`, no bias. `fan_out` is a number of rows, or rows by name for matrices stacked in that order."""

    def __init__(
        self, fan_in: int, fan_out: int | dict[str, int], role: Role, numerics: Numerics, packed: bool = False
    ):
        super().__init__()
        self.role, self.numerics, self.packed = role, numerics, packed and role in ("fp8", "fp4")
        self.parts = {"": fan_out} if isinstance(fan_out, int) else fan_out
        if self.packed:
            for part, rows in self.parts.items():
                codes, scale = _packed_shapes(rows, fan_in, role)
                kind = torch.float8_e4m3fn if role == "fp8" else torch.int8
                self.register_buffer(f"codes_{part}", torch.empty(codes, dtype=kind))
                self.register_buffer(f"scale_{part}", torch.empty(scale, dtype=torch.uint8))
        else:
            dtype = numerics.dtype if role != "f32" else torch.bfloat16 if packed else torch.float32
            self.weight = nn.Parameter(torch.empty(sum(self.parts.values()), fan_in, dtype=dtype))
        self._rows: tuple[int, PackedWeight] | None = None

    @property
    def rounds(self) -> bool:
        return self.numerics.released and self.role in ("fp8", "fp4")

    def dense(self) -> torch.Tensor:
        """The weight as numbers [out, in]."""
        if not self.packed:
            return self.weight.float() if self.role == "f32" else self.weight
        unpack = quant.dequant_fp8 if self.role == "fp8" else quant.dequant_fp4
        parts = [unpack(getattr(self, f"codes_{p}"), getattr(self, f"scale_{p}")) for p in self.parts]
        return torch.cat(parts).to(self.numerics.dtype)

    @property
    def reads_codes(self) -> bool:
        """Whether the product reads the weight as stored: where kernels can, and no gradient is recorded."""
        stored = (self.packed and self.role == "fp8") or self.role == "f32"
        return stored and self.numerics.kernels.reads_codes and not torch.is_grad_enabled()

    def held(self) -> list[tuple[str, int]]:
        """The tensors that hold the weight, by name, each with its rows; scales not counted."""
        if self.packed:
            return [(f"codes_{part}", rows) for part, rows in self.parts.items()]
        return [("weight", sum(self.parts.values()))]

    def rows(self) -> PackedWeight:
        """The weight as kernels read it, made once for as long as it stays where it is."""
        held = [getattr(self, name) for name, _ in self.held()]
        place = held[0].data_ptr()
        if self._rows is None or self._rows[0] != place:
            scales = [getattr(self, f"scale_{part}") for part in self.parts] if self.packed else []
            made = PackedWeight.fp8(list(zip(held, scales))) if self.packed else PackedWeight.plain(held)
            if len(held) > 1:
                become_views([self], made.weight)
                place = made.weight.data_ptr()
            self._rows = place, made
        return self._rows[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounds:
            x = self.numerics.round_input(x)
        if self.reads_codes:
            dtype = torch.float32 if self.role == "f32" else self.numerics.dtype
            return self.numerics.kernels.packed_linear(x, self.rows(), None, dtype)
        weight = self.dense()
        return self.numerics.kernels.linear(x.to(weight.dtype), weight)

    def destinations(self, name: str) -> Iterator[Destination]:
        first = 0
        for part, rows in self.parts.items():
            full = f"{name}.{part}" if part else name
            if self.packed:
                yield Destination(f"{full}.weight", getattr(self, f"codes_{part}"), "codes")
                yield Destination(f"{full}.scale", getattr(self, f"scale_{part}"), "scale")
            else:
                yield Destination(f"{full}.weight", self.weight.detach()[first : first + rows])
                first += rows


def become_views(layers: Sequence[Linear], whole: torch.Tensor) -> None:
    """Once the weights of several layers are stacked in `whole`, let them lie there: in memory once, not twice."""
    first = 0
    for layer in layers:
        for name, rows in layer.held():
            piece = whole[first : first + rows]
            old = getattr(layer, name)
            first += rows
            if layer.packed:
                setattr(layer, name, piece.view(old.dtype))
            elif old.dtype is piece.dtype:
                old.data = piece
        layer._rows = None


def _packed_shapes(fan_out: int, fan_in: int, role: Role) -> tuple[tuple[int, int], tuple[int, int]]:
    if role == "fp8":
        return (fan_out, fan_in), (-(-fan_out // 128), -(-fan_in // 128))
    return (fan_out, fan_in // 2), (fan_out, fan_in // 32)


class SharedInput:
    """Layers that read one input. After `fuse`, those that compute alike are one product over one matrix."""

    def __init__(self, layers: Sequence[Linear]):
        self.layers = list(layers)
        self._fused: list[tuple[list[int], torch.Tensor, list[int]]] | None = None

    def fuse(self) -> None:
        """Move the weights into common matrices; each layer keeps its own as a view."""
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.packed:
                return
            alike.setdefault((layer.weight.dtype, layer.rounds), []).append(i)
        self._fused = []
        for members in alike.values():
            rows = [self.layers[i].weight.shape[0] for i in members]
            whole = torch.cat([self.layers[i].weight.detach() for i in members])
            for i, part in zip(members, whole.split(rows)):
                self.layers[i].weight.data = part
            self._fused.append((members, whole, rows))

    def whole(self) -> torch.Tensor:
        """The one matrix behind all layers, when they all compute alike."""
        assert self._fused is not None and len(self._fused) == 1
        return self._fused[0][1]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        if self._fused is None or torch.is_grad_enabled():
            return [layer(x) for layer in self.layers]
        out: list[torch.Tensor] = [x] * len(self.layers)
        for members, whole, rows in self._fused:
            first = self.layers[members[0]]
            entering = first.numerics.round_input(x) if first.rounds else x
            for i, part in zip(
                members, first.numerics.kernels.linear(entering.to(whole.dtype), whole).split(rows, -1)
            ):
                out[i] = part
        return out


class RMSNorm(nn.Module):
    """Weighted RMSNorm; the weight is kept in float32."""

    def __init__(self, width: int, eps: float, numerics: Numerics):
        super().__init__()
        self.eps = eps
        self.kernels = numerics.kernels
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def destinations(self, name: str) -> Iterator[Destination]:
        yield Destination(f"{name}.weight", self.weight)
