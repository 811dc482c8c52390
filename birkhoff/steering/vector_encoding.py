"""Vectors in requests: a packed blob of several layers, or lists of numbers by layer.

    {"dtype": "float16", "shape": [layers, width], "layer_indices": [4, 20], "data": base64, "scales": [2.0, 1.0]}
    {"4": [0.1, ...], "20": {"vector": [...], "scale": 2.0}}

The forms are distinguished by their keys. Either may have `streams` (the blob for all of its layers): then a row is
one stream wide and applies to those streams. Values are little-endian in requests and float32 here, so the same
numbers give the same vector in either form. Input is not trusted: sizes are compared before bytes are read, and
errors name the field at fault."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.layers import is_list
from birkhoff.option_checks import as_int
from birkhoff.steering.vector import Vector, finite_number

DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_PACKED = ("dtype", "shape", "layer_indices", "data")
_ENTRY = ("vector", "scale", "streams")


@dataclass(frozen=True)
class LayerVector:
    """The vector of one layer. `path` is its request field."""

    layer: int
    vector: Vector
    scale: float
    streams: Any
    path: str


def layer_vectors(raw: Any, path: str) -> list[LayerVector]:
    """The vectors of one hook, ascending by layer."""
    if not isinstance(raw, Mapping):
        raise SteeringError(
            f"is {quoted(raw)}, expected {{layer: numbers}} or a packed blob with {', '.join(_PACKED)}.", path
        )
    entries = list(_unpacked(raw, path) if "data" in raw or "dtype" in raw else _listed(raw, path))
    if not entries:
        raise SteeringError("names no layer. Leave the hook out, or give it a vector.", path)
    seen: dict[int, str] = {}
    for entry in entries:
        if entry.layer in seen:
            raise SteeringError(
                f"layer {entry.layer} is there twice, first as {seen[entry.layer]}. Give it once.", path
            )
        seen[entry.layer] = entry.path
    return sorted(entries, key=lambda entry: entry.layer)


def unpacked_vector(raw: Mapping[str, Any], path: str) -> Vector:
    """A single packed vector: `{"dtype", "shape": [width], "data"}`."""
    unknown = [key for key in raw if key not in ("dtype", "shape", "data")]
    if unknown:
        raise SteeringError(
            f"has the unknown key {quoted(unknown[0])}, expected dtype, shape and data.", path
        )
    shape: Any = raw.get("shape")
    if not is_list(shape) or len(shape) != 1:
        raise SteeringError(f"is {quoted(shape)}, expected [width].", f"{path}.shape")
    return _vector(_numbers(raw, (_size(shape[0], f"{path}.shape[0]"),), path), path)


def unpacked_array(raw: Any, path: str) -> np.ndarray[Any, Any]:
    """A packed array of any shape: `{"dtype", "shape", "data"}`."""
    if not isinstance(raw, Mapping) or set(raw) != {"dtype", "shape", "data"}:
        raise SteeringError(f"is {quoted(raw)}, expected an object with dtype, shape and data.", path)
    if not is_list(raw["shape"]) or not 1 <= len(raw["shape"]) <= 2:
        raise SteeringError(f"is {quoted(raw['shape'])}, expected one or two sizes.", f"{path}.shape")
    shape = tuple(_size(size, f"{path}.shape[{axis}]") for axis, size in enumerate(raw["shape"]))
    return _numbers(raw, shape, path)


def layer_number(key: Any, path: str) -> int:
    """Parse a layer that is the key of an object; negative layers count from the end."""
    layer = as_int(key)
    if layer is None and isinstance(key, str) and len(key) <= 7 and key.removeprefix("-").isascii():
        layer = int(key) if key.removeprefix("-").isdecimal() else None
    if layer is None:
        raise SteeringError(f"has the key {quoted(key)}, expected the number of a layer.", path)
    return layer


def _listed(raw: Mapping[Any, Any], path: str) -> Iterator[LayerVector]:
    for key, value in raw.items():
        layer, where = layer_number(key, path), f"{path}.{key}"
        if not isinstance(value, Mapping):
            yield LayerVector(layer, _vector(value, where), 1.0, None, where)
            continue
        unknown = [name for name in value if name not in _ENTRY]
        if unknown or "vector" not in value:
            fault = f"has the unknown key {quoted(unknown[0])}" if unknown else "has no vector"
            raise SteeringError(f"{fault}, expected {', '.join(_ENTRY)}.", where)
        scale = finite_number(value.get("scale", 1.0), "scale", f"{where}.scale")
        yield LayerVector(
            layer, _vector(value["vector"], f"{where}.vector"), scale, value.get("streams"), where
        )


def packed_rows(raw: Mapping[str, Any], own: tuple[str, ...], path: str) -> list[tuple[int, Vector]]:
    """Layer and row of every row of a packed blob, in their order. `own` are keys of the caller beside the blob's."""
    known = (*_PACKED, *own)
    unknown = [key for key in raw if key not in known]
    missing = [key for key in _PACKED if key not in raw]
    if unknown or missing:
        fault = f"has the unknown key {quoted(unknown[0])}" if unknown else f"has no {missing[0]}"
        raise SteeringError(f"{fault}, expected a packed blob with {', '.join(known)}.", path)
    shape = raw["shape"]
    layers = raw["layer_indices"]
    if not is_list(shape) or len(shape) != 2:
        raise SteeringError(f"is {quoted(shape)}, expected [layers, width].", f"{path}.shape")
    count, width = (_size(size, f"{path}.shape[{axis}]") for axis, size in enumerate(shape))
    if not is_list(layers) or len(layers) != count:
        seen = f"has {len(layers)} entries" if is_list(layers) else f"is {quoted(layers)}"
        raise SteeringError(f"{seen}, expected one for each of {count} rows.", f"{path}.layer_indices")
    rows = _numbers(raw, (count, width), path)
    found = []
    for index, value in enumerate(layers):
        layer = as_int(value)
        if layer is None:
            raise SteeringError(f"is {quoted(value)}, expected a layer.", f"{path}.layer_indices[{index}]")
        found.append((layer, _vector(rows[index], f"{path}.data[{index}]")))
    return found


def _unpacked(raw: Mapping[str, Any], path: str) -> Iterator[LayerVector]:
    rows = packed_rows(raw, ("scales", "streams"), path)
    scales = raw.get("scales")
    if scales is not None and (not is_list(scales) or len(scales) != len(rows)):
        seen = f"has {len(scales)} entries" if is_list(scales) else f"is {quoted(scales)}"
        raise SteeringError(f"{seen}, expected one for each of {len(rows)} rows.", f"{path}.scales")
    for index, (layer, row) in enumerate(rows):
        scale = 1.0 if scales is None else finite_number(scales[index], "scale", f"{path}.scales[{index}]")
        yield LayerVector(layer, row, scale, raw.get("streams"), f"{path}.data[{index}]")


def _numbers(raw: Mapping[str, Any], shape: tuple[int, ...], path: str) -> np.ndarray[Any, Any]:
    dtype = raw.get("dtype")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise SteeringError(f"is {quoted(dtype)}, expected one of {', '.join(DTYPES)}.", f"{path}.dtype")
    data = raw.get("data")
    if not isinstance(data, str):
        raise SteeringError(f"is {quoted(data)}, expected a text of base64.", f"{path}.data")
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SteeringError(f"is not base64 ({error}). Encode the bytes again.", f"{path}.data") from None
    item = np.dtype(DTYPES[dtype]).itemsize
    expected = int(np.prod(shape, dtype=object)) * item
    if len(decoded) != expected:
        raise SteeringError(
            f"has {len(decoded)} bytes, but shape {list(shape)} of {dtype} is {expected}. Check shape and dtype.",
            f"{path}.data",
        )
    return np.frombuffer(decoded, DTYPES[dtype]).reshape(shape)


def _vector(values: Any, path: str) -> Vector:
    if not is_list(values) and not isinstance(values, np.ndarray):
        raise SteeringError(f"is {quoted(values)}, expected a list of numbers.", path)
    try:
        return Vector(values, "the vector")
    except SteeringError as error:
        raise SteeringError(str(error), path) from None


def _size(value: Any, path: str) -> int:
    size = as_int(value)
    if size is None or size < 1:
        raise SteeringError(f"is {quoted(value)}, expected a positive whole number.", path)
    return size
