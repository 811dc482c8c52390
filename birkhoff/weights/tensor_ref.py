"""How one logical tensor lies in a checkpoint, and its numbers, strip by strip.

`recognise` decides from headers alone whether a tensor is plain floats, FP8 with 128x128 scales or FP4 with 1x32
scales, and refuses every combination of dtype and shape that is none of them. `value_strips` then reads it a few rows
at a time, dequantised exactly on the device where it will live, so the cost of a tensor is one strip and never the
tensor. NaN scales, NaN codes and numbers that are not finite are refused with the place where they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from birkhoff.errors import TensorDtype, TensorMissing, TensorShape, TensorValue
from birkhoff.kernels import quant
from birkhoff.weights.layout import FP4_GROUP, FP8_BLOCK, scale_name

Format = Literal["float", "fp8", "fp4"]
FLOATS = ("F32", "BF16", "F16")
BYTES = ("I8", "U8")
SCALES = ("F8_E8M0", "U8")
STRIP_BYTES = 4 << 20
INSPECT = "Look at the files with: birkhoff inspect CHECKPOINT"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that has not been read: what the header says, and how to get the rows.

    `encoding` is the file's own name for the type where rows are decoded while they are read (GGUF blocks); `nbytes`
    are bytes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    reader: Callable[[int, int], torch.Tensor] = field(repr=False, compare=False)
    encoding: str = ""

    def read(self) -> torch.Tensor:
        return self.reader(0, self.num_rows)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) along the first axis, as stored."""
        return self.reader(start, stop)

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1


def recognise(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, ...]) -> Format:
    """The number format of tensor `name`, whose numbers must form `shape`; checks its scale too."""
    ref = tensors.get(name)
    if ref is None:
        raise TensorMissing(f"{name} is not in the files. {INSPECT}")
    if ref.dtype in FLOATS:
        _expect_shape(name, ref.shape, shape, f"for {ref.dtype}")
        return "float"
    if ref.dtype == "F8_E4M3" and len(shape) == 2:
        _expect_shape(name, ref.shape, shape, "for fp8")
        tiles = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
        _expect_scale(tensors, name, tiles, f"{FP8_BLOCK}x{FP8_BLOCK} fp8 blocks")
        return "fp8"
    if ref.dtype in BYTES and len(shape) == 2:
        _expect_shape(name, ref.shape, (shape[0], shape[1] // 2), "for two fp4 codes per byte")
        if shape[1] % FP4_GROUP:
            raise TensorShape(
                f"{name} has an input width of {shape[1]}, expected a multiple of {FP4_GROUP} for fp4."
            )
        _expect_scale(tensors, name, (shape[0], shape[1] // FP4_GROUP), f"1x{FP4_GROUP} fp4 groups")
        return "fp4"
    raise TensorDtype(
        f"{name} is stored as {ref.dtype} {ref.shape}, expected one of {', '.join(FLOATS)}"
        f"{', or F8_E4M3 or I8 with a scale' if len(shape) == 2 else ''}. {INSPECT}"
    )


def check_ids(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, ...]) -> None:
    """The header of an expert table is that of whole numbers."""
    ref = tensors.get(name)
    if ref is None:
        raise TensorMissing(f"{name} is not in the files. {INSPECT}")
    if ref.dtype not in ("I64", "I32"):
        raise TensorDtype(f"{name} is stored as {ref.dtype}, expected I64 or I32. {INSPECT}")
    _expect_shape(name, ref.shape, shape, "for one row of experts per token")


def value_strips(
    tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, ...], device: torch.device | str = "cpu"
) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float32 rows) until the tensor is done; every number finite."""
    stored = recognise(tensors, name, shape)
    ref = tensors[name]
    scale_ref = tensors.get(scale_name(name))
    for start, stop in strips(shape):
        codes = ref.rows(start, stop).to(device)
        if stored == "float":
            values = codes.to(torch.float32)
        else:
            assert scale_ref is not None
            block = FP8_BLOCK if stored == "fp8" else 1
            scale = scale_ref.rows(start // block, -(-stop // block)).to(device)
            check_scale(scale_ref.name, scale, start // block)
            values = (quant.dequant_fp8 if stored == "fp8" else quant.dequant_fp4)(codes, scale)
        check_finite(name, values, start)
        yield start, values


def strips(shape: tuple[int, ...], item_bytes: int = 4) -> Iterator[tuple[int, int]]:
    """Row ranges of about STRIP_BYTES, cut at FP8 tile borders."""
    rows = shape[0] if shape else 1
    row_bytes = item_bytes
    for size in shape[1:]:
        row_bytes *= size
    step = max(FP8_BLOCK, STRIP_BYTES // max(row_bytes, 1) // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def check_scale(name: str, scale: torch.Tensor, first_row: int = 0) -> None:
    """Byte 255 is the NaN of E8M0."""
    _refuse_any(scale == 255, name, first_row, "is NaN (byte 0xFF)", "a power of two")


def check_codes(name: str, codes: torch.Tensor, first_row: int = 0) -> None:
    """E4M3 has a NaN, E2M1 has none."""
    if codes.dtype == torch.float8_e4m3fn:
        _refuse_any((codes.view(torch.uint8) & 0x7F) == 0x7F, name, first_row, "is NaN", "an fp8 number")


def check_finite(name: str, values: torch.Tensor, first_row: int = 0) -> None:
    _refuse_any(~torch.isfinite(values), name, first_row, "is not finite", "a number")


def check_experts(name: str, ids: torch.Tensor, experts: int, first_row: int = 0) -> None:
    """Expert ids from 0 to experts - 1, all different in a row: a token visits each of its experts once."""
    outside = (ids < 0) | (ids >= experts)
    if bool(outside.any()):
        row, column = (int(i) for i in outside.nonzero()[0])
        raise TensorValue(
            f"{name}[{first_row + row}, {column}] is {int(ids[row, column])}, expected an expert from 0 "
            f"to {experts - 1}. config.json and the table do not belong together, or it is damaged."
        )
    ordered = ids.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if bool(twice.any()):
        row = int(twice.nonzero()[0])
        raise TensorValue(
            f"{name}[{first_row + row}] is {ids[row].tolist()}, expected different experts. "
            "The table is damaged or was never filled; take it from the original checkpoint."
        )


def _refuse_any(bad: torch.Tensor, name: str, first_row: int, seen: str, expected: str) -> None:
    if bool(bad.any()):
        place = [int(i) for i in bad.nonzero()[0]]
        place[0] += first_row
        raise TensorValue(
            f"{name}{place} {seen}, expected {expected}; {int(bad.sum())} such in these rows. "
            "The file is damaged; download its shard again."
        )


def _expect_shape(name: str, seen: tuple[int, ...], expected: tuple[int, ...], why: str) -> None:
    if seen != expected:
        raise TensorShape(
            f"{name} is {seen}, expected {expected} {why}. config.json and the shards may not belong "
            f"together. {INSPECT}"
        )


def _expect_scale(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, int], why: str) -> None:
    scale = scale_name(name)
    ref = tensors.get(scale)
    if ref is None:
        raise TensorMissing(
            f"{scale} is not in the files, though {name} is stored as {tensors[name].dtype} and means "
            f"nothing without it. {INSPECT}"
        )
    if ref.dtype not in SCALES:
        raise TensorDtype(
            f"{scale} is stored as {ref.dtype}, expected F8_E8M0 (one power-of-two byte per block). {INSPECT}"
        )
    if ref.shape != shape:
        raise TensorShape(
            f"{scale} is {ref.shape}, expected {shape} for {why}. The shard may be cut short. {INSPECT}"
        )
