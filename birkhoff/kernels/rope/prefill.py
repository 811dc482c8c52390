"""Rotary embedding of many rows on a GPU: one pass that copies the fixed channels and rotates the others, or, in place,
touches only the rotated channels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.rope.reference import Phases


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x,
    cos,
    sin,
    out,
    rows,
    heads,
    fixed,
    SIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, PADDED)
    tile = (r < rows)[:, None] & (d < WIDTH)[None, :]
    at = r[:, None] * WIDTH + d[None, :]
    even, odd = tl.split(
        tl.reshape(tl.load(x + at, mask=tile, other=0.0).to(tl.float32), [ROWS, PADDED // 2, 2])
    )
    i = tl.arange(0, PADDED // 2) - fixed // 2
    rotated_pair = (r < rows)[:, None] & (i >= 0)[None, :] & (i < PAIRS)[None, :]
    angle = (r // heads)[:, None] * PAIRS + i[None, :]
    c = tl.load(cos + angle, mask=rotated_pair, other=1.0)
    s = SIGN * tl.load(sin + angle, mask=rotated_pair, other=0.0)
    rotated = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, PADDED])
    tl.store(out + at, rotated.to(out.dtype.element_ty), mask=tile)


@triton.jit(do_not_specialize=["rows"])
def _rotate_in_place(
    x,
    cos,
    sin,
    rows,
    heads,
    fixed,
    width,
    SIGN: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, 2 * PADDED)
    tile = (r < rows)[:, None] & (d < 2 * PAIRS)[None, :]
    at = x + r[:, None] * width + fixed + d[None, :]
    even, odd = tl.split(tl.reshape(tl.load(at, mask=tile, other=0.0).to(tl.float32), [ROWS, PADDED, 2]))
    i = tl.arange(0, PADDED)
    rotated_pair = (r < rows)[:, None] & (i < PAIRS)[None, :]
    angle = (r // heads)[:, None] * PAIRS + i[None, :]
    c = tl.load(cos + angle, mask=rotated_pair, other=1.0)
    s = SIGN * tl.load(sin + angle, mask=rotated_pair, other=0.0)
    rotated = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [ROWS, 2 * PADDED])
    tl.store(at, rotated.to(x.dtype.element_ty), mask=tile)


def rotate(x: torch.Tensor, phases: Phases, inverse: bool = False, own: bool = False) -> torch.Tensor:
    x = x.contiguous()
    cos = phases.cos.contiguous()
    sin = phases.sin.contiguous()
    width, pairs = x.shape[-1], cos.shape[-1]
    count, positions = x.numel() // width, cos.numel() // pairs
    if own:
        padded = power_of_two(pairs)
        rows = max(1, 1024 // padded)
        if count:
            _rotate_in_place[(-(-count // rows),)](
                x,
                cos,
                sin,
                count,
                count // positions,
                width - 2 * pairs,
                width,
                SIGN=-1 if inverse else 1,
                PAIRS=pairs,
                PADDED=padded,
                ROWS=rows,
                num_warps=4,
            )
        return x
    out = torch.empty_like(x)
    padded = power_of_two(width, 2)
    rows = max(1, 2048 // padded)
    if count:
        _rotate[(-(-count // rows),)](
            x,
            cos,
            sin,
            out,
            count,
            count // positions,
            width - 2 * pairs,
            SIGN=-1 if inverse else 1,
            WIDTH=width,
            PADDED=padded,
            PAIRS=pairs,
            ROWS=rows,
            num_warps=4,
        )
    return out
