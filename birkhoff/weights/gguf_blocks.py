"""Convert ggml block types to and from the released packing, bit-exactly.

MXFP4 holds the same FP4 codes and E8M0 scales as the release in a different order: 17 bytes per 32 values, first the
scale, then byte j with element j in the low nibble and element j + 16 in the high nibble; the release stores elements
2k and 2k + 1 in byte k. Only nibbles move, so both directions are lossless. Q8_0 is 34 bytes per 32 values, a float16
step and 32 signed bytes, rounded as ggml does (half away from zero). Rows are decoded by `kernels.packed`, types that
it does not know by the `gguf` package.
"""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.errors import CheckpointError, TensorDtype
from birkhoff.kernels.packed import TYPES, dequantise

GROUP = 32
MXFP4_BYTES = 17
Q8_0_BYTES = 34
_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_HIGH = np.uint64(0xF0F0F0F0F0F0F0F0)
_FOUR = np.uint64(4)
_MXFP4 = np.dtype([("scale", "u1"), ("codes", "V16")])


def pack_mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Convert released codes [rows, in/2] and scales [rows, in/32] to blocks [rows, in/32 * 17], uint8."""
    rows, groups = scale.shape
    source = np.ascontiguousarray(_bytes(codes)).reshape(rows, groups, 16).view(np.uint64)
    first, second = source[..., 0], source[..., 1]  # elements 0..15 and 16..31, two per byte
    even = (first & _LOW) | ((second & _LOW) << _FOUR)
    odd = ((first >> _FOUR) & _LOW) | (second & _HIGH)
    out = np.empty((rows, groups), _MXFP4)
    out["scale"] = _bytes(scale)
    pairs = _as_bytes(even).astype(np.uint16) | (_as_bytes(odd).astype(np.uint16) << np.uint16(8))
    out["codes"] = pairs.view("V16")[..., 0]
    return torch.from_numpy(out.view(np.uint8).reshape(rows, groups * MXFP4_BYTES))


def unpack_mxfp4(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert blocks [rows, in/32 * 17] to released codes [rows, in/2], int8, and scales [rows, in/32], uint8."""
    rows = blocks.shape[0]
    raw = np.ascontiguousarray(blocks.numpy()).view(_MXFP4)
    groups = raw.shape[1]
    pairs = np.ascontiguousarray(raw["codes"]).view(np.uint16).reshape(rows, groups, 8)
    even = (pairs & np.uint16(0xFF)).astype(np.uint8).view(np.uint64)[..., 0]
    odd = (pairs >> np.uint16(8)).astype(np.uint8).view(np.uint64)[..., 0]
    out = np.empty((rows, groups, 2), np.uint64)
    out[..., 0] = (even & _LOW) | ((odd & _LOW) << _FOUR)
    out[..., 1] = ((even >> _FOUR) & _LOW) | (odd & _HIGH)
    codes = torch.from_numpy(out.view(np.uint8).reshape(rows, groups * 16)).view(torch.int8)
    return codes, torch.from_numpy(np.ascontiguousarray(raw["scale"]))


def pack_q8_0(values: torch.Tensor) -> torch.Tensor:
    """Quantise float32 [rows, in] to blocks [rows, in/32 * 34], uint8."""
    groups = values.float().reshape(-1, GROUP)
    # `abs_` turns -0.0 into 0.0.
    largest = torch.maximum(groups.amax(1, keepdim=True), -groups.amin(1, keepdim=True)).abs_()
    step = largest / 127
    inverse = torch.where(step == 0, 0.0, 1 / step)
    half_step = step.to(torch.float16)
    if not bool(torch.isfinite(half_step).all()) or not bool(torch.isfinite(inverse).all()):
        raise TensorDtype(
            "a block holds numbers too large or too small for the float16 step of Q8_0. Write this tensor as bf16 "
            "or f32."
        )
    scaled = groups * inverse
    whole = scaled.trunc()
    whole += scaled.sub_(whole).mul_(2).trunc_()  # round half away from zero
    out = torch.empty((len(groups), Q8_0_BYTES), dtype=torch.uint8)
    out[:, :2] = half_step.view(torch.uint8)
    out[:, 2:] = whole.to(torch.int8).view(torch.uint8)
    return out.view(values.shape[0], -1)


def unpack_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Dequantise blocks [rows, in/32 * 34] to float32 [rows, in]."""
    return dequantise(TYPES["Q8_0"], blocks)


def decode(blocks: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    """Decode raw rows [rows, row bytes] of any block type to float32 [rows, in]."""
    if kind in TYPES:
        return dequantise(TYPES[kind], blocks)
    try:
        import gguf
        from gguf import quants
    except ImportError:
        raise TensorDtype(
            f"{name} is stored as {kind}, which is decoded by the package gguf, and that is not installed. "
            "Install it (pip install 'birkhoff-v4[gguf]'), or use a file with MXFP4, Q8_0, BF16, F16 or F32."
        ) from None
    try:
        with np.errstate(all="ignore"):  # callers reject non-finite values
            values = quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    except (KeyError, NotImplementedError, ValueError) as error:
        raise TensorDtype(
            f"{name} is stored as {kind}, which the installed gguf package cannot decode ({error}). "
            "Use a file with MXFP4, Q8_0, BF16, F16 or F32."
        ) from None
    if values.shape[0] != blocks.shape[0] or values.dtype != np.float32:
        raise CheckpointError(
            f"{name}: decoding {kind} gave {values.dtype} {values.shape}. Update the gguf package."
        )
    return torch.from_numpy(np.ascontiguousarray(values))


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return (tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)).numpy()


def _as_bytes(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint8).reshape(*words.shape, 8)
