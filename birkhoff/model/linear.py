"""Linear layers, stacked weights, and the rounding of activations (spec 4).

The `role` of a layer is how the release stores its weight. "fp8" weights take inputs that are rounded to FP8 when
numerics are "released"; "bf16" weights compute in the dtype of the model; "f32" weights (compressors, router, head)
compute in float32 whatever that dtype is. A weight is kept as numbers, or packed as in the checkpoint: `packed` is the
release's layout (FP8 codes and scales, bfloat16 for "f32"), `store_as` any type of `kernels.packed`. A packed weight
is dequantised on every use, unless the kernels read it as stored.

A `Linear` may hold several matrices of the checkpoint that read the same input, stacked. `stack_linears` stacks the
weights of several layers, which become views of the result, so that prompts (`SharedInput`) and decode steps can run
them as one product without a second copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.norm.reference import KEY_GROUP
from birkhoff.kernels.packed import TYPES, PackedMatrix, PackedType
from birkhoff.kernels.quant.rounded_rows import Input, rows_of
from birkhoff.kernels.select import KernelSet, select

Role = Literal["fp8", "bf16", "f32"]
ACTIVATION_GROUP = 128


@dataclass(frozen=True)
class Destination:
    """Memory for one tensor of a checkpoint. A `value` is dequantised; `codes` and `scale` are kept as stored, as are
    `blocks`, whole rows of bytes of the given `type`, made of its `stored_type`. `owner` is the module whose weight
    it is a part of."""

    name: str
    tensor: torch.Tensor
    kind: Literal["value", "codes", "scale", "ids", "blocks"] = "value"
    type: PackedType | None = None
    owner: nn.Module | None = None


@dataclass(frozen=True)
class Numerics:
    """Compute dtype, whether the release's rounding of activations is reproduced, and the kernels."""

    dtype: torch.dtype = torch.float32
    released: bool = False
    kernels: KernelSet = field(default_factory=lambda: select("reference"))

    def round_input(self, x: torch.Tensor) -> torch.Tensor:
        """Round the input of an FP8 or FP4 linear layer."""
        return self.kernels.fp8_round(x, ACTIVATION_GROUP) if self.released else x

    def round_key(self, key: torch.Tensor, rope_dim: int) -> torch.Tensor:
        """Round what enters the key cache to FP8 in groups of 64; the rotary channels are kept as they are."""
        return self.kernels.fp8_round(key, KEY_GROUP, rope_dim) if self.released else key

    def round_index(self, x: torch.Tensor) -> torch.Tensor:
        """Round indexer queries and keys: a Hadamard transform, then FP4 in groups of 32."""
        return self.kernels.hadamard_fp4(x) if self.released else x


class Linear(nn.Module):
    """`y = x W^T`, no bias.

    `fan_out` is the number of rows, or the rows of each stacked matrix by its name in the checkpoint. A packed weight
    is `codes` [out, bytes of a row] of type `code_type` and, for FP8 and FP4, `scale`, whose rows are those of each
    stacked matrix in turn (FP8: one per 128 rows of the matrix)."""

    def __init__(
        self, fan_in: int, fan_out: int | dict[str, int], role: Role, numerics: Numerics, packed: bool = False
    ):
        super().__init__()
        self.role, self.numerics, self.fan_in = role, numerics, fan_in
        self.parts = {"": fan_out} if isinstance(fan_out, int) else fan_out
        self.code_type: PackedType | None = None
        self.as_stored = packed
        self.codes: torch.Tensor
        self.scale: torch.Tensor
        if packed and role == "fp8":
            self._keep_codes(TYPES["FP8"], None)
        else:
            dtype = numerics.dtype if role != "f32" else torch.bfloat16 if packed else torch.float32
            self.weight = nn.Parameter(torch.empty(sum(self.parts.values()), fan_in, dtype=dtype))
        self._arranged: tuple[int, Any] | None = None  # for kernels, with the address it was made for

    def store_as(self, types: Sequence[PackedType]) -> bool:
        """Keep the weight in the types in which its matrices are stored, if they are all of one type; call it before
        the model is given memory. Returns whether it is."""
        kind = types[0]
        if any(each != kind for each in types) or self.fan_in % kind.block:
            return False
        self.as_stored = True
        if kind.dtype is None:
            device = self.weight.device
            del self.weight
            self._keep_codes(kind, device)
        else:
            self.weight = nn.Parameter(
                torch.empty(self.weight.shape, dtype=kind.dtype, device=self.weight.device)
            )
        return True

    def _keep_codes(self, kind: PackedType, device: torch.device | None) -> None:
        self.code_type = kind
        dtype = torch.float8_e4m3fn if kind.name == "FP8" else torch.uint8
        heights = list(self.parts.values())
        codes = torch.empty(sum(heights), kind.row_bytes(self.fan_in), dtype=dtype, device=device)
        self.register_buffer("codes", codes)
        shapes = [kind.scale_shape(height, self.fan_in) for height in heights]
        if shapes[0] is not None:
            rows = sum(shape[0] for shape in shapes if shape is not None)
            self.register_buffer("scale", torch.empty(rows, shapes[0][1], dtype=torch.uint8, device=device))

    @property
    def packed(self) -> bool:
        """Whether the weight is codes."""
        return self.code_type is not None

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
        kernels = self.numerics.kernels
        return (
            kernels.reads_codes
            and not torch.is_grad_enabled()
            and (self.as_stored or (kernels.on_gpu and self.role == "f32"))
        )

    def dense(self) -> torch.Tensor:
        """The weight as numbers [out, in]."""
        dtype = torch.float32 if self.role == "f32" else self.numerics.dtype
        if not self.packed:
            return self.weight.to(dtype)
        dequantise = self.numerics.kernels.dequantise
        return torch.cat([dequantise(matrix) for matrix in self.matrices()]).to(dtype)

    def matrices(self) -> list[PackedMatrix]:
        """Each stacked matrix as stored, as views."""
        heights = list(self.parts.values())
        if self.code_type is None:
            return [PackedMatrix.floats(part) for part in self.weight.detach().split(heights)]
        codes = self.codes.view(torch.uint8).split(heights)
        shapes = [self.code_type.scale_shape(height, self.fan_in) for height in heights]
        if shapes[0] is None:
            return [PackedMatrix(self.code_type, self.fan_in, part) for part in codes]
        scales = self.scale.split([shape[0] for shape in shapes if shape is not None])
        return [PackedMatrix(self.code_type, self.fan_in, part, scale) for part, scale in zip(codes, scales)]

    def packed_weight(self) -> Any:
        """The weight as kernels read it, cached until the weight moves."""
        address = self.stored.data_ptr()
        if self._arranged is None or self._arranged[0] != address:
            self._arranged = address, self.numerics.kernels.arrange(self.matrices())
        return self._arranged[1]

    def forward(self, x: Input) -> torch.Tensor:
        kernels = self.numerics.kernels
        y: torch.Tensor
        if self.rounds_input and self.packed and self.reads_codes:
            y = kernels.rounded_linear(x, self.packed_weight(), self.numerics.dtype)
            return y
        x = rows_of(x)
        if self.rounds_input:
            x = self.numerics.round_input(x)
        if self.reads_codes:
            dtype = torch.float32 if self.role == "f32" else self.numerics.dtype
            y = kernels.packed_linear(x, self.packed_weight(), None, dtype)
        else:
            weight = self.dense()
            y = kernels.linear(x.to(weight.dtype), weight)
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        prefixes = [f"{name}.{part}" if part else name for part in self.parts]
        if self.code_type is None:
            for prefix, weight in zip(prefixes, self.weight.detach().split(list(self.parts.values()))):
                yield Destination(f"{prefix}.weight", weight, owner=self)
            return
        heights = list(self.parts.values())
        shapes = [self.code_type.scale_shape(height, self.fan_in) for height in heights]
        if shapes[0] is None:
            for prefix, codes in zip(prefixes, self.codes.split(heights)):
                yield Destination(f"{prefix}.weight", codes, "blocks", self.code_type, self)
            return
        scales = self.scale.split([shape[0] for shape in shapes if shape is not None])
        for prefix, codes, scale in zip(prefixes, self.codes.split(heights), scales):
            yield Destination(f"{prefix}.weight", codes, "codes", self.code_type, self)
            yield Destination(f"{prefix}.scale", scale, "scale", self.code_type, self)


def stack_linears(layers: Sequence[Linear], narrow: bool = True) -> PackedWeight:
    """Stack the weights of layers that read one input, for GPU kernels; each keeps its rows as a view of the result.

    The layers must all be of one packed type or all hold numbers. Numbers become bfloat16 when that loses nothing,
    unless `narrow` is False; a layer whose own dtype differs from that of the result keeps its weight."""
    if len(layers) == 1 and narrow:
        only: PackedWeight = layers[0].packed_weight()
        return only
    if layers[0].packed:
        stacked = PackedWeight.stacked([layer.packed_weight() for layer in layers])
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
        layer._arranged = None
    return stacked


class SharedInput:
    """Layers that read one input. After `fuse`, layers of equal dtype and rounding run as one product; after `stack`,
    neighbours of one type that GPU kernels read as stored."""

    def __init__(self, layers: Sequence[Linear]):
        self.layers = list(layers)
        self._fused: list[tuple[list[int], torch.Tensor]] | None = None  # indices of layers, stacked weight
        self._stacked: tuple[tuple[int, ...], list[tuple[list[Linear], PackedWeight]]] | None = None

    def fuse(self) -> None:
        """Stack the weights of layers that compute alike; weights kept as stored are stacked for GPU kernels only."""
        alike: dict[tuple[torch.dtype, bool], list[int]] = {}
        if self.layers[0].numerics.kernels.on_gpu:
            self.stack()
            return
        if any(layer.as_stored for layer in self.layers):
            return
        for index, layer in enumerate(self.layers):
            alike.setdefault((layer.weight.dtype, layer.rounds_input), []).append(index)
        self._fused = [
            (members, stack_linears([self.layers[index] for index in members], narrow=False).weight)
            for members in alike.values()
        ]

    def stack(self) -> list[PackedWeight]:
        """The weights in order, for GPU kernels; neighbours of one type are stacked. Stacked once until they move."""
        addresses = tuple(layer.stored.data_ptr() for layer in self.layers)
        if self._stacked is None or self._stacked[0] != addresses:
            runs: list[list[Linear]] = []
            for layer in self.layers:
                first = runs[-1][0] if runs else None
                if first is not None and (first.code_type, first.role == "fp8") == (
                    layer.code_type,
                    layer.role == "fp8",
                ):
                    runs[-1].append(layer)
                else:
                    runs.append([layer])
            stacked = [(run, stack_linears(run)) for run in runs]
            self._stacked = tuple(layer.stored.data_ptr() for layer in self.layers), stacked
        return [weight for _, weight in self._stacked[1]]

    def stacked_weight(self) -> torch.Tensor:
        """The one matrix of all layers, which must all compute alike."""
        assert self._fused is not None and len(self._fused) == 1
        return self._fused[0][1]

    def __call__(self, x: Input) -> list[torch.Tensor]:
        """The output of each layer, in order. Layers of role "bf16" that are stacked with others give float32."""
        if torch.is_grad_enabled() or (self._fused is None and self._stacked is None):
            return [layer(x) for layer in self.layers]
        if self._stacked is not None:
            return self._multiply_stacked(x, self._stacked[1])
        assert self._fused is not None
        x = rows_of(x)
        outputs: list[torch.Tensor] = [x] * len(self.layers)
        for members, weight in self._fused:
            first = self.layers[members[0]]
            rounded = first.numerics.round_input(x) if first.rounds_input else x
            product = first.numerics.kernels.linear(rounded.to(weight.dtype), weight)
            heights = [len(self.layers[index].stored) for index in members]
            for index, part in zip(members, product.split(heights, -1)):
                outputs[index] = part
        return outputs

    def _multiply_stacked(
        self, x: Input, runs: Sequence[tuple[list[Linear], PackedWeight]]
    ) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        for layers, weight in runs:
            first, numerics = layers[0], layers[0].numerics
            if len(layers) == 1:
                outputs.append(first(x))
                continue
            if first.rounds_input and first.packed:
                product = numerics.kernels.rounded_linear(x, weight, numerics.dtype)
            else:
                dtype = numerics.dtype if all(layer.role != "f32" for layer in layers) else torch.float32
                rows = rows_of(x)
                rows = numerics.round_input(rows) if first.rounds_input else rows
                product = numerics.kernels.packed_linear(rows, weight, None, dtype)
            outputs += product.split([len(layer.stored) for layer in layers], -1)
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

    def input(self, x: torch.Tensor, released: bool) -> Input:
        """The same as an input of products; with `released` numerics kernels may round it at once."""
        normalised: Input = self.kernels.norm_input(x, self.weight, self.eps, released)
        return normalised

    def destinations(self, name: str) -> Iterator[Destination]:
        yield Destination(f"{name}.weight", self.weight)
