"""Dtypes of capture files: little-endian, without a header, named in the sidecar.

NumPy has neither bfloat16 nor fp8; their rows are kept as integers of the same bits, and `to_float32` returns their
values. Every bf16, fp16 and fp8 number is exactly representable in float32. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Dtypes accepted in a sidecar. The first four are written by this package, the others by other writers.
STORED: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
    "fp8_e4m3": np.dtype("u1"),
    "float64": np.dtype("<f8"),
    "uint16": np.dtype("<u2"),
    "uint8": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
WRITTEN = ("bfloat16", "float16", "float32", "fp8_e4m3")


def to_float32(array: Array, dtype: str, scale: Array | None = None) -> Array:
    """The values of stored rows as float32; `scale` is one factor per row, required for fp8."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    if dtype == "fp8_e4m3":
        values = _E4M3[array]
        if scale is not None:
            values = values * scale.reshape(-1, *[1] * (array.ndim - 1)).astype(np.float32)
        return values
    with np.errstate(invalid="ignore"):  # NaN stays NaN; NumPy warns about some of them
        return array.astype(np.float32)


def _e4m3_values() -> Array:
    """All 256 values: 1 sign bit, 4 exponent bits (bias 7), 3 mantissa bits; all ones is NaN; no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    small = mantissa / 8 * 2.0**-6
    size = np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[codes & 127 == 127] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


_E4M3 = _e4m3_values()
