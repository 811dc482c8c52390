"""Read and write safetensors files: validated headers, row-range reads, streaming writes.

`read_header` treats the file as untrusted: the header length is capped and compared with the file size, offsets must
cover the data without gap or overlap, and each tensor's byte count must follow from its dtype and shape. Tensor data
is read with plain reads into torch memory instead of `safe_open`, which maps the file: mapped pages count as resident
memory, and a mapped file that another process truncates kills this one with SIGBUS. `SafetensorsWriter` declares all
tensors first, accepts their rows in any order, and renames the file to its final name only once it is complete and
flushed to disk. E8M0 scales are read and written as uint8.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from birkhoff.atomic_file import sync_directory
from birkhoff.errors import CheckpointError, TensorDtype, TensorShape
from birkhoff.json_limits import parse_json
from birkhoff.small_file import HEADER_BYTES, check_regular, open_regular

MAX_DIMENSIONS = 8
MAX_TENSORS = 200_000  # the largest model has 145,116; parsing far more would take seconds

TORCH_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file. `offset` is in bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _TensorType(NamedTuple):
    """Dtype, shape and size, shared by all entries that have them in common."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsHeader(NamedTuple):
    tensors: dict[str, TensorEntry]  # in file order
    metadata: dict[str, str]


def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a safetensors dtype name."""
    return TORCH_DTYPES[dtype].itemsize


def read_header(path: str | Path) -> SafetensorsHeader:
    """Read and validate a file's header against the file size, without reading tensor data."""
    path = Path(path)
    try:
        return _parse(path, *_read_header_bytes(path))
    except FileNotFoundError:
        link = f" (it is a link to {os.readlink(path)}, where nothing is)" if path.is_symlink() else ""
        raise CheckpointError(f"{path.name} is missing in {path.parent}{link}. Download it again.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Check that it is a readable file."
        ) from None


def read_rows(entry: TensorEntry, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Read rows [start, stop) along the first axis into a new CPU tensor."""
    rows = entry.shape[0] if entry.shape else 1
    stop = rows if stop is None else stop
    assert 0 <= start <= stop <= rows, (start, stop, rows)
    shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
    out = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype])
    if out.numel():
        read_exactly(entry.path, entry.offset + start * (entry.nbytes // rows), memoryview(_as_bytes(out)))
    return out


def read_exactly(path: Path, offset: int, view: memoryview) -> None:
    """Fill `view` from the file at `offset`. A short read raises: the header was checked against the file size."""
    with open(open_regular(path), "rb", buffering=0) as file:
        done = 0
        while done < len(view):
            count = os.preadv(file.fileno(), [view[done : done + (1 << 30)]], offset + done)
            if not count:
                raise CheckpointError(
                    f"{path.name} ended at byte {offset + done} while {len(view) - done} more were "
                    "expected: it changed while it was read. Try again."
                )
            done += count


def build_header(
    path: Path, tensors: Mapping[str, tuple[str, Iterable[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the header bytes of a file with these tensors, and each tensor's entry."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    # Largest item size first, so that each tensor starts at a multiple of its item size.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item_bytes(item[1][0])):
        size = math.prod(shape := tuple(shape)) * item_bytes(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES:
        raise CheckpointError(
            f"{path.name} would have a header of {len(text)} bytes, more than the format "
            f"allows ({HEADER_BYTES}). Use smaller shards."
        )
    return len(text).to_bytes(8, "little") + text, _entries(path, header, 8 + len(text))


class SafetensorsWriter:
    """Write one file: declare names, dtypes and shapes, `write` each tensor whole or by rows, then `close`.

    As a context manager it closes on success and deletes the partial file on an exception.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[str, Iterable[int]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        prefix, self._entries = build_header(self.path, tensors, metadata)
        self._left = {name: entry.nbytes for name, entry in self._entries.items()}
        self._file: BinaryIO = open(self._partial, "wb", buffering=0)  # noqa: SIM115 (closed by close or discard)
        try:
            self._file.write(prefix)
            self._file.truncate(len(prefix) + sum(self._left.values()))
        except OSError:
            self.discard()
            raise

    def write(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Write `tensor` as rows [start, start + len) of the declared tensor. Each row is written exactly once."""
        entry = self._entries[name]
        if tensor.dtype == torch.float8_e8m0fnu:
            tensor = tensor.view(torch.uint8)
        if tensor.dtype != TORCH_DTYPES[entry.dtype]:
            raise TensorDtype(f"{name} was declared {entry.dtype}, got {tensor.dtype}.")
        rows = tensor.shape[0] if tensor.ndim else 1
        declared_rows = entry.shape[0] if entry.shape else 1
        same_columns = tensor.ndim == len(entry.shape) and tuple(tensor.shape[1:]) == entry.shape[1:]
        if not same_columns or start + rows > declared_rows:
            raise TensorShape(f"{name} was declared {entry.shape}, got {tuple(tensor.shape)} at row {start}.")
        data = _as_bytes(tensor.detach().cpu().contiguous())
        self._left[name] -= data.nbytes
        assert self._left[name] >= 0, f"{name} was written twice"
        self._file.seek(entry.offset + start * (entry.nbytes // max(declared_rows, 1)))
        view = memoryview(data)
        while view:
            view = view[self._file.write(view[: 1 << 30]) :]

    def close(self) -> None:
        """Flush to disk and rename the partial file to its final name."""
        unwritten = [name for name, left in self._left.items() if left]
        if unwritten:
            self.discard()
            raise CheckpointError(
                f"{self.path.name}: {len(unwritten)} declared tensors were not fully written, first "
                f"{unwritten[0]}. Nothing was left behind."
            )
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, self.path)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Delete the partial file."""
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def load_json(raw: bytes, label: str, max_bytes: int, unique_keys: bool = True) -> Any:
    """Parse JSON, raising CheckpointError for malformed or large text and, with `unique_keys`, for repeated keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{label} names {twice!r} twice. Download it again.")
        return out

    try:
        return parse_json(raw, max_bytes, object_pairs_hook=unique if unique_keys else None)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label} is not valid JSON ({error}). Download it again.") from None


def _read_header_bytes(path: Path) -> tuple[bytes, int]:
    """Return the raw header and the number of data bytes after it."""
    total = check_regular(path)
    if total < 8:
        raise CheckpointError(
            f"{path.name} holds {total} bytes, too few for a safetensors header. Download it again."
        )
    prefix = bytearray(8)
    read_exactly(path, 0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= HEADER_BYTES:
        raise CheckpointError(
            f"{path.name} announces a header of {length} bytes, expected 2 to {HEADER_BYTES}. "
            "It is not a safetensors file, or it is damaged; download it again."
        )
    if length > total - 8:
        raise CheckpointError(
            f"{path.name} is cut short: its header needs {length + 8} bytes, the file has {total}. Download it again."
        )
    with open(open_regular(path), "rb", buffering=0) as file:
        raw = os.pread(file.fileno(), length, 8)
    if len(raw) < length:
        raise CheckpointError(f"{path.name} changed while it was read. Try again.")
    return raw, total - 8 - length


def _parse(path: Path, raw: bytes, payload_bytes: int) -> SafetensorsHeader:
    rows = raw.count(b'"data_offsets"')
    if rows > MAX_TENSORS:
        raise CheckpointError(
            f"the header of {path.name} has {rows} rows, more than the {MAX_TENSORS} allowed. It is damaged or "
            "was made to do harm; download it again."
        )
    header = load_json(raw, f"the header of {path.name}", HEADER_BYTES)
    if not isinstance(header, dict):
        raise CheckpointError(
            f"the header of {path.name} is a {type(header).__name__}, expected an object. Download it again."
        )
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"__metadata__ of {path.name} is not a map of strings. Download it again.")
    entries = _entries(path, header, 8 + len(raw))
    end = 8 + len(raw)
    for name, entry in entries.items():
        if entry.offset != end:
            word = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise CheckpointError(
                f"{path.name}: {name} {word} (starts at byte {entry.offset}, expected {end}). "
                "The header is damaged; download it again."
            )
        end += entry.nbytes
    present = 8 + len(raw) + payload_bytes
    if end != present:
        word = "is cut short" if end > present else "is too long"
        raise CheckpointError(
            f"{path.name} {word}: its header describes {end} bytes, the file has {present}. Download it again."
        )
    return SafetensorsHeader(entries, metadata)


def _entries(path: Path, header: dict[str, Any], base: int) -> dict[str, TensorEntry]:
    """Convert header rows to validated entries, in file order."""
    entries: list[tuple[str, TensorEntry]] = []
    known: dict[tuple[str, tuple[int, ...]], _TensorType] = {}  # 70,000 tensors share about 40 types
    for name, row in header.items():
        if name != "__metadata__":
            entries.append((name, _entry(path, name, row, base, known)))
    entries.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    return dict(entries)


def _entry(
    path: Path, name: str, row: Any, base: int, known: dict[tuple[str, tuple[int, ...]], _TensorType]
) -> TensorEntry:
    if not name.isprintable():
        raise CheckpointError(
            f"{path.name} holds a tensor named {name!a}. The header is damaged; download it again."
        )
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{path.name}: the header row of {name} is not dtype, shape and data_offsets. Download the file again."
        )
    dtype = row["dtype"]
    shape = row["shape"]
    offsets = row["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise TensorDtype(
            f"{path.name}: {name} is stored as {dtype!r}, expected one of {', '.join(TORCH_DTYPES)}."
        )
    if not _whole_numbers(shape) or len(shape) > MAX_DIMENSIONS:
        raise TensorShape(
            f"{path.name}: {name} has shape {shape!r}, expected up to {MAX_DIMENSIONS} whole numbers."
        )
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(
            f"{path.name}: data_offsets of {name} are {offsets!r}, expected two ascending numbers. "
            "Download the file again."
        )
    nbytes = offsets[1] - offsets[0]
    needed = math.prod(shape) * item_bytes(dtype)
    if nbytes != needed:
        raise TensorShape(
            f"{path.name}: {name} has {nbytes} bytes, expected {needed} for {dtype} {tuple(shape)}. "
            "Download the file again."
        )
    tensor_type = known.setdefault(
        (dtype, tuple(shape)), _TensorType(sys.intern(dtype), tuple(shape), nbytes)
    )
    return TensorEntry(path, tensor_type.dtype, tensor_type.shape, base + offsets[0], tensor_type.nbytes)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()
