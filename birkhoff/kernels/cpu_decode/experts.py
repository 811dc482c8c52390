"""Routing and experts for a few rows; the weights of each expert are read once, in place."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import add_matmul, matmul


@compiled
def route_rows(projected, hash_ids, bias, factor, limit, logits, ids, weights, z):
    """projected [n, router logits, shared gate, shared up] -> router logits [n, E], selected ids [n, k], their weights,
    and the gated input z [n, i] of the shared expert's down. `hash_ids` [n, k] are hash-routed ids or has no rows."""
    num_experts, inner = logits.shape[1], z.shape[1]
    for row in range(projected.shape[0]):
        for e in range(num_experts):
            logits[row, e] = projected[row, e]
        _route(logits[row], hash_ids, row, bias, factor, ids[row], weights[row])
        for i in range(inner):
            z[row, i] = _swiglu(
                projected[row, num_experts + i], projected[row, num_experts + inner + i], limit
            )


@compiled
def add_experts(x, ids, weights, gate_up, down, limit, out):
    """out [n, d] += the weighted sum over the experts of each row. Experts are processed in ascending order, so that
    the
    sum of a row does not depend on the other rows."""
    count, width = x.shape
    num_experts, inner = gate_up.shape[0], down.shape[1]
    # a row may list one expert twice: in a hash table, or if its scores are NaN
    max_pairs = count * ids.shape[1]
    gate_up_rows = np.empty((max_pairs, 2 * inner), np.float32)
    z = np.empty((max_pairs, inner), np.float32)
    expert_rows = np.empty((max_pairs, width), np.float32)
    out_rows = np.empty(max_pairs, np.int64)
    for e in range(num_experts):
        count_rows = 0
        for row in range(count):
            for choice in range(ids.shape[1]):
                if ids[row, choice] == e:
                    expert_rows[count_rows], out_rows[count_rows] = x[row], row
                    z[count_rows, 0] = weights[row, choice]
                    count_rows += 1
        if count_rows == 0:
            continue
        matmul(expert_rows[:count_rows], gate_up[e], gate_up_rows[:count_rows])
        for g in range(count_rows):
            weight = z[g, 0]
            for i in range(inner):
                z[g, i] = _swiglu(gate_up_rows[g, i], gate_up_rows[g, inner + i], limit) * weight
        add_matmul(z[:count_rows], down[e], out_rows, out)


@compiled
def _swiglu(a, b, limit):
    a, b = min(a, limit), max(min(b, limit), -limit)
    return a / (np.float32(1) + np.exp(-a)) * b


@compiled
def _route(logits, hash_ids, row, bias, factor, ids, weights):
    num_experts, topk = logits.shape[0], ids.shape[0]
    scores = np.empty(num_experts, np.float32)
    for e in range(num_experts):
        z = logits[e]
        scores[e] = np.sqrt(max(z, np.float32(0)) + np.log1p(np.exp(-abs(z))))
    if hash_ids.shape[0]:
        for choice in range(topk):
            ids[choice] = hash_ids[row, choice]
    else:
        biased = scores + bias
        for choice in range(topk):
            best = 0
            for e in range(1, num_experts):
                if biased[e] > biased[best]:  # ties: lowest id
                    best = e
            ids[choice] = best
            biased[best] = -np.inf
    total = np.float32(0)
    for choice in range(topk):
        total += scores[ids[choice]]
    for choice in range(topk):
        weights[choice] = scores[ids[choice]] / total * factor
