"""Random matrices of every packed type, and GGUF files that hold them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from birkhoff.config import V4Config
from birkhoff.convert.gguf_bytes import TensorRow, encode_header
from birkhoff.kernels import quant
from birkhoff.kernels.packed import Q8_ROWS, TYPES, PackedMatrix, PackedType, from_blocks
from birkhoff.weights.gguf import read_header
from birkhoff.weights.gguf_keys import MetadataEntry, metadata_of

# Where a block holds its float16 factors, and their ratio. Types with a minimum multiply unsigned codes and subtract
# it: with the middle of the codes as ratio the mean of the values is zero, as that of weights is. With a mean as
# large as their spread one direction of a model's stream outgrows the others, and the rounding of float32 shows fifty
# times as large in some rows.
_HALVES = {
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "MXFP4": {},
}


def random_matrix(
    kind: PackedType, rows: int, columns: int, seed: int = 0, spread: float = 1.0
) -> PackedMatrix:
    """Random codes whose values have about the standard deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * spread
    if kind.dtype is not None:
        return PackedMatrix.floats(values.to(kind.dtype))
    if kind.name == "FP8":
        return PackedMatrix.fp8(*quant.quant_fp8(values))
    if kind.name == "FP4":
        return PackedMatrix.fp4(*quant.quant_fp4(values))
    if kind == Q8_ROWS:
        blocks = random_matrix(TYPES["Q8_0"], rows, columns, seed, spread).codes
        return PackedMatrix(kind, columns, from_blocks(kind, blocks))
    shape = (rows, columns // kind.block, kind.block_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    steps = 0.01 * (0.5 + torch.rand(shape[:2], generator=generator))

    def write(factor: float) -> PackedMatrix:
        for start, ratio in _HALVES.get(kind.name, {0: 1.0}).items():
            halves = (steps * factor * ratio).half()
            blocks[..., start : start + 2] = halves.view(torch.uint8).view(*shape[:2], 2)
        if kind.name == "MXFP4":
            exponents = torch.randint(-1, 2, shape[:2], generator=generator) + round(math.log2(factor)) + 125
            blocks[..., 0] = exponents.to(torch.uint8)
        return PackedMatrix(kind, columns, blocks.view(rows, -1))

    return write(spread / float(write(1.0).dense().std()))


def retyped_gguf(
    source: Path, path: Path, config: V4Config, kind_of: Callable[[str], str | None], seed: int = 0
) -> Path:
    """A copy of an F32 GGUF file without tokenizer in which some tensors are random ones of another type: `kind_of`
    returns the type of a tensor, by its GGUF name, or None to copy it."""
    rows, data = [], []
    for index, tensor in enumerate(read_header(source).tensors):
        kind = kind_of(tensor.name)
        if kind is None:
            raw = source.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        else:
            height, width = math.prod(tensor.shape[:-1]), tensor.shape[-1]
            matrix = random_matrix(TYPES[kind], height, width, seed + index, 1.5 * width**-0.5)
            raw = matrix.codes.contiguous().numpy().tobytes()
        rows.append(TensorRow(tensor.name, kind or tensor.kind, tensor.shape))
        data.append(raw)
    keys = [
        MetadataEntry("general.architecture", 8, "deepseek4"),
        *metadata_of(config),
        MetadataEntry("tokenizer.ggml.model", 8, "no_vocab"),
    ]
    header, offsets, size = encode_header(keys, rows)
    whole = bytearray(size)
    whole[: len(header)] = header
    for raw, at in zip(data, offsets):
        whole[at : at + len(raw)] = raw
    path.write_bytes(whole)
    return path
