"""Experts as compiled loops for the few rows of a decoding step: nothing is gathered, sorted or padded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from birkhoff.kernels.experts import reference
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.jit import compiled

FEW = 12  # rows up to which the loops beat one matrix product per expert
NO_BIAS = np.zeros(0, np.float32)


@compiled
def _choose(scores, bias, ids):
    """The highest biased scores of each row, the lowest id among equals."""
    rows, count = scores.shape
    biased = np.empty(count, np.float32)
    for row in range(rows):
        for e in range(count):
            biased[e] = scores[row, e] + (bias[e] if bias.shape[0] else np.float32(0))
        for place in range(ids.shape[1]):
            best = 0
            for e in range(1, count):
                if biased[e] > biased[best]:
                    best = e
            ids[row, place] = best
            biased[best] = -np.inf


@compiled
def _visit(x, ids, weights, gate_up, down, limit, out):
    """out[r] = sum over the chosen experts, ascending, of down(swiglu(gate_up x) * weight)."""
    rows, width = x.shape
    inner = down.shape[1]
    opened, z = np.empty(2 * inner, np.float32), np.empty(inner, np.float32)
    for row in range(rows):
        for c in range(width):
            out[row, c] = 0
    for expert in range(gate_up.shape[0]):
        for row in range(rows):
            for place in range(ids.shape[1]):
                if ids[row, place] != expert:
                    continue
                source, target = x[row], out[row]
                for o in range(2 * inner):
                    w = gate_up[expert, o]
                    total = w[0] * 0
                    for k in range(width):
                        total += w[k] * source[k]
                    opened[o] = total
                for i in range(inner):
                    a, b = min(opened[i], limit), max(min(opened[inner + i], limit), -limit)
                    z[i] = a / (1 + np.exp(-a)) * b * weights[row, place]
                i = 0
                while i + 4 <= inner:
                    d0, d1, d2, d3 = down[expert, i], down[expert, i + 1], down[expert, i + 2], down[expert, i + 3]
                    z0, z1, z2, z3 = z[i], z[i + 1], z[i + 2], z[i + 3]
                    for c in range(width):
                        target[c] += z0 * d0[c] + z1 * d1[c] + z2 * d2[c] + z3 * d3[c]
                    i += 4
                while i < inner:
                    d0, z0 = down[expert, i], z[i]
                    for c in range(width):
                        target[c] += z0 * d0[c]
                    i += 1


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor | None, topk: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.nn.functional.softplus(logits).sqrt_()
    if ids is None:
        ids = torch.empty(*scores.shape[:-1], topk, dtype=torch.long)
        _choose(scores.numpy(), NO_BIAS if bias is None else bias.numpy(), ids.numpy())
    picked = scores.gather(-1, ids)
    return ids, picked.mul_(factor / picked.sum(-1, keepdim=True))


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    if x.shape[0] > FEW or stack.dense is None or round_input is not None or x.dtype is not torch.float32:
        return reference.experts(x, ids, weights, stack, limit, round_input)
    gate_up, down = stack.dense
    out = torch.empty(x.shape)
    _visit(x.numpy(), ids.numpy(), weights.numpy(), gate_up.numpy(), down.numpy(), np.float32(limit), out.numpy())
    return out
