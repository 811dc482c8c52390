"""Attention for one new token per sequence, in compiled loops over the caches as they lie."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import add_product, rows_by_weight
from birkhoff.kernels.norm.cpu import normalise
from birkhoff.kernels.rope.cpu import turn

NOTHING = np.ones(0, np.float32)


@compiled
def qkv_proj(
    x, entry, q_norm, wq_b, kv_norm, eps, cos, sin, ring, slots, positions, entered, latent, queries
):
    """x [n, d] -> entered [n, everything that reads x], latent [n, q], queries [n, h, c]; keys go to their ring."""
    count, rank = latent.shape
    heads, width = queries.shape[1], queries.shape[2]
    rows_by_weight(x, entry, entered)
    normalise(entered[:, :rank], q_norm, eps, latent)
    flat = np.empty((count, heads * width), np.float32)
    rows_by_weight(latent, wq_b, flat)
    by_head = flat.reshape(count * heads, width)
    normalise(by_head, NOTHING, eps, by_head)
    turn(flat.reshape(count, heads, width), cos, sin, 1, queries)
    key = np.empty((count, 1, width), np.float32)
    normalise(entered[:, rank : rank + width], kv_norm, eps, key[:, 0])
    turned = np.empty((count, 1, width), np.float32)
    turn(key, cos, sin, 1, turned)
    size = ring.shape[1]
    for row in range(count):
        ring[slots[row], positions[row] % size] = turned[row, 0]


@compiled
def store_compressor_rows(raw, ape, ring, slots, positions):
    """raw [n, values and gates] into the compressor's ring, with the gates' position bias."""
    size = ring.shape[1]
    phases = ape.shape[0]
    half = ape.shape[1]
    for row in range(raw.shape[0]):
        at = positions[row]
        target, bias = ring[slots[row], at % size], ape[at % phases]
        for k in range(half):
            target[k] = raw[row, k]
            target[half + k] = raw[row, half + k] + bias[k]


@compiled
def topk_entries(latent, wq_b, heads, cos, sin, weights, scale, pages, table, slots, positions, topk, chosen):
    """Marks the `topk` best of each sequence's finished entries; the lowest number among equals. chosen [n, most]."""
    count = latent.shape[0]
    per_page, width = pages.shape[1], pages.shape[2]
    flat = np.empty((count, heads * width), np.float32)
    rows_by_weight(latent, wq_b, flat)
    queries = np.empty((count, heads, width), np.float32)
    turn(flat.reshape(count, heads, width), cos, sin, 1, queries)
    for row in range(count):
        entries = (positions[row] + 1) // 4
        chosen[row] = False
        if entries <= topk:
            chosen[row, :entries] = True
            continue
        scores = np.empty(entries, np.float32)
        for e in range(entries):
            key = pages[table[slots[row], e // per_page], e % per_page]
            total = np.float32(0)
            for h in range(heads):
                query, match = queries[row, h], np.float32(0)
                for k in range(width):
                    match += query[k] * key[k]
                total += weights[row, h] * scale * max(match, np.float32(0))
            scores[e] = -total
        best = np.argsort(scores, kind="mergesort")  # stable
        for place in range(topk):
            chosen[row, best[place]] = True


@compiled
def pool_entries(ring, pages, table, slots, positions, ratio, overlap, norm, eps, omega):
    """The entry of every row that ends a block: pooled from the ring, normalised, turned, put on its page.

    With `overlap` 2 the block before lends the first half of its channels; the first block has none before it."""
    size = ring.shape[1]
    per_page = pages.shape[1]
    width = pages.shape[2]
    gate, pairs = overlap * width, omega.shape[0]
    entry = np.empty((1, 1, width), np.float32)
    cos = np.empty((1, pairs), np.float32)
    sin = np.empty((1, pairs), np.float32)
    for row in range(slots.shape[0]):
        at, slot = positions[row], slots[row]
        if (at + 1) % ratio:
            continue
        number = at // ratio
        first = number * ratio
        oldest = max(first - (overlap - 1) * ratio, 0)
        top = np.full(width, -np.inf, np.float32)
        total = np.zeros(width, np.float32)
        pooled = entry[0, 0]
        pooled[:] = 0
        for p in range(oldest, at + 1):
            part = width if overlap == 2 and p >= first else 0
            gates = ring[slot, p % size, gate + part : gate + part + width]
            for c in range(width):
                top[c] = max(top[c], gates[c])
        for p in range(oldest, at + 1):
            part = width if overlap == 2 and p >= first else 0
            source = ring[slot, p % size]
            for c in range(width):
                share = np.exp(source[gate + part + c] - top[c])
                total[c] += share
                pooled[c] += share * source[part + c]
        for c in range(width):
            pooled[c] /= total[c]
        normalise(entry[0], norm, eps, entry[0])
        for i in range(pairs):
            angle = np.float32(first) * omega[i]
            cos[0, i], sin[0, i] = np.cos(angle), np.sin(angle)
        page = table[slot, number // per_page]
        place = number % per_page
        turn(entry, cos, sin, 1, pages[page : page + 1, place : place + 1])


@compiled
def attend_and_project(
    queries,
    ring,
    window,
    pages,
    table,
    ratio,
    chosen,
    slots,
    positions,
    sink,
    scale,
    cos,
    sin,
    wo_a,
    wo_b,
    out,
):
    """queries [n, h, c] -> out [n, d]. `ratio` 0: no compressed entries; `chosen` without rows: all finished ones."""
    count, heads, width = queries.shape
    groups, rank = wo_a.shape[0], wo_a.shape[1]
    mixed = np.zeros((count, heads, width), np.float32)
    every = np.arange(heads)
    for row in range(count):
        keys = _visible(row, ring, window, pages, table, ratio, chosen, slots[row], positions[row])
        weights = np.empty((heads, keys.shape[0]), np.float32)
        rows_by_weight(queries[row], keys, weights)
        _soften(weights, sink, scale)
        add_product(weights, keys, every, mixed[row])
    turned = np.empty((count, heads, width), np.float32)
    turn(mixed, cos, sin, -1, turned)
    grouped = turned.reshape(count, groups, heads // groups * width)
    own = np.empty(
        (count, grouped.shape[2]), np.float32
    )  # rows that are known to lie in one piece are read faster
    middle = np.empty((count, groups * rank), np.float32)
    for g in range(groups):
        own[:] = grouped[:, g]
        rows_by_weight(own, wo_a[g], middle[:, g * rank : (g + 1) * rank])
    rows_by_weight(middle, wo_b, out)


@compiled
def _visible(row, ring, window, pages, table, ratio, chosen, slot, at):
    """What a query attends to, side by side [e, c]: the window, oldest first, then its entries."""
    size = ring.shape[1]
    width = ring.shape[2]
    per_page = pages.shape[1]
    near = min(at + 1, window)
    far = (at + 1) // ratio if ratio else 0
    keys = np.empty((near + far, width), np.float32)
    for e in range(near):
        source = ring[slot, (at - near + 1 + e) % size]
        target = keys[e]
        for c in range(width):
            target[c] = source[c]
    used = near
    for e in range(far):
        if chosen.shape[0] and not chosen[row, e]:
            continue
        source = pages[table[slot, e // per_page], e % per_page]
        target = keys[used]
        for c in range(width):
            target[c] = source[c]
        used += 1
    return keys[:used]


@compiled
def _soften(logits, sink, scale):
    """A softmax over each head's logits [h, e], in place, with the sink in its sum."""
    for h in range(logits.shape[0]):
        weights, top = logits[h], sink[h]
        for e in range(weights.shape[0]):
            weights[e] *= scale
            top = max(top, weights[e])
        total = np.exp(sink[h] - top)
        for e in range(weights.shape[0]):
            weights[e] = np.exp(weights[e] - top)
            total += weights[e]
        for e in range(weights.shape[0]):
            weights[e] /= total
