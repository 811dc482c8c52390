"""Rotation of a vector's last channels inside a kernel: adjacent channels are a pair, float32 inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(x, cos, sin, WIDTH: tl.constexpr, TURNING: tl.constexpr, SIGN: tl.constexpr):
    """x [WIDTH] float32, its last TURNING channels turned by cos, sin [TURNING / 2] in memory."""
    even, odd = tl.split(tl.reshape(x, [WIDTH // 2, 2]))
    i = tl.arange(0, WIDTH // 2) - (WIDTH - TURNING) // 2
    c = tl.load(cos + i, mask=i >= 0, other=1.0)
    s = SIGN * tl.load(sin + i, mask=i >= 0, other=0.0)
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [WIDTH])


@triton.jit
def turned_heads(x, cos, sin, HEADS: tl.constexpr, WIDTH: tl.constexpr, TURNING: tl.constexpr):
    """The same for x [HEADS, WIDTH], all heads by the same angles."""
    even, odd = tl.split(tl.reshape(x, [HEADS, WIDTH // 2, 2]))
    i = tl.arange(0, WIDTH // 2) - (WIDTH - TURNING) // 2
    c = tl.load(cos + i, mask=i >= 0, other=1.0)[None, :]
    s = tl.load(sin + i, mask=i >= 0, other=0.0)[None, :]
    return tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), [HEADS, WIDTH])
