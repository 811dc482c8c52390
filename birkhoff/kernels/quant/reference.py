"""The number formats in plain PyTorch, on any device (spec 11).

Three facts are used throughout. A power of two is a float32 with an empty mantissa, so scales are built and read as
integer bits. An E2M1 nibble is an E4M3 byte with shifted bits, 2^6 smaller, so FP4 uses the FP8 cast. And
448 = 1.75 * 2^8, 6 = 1.5 * 2^2, so ceil(log2(amax / 448)) is the exponent of amax plus one mantissa comparison.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from birkhoff.errors import ConfigError, TensorDtype, TensorShape, TensorValue

FP8_BLOCK = 128
FP4_GROUP = 32

_MANTISSA = 0x7FFFFF
# (exponent, mantissa) of the largest value of each format: 448 and 6.
_FP8_MAX = (8, 0x600000)
_FP4_MAX = (2, 0x400000)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Bytes to powers of two, 2^(byte - 127); byte 255 is NaN."""
    if codes.dtype == torch.float8_e8m0fnu:
        codes = codes.view(torch.uint8)
    if codes.dtype != torch.uint8:
        raise TensorDtype(
            f"E8M0 scales come as uint8 bytes, got {codes.dtype}. View the stored bytes, do not cast."
        )
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, 0x00400000, bits)  # 2^-127 is subnormal in float32
    bits = torch.where(codes == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def dequant_fp8(codes: Tensor, scale: Tensor, block: int = FP8_BLOCK) -> Tensor:
    """E4M3 codes [out, in] times one E8M0 scale per block x block tile; the last tiles may be partial."""
    if codes.dtype in (torch.uint8, torch.int8):
        codes = codes.view(torch.float8_e4m3fn)
    if codes.dtype != torch.float8_e4m3fn or codes.ndim != 2:
        raise TensorDtype(
            f"FP8 codes are a float8_e4m3fn or uint8 matrix, got {codes.dtype} {tuple(codes.shape)}."
        )
    rows, columns = codes.shape
    expected = (-(-rows // block), -(-columns // block))
    if tuple(scale.shape) != expected:
        raise TensorShape(
            f"FP8 scale is {tuple(scale.shape)}, expected {expected} for a {rows}x{columns} weight in "
            f"{block}x{block} tiles."
        )
    factor, values = decode_e8m0(scale), codes.to(torch.float32)
    if rows % block == 0 and columns % block == 0:
        tiles = values.view(expected[0], block, expected[1], block)
        tiles.mul_(factor[:, None, :, None])
    else:
        by_row = factor.repeat_interleave(block, 0)[:rows]
        values.mul_(by_row.repeat_interleave(block, 1)[:, :columns])
    return values


def dequant_fp4(codes: Tensor, scale: Tensor) -> Tensor:
    """Packed E2M1 codes [out, in/2], low nibble first, times one E8M0 scale per 32 inputs."""
    if codes.dtype == torch.int8:
        codes = codes.view(torch.uint8)
    if codes.dtype != torch.uint8 or codes.ndim != 2:
        raise TensorDtype(f"FP4 codes are an int8 or uint8 matrix, got {codes.dtype} {tuple(codes.shape)}.")
    rows, half = codes.shape
    if (2 * half) % FP4_GROUP or tuple(scale.shape) != (rows, 2 * half // FP4_GROUP):
        raise TensorShape(
            f"FP4 scale is {tuple(scale.shape)} for codes {(rows, half)}, expected "
            f"{(rows, 2 * half // FP4_GROUP)}: one byte per {FP4_GROUP} inputs, two inputs per byte."
        )
    every_byte = torch.arange(256, dtype=torch.uint8, device=codes.device)
    pairs = embedding(codes.to(torch.int32), _decode_e2m1_pairs(every_byte))  # [out, in/2, 2]
    values = pairs.view(rows, 2 * half // FP4_GROUP, FP4_GROUP)
    return values.mul_(decode_e8m0(scale)[:, :, None]).view(rows, 2 * half)


def quant_fp8(weight: Tensor, block: int = FP8_BLOCK) -> tuple[Tensor, Tensor]:
    """Float weight [out, in] to E4M3 codes and E8M0 tile scales. Representable values are exact."""
    _check_matrix(weight, "FP8")
    rows, columns = weight.shape
    padded = pad(weight.to(torch.float32), (0, -columns % block, 0, -rows % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    amax = torch.maximum(tiles.amax((1, 3)), -tiles.amin((1, 3)))
    exponent = _weight_exponent(amax, _FP8_MAX)
    codes = (tiles * _power_of_two(-exponent)[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(padded.shape)[:rows, :columns].contiguous(), (exponent + 127).to(torch.uint8)


def quant_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Float weight [out, in] to packed E2M1 codes and E8M0 scales per 32 inputs; `in` is a multiple of 32."""
    _check_matrix(weight, "FP4")
    rows, columns = weight.shape
    if columns % FP4_GROUP:
        raise TensorShape(
            f"an FP4 weight needs an input width that is a multiple of {FP4_GROUP}, got {columns}. "
            "Write this tensor as bf16 or fp8."
        )
    groups = weight.to(torch.float32).reshape(rows, columns // FP4_GROUP, FP4_GROUP)
    amax = torch.maximum(groups.amax(-1), -groups.amin(-1))
    exponent = _weight_exponent(amax, _FP4_MAX)
    rounded = _round_e2m1(groups * _power_of_two(-exponent)[:, :, None])
    moved = (rounded * 2.0**-6).to(torch.float8_e4m3fn).view(torch.uint8)  # inverse of _decode_e2m1_pairs
    nibbles = (((moved & 0x80) >> 4) | ((moved & 0x1C) >> 2)).view(rows, columns // 2, 2)
    return nibbles[:, :, 0] | (nibbles[:, :, 1] << 4), (exponent + 127).to(torch.uint8)


def fp8_round(x: Tensor, group: int, keep: int = 0) -> Tensor:
    """Round groups of the last axis to E4M3 times a power of two, except its last `keep` channels; the last group may
    be short."""
    if keep:
        if keep >= x.shape[-1]:
            return x
        return torch.cat((fp8_round(x[..., :-keep], group), x[..., -keep:]), dim=-1)
    groups = _grouped(x, group)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(1e-4)
    exponent = _ceil_log2_ratio(amax, _FP8_MAX)
    rounded = (groups * _power_of_two(-exponent)).to(torch.float8_e4m3fn).to(torch.float32)
    return _ungrouped(rounded.mul_(_power_of_two(exponent)), x)


def fp4_round(x: Tensor, group: int = FP4_GROUP) -> Tensor:
    """Round groups of the last axis to E2M1 times a power of two; the last group may be short."""
    groups = _grouped(x, group)
    amax = groups.abs().amax(-1, keepdim=True).clamp_min_(6 * 2.0**-126)
    exponent = _ceil_log2_ratio(amax, _FP4_MAX)
    return _ungrouped(_round_e2m1(groups * _power_of_two(-exponent)).mul_(_power_of_two(exponent)), x)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard of the last axis in natural order, scaled to be orthogonal; float32 inside, one final rounding."""
    width = x.shape[-1]
    if width < 1 or width & (width - 1):
        raise ConfigError(
            f"the Hadamard step needs a power-of-two width, got {width}. Released numerics need "
            "index_head_dim to be a power of two; use numerics='plain' for this model."
        )
    y, half = x.to(torch.float32), 1
    # Butterflies instead of a matmul: the order of additions is fixed, so a row does not depend on other rows.
    while half < width:
        y = y.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        upper, lower = y.unbind(-2)
        y = torch.stack((upper + lower, upper - lower), -2)
        half *= 2
    return y.reshape(x.shape).mul(width**-0.5).to(x.dtype)


def hadamard_fp4(x: Tensor) -> Tensor:
    """The Hadamard transform, then FP4 in groups of 32: what indexer queries and keys are rounded to."""
    return fp4_round(hadamard(x), FP4_GROUP)


def _decode_e2m1_pairs(codes: Tensor) -> Tensor:
    """Bytes [n] to their two E2M1 values [n, 2], low nibble first."""
    # Nibble s.ee.m becomes the E4M3 byte s.00ee.m00, whose value is 2^-6 times the E2M1 one, subnormals included.
    low = ((codes & 0x08) << 4) | ((codes & 0x07) << 2)
    high = (codes & 0x80) | ((codes & 0x70) >> 2)
    return torch.stack((low, high), -1).view(torch.float8_e4m3fn).to(torch.float32).mul_(64.0)


def _ceil_log2_ratio(amax: Tensor, largest: tuple[int, int]) -> Tensor:
    """ceil(log2(amax / largest)) as int32, from the bits of a positive float32."""
    exponent, mantissa = largest
    bits = amax.view(torch.int32)
    return (bits >> 23) - (127 + exponent) + ((bits & _MANTISSA) > mantissa).to(torch.int32)


def _weight_exponent(amax: Tensor, largest: tuple[int, int]) -> Tensor:
    """Exponent of a stored scale; an all-zero tile gets 2^0, and tiny ones stay inside E8M0."""
    if not torch.isfinite(amax).all():
        raise TensorValue(
            "a weight to be quantised holds NaN or infinity, which FP8 and FP4 cannot say. "
            "Check the weights it came from."
        )
    exponent = _ceil_log2_ratio(amax, largest).clamp_min_(-127)
    return torch.where(amax == 0, 0, exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float32 for exponents -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def _round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 for |x| <= 6, ties to the even code."""
    magnitude = x.abs()
    # The grid step doubles at 2 and at 4. Both bounds are grid points, and `round` rounds half to even as the codes do.
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    return (x / step).round_().mul_(step)


def _grouped(x: Tensor, group: int) -> Tensor:
    width = x.shape[-1]
    values = x.to(torch.float32)
    if width % group:
        values = pad(values, (0, -width % group))
    return values.reshape(*x.shape[:-1], -(-width // group), group)


def _ungrouped(groups: Tensor, x: Tensor) -> Tensor:
    return groups.reshape(*x.shape[:-1], groups.shape[-2] * groups.shape[-1])[..., : x.shape[-1]].to(x.dtype)


def _check_matrix(weight: Tensor, name: str) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise TensorShape(
            f"{name} quantisation takes a float matrix, got {weight.dtype} {tuple(weight.shape)}."
        )
