"""Parse the header of an untrusted GGUF file. Standard library only.

Every count and length is checked against a limit and the remaining bytes before it is used; sizes are Python integers
and cannot overflow; names and keys are unique; tensor data must be contiguous with the format's padding and lie inside
the file. The result is JSON-serialisable, because this file is also a program: `python gguf_header.py FILE` prints it,
and `gguf.py` runs it in a child process with a deadline. Large numeric arrays are returned as their position in the
file (`{"at", "count", "type"}`).
"""

from __future__ import annotations

import json
import os
import struct
import sys
from typing import Any, BinaryIO

MAX_KEYS = 4096
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 64 << 20
MAX_STRINGS = 1 << 20  # over all arrays; the release has 257,021
MAX_ARRAY_BYTES = 256 << 20
MAX_INLINE = 4096
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

# type id -> (name, elements per block, bytes per block)
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

_STRING, _ARRAY = 8, 9
# value type id -> struct code
SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


class MalformedGGUF(ValueError):
    """A malformed file. `kind` is "file", "shape" or "dtype"."""

    def __init__(self, message: str, kind: str = "file"):
        super().__init__(message)
        self.kind = kind


class _Cursor:
    """Reads forward through a file and raises before reading past its end."""

    def __init__(self, file: BinaryIO, size: int):
        self.file = file
        self.size = size
        self.at = 0
        self.strings = 0

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise MalformedGGUF(
                f"is cut short: {what} needs {count} bytes at {self.at}, the file has {self.size}"
            )
        self.at += count
        data = self.file.read(count)
        if len(data) != count:
            raise MalformedGGUF(f"ended while it was read, at byte {self.at}")
        return data

    def skip(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise MalformedGGUF(
                f"is cut short: {what} needs {count} bytes at {self.at}, the file has {self.size}"
            )
        self.at += count
        self.file.seek(self.at)

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def string(self, limit: int, what: str) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise MalformedGGUF(f"announces {length} bytes for {what}, more than the {limit} allowed")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise MalformedGGUF(
                f"has {what} that is not UTF-8 ({error.reason} at byte {error.start})"
            ) from None


def read_header(path: str) -> dict[str, Any]:
    """Return {"version", "alignment", "size", "data", "keys": {key: value}, "types": {key: id}, "tensors": [...]}.

    A tensor is [name, type, shape, offset, bytes] with the outermost dimension first and the offset from the file
    start.
    """
    with open(path, "rb") as file:
        cursor = _Cursor(file, os.fstat(file.fileno()).st_size)
        version = _version(cursor)
        num_tensors = cursor.number("Q", "the tensor count")
        num_keys = cursor.number("Q", "the key count")
        for count, cap, what in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "keys")):
            if count > cap:
                raise MalformedGGUF(f"announces {count} {what}, more than the {cap} allowed")
        keys, types = _keys(cursor, num_keys)
        alignment = keys.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise MalformedGGUF(f"has the alignment {alignment!r}, expected a power of two from 8 to 65536")
        rows = [_tensor(cursor, index) for index in range(num_tensors)]
    data = -(-cursor.at // alignment) * alignment
    tensors = _placed(rows, data, alignment, cursor.size)
    return {
        "version": version,
        "alignment": alignment,
        "size": cursor.size,
        "data": data,
        "keys": keys,
        "types": types,
        "tensors": tensors,
    }


def _version(cursor: _Cursor) -> int:
    magic = cursor.take(4, "the magic")
    if magic != b"GGUF":
        raise MalformedGGUF(f"begins with {magic!r}, expected b'GGUF': it is not a GGUF file")
    version: int = cursor.number("I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = " (a big-endian file; convert it on the machine it came from)" if swapped in (2, 3) else ""
        raise MalformedGGUF(f"has version {version}, expected 2 or 3{why}")
    return version


def _keys(cursor: _Cursor, count: int) -> tuple[dict[str, Any], dict[str, int]]:
    keys: dict[str, Any] = {}
    types: dict[str, int] = {}
    for index in range(count):
        key = cursor.string(MAX_NAME_BYTES, f"the name of key {index}")
        if key in keys:
            raise MalformedGGUF(f"has the key {key[:80]!r} twice")
        kind = cursor.number("I", f"the type of {key[:80]!r}")
        keys[key], types[key] = _value(cursor, kind, key), kind
    return keys, types


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    what = f"the value of {key[:80]!r}"
    if kind in SCALARS:
        return cursor.number(SCALARS[kind], what)
    if kind == _STRING:
        return cursor.string(MAX_STRING_BYTES, what)
    if kind != _ARRAY:
        raise MalformedGGUF(f"gives {key[:80]!r} the value type {kind}, which the format does not have")
    inner = cursor.number("I", what)
    count = cursor.number("Q", what)
    if inner == _STRING:
        cursor.strings += count
        if cursor.strings > MAX_STRINGS:
            raise MalformedGGUF(
                f"announces {count} strings in {key[:80]!r}, more than the {MAX_STRINGS} allowed"
            )
        return [cursor.string(MAX_STRING_BYTES, f"an entry of {key[:80]!r}") for _ in range(count)]
    if inner not in SCALARS:
        raise MalformedGGUF(f"has an array of type {inner} in {key[:80]!r}, expected numbers or strings")
    code = SCALARS[inner]
    size = count * struct.calcsize("<" + code)
    if size > MAX_ARRAY_BYTES:
        raise MalformedGGUF(
            f"announces {size} bytes for {key[:80]!r}, more than the {MAX_ARRAY_BYTES} allowed"
        )
    if count > MAX_INLINE:
        position = {"at": cursor.at, "count": count, "type": code}
        cursor.skip(size, what)
        return position
    return list(struct.unpack(f"<{count}{code}", cursor.take(size, what)))


def _tensor(cursor: _Cursor, index: int) -> tuple[str, str, list[int], int, int]:
    name = cursor.string(MAX_NAME_BYTES, f"the name of tensor {index}")
    if not name.isprintable() or not name:
        raise MalformedGGUF(f"has a tensor named {name[:80]!a}")
    dimensions = cursor.number("I", f"the dimensions of {name}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise MalformedGGUF(f"gives {name} {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}", "shape")
    shape = [cursor.number("Q", f"the shape of {name}") for _ in range(dimensions)]
    kind = cursor.number("I", f"the type of {name}")
    offset = cursor.number("Q", f"the offset of {name}")
    if kind not in TYPES:
        raise MalformedGGUF(f"stores {name} as type {kind}, which Birkhoff does not know", "dtype")
    label, block, block_bytes = TYPES[kind]
    if not all(1 <= size < 1 << 48 for size in shape):
        raise MalformedGGUF(f"gives {name} the shape {shape[::-1]}, expected positive sizes", "shape")
    if shape[0] % block:
        raise MalformedGGUF(
            f"stores {name} with rows of {shape[0]} as {label}, expected a multiple of {block}", "shape"
        )
    count = 1
    for size in shape:
        count *= size
    return name, label, shape[::-1], offset, count // block * block_bytes


def _placed(
    rows: list[tuple[str, str, list[int], int, int]], data: int, alignment: int, size: int
) -> list[list[Any]]:
    """Return the rows in file order with absolute offsets; each must start at the padded end of the previous one."""
    seen: set[str] = set()
    for name, *_ in rows:
        if name in seen:
            raise MalformedGGUF(f"names the tensor {name} twice")
        seen.add(name)
    placed, end = [], 0
    for name, label, shape, offset, nbytes in sorted(rows, key=lambda row: row[3]):
        expected = -(-end // alignment) * alignment
        if offset != expected:
            word = "overlaps the tensor before it" if offset < end else "leaves a hole before it"
            raise MalformedGGUF(f"has {name} at {offset} where {expected} is expected: it {word}")
        end = offset + nbytes
        placed.append([name, label, shape, data + offset, nbytes])
    if not rows:
        return placed
    present = size - data
    if end > present:
        raise MalformedGGUF(f"is cut short: its tensors need {data + end} bytes, the file has {size}")
    if present - end >= alignment:
        raise MalformedGGUF(f"is too long: its tensors need {data + end} bytes, the file has {size}")
    return placed


def main(path: str) -> int:
    """Print the header or the error as one JSON object."""
    try:
        result: dict[str, Any] = {"header": read_header(path)}
    except MalformedGGUF as error:
        result = {"kind": error.kind, "malformed": str(error)}
    except OSError as error:
        result = {"kind": "file", "malformed": f"cannot be read ({error.strerror})"}
    except MemoryError:
        result = {
            "kind": "file",
            "malformed": "has a header that does not fit the memory set aside for reading it",
        }
    sys.stdout.write(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
