"""GGUF files for tests: valid ones by our writer, malformed ones by hand, others by the `gguf` package."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from birkhoff.convert.convert import convert
from birkhoff.convert.gguf_bytes import TensorRow, encode_header
from birkhoff.weights.gguf_keys import MetadataEntry


def tiny_gguf(source: Path, path: Path, **options) -> Path:
    convert(source, path, **options)
    return path


def raw_file(path: Path, keys: list[MetadataEntry], tensors: list[tuple[TensorRow, bytes]]) -> Path:
    """Write a file with the given metadata and bytes, valid or not."""
    header, offsets, size = encode_header(keys, [row for row, _ in tensors])
    data = bytearray(header) + bytearray(size - len(header))
    for (_, payload), at in zip(tensors, offsets):
        data[at : at + len(payload)] = payload
    path.write_bytes(data)
    return path


def by_the_package(
    path: Path, keys: dict[str, object], tensors: dict[str, tuple[np.ndarray, str | None]]
) -> Path:
    """Write a file with the `gguf` package. `tensors` are arrays and the type to quantise them to."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "deepseek4")
    for key, value in keys.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (array, kind) in tensors.items():
        if kind is None:
            writer.add_tensor(name, array)
        else:
            index = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(array, index), raw_dtype=index)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def head(tensors: int = 0, keys: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def tensor_row(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
