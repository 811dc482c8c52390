"""Round weights as the released layout does, without writing a file; the result stays float.

The rules are those of `birkhoff.kernels.quant` (compared bit for bit by a test): FP4 with one power-of-two scale per
32 inputs for routed experts, FP8 with one per 128x128 tile for dense matrices, bf16 for the rest. Reimplemented
because they run in every step of the last tenth of training, on whole stacks, without synchronising with the device.
Gradients do not pass through: the step differentiates with respect to the rounded weights and updates the masters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birkhoff.errors import TensorShape

FP8_BLOCK = 128
FP4_GROUP = 32
FP8_LARGEST = (8, 0x600000)  # 448 = 1.75 * 2^8, as exponent and float32 mantissa bits
FP4_LARGEST = (2, 0x400000)  # 6 = 1.5 * 2^2


def round_stored(stack: Tensor, storage: str) -> Tensor:
    """Return a stack [..., rows, columns] (any tensor for bf16 and f32) as read back from a released file."""
    if storage == "expert":
        return round_fp4(stack)
    if storage == "dense":
        return round_fp8(stack)
    return stack.bfloat16().float() if storage == "bf16" else stack


def round_fp8(stack: Tensor) -> Tensor:
    rows, columns = stack.shape[-2:]
    if rows % FP8_BLOCK or columns % FP8_BLOCK:
        raise TensorShape(
            f"an FP8 weight of {rows}x{columns} does not divide into {FP8_BLOCK}x{FP8_BLOCK} tiles. "
            "Train this config without rounding (--set round_share=0)."
        )
    # [.., tr, 128, tc, 128]
    tiles = stack.float().unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    exponent = _scale_exponent(tiles.abs().amax((-3, -1), keepdim=True), *FP8_LARGEST)
    rounded = (tiles * _power_of_two(-exponent)).to(torch.float8_e4m3fn).float() * _power_of_two(exponent)
    return rounded.flatten(-2).flatten(-3, -2)


def round_fp4(stack: Tensor) -> Tensor:
    if stack.shape[-1] % FP4_GROUP:
        raise TensorShape(
            f"an FP4 weight with {stack.shape[-1]} inputs does not divide into groups of {FP4_GROUP}. "
            "Train this config without rounding (--set round_share=0)."
        )
    groups = stack.float().unflatten(-1, (-1, FP4_GROUP))
    exponent = _scale_exponent(groups.abs().amax(-1, keepdim=True), *FP4_LARGEST)
    ratio = groups * _power_of_two(-exponent)
    # E2M1 is 0.5 apart up to 2, 1 up to 4, 2 up to 6: round in units of that step, ties to even.
    size = ratio.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((ratio / step).round() * step * _power_of_two(exponent)).flatten(-2)


def _scale_exponent(amax: Tensor, exponent: int, mantissa: int) -> Tensor:
    """Return the smallest e with amax / 2^e within the format's largest value; 0 for an all-zero tile."""
    bits = amax.contiguous().view(torch.int32)
    least = (bits >> 23) - (127 + exponent) + ((bits & 0x7FFFFF) > mantissa).to(torch.int32)
    return torch.where(amax == 0, 0, least.clamp(-126, 126))


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
