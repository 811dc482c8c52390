"""Linear layers, stacked weights, and the rounding of activations (spec 4).

The `role` of a layer is how the release stores its weight. "fp8" weights take inputs that are rounded to FP8 when
numerics are "released"; "bf16" weights compute in the dtype of the model; "f32" weights (compressors, router, head)
compute in float32 whatever that dtype is. A weight is kept as numbers, or packed as in the checkpoint (codes and scales
for "fp8", bfloat16 for "f32"). A packed weight is dequantised on every use, unless the kernels read it as stored.

A `Linear` may hold several matrices of the checkpoint that read the same input, stacked. `stack_linears` stacks the
weights of several layers, which become views of the result, so that prompts (`SharedInput`) and decode steps can run
them as one product without a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from birkhoff.kernels import quant
from birkhoff.kernels.linear.packed import BLOCK, PackedWeight
from birkhoff.kernels.select import KernelSet, select

Role = Literal["fp8", "bf16", "f32"]
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class Destination:
    """Memory for one tensor of a checkpoint. A `value` is dequantised; `codes` and `scale` are kept as stored."""

    name: str
    tensor: torch.Tensor
    kind: Literal["value", "codes", "scale", "ids"] = "value"


@dataclass(frozen=True)
class Numerics:
    """Compute dtype, whether the release's rounding of activations is reproduced, and the kernels."""

    dtype: torch.dtype = torch.float32
    released: bool = False
    kernels: KernelSet = field(default_factory=lambda: select("reference"))

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """Round the input of an FP8 or FP4 linear layer."""
        return quant.fp8_round(x, ACTIVATION_GROUP) if self.released else x

    def round_key(self, key: torch.Tensor, rope_dim: int) -> torch.Tensor:
        """Round what enters the key cache to FP8 in groups of 64; the rotary channels are kept as they are."""
        if not self.released or key.shape[-1] == rope_dim:
            return key
        return torch.cat((quant.fp8_round(key[..., :-rope_dim], 64), key[..., -rope_dim:]), dim=-1)

    def round_index(self, x: torch.Tensor) -> torch.Tensor:
        """Round indexer queries and keys: a Hadamard transform, then FP4 in groups of 32."""
        return quant.fp4_round(quant.hadamard(x), 32) if self.released else x


class Linear(nn.Module):
    """`y = x W^T`, no bias.

    `fan_out` is the number of rows, or the rows of each stacked matrix by its name in the checkpoint. A packed FP8
    weight is `codes` [out, in] and `scale`, which has one row per 128 rows of each stacked matrix."""

    def __init__(
        self, fan_in: int, fan_out: int | dict[str, int], role: Role, numerics: Numerics, packed: bool = False
    ):
        super().__init__()
        self.role, self.numerics, self.packed = role, numerics, packed and role == "fp8"
        self.parts = {"": fan_out} if isinstance(fan_out, int) else fan_out
        rows = sum(self.parts.values())
        self.codes: torch.Tensor
        self.scale: torch.Tensor
        if self.packed:
            scale_rows = sum(_blocks(height) for height in self.parts.values())
            self.register_buffer("codes", torch.empty(rows, fan_in, dtype=torch.float8_e4m3fn))
            self.register_buffer("scale", torch.empty(scale_rows, _blocks(fan_in), dtype=torch.uint8))
        else:
            dtype = numerics.dtype if role != "f32" else torch.bfloat16 if packed else torch.float32
            self.weight = nn.Parameter(torch.empty(rows, fan_in, dtype=dtype))
        self._packed_weight: tuple[int, PackedWeight] | None = None  # with the address it was made for

    @property
    def stored(self) -> torch.Tensor:
        """The tensor that holds the weight: codes, or numbers."""
        return self.codes if self.packed else self.weight

    @property
    def rounds_input(self) -> bool:
        return self.numerics.released and self.role == "fp8"

    @property
    def reads_codes(self) -> bool:
        """Whether the product reads the weight as stored: if kernels can, and no gradient is recorded."""
        return (
            (self.packed or self.role == "f32")
            and self.numerics.kernels.reads_codes
            and not torch.is_grad_enabled()
        )

    def dense(self) -> torch.Tensor:
        """The weight as numbers [out, in]."""
        if not self.packed:
            return self.weight.float() if self.role == "f32" else self.weight
        return torch.cat([quant.dequant_fp8(*part) for part in self._coded_parts()]).to(self.numerics.dtype)

    def packed_weight(self) -> PackedWeight:
        """The weight as kernels read it, cached until the weight moves."""
        address = self.stored.data_ptr()
        if self._packed_weight is None or self._packed_weight[0] != address:
            if self.packed:
                scales = [PackedWeight.fp8([part]).scale for part in self._coded_parts()]
                packed = PackedWeight(self.codes.view(torch.uint8), torch.cat(scales, dim=1))  # type: ignore[arg-type]
            else:
                packed = PackedWeight.plain([self.weight])
            self._packed_weight = address, packed
        return self._packed_weight[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels = self.numerics.kernels
        if self.rounds_input:
            x = self.numerics.round_input(x)
        y: torch.Tensor
        if self.reads_codes:
            dtype = torch.float32 if self.role == "f32" else self.numerics.dtype
            y = kernels.packed_linear(x, self.packed_weight(), None, dtype)
        else:
            weight = self.dense()
            y = kernels.linear(x.to(weight.dtype), weight)
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        prefixes = [f"{name}.{part}" if part else name for part in self.parts]
        if self.packed:
            for prefix, (codes, scale) in zip(prefixes, self._coded_parts()):
                yield Destination(f"{prefix}.weight", codes, "codes")
                yield Destination(f"{prefix}.scale", scale, "scale")
        else:
            for prefix, weight in zip(prefixes, self.weight.detach().split(list(self.parts.values()))):
                yield Destination(f"{prefix}.weight", weight)

    def _coded_parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Codes and scales of each stacked matrix, as views."""
        rows = list(self.parts.values())
        return list(zip(self.codes.split(rows), self.scale.split([_blocks(height) for height in rows])))


def _blocks(size: int) -> int:
    return -(-size // BLOCK)


def stack_linears(layers: Sequence[Linear], narrow: bool = True) -> PackedWeight:
    """Stack the weights of layers that read one input; each layer keeps its rows as a view of the result.

    The layers must all be packed or all hold numbers. Numbers become bfloat16 when that loses nothing, unless `narrow`
    is False; a layer whose own dtype differs from that of the result keeps its weight."""
    if len(layers) == 1 and narrow:
        return layers[0].packed_weight()
    if layers[0].packed:
        parts = [layer.packed_weight() for layer in layers]
        scale = torch.cat([part.scale for part in parts], dim=1)  # type: ignore[misc]
        stacked = PackedWeight(torch.cat([part.weight for part in parts]), scale)
    elif narrow:
        stacked = PackedWeight.plain([layer.weight for layer in layers])
    else:
        stacked = PackedWeight(torch.cat([layer.weight.detach() for layer in layers]))
    heights = [len(layer.stored) for layer in layers]
    for layer, rows in zip(layers, stacked.weight.split(heights)):
        if layer.packed:
            layer.codes = rows.view(layer.codes.dtype)
        elif layer.weight.dtype is rows.dtype:
            layer.weight.data = rows
        layer._packed_weight = None
    return stacked


class SharedInput:
    """Layers that read one input. After `fuse`, layers of equal dtype and rounding run as one product."""

    def __init__(self, layers: Sequence[Linear]):
        self.layers = list(layers)
        self._fused: list[tuple[list[int], torch.Tensor]] | None = None  # indices of layers, stacked weight

    def fuse(self) -> None:
        """Stack the weights of layers that compute alike; packed layers stay separate."""
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.packed:
                return
            alike.setdefault((layer.weight.dtype, layer.rounds_input), []).append(index)
        self._fused = [
            (members, stack_linears([self.layers[index] for index in members], narrow=False).weight)
            for members in alike.values()
        ]

    def stacked_weight(self) -> torch.Tensor:
        """The one matrix of all layers, which must all compute alike."""
        assert self._fused is not None and len(self._fused) == 1
        return self._fused[0][1]

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The output of each layer, in order."""
        if self._fused is None or torch.is_grad_enabled():
            return [layer(x) for layer in self.layers]
        outputs: list[torch.Tensor] = [x] * len(self.layers)
        for members, weight in self._fused:
            first = self.layers[members[0]]
            rounded = first.numerics.round_input(x) if first.rounds_input else x
            product = first.numerics.kernels.linear(rounded.to(weight.dtype), weight)
            heights = [len(self.layers[index].stored) for index in members]
            for index, part in zip(members, product.split(heights, -1)):
                outputs[index] = part
        return outputs


class RMSNorm(nn.Module):
    """Weighted RMSNorm; the weight is kept in float32."""

    def __init__(self, width: int, eps: float, numerics: Numerics):
        super().__init__()
        self.eps = eps
        self.kernels = numerics.kernels
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalised: torch.Tensor = self.kernels.rms_norm(x, self.weight, self.eps)
        return normalised

    def destinations(self, name: str) -> Iterator[Destination]:
        yield Destination(f"{name}.weight", self.weight)
