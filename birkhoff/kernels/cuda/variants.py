"""Which CUDA kernels apply to a weight, and which variant of them is the fastest by the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from birkhoff.kernels.decode_buffers import ExpertLayerWeights
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import Q8_ROWS

MAX_ROWS = 64


@dataclass(frozen=True)
class BlockDecoder:
    """A type of experts in block_types.cuh: bytes of 256 columns, whether it needs sums of inputs, bytes of its table,
    and whether it serves a single token, whose inputs are digits."""

    block_bytes: int
    sums: bool = False
    table: int = 0
    digits: bool = False


BLOCK_DECODERS = {
    "Q2_K": BlockDecoder(84, sums=True),
    "Q2_K_DIGITS": BlockDecoder(84, digits=True),
    "Q3_K": BlockDecoder(110, sums=True),
    "Q4_K": BlockDecoder(144, sums=True),
    "Q5_K": BlockDecoder(176, sums=True),
    "Q6_K": BlockDecoder(210),
    "IQ4_XS": BlockDecoder(136),
    "IQ2_XXS": BlockDecoder(66, table=2048),
    "IQ2_XXS_DIGITS": BlockDecoder(66, table=1536 * 8, digits=True),
    "IQ2_XXS_DIGITS16": BlockDecoder(66, table=1536 * 16, digits=True),
    "IQ2_XS": BlockDecoder(74, table=4096),
    "IQ3_XXS": BlockDecoder(98, table=1024),
}
BLOCK_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_XS")


def digit_bytes(inner: int) -> int:
    """Bytes of the digits and factors of one token's inputs (blocks.cuh)."""
    return inner // 256 * 768 + -(-inner // 1024) * 16


@dataclass(frozen=True)
class BlockVariant:
    """A form of blocks.cu: its decoder, warps of a thread block, tiles of sixteen rows that are copied at a time, and
    thread blocks per multiprocessor; 0 if every tile has its own."""

    decoder: str
    warps: int = 4
    stages: int = 1
    blocks: int = 0

    @property
    def defines(self) -> tuple[str, ...]:
        resident = self.blocks or 28 // self.warps  # 72 registers per thread
        return (
            f"BLOCK_TYPE={self.decoder}",
            f"BLOCK_WARPS={self.warps}",
            f"BLOCK_STAGES={self.stages}",
            f"BLOCK_RESIDENT={resident}",
        )

    def memory(self, inner: int, rows: int) -> int:
        """Bytes of dynamic shared memory: the table, tiles, and sums of the inputs of up to eight tokens or digits."""
        decoder = BLOCK_DECODERS[self.decoder]
        blocks = inner // 256
        row = blocks * decoder.block_bytes
        if decoder.digits:
            row += 0 if row % 32 else 16
            inputs = digit_bytes(inner)
        else:
            inputs = inner // 4 * min(rows, 8) if decoder.sums else 0
        return decoder.table + self.stages * 16 * row + inputs

    def thread_blocks(self, tiles: int, processors: int) -> int:
        return min(tiles, processors * self.blocks) if self.blocks else tiles

    def split(
        self, tiles: int, row_bytes: int, shared: int, shared_bytes: int, processors: int
    ) -> tuple[int, int]:
        """Thread blocks of a shared expert of `shared` tiles and of the others, by their share of the bytes."""
        if not self.blocks:
            return shared, tiles
        every = processors * self.blocks
        part = round(every * shared * shared_bytes / (shared * shared_bytes + tiles * row_bytes))
        part = min(max(part, 1), shared)
        return part, min(tiles, every - part)


@dataclass(frozen=True)
class RowsVariant:
    """A form of gemm_rows.cu: warps of 32 rows in a thread block, and steps of K in flight."""

    warps: int
    stages: int

    @property
    def rows(self) -> int:
        return 32 * self.warps

    def defines(self, tiles: int) -> tuple[str, ...]:
        resident = 2 if 2 * (self.memory(tiles) + 1024) <= 228 * 1024 and self.warps <= 4 else 1
        return (
            f"ROWS_TILES={tiles}",
            f"ROWS_WARPS={self.warps}",
            f"ROWS_STAGES={self.stages}",
            f"ROWS_RESIDENT={resident}",
        )

    def memory(self, tiles: int) -> int:
        """Bytes of dynamic shared memory: steps of weights and inputs, then the sums of all rows and tokens."""
        steps = self.stages * (self.rows * 128 + tiles * 8 * 272)
        return max(steps, tiles * 8 * (self.rows + 4) * 4)

    def thread_blocks(self, outs: Iterable[int]) -> int:
        return sum(-(-out // self.rows) for out in outs)


# Variants that were measured to be faster than `BlockVariant(type)`: by type, kernel ("gate_up" or "down") and whether
# there is one token.
BLOCK_CHOICES = {
    ("Q2_K", "gate_up", True): BlockVariant("Q2_K_DIGITS", 4, 2, 3),
    ("Q2_K", "down", True): BlockVariant("Q2_K_DIGITS", 4, 2, 4),
    ("Q4_K", "gate_up", True): BlockVariant("Q4_K", 8, 2, 2),
    ("Q5_K", "gate_up", True): BlockVariant("Q5_K", 8, 2, 2),
    ("IQ2_XXS", "gate_up", True): BlockVariant("IQ2_XXS_DIGITS16", 4, 2, 3),
    ("IQ2_XXS", "down", True): BlockVariant("IQ2_XXS_DIGITS", 4, 2, 4),
}


def block_variant(kind: str, kernel: str, rows: int, host: bool = False) -> BlockVariant:
    """The variant of blocks.cu in which a kernel of a type runs. With `host`, some experts are in host memory: bulk
    copies of single rows cross the bus more slowly than the others."""
    return (None if host else BLOCK_CHOICES.get((kind, kernel, rows == 1))) or BlockVariant(kind)


def type_sources(kinds: Iterable[str]) -> set[tuple[str, tuple[str, ...]]]:
    """Sources and definitions of the kernels of experts and projections of some types, besides the released ones."""
    sources: set[tuple[str, tuple[str, ...]]] = set()
    for kind in kinds:
        if kind in BLOCK_TYPES:
            chosen = [block_variant(kind, kernel, rows) for kernel in ("gate_up", "down") for rows in (1, 2)]
            sources |= {("blocks.cu", variant.defines) for variant in chosen}
        elif kind == "FP8":
            sources.add(("fp8_experts.cu", ()))
        elif kind == Q8_ROWS.name:
            sources.add(("gemv.cu", ("Q8_CODES=1",)))
    return sources


def reads(weight: PackedWeight, x: tuple[torch.Tensor | None, torch.Tensor]) -> bool:
    """Whether `gemv.cu` multiplies these inputs with this weight: FP8 or Q8_ROWS with float16, or both bfloat16."""
    if weight.type is not None and (weight.type != Q8_ROWS or weight.out % 16):
        return False
    if weight.is_codes:
        return x[0] is not None and x[0].dtype is torch.float16
    return weight.weight.dtype is torch.bfloat16 and x[1].dtype is torch.bfloat16


def reads_experts(w: ExpertLayerWeights, width: int, inner: int) -> bool:
    """Whether `blocks.cu` or `fp8_experts.cu` multiplies the experts of a layer: known types, whole blocks."""
    if is_fp8_experts(w):
        return width % 128 == 0 and inner % 128 == 0
    return all(kind.name in BLOCK_TYPES for kind in w.expert_types) and width % 256 == 0 and inner % 256 == 0


def is_fp8_experts(w: ExpertLayerWeights) -> bool:
    return all(kind.name == "FP8" for kind in w.expert_types)


MANY_ROWS = 32768  # of weights, from which gemm_rows.cu is faster
ROWS_CHOICES = {  # by tiles of eight tokens: bfloat16 weights, and FP8 weights of up to and above MANY_ROWS
    4: (RowsVariant(4, 3), RowsVariant(8, 4), RowsVariant(10, 3)),
    8: (RowsVariant(4, 3), RowsVariant(4, 3), RowsVariant(10, 3)),
}


def rows_variant(tiles: int, inner: int, outs: Sequence[int], fp8: bool) -> RowsVariant | None:
    """The variant of gemm_rows.cu for matrices of `outs` rows, or None where gemv.cu is faster or was not compared."""
    total = sum(outs)
    if (
        tiles not in ROWS_CHOICES
        or total < MANY_ROWS
        or any(out % 32 for out in outs)
        or (fp8 and inner > 1024)
    ):
        return None
    return ROWS_CHOICES[tiles][0 if not fp8 else 1 if total == MANY_ROWS else 2]


def gemv_variant(tiles: int, inner: int, total: int, grouped: bool, q8: bool = False) -> tuple[int, int, int]:
    """The fastest variant measured: warps that split K, blocks of 128 inputs each has in flight, and row blocks per
    thread block."""
    if tiles == 1:
        if inner <= 1024 or grouped or (q8 and total > 8192):
            return 8, 1, 1
        return (8, 3, 1) if total <= 8192 else (8, 2, 1)
    if tiles == 2:
        return (4, 1, 1) if inner <= 1024 else (8, 1, 1)
    if tiles == 4:
        return (2, 1, 4) if total >= 16384 else (4, 1, 2) if grouped else (8, 1, 1)
    if total >= 16384:  # enough rows to keep all warps busy without splitting K further
        return (2, 1, 4) if inner > 1024 else (1, 1, 8)
    return (2, 1, 4) if grouped else (4, 1, 1)


def token_tiles(n: int) -> int:
    """Tiles of eight tokens, rounded up to a power of two."""
    assert n <= MAX_ROWS
    return next(tiles for tiles in (1, 2, 4, 8) if n <= 8 * tiles)
