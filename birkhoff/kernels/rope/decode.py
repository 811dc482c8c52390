"""Rotary embedding inside Triton kernels: the last channels of a vector, adjacent channels forming a pair, in
float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rope(x, cos, sin, WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr, SIGN: tl.constexpr):
    """x [WIDTH] float32 with its last ROPE_DIM channels rotated by cos, sin [ROPE_DIM / 2] in memory; SIGN -1
    inverts."""
    even, odd = tl.split(tl.reshape(x, [WIDTH // 2, 2]))
    i = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE_DIM) // 2
    c = tl.load(cos + i, mask=i >= 0, other=1.0)
    s = SIGN * tl.load(sin + i, mask=i >= 0, other=0.0)
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [WIDTH])


@triton.jit
def rope_heads(x, cos, sin, HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE_DIM: tl.constexpr):
    """`rope` for x [HEADS, WIDTH], all heads by the same angles."""
    even, odd = tl.split(tl.reshape(x, [HEADS, WIDTH // 2, 2]))
    i = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE_DIM) // 2
    c = tl.load(cos + i, mask=i >= 0, other=1.0)[None, :]
    s = tl.load(sin + i, mask=i >= 0, other=0.0)[None, :]
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [HEADS, WIDTH])
