"""Attention for one new token per sequence, in compiled loops directly over the cache."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import add_matmul, matmul
from birkhoff.kernels.norm.cpu import rms_norm_rows
from birkhoff.kernels.rope.cpu import rope_rows

NO_WEIGHT = np.ones(0, np.float32)
KEY, ENTRY, FORBID, FORCE, ZERO = 0, 1, 2, 3, 4  # kinds of rules, see `attend/__init__.py`


@compiled
def norm_qkv(qkv, q_norm, kv_norm, eps, cos, sin, ring, slots, positions, latent):
    """qkv [n, all projections of x] -> latent [n, q], normalised; stores normalised, rotated keys in their ring."""
    count, rank = latent.shape
    size, width = ring.shape[1], ring.shape[2]
    rms_norm_rows(qkv[:, :rank], q_norm, eps, latent)
    key = np.empty((count, 1, width), np.float32)
    rms_norm_rows(qkv[:, rank : rank + width], kv_norm, eps, key[:, 0])
    rotated = np.empty((count, 1, width), np.float32)
    rope_rows(key, cos, sin, 1, rotated)
    for row in range(count):
        ring[slots[row], positions[row] % size] = rotated[row, 0]


@compiled
def store_compressor_rows(raw, ape, ring, slots, positions):
    """Store raw [n, values and gates] in the ring of the compressor, with the position bias `ape` added to the
    gates."""
    size = ring.shape[1]
    phases = ape.shape[0]
    half = ape.shape[1]
    for row in range(raw.shape[0]):
        position = positions[row]
        target, bias = ring[slots[row], position % size], ape[position % phases]
        for k in range(half):
            target[k] = raw[row, k]
            target[half + k] = raw[row, half + k] + bias[k]


@compiled
def topk_entries(
    raw, cos, sin, weights, scale, pages, table, slots, positions, topk, rule_counts, rules, selected
):
    """Mark the `topk` highest-scoring finished entries of each sequence in selected [n, entries]; ties: lowest
    index. `raw` [n, heads, width] are the index queries before rotation; `rules` as for `attend`."""
    count, heads = raw.shape[0], raw.shape[1]
    per_page, width = pages.shape[1], pages.shape[2]
    queries = np.empty((count, heads, width), np.float32)
    rope_rows(raw, cos, sin, 1, queries)
    for row in range(count):
        entries = (positions[row] + 1) // 4
        selected[row] = False
        if entries <= topk:
            selected[row, :entries] = True
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
        if rule_counts.shape[0]:
            for kind in (FORCE, FORBID):
                for r in range(rule_counts[row]):
                    if rules[row, r, 0] == kind:
                        first, stop = max(rules[row, r, 1], 0), min(rules[row, r, 2], entries)
                        scores[first:stop] = np.inf if kind == FORBID else -np.inf
        best = np.argsort(scores, kind="mergesort")  # stable
        for rank in range(topk):
            selected[row, best[rank]] = True


@compiled
def pool_entries(ring, pages, table, slots, positions, ratio, overlap, norm, eps, omega):
    """For every row that completes a block: pool the block from the ring, normalise, rotate and store it on its page.

    With `overlap` 2 the preceding block contributes the first half of its channels; the first block has none."""
    size = ring.shape[1]
    per_page = pages.shape[1]
    width = pages.shape[2]
    gate, pairs = overlap * width, omega.shape[0]
    entry = np.empty((1, 1, width), np.float32)
    cos = np.empty((1, pairs), np.float32)
    sin = np.empty((1, pairs), np.float32)
    for row in range(slots.shape[0]):
        position, slot = positions[row], slots[row]
        if (position + 1) % ratio:
            continue
        entry_index = position // ratio
        first = entry_index * ratio
        oldest = max(first - (overlap - 1) * ratio, 0)
        top = np.full(width, -np.inf, np.float32)
        total = np.zeros(width, np.float32)
        pooled = entry[0, 0]
        pooled[:] = 0
        for p in range(oldest, position + 1):
            half_offset = width if overlap == 2 and p >= first else 0
            gates = ring[slot, p % size, gate + half_offset : gate + half_offset + width]
            for c in range(width):
                top[c] = max(top[c], gates[c])
        for p in range(oldest, position + 1):
            half_offset = width if overlap == 2 and p >= first else 0
            source = ring[slot, p % size]
            for c in range(width):
                weight = np.exp(source[gate + half_offset + c] - top[c])
                total[c] += weight
                pooled[c] += weight * source[half_offset + c]
        for c in range(width):
            pooled[c] /= total[c]
        rms_norm_rows(entry[0], norm, eps, entry[0])
        for i in range(pairs):
            angle = np.float32(first) * omega[i]
            cos[0, i], sin[0, i] = np.cos(angle), np.sin(angle)
        page = table[slot, entry_index // per_page]
        page_row = entry_index % per_page
        rope_rows(entry, cos, sin, 1, pages[page : page + 1, page_row : page_row + 1])


@compiled
def attend(
    raw,
    eps,
    ring,
    window,
    pages,
    table,
    ratio,
    selected,
    slots,
    positions,
    sink,
    scale,
    cos,
    sin,
    rule_counts,
    rules,
    rule_sink,
    rotated,
):
    """Queries [n, h, c] before norm and rotation -> their weighted values [n, h, c], rotated back. `ratio` 0: no
    compressed entries; `selected` without rows: all finished ones; `rule_counts` without rows: no rules."""
    count, heads, width = raw.shape
    by_head = raw.reshape(count * heads, width)
    rms_norm_rows(by_head, NO_WEIGHT, eps, by_head)
    queries = np.empty((count, heads, width), np.float32)
    rope_rows(raw, cos, sin, 1, queries)
    weighted = np.zeros((count, heads, width), np.float32)
    head_rows = np.arange(heads)
    for row in range(count):
        keys = _visible_keys(row, ring, window, pages, table, ratio, selected, slots[row], positions[row])
        weights = np.empty((heads, keys.shape[0]), np.float32)
        if rule_counts.shape[0]:
            visible = window, ratio, selected, positions[row]
            _zero_keys(row, rule_counts[row], rules, visible, keys)
            matmul(queries[row], keys, weights)
            _hide_keys(row, rule_counts[row], rules, visible, weights)
            _softmax_with_sink(weights, sink + rule_sink[row], scale)
        else:
            matmul(queries[row], keys, weights)
            _softmax_with_sink(weights, sink, scale)
        add_matmul(weights, keys, head_rows, weighted[row])
    rope_rows(weighted, cos, sin, -1, rotated)


@compiled
def _visible_keys(row, ring, window, pages, table, ratio, selected, slot, position):
    """The keys a query attends to, contiguous [e, c]: the window, oldest first, then its entries."""
    size = ring.shape[1]
    width = ring.shape[2]
    per_page = pages.shape[1]
    near = min(position + 1, window)
    far = (position + 1) // ratio if ratio else 0
    keys = np.empty((near + far, width), np.float32)
    for e in range(near):
        source = ring[slot, (position - near + 1 + e) % size]
        target = keys[e]
        for c in range(width):
            target[c] = source[c]
    used = near
    for e in range(far):
        if selected.shape[0] and not selected[row, e]:
            continue
        source = pages[table[slot, e // per_page], e % per_page]
        target = keys[used]
        for c in range(width):
            target[c] = source[c]
        used += 1
    return keys[:used]


@compiled
def _rule_columns(row, rule, visible):
    """The columns of `_visible_keys` that a rule names, as first and stop: they are adjacent."""
    window, ratio, selected, position = visible
    near = min(position + 1, window)
    oldest = position - near + 1
    if rule[0] == KEY:
        return max(rule[1] - oldest, 0), max(min(rule[2] - oldest, near), 0)
    far = (position + 1) // ratio if ratio else 0
    first, stop = min(max(rule[1], 0), far), min(max(rule[2], 0), far)
    if selected.shape[0] == 0:
        return near + first, near + stop
    before, inside = 0, 0
    for e in range(stop):
        if selected[row, e]:
            if e < first:
                before += 1
            else:
                inside += 1
    return near + before, near + before + inside


@compiled
def _zero_keys(row, count, rules, visible, keys):
    """Set the entries that are ablated to zero."""
    for r in range(count):
        if rules[row, r, 0] == ZERO:
            first, stop = _rule_columns(row, rules[row, r], visible)
            for e in range(first, stop):
                keys[e] = 0


@compiled
def _hide_keys(row, count, rules, visible, logits):
    """Set the logits [h, e] of keys that get no weight."""
    for r in range(count):
        rule = rules[row, r]
        if rule[0] > FORBID:
            continue
        first, stop = _rule_columns(row, rule, visible)
        for h in range(logits.shape[0]):
            if (rule[3 + h // 32] >> (h % 32)) & 1:
                for e in range(first, stop):
                    logits[h, e] = -np.inf


@compiled
def _softmax_with_sink(logits, sink, scale):
    """Softmax over the logits [h, e] of each head, in place, with the sink in the denominator."""
    for h in range(logits.shape[0]):
        weights, top = logits[h], sink[h]
        for e in range(weights.shape[0]):
            weights[e] *= scale
            top = max(top, weights[e])
        if top == -np.inf:  # nothing to attend to
            weights[:] = 0
            continue
        total = np.exp(sink[h] - top)
        for e in range(weights.shape[0]):
            weights[e] = np.exp(weights[e] - top)
            total += weights[e]
        for e in range(weights.shape[0]):
            weights[e] /= total
