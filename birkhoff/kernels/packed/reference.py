"""Dequantisation of every packed type in plain PyTorch, on any device.

`dequantise(type, codes [rows, row bytes], scales) -> float32 [rows, columns]`. The operations and their order are those
of the format's definition in float32, so that results equal those of ggml's own decoders bit for bit. A damaged block
(a scale that is NaN or infinite) gives NaN or infinite values; nothing is rejected here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from birkhoff.kernels import quant
from birkhoff.kernels.packed.grids import grid
from birkhoff.kernels.packed.types import Q8_ROWS, PackedType

_FP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantise(kind: PackedType, codes: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The values of a packed matrix, float32 [rows, columns]."""
    if kind.dtype is not None:
        return codes.view(kind.dtype).float()
    if kind.name == "FP8":
        return quant.dequant_fp8(codes.view(torch.float8_e4m3fn), _present(scales))
    if kind.name == "FP4":
        return quant.dequant_fp4(codes, _present(scales))
    if kind == Q8_ROWS:
        columns = codes.shape[1] // kind.block_bytes * kind.block
        pairs = codes[:, :columns].reshape(-1, columns // 64, 4, 2, 8).transpose(2, 3)  # of 32 columns
        steps = codes[:, columns:].contiguous().view(torch.float16).float()
        return ((pairs.reshape(-1, columns // 32, 32).float() - 128) * steps.unsqueeze(-1)).flatten(1)
    blocks = codes.reshape(-1, kind.block_bytes)
    return _DECODERS[kind.name](blocks).reshape(codes.shape[0], -1)


def from_blocks(kind: PackedType, blocks: torch.Tensor) -> torch.Tensor:
    """Rows of type `kind` from the rows of its `stored_type`, on the same device."""
    if kind != Q8_ROWS:
        return blocks
    parts = blocks.reshape(len(blocks), -1, 2, kind.block_bytes)
    codes = (parts[..., 2:] ^ 128).unflatten(-1, (4, 8)).transpose(2, 3)
    return torch.cat((codes.reshape(len(blocks), -1), parts[..., :2].reshape(len(blocks), -1)), dim=1)


def _present(scales: torch.Tensor | None) -> torch.Tensor:
    assert scales is not None, "this type has separate scales"
    return scales


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """A float16 number of every block as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _fields(values: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Bit fields [blocks, groups, shifts, width] of bytes [blocks, groups, width]."""
    by_shift = torch.tensor(shifts, dtype=values.dtype, device=values.device).view(1, 1, -1, 1)
    return (values.unsqueeze(2) >> by_shift) & mask


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor(_FP4_LEVELS, device=blocks.device)
    codes = torch.cat((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), dim=1)
    return levels[codes.long()] * quant.decode_e8m0(blocks[:, :1])


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, codes = blocks[:, :16], blocks[:, 16:80].view(-1, 2, 32)
    step = (_half(blocks, 80) * (scales & 15).float()).unsqueeze(-1)
    least = (_half(blocks, 82) * (scales >> 4).float()).unsqueeze(-1)
    return step * _fields(codes, (0, 2, 4, 6), 3).reshape(-1, 16, 16).float() - least


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, 96:104].view(-1, 1, 8), (0, 4), 15).reshape(-1, 16)
    high = _fields(blocks[:, 104:108].view(-1, 1, 4), (0, 2, 4, 6), 3).reshape(-1, 16)
    scales = (low | (high << 4)).float() - 32
    bits = _fields(blocks[:, 32:96].view(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 16, 16).float()
    top = _fields(blocks[:, :32].view(-1, 1, 32), tuple(range(8)), 1).reshape(-1, 16, 16).float()
    return (_half(blocks, 108) * scales).unsqueeze(-1) * (bits + 4 * top - 4)


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of six bits each, from twelve bytes; float32 [blocks, 8]."""
    first, second, third = packed.view(-1, 3, 4).unbind(1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales.float(), minima.float()


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = _fields(blocks[:, 16:].view(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    return (_half(blocks, 0) * scales).unsqueeze(-1) * codes.float() - (_half(blocks, 2) * minima).unsqueeze(
        -1
    )


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    codes = _fields(blocks[:, 48:].view(-1, 4, 32), (0, 4), 15).reshape(-1, 8, 32)
    top = _fields(blocks[:, 16:48].view(-1, 1, 32), tuple(range(8)), 1).reshape(-1, 8, 32)
    values = (codes | (top << 4)).float()
    return (_half(blocks, 0) * scales).unsqueeze(-1) * values - (_half(blocks, 2) * minima).unsqueeze(-1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _fields(blocks[:, :128].view(-1, 2, 64), (0, 4), 15).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192].view(-1, 2, 32), (0, 2, 4, 6), 3).reshape(-1, 8, 32)
    values = (low | (high << 4)).float() - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return scales.unsqueeze(-1) * values.reshape(-1, 16, 16)


def _signs(indices: torch.Tensor) -> torch.Tensor:
    """Seven-bit sign patterns [...] to factors [..., 8]; the eighth sign makes the number of minus signs even."""
    bits = (indices.unsqueeze(-1) >> torch.arange(8, device=indices.device)) & 1
    bits[..., 7] = bits[..., :7].sum(-1) & 1
    return 1.0 - 2.0 * bits.float()


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    raw = blocks[:, 2:].view(-1, 8, 8).long()
    word = raw[..., 4] | (raw[..., 5] << 8) | (raw[..., 6] << 16) | (raw[..., 7] << 24)
    step = _half(blocks, 0) * (0.5 + (word >> 28).float()) * 0.25
    signs = _signs((word.unsqueeze(-1) >> torch.tensor((0, 7, 14, 21), device=word.device)) & 127)
    values = grid("IQ2_XXS").to(blocks.device)[raw[..., :4]].float()
    return step[..., None, None] * values * signs


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    raw = blocks[:, 2:66].view(-1, 32, 2).long()
    words = (raw[..., 0] | (raw[..., 1] << 8)).view(-1, 16, 2)
    scales = torch.stack((blocks[:, 66:] & 15, blocks[:, 66:] >> 4), dim=-1).view(-1, 16)
    step = _half(blocks, 0) * (0.5 + scales.float()) * 0.25
    values = grid("IQ2_XS").to(blocks.device)[words & 511].float()
    return step[..., None, None] * values * _signs(words >> 9)


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    raw = blocks[:, 66:].view(-1, 8, 4).long()
    word = raw[..., 0] | (raw[..., 1] << 8) | (raw[..., 2] << 16) | (raw[..., 3] << 24)
    step = _half(blocks, 0) * (0.5 + (word >> 28).float()) * 0.5
    signs = _signs((word.unsqueeze(-1) >> torch.tensor((0, 7, 14, 21), device=word.device)) & 127)
    values = grid("IQ3_XXS").to(blocks.device)[blocks[:, 2:66].long()].float()
    return step[..., None, None] * values.reshape(-1, 8, 4, 8) * signs


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    high = blocks[:, 2].long() | (blocks[:, 3].long() << 8)
    high = (high.unsqueeze(-1) >> torch.arange(0, 16, 2, device=blocks.device)) & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).view(-1, 8)
    step = _half(blocks, 0) * ((low | (high << 4)).float() - 32)
    codes = _fields(blocks[:, 8:].view(-1, 8, 16), (0, 4), 15).reshape(-1, 8, 32)
    levels = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=blocks.device)
    return step.unsqueeze(-1) * levels[codes.long()]


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ3_XXS": _iq3_xxs,
    "IQ4_XS": _iq4_xs,
}
