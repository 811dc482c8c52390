"""Safetensors files: headers checked before use, tensors read by range, files written as a stream.

The reader trusts nothing: the header length is capped and compared with the file, offsets must tile the data without
gap or overlap, and every tensor's bytes must follow from its dtype and shape. Payloads are read with plain file reads
into torch memory, never mapped, because mapped pages count as resident. `SafetensorsWriter` declares every tensor
first, takes the bytes in any order and row by row, and the file appears under its name only when it is complete and
on disk. E8M0 scales are handed out, and taken, as uint8 bytes.
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

from birkhoff.errors import CheckpointError, TensorDtype, TensorShape

MAX_HEADER_BYTES = 100_000_000  # the cap of the format's own library
MAX_DIMENSIONS = 8
MAX_TENSORS = 200_000  # the largest model has 145,116; parsing many more would take seconds

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
    """One tensor of one file: `offset` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Form(NamedTuple):
    """What equal tensors share, kept once."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class SafetensorsHeader(NamedTuple):
    tensors: dict[str, TensorEntry]  # in file order
    metadata: dict[str, str]


def item_bytes(dtype: str) -> int:
    return TORCH_DTYPES[dtype].itemsize


def read_header(path: str | Path) -> SafetensorsHeader:
    """Names, dtypes, shapes and offsets of a file, fully checked against its size. Reads no payload."""
    path = Path(path)
    try:
        with open(path, "rb", buffering=0) as file:
            return _parse(path, *_header_bytes(path, file))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing in {path.parent}. Download it again.") from None
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Check that it is a readable file."
        ) from None


def read_rows(
    entry: TensorEntry, start: int = 0, stop: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows [start, stop) along the first axis, read into `out` (contiguous, on the CPU) or a fresh tensor."""
    rows = entry.shape[0] if entry.shape else 1
    stop = rows if stop is None else stop
    assert 0 <= start <= stop <= rows, (start, stop, rows)
    shape = (stop - start, *entry.shape[1:]) if entry.shape else ()
    dtype = TORCH_DTYPES[entry.dtype]
    if out is None:
        out = torch.empty(shape, dtype=dtype)
    elif (
        out.dtype != dtype or tuple(out.shape) != shape or not out.is_contiguous() or out.device.type != "cpu"
    ):
        raise TensorShape(
            f"cannot read {entry.dtype} {shape} of {entry.path.name} into {out.dtype} {tuple(out.shape)} "
            f"on {out.device}: a contiguous CPU tensor of the same dtype and shape is needed."
        )
    row_bytes = entry.nbytes // rows if rows else 0
    if out.numel():
        with open(entry.path, "rb", buffering=0) as file:
            _fill(file, entry.path, entry.offset + start * row_bytes, memoryview(_as_bytes(out)))
    return out


def layout(
    path: Path, tensors: Mapping[str, tuple[str, Iterable[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The bytes before the first payload of a file with these tensors, and where each of them will lie."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    # Wide items first: then every tensor starts at a multiple of its own item size.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item_bytes(item[1][0])):
        size = math.prod(shape := tuple(shape)) * item_bytes(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path.name} would have a header of {len(text)} bytes, more than the format "
            f"allows ({MAX_HEADER_BYTES}). Use smaller shards."
        )
    return len(text).to_bytes(8, "little") + text, _entries(path, header, 8 + len(text))


class SafetensorsWriter:
    """Writes one file: declare names, dtypes and shapes; then `write` each tensor, whole or by rows; then `close`.

    Used as a context manager it closes on success and removes what it wrote on failure.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[str, Iterable[int]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self.path = Path(path)
        self._partial = self.path.with_name(self.path.name + ".partial")
        prefix, self._entries = layout(self.path, tensors, metadata)
        self._left = {name: entry.nbytes for name, entry in self._entries.items()}
        self._file: BinaryIO = open(self._partial, "wb", buffering=0)  # noqa: SIM115 (closed by close or discard)
        self._file.write(prefix)
        self._file.truncate(len(prefix) + sum(self._left.values()))

    def write(self, name: str, tensor: torch.Tensor, start: int = 0) -> None:
        """Store `tensor` as rows [start, start + len) of the declared tensor; each row exactly once."""
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
        """Flush to disk and give the file its name."""
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
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def write_text(path: Path, text: str) -> None:
    """A small file, complete under its name or not there at all."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make a rename durable; a no-op where directories cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_json(raw: bytes, label: str, unique_keys: bool = True) -> Any:
    """JSON with every way of being malformed as one error; repeated keys are malformed unless said otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{label} names {twice!r} twice. Download it again.")
        return out

    try:
        text = raw.decode()
        del raw  # an index is tens of megabytes; do not hold it twice while its objects are made
        return json.loads(text, object_pairs_hook=unique if unique_keys else None)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label} is not valid JSON ({error}). Download it again.") from None


def _header_bytes(path: Path, file: BinaryIO) -> tuple[bytes, int]:
    """The raw header and the number of payload bytes behind it."""
    total = os.fstat(file.fileno()).st_size
    if total < 8:
        raise CheckpointError(
            f"{path.name} holds {total} bytes, too few for a safetensors header. Download it again."
        )
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path.name} announces a header of {length} bytes, expected 2 to {MAX_HEADER_BYTES}. "
            "It is not a safetensors file, or it is damaged; download it again."
        )
    if length > total - 8:
        raise CheckpointError(
            f"{path.name} is cut short: its header needs {length + 8} bytes, the file has {total}. Download it again."
        )
    raw = bytearray(length)
    _fill(file, path, 8, memoryview(raw))
    return bytes(raw), total - 8 - length


def _parse(path: Path, raw: bytes, payload_bytes: int) -> SafetensorsHeader:
    rows = raw.count(b'"data_offsets"')
    if rows > MAX_TENSORS:
        raise CheckpointError(
            f"the header of {path.name} has {rows} rows, more than the {MAX_TENSORS} allowed. It is damaged or "
            "was made to do harm; download it again."
        )
    header = load_json(raw, f"the header of {path.name}")
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
    """Header rows as entries, in file order, each one consistent in itself."""
    entries: list[tuple[str, TensorEntry]] = []
    known: dict[tuple[str, tuple[int, ...]], _Form] = {}  # a model has 70,000 tensors of some 40 forms
    for name, row in header.items():
        if name != "__metadata__":
            entries.append((name, _entry(path, name, row, base, known)))
    entries.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    return dict(entries)


def _entry(
    path: Path, name: str, row: Any, base: int, known: dict[tuple[str, tuple[int, ...]], _Form]
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
    form = known.setdefault((dtype, tuple(shape)), _Form(sys.intern(dtype), tuple(shape), nbytes))
    return TensorEntry(path, form.dtype, form.shape, base + offsets[0], form.nbytes)


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _fill(file: BinaryIO, path: Path, offset: int, view: memoryview) -> None:
    """Read exactly len(view) bytes; the kernel may hand them over in pieces."""
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done : done + (1 << 30)])  # type: ignore[attr-defined]
        if not count:
            raise CheckpointError(
                f"{path.name} ended at byte {offset + done} while {len(view) - done} more were "
                "expected: it changed while it was read. Try again."
            )
        done += count
