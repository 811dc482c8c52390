"""Parser of capture files: sidecars are validated, payloads are read by range.

Every number of a sidecar is checked before use: counts and sizes are integers, the size of an entry follows from its
shape and dtype and lies inside the payload, and the size and number of entries of a sidecar are limited. Arbitrary
bytes therefore give a `CaptureFileError` or a correct array, never a crash, a hang or an allocation larger than the
files. Payload and sidecar are opened together; if a writer replaces the capture meanwhile, the reader retries. NumPy
only.
"""

from __future__ import annotations

import math
import mmap as mapping
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from birkhoff.capture.spec.dtypes import STORED, Array
from birkhoff.capture.store.entry import CaptureEntry
from birkhoff.errors import CaptureChecksum, CaptureFileError, quoted
from birkhoff.small_file import SIDECAR_BYTES, open_regular, read_json

MAX_ENTRIES = 1 << 20
MAX_ROWS = 1 << 40
MAX_WIDTH = 1 << 31
MAX_DIMENSIONS = 8
_BLOCK = 4 << 20
_NO_ROWS = np.empty(0)
_ENTRY_WORDS = frozenset(
    """layer hook shape offset nbytes dtype row_shape positions token_ids phase row_offset steps crc32 scale axes
    entries""".split()
)


@dataclass(frozen=True, slots=True)
class PayloadRange:
    """Where the rows of an entry are in the payload. `unread` is the entry with its labels and without its rows."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]  # rows first
    crc32: int | None
    row_offset: int | None
    request_id: str | None
    unread: CaptureEntry

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def site(self) -> tuple[str, int]:
        return self.unread.hook, self.unread.layer

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and row shape."""
        return self.unread.dtype, self.shape[1:]

    @property
    def name(self) -> str:
        hook, layer = self.site
        return f"{hook}[{layer}], bytes {self.offset} to {self.offset + self.nbytes}"


class CaptureFile:
    """An open sidecar and its payload. `facts` are the fields of the sidecar besides its entries.

    Without `labels`, positions, token ids and phases are checked but not kept: for small rows they exceed the payload.
    """

    def __init__(self, sidecar: str | os.PathLike[str], labels: bool = True):
        self.path = Path(sidecar)
        self._keep_labels = labels
        self.payload_path = self.path.with_suffix(".bin")
        self._file = -1
        for _ in range(8):  # a capture that is being replaced is complete again after a moment
            self._file = _open(self.payload_path, "payload")
            try:
                self.facts = _load(self.path)
                size = os.fstat(self._file).st_size
                if os.path.samestat(os.fstat(self._file), os.stat(self.payload_path)):
                    self.records = self._parse(size)
                    return
            except FileNotFoundError:
                self._refuse(f"the payload {self.payload_path.name} has been removed. Read another capture.")
            except BaseException:
                self.close()
                raise
            self.close()
        self._refuse("keeps changing while it is read. Wait until its writer is done.")

    def read(self, record: PayloadRange, verify: bool = True, mmap: bool = False) -> CaptureEntry:
        """The rows of a record. With `mmap` the file is mapped; changes to the array stay private."""
        stored = STORED[record.unread.dtype]
        if mmap and record.nbytes and record.offset % stored.itemsize == 0:
            flat = self._mapped(record, stored)
            total = zlib.crc32(_bytes_of(flat)) if verify and record.crc32 is not None else record.crc32
        else:
            flat = np.empty(record.nbytes // stored.itemsize, stored)
            total = self._fill(record, _bytes_of(flat), verify)
        self._compare(record, total)
        return replace(record.unread, array=flat.reshape(record.shape))

    def check(self, record: PayloadRange) -> None:
        """Compare a record with its checksum in bounded memory."""
        total = 0
        buffer = memoryview(bytearray(min(_BLOCK, record.nbytes)))
        for start in range(0, record.nbytes, _BLOCK):
            view = buffer[: min(_BLOCK, record.nbytes - start)]
            self._read_into(record, view, record.offset + start)
            total = zlib.crc32(view, total)
        if record.crc32 is not None:
            self._compare(record, total)

    def read_rows(self, record: PayloadRange, start: int, stop: int) -> CaptureEntry:
        """Some rows of a record, without checking its checksum."""
        row_bytes = record.nbytes // record.rows
        array = np.empty((stop - start, *record.shape[1:]), STORED[record.unread.dtype])
        self._read_into(record, _bytes_of(array), record.offset + start * row_bytes)
        return record.unread.with_rows(array, start)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> CaptureFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mapped(self, record: PayloadRange, stored: np.dtype[Any]) -> Array:
        """Map the record in the open file, even if another file now has its name."""
        first = record.offset - record.offset % mapping.ALLOCATIONGRANULARITY
        pages = mapping.mmap(
            self._file, record.offset + record.nbytes - first, access=mapping.ACCESS_COPY, offset=first
        )
        return np.frombuffer(pages, stored, record.nbytes // stored.itemsize, record.offset - first)

    def _compare(self, record: PayloadRange, total: int | None) -> None:
        if total != record.crc32:
            raise CaptureChecksum(
                f"{self.payload_path}: {record.name} changed since it was written (checksum {total}, expected "
                f"{record.crc32}). Take this record from another copy; the others can be read with on_damage."
            )

    def _fill(self, record: PayloadRange, view: memoryview, verify: bool) -> int | None:
        if not verify or record.crc32 is None:
            self._read_into(record, view, record.offset)
            return record.crc32
        total = 0
        for start in range(0, len(view), _BLOCK):  # while the block is in the CPU cache
            block = view[start : start + _BLOCK]
            self._read_into(record, block, record.offset + start)
            total = zlib.crc32(block, total)
        return total

    def _read_into(self, record: PayloadRange, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._file, [view[done : done + (1 << 30)]], offset + done)
            if not count:
                self._refuse(f"{record.name} ends at byte {offset + done}: the payload is cut short.")
            done += count

    def _refuse(self, reason: str) -> NoReturn:
        self.close()
        raise CaptureFileError(f"{self.path}: {reason}")

    def _parse(self, size: int) -> list[PayloadRange]:
        facts = self.facts
        if "entries" not in facts:
            rows = {**facts, "offset": 0, "dtype": facts.get("dtype", "float32")}
            records = [self._record(rows, "float32", size, whole=True)]
            if records[0].nbytes != size:
                self._refuse(
                    f"{records[0].name} are expected, and the payload has {size}. It was cut or belongs to another "
                    "sidecar."
                )
        else:
            entries = facts["entries"]
            if not isinstance(entries, list) or len(entries) > MAX_ENTRIES:
                self._refuse(f"entries are {_kind(entries)}, expected a list of up to {MAX_ENTRIES}.")
            records, claimed = [], 0
            for entry in entries:
                records.append(self._record(entry, facts.get("dtype"), size))
                claimed += records[-1].nbytes
                if claimed > size:  # overlapping entries could require any amount of memory
                    self._refuse(
                        f"entries up to {records[-1].name} claim more than the {size} bytes of the payload."
                    )
        self.facts = {name: value for name, value in facts.items() if name not in _ENTRY_WORDS}
        return records

    def _record(self, entry: Any, dtype: Any, size: int, whole: bool = False) -> PayloadRange:
        if not isinstance(entry, dict):
            self._refuse(f"an entry is {_kind(entry)}, expected an object.")
        layer = self._whole(entry, "layer", 1 << 31)
        hook = entry.get("hook")
        if not isinstance(hook, str) or len(hook) > 256:
            self._refuse(f"hook is {quoted(hook)}, expected a name.")
        label = f"{quoted(hook)}[{layer}]"
        dtype = entry.get("dtype", dtype)
        if not isinstance(dtype, str) or dtype not in STORED:
            self._refuse(f"dtype of {label} is {quoted(dtype)}, expected one of {', '.join(STORED)}.")
        shape: Any = entry.get("shape")
        if not _whole_numbers(shape, MAX_ROWS) or len(shape) != 2 or not 1 <= shape[1] <= MAX_WIDTH:
            self._refuse(f"shape of {label} is {quoted(shape)}, expected [rows, width].")
        rows, width = shape
        needed = rows * width * STORED[dtype].itemsize
        offset = self._whole(entry, "offset", 1 << 62)
        nbytes = needed if whole else self._whole(entry, "nbytes", 1 << 62)
        if nbytes != needed:
            self._refuse(f"{label} has {nbytes} bytes, expected {needed} for {dtype} {shape}.")
        if offset + nbytes > size:
            self._refuse(
                f"{label} needs bytes {offset} to {offset + nbytes}, and the payload has {size}. It is cut short; "
                "take it from another copy."
            )
        row_shape = entry.get("row_shape")
        if row_shape is not None and (
            not _whole_numbers(row_shape, MAX_WIDTH)
            or len(row_shape) > MAX_DIMENSIONS
            or (row_shape and math.prod(row_shape) != width)
        ):
            self._refuse(f"row_shape of {label} is {quoted(row_shape)}, expected a shape of {width} numbers.")
        shape = (rows, *row_shape) if row_shape else (rows, width)
        unread = CaptureEntry(
            layer,
            hook,
            _NO_ROWS,
            dtype,
            self._labels(entry, "positions", label, rows),
            self._labels(entry, "token_ids", label, rows),
            self._phases(entry, label, rows),
            self._scale(entry, label, rows, dtype),
            self._axes(entry, label),
        )
        return PayloadRange(
            offset,
            nbytes,
            shape,
            self._whole(entry, "crc32", 1 << 32) if entry.get("crc32") is not None else None,
            self._whole(entry, "row_offset", 1 << 62) if "row_offset" in entry else None,
            entry["request_id"] if isinstance(entry.get("request_id"), str) else None,
            unread,
        )

    def _whole(self, entry: dict[str, Any], name: str, limit: int) -> int:
        value = entry.get(name)
        if type(value) is not int or not 0 <= value < limit:
            self._refuse(f"{name} of an entry is {quoted(value)}, expected a whole number below {limit}.")
        return value

    def _labels(self, entry: dict[str, Any], name: str, label: str, rows: int) -> list[int] | None:
        values = entry.get(name)
        if values is not None and (not _whole_numbers(values, 1 << 62) or len(values) != rows):
            self._refuse(f"{name} of {label} are {_kind(values)}, expected {rows} whole numbers.")
        return values if self._keep_labels else None

    def _phases(self, entry: dict[str, Any], label: str, rows: int) -> list[str] | None:
        phase = entry.get("phase")
        words = [phase] * min(rows, 1) if isinstance(phase, str) else phase
        if phase is None:
            return None
        known = isinstance(words, list) and all(
            isinstance(word, str) and word in ("prefill", "decode") for word in words
        )
        if not known or (isinstance(phase, list) and len(phase) != rows):
            self._refuse(f"phase of {label} is {_kind(phase)}, expected prefill or decode for {rows} rows.")
        if not self._keep_labels:
            return None
        # The payload bounds the number of rows, so repeating a word for each row is safe.
        return [phase] * rows if isinstance(phase, str) else phase

    def _scale(self, entry: dict[str, Any], label: str, rows: int, dtype: str) -> Array | None:
        scale = entry.get("scale")
        if scale is None and dtype != "fp8_e4m3":
            return None
        numbers = isinstance(scale, list) and all(
            type(value) in (int, float) and abs(value) <= 3.5e38
            for value in scale  # NaN compares as false
        )
        if not numbers or len(scale) != rows:  # type: ignore[arg-type]
            self._refuse(f"scale of {label} is {_kind(scale)}, expected {rows} numbers.")
        return np.array(scale, dtype=np.float32)

    def _axes(self, entry: dict[str, Any], label: str) -> list[str] | None:
        axes = entry.get("axes")
        if axes is not None and not (
            isinstance(axes, list)
            and len(axes) <= MAX_DIMENSIONS
            and all(isinstance(axis, str) for axis in axes)
        ):
            self._refuse(f"axes of {label} are {quoted(axes)}, expected names.")
        return axes


def _bytes_of(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _open(path: Path, what: str) -> int:
    """Open a regular file; another kind, such as a pipe, could block the reader forever."""
    try:
        return open_regular(path)
    except FileNotFoundError:
        raise CaptureFileError(f"{path}: there is no such {what}.{_hint(path)}") from None
    except OSError as error:
        raise CaptureFileError(f"{path}: the {what} cannot be opened ({error.strerror}).") from None
    except ValueError as error:  # a NUL character
        raise CaptureFileError(f"{path}: the {what} cannot be opened ({error}).") from None


def _hint(path: Path) -> str:
    open_files = path.with_name(path.name + ".tmp").exists() or path.with_suffix(".journal").exists()
    return (
        " It is still being written, or a writer died: run birkhoff.capture.store.repair.repair."
        if open_files
        else ""
    )


def _load(path: Path) -> dict[str, Any]:
    try:
        facts = read_json(path, SIDECAR_BYTES)
    except FileNotFoundError:
        raise CaptureFileError(f"{path}: there is no such sidecar.{_hint(path)}") from None
    except OSError as error:
        raise CaptureFileError(f"{path}: the sidecar cannot be opened ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise CaptureFileError(
            f"{path}: the sidecar is not JSON ({error}). Take it from another copy."
        ) from None
    if not isinstance(facts, dict):
        raise CaptureFileError(f"{path}: the sidecar is {_kind(facts)}, expected an object.")
    return facts


def _kind(value: Any) -> str:
    if isinstance(value, (list, dict, str)):
        return f"a {type(value).__name__} of {len(value)}"
    return quoted(value)


def _whole_numbers(values: Any, limit: int) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < limit for value in values)
