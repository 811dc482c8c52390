"""Attention for one new token per sequence, in compiled loops over the caches as they lie."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import rows_by_weight
from birkhoff.kernels.norm.cpu import normalise
from birkhoff.kernels.rope.cpu import turn

NOTHING = np.ones(0, np.float32)


@compiled
def open_attention(x, entry, q_norm, wq_b, kv_norm, eps, cos, sin, ring, slots, positions, entered, latent, queries):
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
def carry(raw, ape, ring, slots, positions):
    """raw [n, values and gates] into the compressor's ring, with the gates' position bias."""
    size, phases, half = ring.shape[1], ape.shape[0], ape.shape[1]
    for row in range(raw.shape[0]):
        at = positions[row]
        target, bias = ring[slots[row], at % size], ape[at % phases]
        for k in range(half):
            target[k] = raw[row, k]
            target[half + k] = raw[row, half + k] + bias[k]


@compiled
def choose(latent, wq_b, heads, cos, sin, weights, scale, pages, table, slots, positions, topk, chosen):
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
def close_attention(
    queries, ring, window, pages, table, ratio, chosen, slots, positions, sink, scale, cos, sin, wo_a, wo_b, out
):
    """queries [n, h, c] -> out [n, d]. `ratio` 0: no compressed entries; `chosen` without rows: all finished ones."""
    count, heads, width = queries.shape
    size, groups, rank = ring.shape[1], wo_a.shape[0], wo_a.shape[1]
    mixed = np.zeros((count, heads, width), np.float32)
    for row in range(count):
        at, slot = positions[row], slots[row]
        near = min(at + 1, window)
        far = (at + 1) // ratio if ratio else 0
        logits = np.empty((heads, near + far), np.float32)
        used = 0
        for e in range(near + far):
            if e >= near and chosen.shape[0] and not chosen[row, e - near]:
                continue
            used += 1
            key = _key(e, near, at, slot, ring, size, pages, table)
            for h in range(heads):
                query, match = queries[row, h], np.float32(0)
                for k in range(width):
                    match += query[k] * key[k]
                logits[h, used - 1] = match * scale
        for h in range(heads):
            weights = logits[h]
            top = sink[h]
            for e in range(used):
                top = max(top, weights[e])
            total = np.exp(sink[h] - top)
            for e in range(used):
                weights[e] = np.exp(weights[e] - top)
                total += weights[e]
            for e in range(used):
                weights[e] /= total
        used = 0
        for e in range(near + far):
            if e >= near and chosen.shape[0] and not chosen[row, e - near]:
                continue
            key = _key(e, near, at, slot, ring, size, pages, table)
            for h in range(heads):
                target, weight = mixed[row, h], logits[h, used]
                for k in range(width):
                    target[k] += weight * key[k]
            used += 1
    turned = np.empty((count, heads, width), np.float32)
    turn(mixed, cos, sin, -1, turned)
    grouped = turned.reshape(count, groups, heads // groups * width)
    middle = np.empty((count, groups * rank), np.float32)
    for g in range(groups):
        rows_by_weight(grouped[:, g], wo_a[g], middle[:, g * rank : (g + 1) * rank])
    rows_by_weight(middle, wo_b, out)


@compiled
def _key(e, near, at, slot, ring, size, pages, table):
    """Entry e of a query's view: first the window, oldest first, then the pages."""
    if e < near:
        return ring[slot, (at - near + 1 + e) % size]
    per_page = pages.shape[1]
    return pages[table[slot, (e - near) // per_page], (e - near) % per_page]
