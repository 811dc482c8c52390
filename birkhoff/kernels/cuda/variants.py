"""Which CUDA kernels apply to a weight, and which variant of them is the fastest by the number of tokens."""

from __future__ import annotations

import torch

from birkhoff.kernels.decode_buffers import ExpertLayerWeights
from birkhoff.kernels.linear.packed import PackedWeight

MAX_ROWS = 64
Q8_COLUMNS = 256  # of a stage, as in blocks.cuh
Q8_STAGE = 16 * 272  # its bytes of shared memory
# Types of experts in blocks.cu: bytes of 256 columns, and whether they need sums of inputs.
BLOCK_TYPES = {"Q2_K": (84, True), "IQ2_XXS": (66, False)}
BLOCK_WARPS = 4


def reads(weight: PackedWeight, x: tuple[torch.Tensor | None, torch.Tensor]) -> bool:
    """Whether `gemv.cu` multiplies these inputs with this weight: FP8 or Q8_0 with float16, or both bfloat16."""
    if weight.type is not None and (
        weight.type.name != "Q8_0" or weight.inner % Q8_COLUMNS or weight.out % 16
    ):
        return False
    if weight.is_codes:
        return x[0] is not None and x[0].dtype is torch.float16
    return weight.weight.dtype is torch.bfloat16 and x[1].dtype is torch.bfloat16


def reads_experts(w: ExpertLayerWeights, width: int, inner: int) -> bool:
    """Whether `blocks.cu` multiplies the experts of a layer: known types, whole blocks, all on the GPU."""
    known = all(kind.name in BLOCK_TYPES for kind in w.expert_types)
    return known and width % 256 == 0 and inner % 256 == 0 and w.host_range is None


def block_memory(kind: str, inner: int, rows: int) -> int:
    """Bytes of dynamic shared memory: sixteen rows, and sums of the inputs of up to eight tokens."""
    size, sums = BLOCK_TYPES[kind]
    return inner // 256 * (16 * size + (64 * min(rows, 8) if sums else 0))


def gemv_variant(tiles: int, inner: int, total: int, grouped: bool) -> tuple[int, int, int]:
    """The fastest variant measured: warps that split K, blocks of 128 inputs each has in flight, and row blocks per
    thread block."""
    if tiles == 1:
        return (8, 1, 1) if inner <= 1024 or grouped else (8, 3, 1) if total <= 8192 else (8, 2, 1)
    if tiles == 2:
        return (4, 1, 1) if inner <= 1024 else (8, 1, 1)
    if tiles == 4:
        return (2, 1, 4) if total >= 16384 else (4, 1, 2) if grouped else (8, 1, 1)
    if total >= 16384:  # enough rows to keep all warps busy without splitting K further
        return (2, 1, 4) if inner > 1024 else (1, 1, 8)
    return (2, 1, 4) if grouped else (4, 1, 1)


def q8_variant(tiles: int, inner: int) -> tuple[int, int]:
    """Of Q8_0: warps that split K, and stages of 256 columns each has in flight."""
    return (4, 2) if inner <= 4 * Q8_COLUMNS or tiles == 8 else (8, 2)


def token_tiles(n: int) -> int:
    """Tiles of eight tokens, rounded up to a power of two."""
    assert n <= MAX_ROWS
    return next(tiles for tiles in (1, 2, 4, 8) if n <= 8 * tiles)
