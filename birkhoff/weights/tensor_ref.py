"""References to stored tensors, their number formats, and their values in row strips.

`check_tensor` validates from headers that a tensor is plain floats, FP8 with 128x128 scales or FP4 with 1x32 scales,
with a matching scale tensor. `open_checkpoint` calls it once per tensor; after that `TensorRef.format` and
`TensorRef.value_shape` follow from the dtype and need no further check. `value_strips` reads a tensor a few rows at a
time and dequantises exactly on the target device, so that memory use is one strip. NaN scales, NaN codes and
non-finite values raise TensorValue with their index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from birkhoff.errors import CheckpointError, TensorDtype, TensorMissing, TensorShape, TensorValue
from birkhoff.kernels import quant
from birkhoff.kernels.packed import TYPES, PackedMatrix, PackedType, native
from birkhoff.weights.layout import FP4_GROUP, FP8_BLOCK, scale_name
from birkhoff.weights.safetensors import read_exactly

Format = Literal["float", "fp8", "fp4", "ids"]
FLOATS = ("F32", "BF16", "F16")
BYTES = ("I8", "U8")
IDS = ("I64", "I32")
SCALES = ("F8_E8M0", "U8")
STRIP_BYTES = 4 << 20
INSPECT = "Look at the files with: birkhoff inspect CHECKPOINT"
_FORMATS: dict[str, Format] = {
    **dict.fromkeys(FLOATS, "float"),
    **dict.fromkeys(BYTES, "fp4"),
    **dict.fromkeys(IDS, "ids"),
    "F8_E4M3": "fp8",
}


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor that has not been read: header fields and a row reader.

    `nbytes` is the size in the file. `encoding` is the file's own type name where `reader` decodes rows (GGUF block
    types), else empty. `location` is the file and offset of the rows as they are stored; None if they are not
    contiguous there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    reader: Callable[..., torch.Tensor] = field(repr=False, compare=False)
    encoding: str = ""
    location: tuple[Path, int] | None = None

    def read(self) -> torch.Tensor:
        """Read the whole tensor as stored."""
        return self.reader(0, self.num_rows)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Read rows [start, stop) along the first axis as stored."""
        return self.reader(start, stop)

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def format(self) -> Format:
        """Number format of a weight in an opened checkpoint. Not defined for scale tensors."""
        return _FORMATS[self.dtype]

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the dequantised values; FP4 stores two codes per byte."""
        return (self.shape[0], 2 * self.shape[1]) if self.format == "fp4" else self.shape

    @property
    def packed_type(self) -> PackedType | None:
        """The type in which kernels can read the rows as they are stored; None if there is none."""
        if self.location is None or len(self.shape) != 2 or self.format == "ids":
            return None
        name = self.encoding or {"F8_E4M3": "FP8", "I8": "FP4", "U8": "FP4"}.get(self.dtype, self.dtype)
        kind = TYPES.get(name)
        return None if kind is None or self.value_shape[1] % kind.block else kind

    def stored_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) as bytes, [rows, bytes of a row]."""
        kind = self.packed_type
        assert kind is not None and self.location is not None, self.name
        size = kind.row_bytes(self.value_shape[1])
        out = torch.empty(stop - start, size, dtype=torch.uint8)
        read_exactly(self.location[0], self.location[1] + start * size, out.view(-1).numpy().data)
        return out


def _about(name: str, error: CheckpointError) -> CheckpointError:
    """The error with the name of the tensor that it is about."""
    error.tensor = name
    return error


def in_file(error: CheckpointError, tensors: Mapping[str, TensorRef]) -> CheckpointError:
    """The error with the name of the file that holds the tensor it is about, where that is known."""
    # Scales in GGUF blocks have no place of their own.
    refs = [tensors.get(name) for name in (error.tensor, error.tensor.removesuffix("scale") + "weight")]
    files = [ref.location[0].name for ref in refs if ref is not None and ref.location is not None]
    if not files or files[0] in str(error):
        return error
    return _about(error.tensor, type(error)(f"{error} The tensor is in {files[0]}."))


@contextmanager
def naming_files(tensors: Mapping[str, TensorRef]) -> Iterator[None]:
    """Raise errors about tensors with the names of their files."""
    try:
        yield
    except CheckpointError as error:
        raise in_file(error, tensors) from None


def check_tensor(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, ...]) -> Format:
    """Validate the dtype, shape and scale of weight `name`, whose values have `shape`; return its format."""
    ref = _find(tensors, name)
    if ref.dtype in FLOATS:
        check_shape(name, ref.shape, shape, f"for {ref.dtype}")
        return "float"
    if ref.dtype == "F8_E4M3" and len(shape) == 2:
        check_shape(name, ref.shape, shape, "for fp8")
        tiles = (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
        _check_scale_header(tensors, name, tiles, f"{FP8_BLOCK}x{FP8_BLOCK} fp8 blocks")
        return "fp8"
    if ref.dtype in BYTES and len(shape) == 2:
        check_shape(name, ref.shape, (shape[0], shape[1] // 2), "for two fp4 codes per byte")
        if shape[1] % FP4_GROUP:
            raise _about(
                name,
                TensorShape(
                    f"{name} has an input width of {shape[1]}, expected a multiple of {FP4_GROUP} for fp4."
                ),
            )
        _check_scale_header(tensors, name, (shape[0], shape[1] // FP4_GROUP), f"1x{FP4_GROUP} fp4 groups")
        return "fp4"
    raise _about(
        name,
        TensorDtype(
            f"{name} is stored as {ref.dtype} {ref.shape}, expected one of {', '.join(FLOATS)}"
            f"{', or F8_E4M3 or I8 with a scale' if len(shape) == 2 else ''}. {INSPECT}"
        ),
    )


def check_expert_table(tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, ...]) -> None:
    """Validate the dtype and shape of a table of expert ids."""
    ref = _find(tensors, name)
    if ref.dtype not in IDS:
        raise _about(name, TensorDtype(f"{name} is stored as {ref.dtype}, expected I64 or I32. {INSPECT}"))
    check_shape(name, ref.shape, shape, "for one row of experts per token")


def value_strips(
    tensors: Mapping[str, TensorRef], name: str, device: torch.device | str = "cpu"
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first row, float32 rows) over the whole tensor; raise TensorValue for a non-finite value."""
    for start, stop in strips(tensors[name].value_shape):
        values = read_values(tensors, name, start, stop, device)
        check_finite(name, values, start)
        yield start, values


def read_values(
    tensors: Mapping[str, TensorRef], name: str, start: int, stop: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Read rows [start, stop) of a weight as exactly dequantised float32 values."""
    ref = tensors[name]
    if ref.format == "float":
        return ref.rows(start, stop).to(device).to(torch.float32)
    block = FP8_BLOCK if ref.format == "fp8" else 1
    scale_ref = tensors[scale_name(name)]
    first = start // block * block  # rows of one FP8 tile share a scale
    codes = ref.rows(first, stop).to(device)
    scale = scale_ref.rows(start // block, -(-stop // block)).to(device)
    check_scale(scale_ref.name, scale, start // block)
    values = (quant.dequant_fp8 if ref.format == "fp8" else quant.dequant_fp4)(codes, scale)
    return values[start - first :]


def strips(shape: tuple[int, ...], item_bytes: int = 4) -> Iterator[tuple[int, int]]:
    """Yield row ranges of about STRIP_BYTES, split at FP8 tile boundaries."""
    rows = shape[0] if shape else 1
    row_bytes = item_bytes
    for size in shape[1:]:
        row_bytes *= size
    step = max(FP8_BLOCK, STRIP_BYTES // max(row_bytes, 1) // FP8_BLOCK * FP8_BLOCK)
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def check_scale(name: str, scale: torch.Tensor, first_row: int = 0) -> None:
    """Reject byte 255, the NaN of E8M0."""
    _reject(invalid_scale(scale), name, first_row, "is NaN (byte 0xFF)", "a power of two")


def check_codes(name: str, codes: torch.Tensor, first_row: int = 0) -> None:
    """Reject the NaN codes of E4M3; E2M1 has none."""
    invalid = invalid_codes(codes)
    if invalid is not None:
        _reject(invalid, name, first_row, "is NaN", "an fp8 number")


def invalid_scale(scale: torch.Tensor) -> torch.Tensor:
    """Where E8M0 scales are NaN."""
    return scale == 255


def invalid_codes(codes: torch.Tensor) -> torch.Tensor | None:
    """Where E4M3 codes are NaN; None for codes that cannot be."""
    return (codes.view(torch.uint8) & 0x7F) == 0x7F if codes.dtype == torch.float8_e4m3fn else None


def check_finite(name: str, values: torch.Tensor, first_row: int = 0) -> None:
    """Reject NaN and infinities. A finite sum has finite terms only, and takes one pass without a mask."""
    if not torch.isfinite(values.sum()):
        _reject(~torch.isfinite(values), name, first_row, "is not finite", "a number")


def check_blocks(name: str, matrix: PackedMatrix, first_row: int = 0) -> None:
    """Reject blocks whose values are not all finite."""
    row = native.first_bad_row(matrix) if native.available() else None
    if row is not None or not native.available():
        check_finite(name, matrix.dense(), first_row)


def check_experts(name: str, ids: torch.Tensor, experts: int, first_row: int = 0) -> None:
    """Reject expert ids outside [0, experts) and ids that repeat within a row."""
    outside = (ids < 0) | (ids >= experts)
    if bool(outside.any()):
        row, column = (int(i) for i in outside.nonzero()[0])
        raise _about(
            name,
            TensorValue(
                f"{name}[{first_row + row}, {column}] is {int(ids[row, column])}, expected an expert from 0 "
                f"to {experts - 1}. config.json and the table do not belong together, or it is damaged."
            ),
        )
    ordered = ids.sort(dim=1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if bool(repeated.any()):
        row = int(repeated.nonzero()[0])
        raise _about(
            name,
            TensorValue(
                f"{name}[{first_row + row}] is {ids[row].tolist()}, expected different experts. "
                "The table is damaged or was never filled; take it from the original checkpoint."
            ),
        )


def check_shape(name: str, seen: tuple[int, ...], expected: tuple[int, ...], why: str) -> None:
    """Raise TensorShape when a stored shape differs from the expected one."""
    if seen != expected:
        raise _about(
            name,
            TensorShape(
                f"{name} is {seen}, expected {expected} {why}. config.json and the shards may not belong "
                f"together. {INSPECT}"
            ),
        )


def _find(tensors: Mapping[str, TensorRef], name: str) -> TensorRef:
    ref = tensors.get(name)
    if ref is None:
        raise TensorMissing(f"{name} is not in the files. {INSPECT}")
    return ref


def _reject(bad: torch.Tensor, name: str, first_row: int, seen: str, expected: str) -> None:
    if bool(bad.any()):
        index = [int(i) for i in bad.nonzero()[0]]
        index[0] += first_row
        raise _about(
            name,
            TensorValue(
                f"{name}{index} {seen}, expected {expected}; {int(bad.sum())} such in these rows. "
                "The file is damaged; download its shard again."
            ),
        )


def _check_scale_header(
    tensors: Mapping[str, TensorRef], name: str, shape: tuple[int, int], why: str
) -> None:
    scale = scale_name(name)
    ref = tensors.get(scale)
    if ref is None:
        raise TensorMissing(
            f"{scale} is not in the files, though {name} is stored as {tensors[name].dtype} and means "
            f"nothing without it. {INSPECT}"
        )
    if ref.dtype not in SCALES:
        raise _about(
            scale,
            TensorDtype(
                f"{scale} is stored as {ref.dtype}, expected F8_E8M0 (one power-of-two byte per block). {INSPECT}"
            ),
        )
    if ref.shape != shape:
        raise _about(
            scale,
            TensorShape(
                f"{scale} is {ref.shape}, expected {shape} for {why}. The shard may be cut short. {INSPECT}"
            ),
        )
