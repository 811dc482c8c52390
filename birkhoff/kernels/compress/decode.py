"""What a new token leaves in its layer's state on a GPU: the small stage between two products, in one launch.

`norm_rope_store` takes the rows of the first product, `entered [n, everything that reads x]` float32. Per token, one program
normalises the query latent; one normalises and rotates the key into the window's ring; and one per compressor puts the
token's values and gates into their ring and, when the token ends a block, pools the block, normalises, rotates and
appends the entry to its page. Positions, slots and page tables are data on the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.rope.decode import turned


@triton.jit
def _normal(x, weight, eps, WIDTH: tl.constexpr, kept: tl.constexpr):
    """Weighted RMS norm of x [WIDTH], rounded before and after as the plain twin does."""
    x = x.to(kept).to(tl.float32)
    rho = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    return (x * rho * tl.load(weight + tl.arange(0, WIDTH))).to(kept).to(tl.float32)


@triton.jit
def _pool(
    raw,
    ape,
    norm,
    ring,
    pages,
    table,
    cos,
    sin,
    slot,
    position,
    ring_size,
    table_stride,
    eps,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    ITEMS: tl.constexpr,
    kept: tl.constexpr,
):
    """One compressor's share of a token; `raw` points to its values and gates."""
    OVERLAP: tl.constexpr = 2 if RATIO == 4 else 1
    ROW: tl.constexpr = 2 * OVERLAP * WIDTH
    c = tl.arange(0, OVERLAP * WIDTH)
    own = ring + (slot * ring_size + position % ring_size) * ROW
    tl.store(own + c, tl.load(raw + c))
    gates = tl.load(raw + OVERLAP * WIDTH + c) + tl.load(ape + (position % RATIO) * OVERLAP * WIDTH + c)
    tl.store(own + OVERLAP * WIDTH + c, gates)
    tl.debug_barrier()  # the block below is read by other threads than wrote this row
    if (position + 1) % RATIO == 0:
        d = tl.arange(0, WIDTH)
        top = tl.full([WIDTH], float("-inf"), tl.float32)
        mass = tl.zeros([WIDTH], tl.float32)
        total = tl.zeros([WIDTH], tl.float32)
        for first in range(0, OVERLAP * RATIO, ITEMS):
            item = first + tl.arange(0, ITEMS)
            at = (
                position + 1 - OVERLAP * RATIO + item
            )  # with overlap the older block comes first, by its first half
            half = (item // RATIO) * WIDTH if OVERLAP == 2 else item * 0
            from_row = ring + (slot * ring_size + (at + ring_size) % ring_size) * ROW + half
            there = (at >= 0)[:, None]
            value = tl.load(from_row[:, None] + d[None, :], mask=there, other=0.0)
            gate = tl.load(
                from_row[:, None] + (OVERLAP * WIDTH + d)[None, :], mask=there, other=float("-inf")
            )
            peak = tl.maximum(top, tl.max(gate, axis=0))
            old, new = tl.exp(top - peak), tl.exp(gate - peak[None, :])
            mass = mass * old + tl.sum(new, axis=0)
            total = total * old + tl.sum(new * value, axis=0)
            top = peak
        entry = turned(_normal(total / mass, norm, eps, WIDTH, kept), cos, sin, WIDTH, TURNING, 1)
        number = position // RATIO
        PER_PAGE: tl.constexpr = 128 // RATIO
        page = tl.load(table + slot * table_stride + number // PER_PAGE)
        tl.store(pages + (page * PER_PAGE + number % PER_PAGE) * WIDTH + d, entry.to(kept))


@triton.jit
def _settle(
    entered,
    entered_stride,
    q_norm,
    latent,
    latent_half,
    kv_norm,
    keys,
    key_ring,
    ape,
    norm,
    ring,
    pages,
    ape2,
    norm2,
    ring2,
    pages2,
    table,
    table_stride,
    slots,
    positions,
    cos,
    sin,
    eps,
    ring_size,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNING: tl.constexpr,
    RATIO: tl.constexpr,
    INDEX: tl.constexpr,
    HALF: tl.constexpr,
    ITEMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    task = tl.program_id(1)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)  # 64-bit division is slow
    entered += row * entered_stride
    kept = latent.dtype.element_ty
    if task == 0:
        k = tl.arange(0, RANK)
        out = _normal(tl.load(entered + k), q_norm, eps, RANK, kept)
        tl.store(latent + row * RANK + k, out.to(kept))
        if HALF:
            tl.store(latent_half + row * RANK + k, out.to(tl.float16))
    elif task == 1:
        d = tl.arange(0, WIDTH)
        key = _normal(tl.load(entered + RANK + d), kv_norm, eps, WIDTH, kept)
        own = turned(key, cos + row * 4 * (TURNING // 2), sin + row * 4 * (TURNING // 2), WIDTH, TURNING, 1)
        tl.store(keys + (slot * key_ring + position % key_ring) * WIDTH + d, own.to(kept))
    elif task == 2:
        # phases: 0 own position, 1 start of the four tokens this one may end, 2 start of the 128
        at = (row * 4 + (1 if RATIO == 4 else 2)) * (TURNING // 2)
        _pool(
            entered + RANK + WIDTH,
            ape,
            norm,
            ring,
            pages,
            table,
            cos + at,
            sin + at,
            slot,
            position,
            ring_size,
            table_stride,
            eps,
            RATIO,
            WIDTH,
            TURNING,
            ITEMS,
            kept,
        )
    elif INDEX > 0:
        at = (row * 4 + 1) * (TURNING // 2)
        _pool(
            entered + RANK + WIDTH + 4 * WIDTH,
            ape2,
            norm2,
            ring2,
            pages2,
            table,
            cos + at,
            sin + at,
            slot,
            position,
            ring_size,
            table_stride,
            eps,
            RATIO,
            INDEX,
            TURNING,
            ITEMS,
            kept,
        )


def norm_rope_store(
    entered,
    q_norm,
    latent,
    half,
    kv_norm,
    keys,
    entry,
    index,
    table,
    slots,
    positions,
    cos,
    sin,
    eps,
    pdl=False,
) -> None:
    """Norms, rotations and state of n new tokens.

    keys [slots, ring, c]; `entry` and `index` are (ape, norm, ring, pages) of a compressor or None; table [slots,
    pages]; cos, sin [n, 4, r / 2]: by a token's own position, and by the first of the 4 and of the 128 it may end."""
    n, rank = latent.shape
    width = keys.shape[2]
    ratio = 0 if entry is None else entry[0].shape[0]
    none = (q_norm, q_norm, keys, keys)
    _settle[(n, 2 if entry is None else 3 if index is None else 4)](
        entered,
        entered.stride(0),
        q_norm,
        latent,
        latent if half is None else half,
        kv_norm,
        keys,
        keys.shape[1],
        *(entry or none),
        *(index or none),
        table,
        table.stride(0),
        slots,
        positions,
        cos,
        sin,
        eps,
        1 if entry is None else entry[2].shape[1],
        RANK=rank,
        WIDTH=width,
        TURNING=2 * cos.shape[-1],
        RATIO=ratio or 4,
        INDEX=0 if index is None else index[3].shape[2],
        HALF=half is not None,
        ITEMS=8 if ratio == 4 else 16,
        num_warps=4 if ratio != 128 else 8,
        PDL=pdl,
    )
    assert rank == power_of_two(rank) and width == power_of_two(width)
