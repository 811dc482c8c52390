"""The whole expert sublayer for a few rows: nothing is gathered from the weights, each expert is read once."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import add_product, rows_by_weight


@compiled
def experts(x, entry, given, bias, factor, gate_up, down, shared_down, limit, logits, ids, weights, out):
    """x [n, d] -> out [n, d]; also router logits [n, E], chosen ids [n, k] and their weights.

    `entry` holds the gate above the shared expert's gate and up; `given` [n, k] are hash-routed ids or has no rows.
    Experts are visited in ascending order, so that a row's sum does not depend on its neighbours."""
    count, width = x.shape
    number, inner = gate_up.shape[0], down.shape[1]
    entered = np.empty((count, entry.shape[0]), np.float32)
    rows_by_weight(x, entry, entered)
    for row in range(count):
        for e in range(number):
            logits[row, e] = entered[row, e]
        _route(logits[row], given, row, bias, factor, ids[row], weights[row])

    most = (
        count * ids.shape[1]
    )  # a row may name one expert twice: in a token table, or when its scores are NaN
    opened = np.empty((most, 2 * inner), np.float32)
    z = np.empty((most, inner), np.float32)
    for row in range(count):
        for i in range(inner):
            z[row, i] = _swiglu(entered[row, number + i], entered[row, number + inner + i], limit)
    rows_by_weight(z[:count], shared_down, out)

    visitors = np.empty((most, width), np.float32)
    whose = np.empty(most, np.int64)
    for e in range(number):
        guests = 0
        for row in range(count):
            for place in range(ids.shape[1]):
                if ids[row, place] == e:
                    visitors[guests], whose[guests] = x[row], row
                    z[guests, 0] = weights[row, place]
                    guests += 1
        if guests == 0:
            continue
        rows_by_weight(visitors[:guests], gate_up[e], opened[:guests])
        for g in range(guests):
            weight = z[g, 0]
            for i in range(inner):
                z[g, i] = _swiglu(opened[g, i], opened[g, inner + i], limit) * weight
        add_product(z[:guests], down[e], whose, out)


@compiled
def _swiglu(a, b, limit):
    a, b = min(a, limit), max(min(b, limit), -limit)
    return a / (np.float32(1) + np.exp(-a)) * b


@compiled
def _route(logits, given, row, bias, factor, ids, weights):
    number, places = logits.shape[0], ids.shape[0]
    scores = np.empty(number, np.float32)
    for e in range(number):
        z = logits[e]
        scores[e] = np.sqrt(max(z, np.float32(0)) + np.log1p(np.exp(-abs(z))))
    if given.shape[0]:
        for place in range(places):
            ids[place] = given[row, place]
    else:
        biased = scores + bias
        for place in range(places):
            best = 0
            for e in range(1, number):
                if biased[e] > biased[best]:  # the lowest id among equals
                    best = e
            ids[place] = best
            biased[best] = -np.inf
    total = np.float32(0)
    for place in range(places):
        total += scores[ids[place]]
    for place in range(places):
        weights[place] = scores[ids[place]] / total * factor
