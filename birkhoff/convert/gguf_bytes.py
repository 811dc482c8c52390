"""Encode GGUF headers (format version 3): typed metadata, then one row per tensor with its offset."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from birkhoff.weights.gguf_header import DEFAULT_ALIGNMENT, SCALARS, TYPES
from birkhoff.weights.gguf_keys import MetadataEntry

_STRING, _ARRAY = 8, 9
_TYPE_IDS = {name: type_id for type_id, (name, _, _) in TYPES.items()}


class TensorRow(NamedTuple):
    """A tensor to write. `shape` is outermost first."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        _, block, block_bytes = TYPES[_TYPE_IDS[self.kind]]
        return self.shape[-1] // block * block_bytes

    @property
    def nbytes(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows * self.row_bytes


def block_width(kind: str) -> int:
    """Return the number of values per block."""
    return TYPES[_TYPE_IDS[kind]][1]


def encode_header(
    keys: Sequence[MetadataEntry], tensors: Sequence[TensorRow]
) -> tuple[bytes, list[int], int]:
    """Return the padded header, the absolute offset of each tensor, and the file size."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(keys))]
    for key in keys:
        parts += [_string(key.name), _value(key.kind, key.value)]
    offsets, end = [], 0
    for tensor in tensors:
        at = _padded(end)
        offsets.append(at)
        end = at + tensor.nbytes
        dimensions = tensor.shape[::-1]
        parts.append(
            _string(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        )
        parts.append(struct.pack("<IQ", _TYPE_IDS[tensor.kind], at))
    header = b"".join(parts)
    header += b"\0" * (_padded(len(header)) - len(header))
    return header, [len(header) + at for at in offsets], len(header) + _padded(end)


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int | tuple[int, int], value: Any) -> bytes:
    if kind == _STRING:
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(kind, int):
        return struct.pack("<I" + SCALARS[kind], kind, value)
    inner = kind[1]
    head = struct.pack("<IIQ", _ARRAY, inner, len(value))
    if inner == _STRING:
        return head + b"".join(map(_string, value))
    if isinstance(value, (bytes, bytearray)):
        return head + bytes(value)
    return head + struct.pack(f"<{len(value)}{SCALARS[inner]}", *value)
