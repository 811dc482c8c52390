"""Experts on a CPU: the plain twin copies and scatters rows for every expert in use; a decoding step can do less.

A single row visits its few experts one after the other with no indexing at all. A handful of rows that together hit
most experts asks all of them in two products and lets the routing weight, zero where an expert was not chosen, pick:
more arithmetic, but each weight is read once and nothing is sorted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from birkhoff.kernels.experts import reference
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.linear import cpu as product

FEW = 16  # rows up to which asking every expert can pay


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    n = x.shape[0]
    if n == 1:
        return _single(x, ids, weights, stack, limit, round_input)
    if stack.dense is not None and n <= FEW and ids.numel() >= stack.count:
        return _everyone(x, ids, weights, stack, limit, round_input)
    return reference.experts(x, ids, weights, stack, limit, round_input)


def _single(x, ids, weights, stack: Stack, limit: float, round_input) -> torch.Tensor:
    chosen = sorted(zip(ids[0].tolist(), range(ids.shape[1])))  # ascending, as the plain twin adds
    entering = round_input(x)
    opened = torch.cat([product.linear(entering, stack.gate_up(expert)) for expert, _ in chosen])
    a, b = opened.chunk(2, dim=-1)
    z = reference.swiglu(a, b, limit) * weights[0, [place for _, place in chosen]].unsqueeze(-1)
    z = round_input(z.to(x.dtype))
    out = torch.mm(z[:1], stack.down(chosen[0][0])).float()
    for row, (expert, _) in enumerate(chosen[1:], 1):
        out += torch.mm(z[row : row + 1], stack.down(expert))
    return out


def _everyone(x, ids, weights, stack: Stack, limit: float, round_input) -> torch.Tensor:
    assert stack.dense is not None
    gate_up, down = stack.dense  # [E, 2i, d], [E, i, d]
    count, double, _ = gate_up.shape
    share = torch.zeros(x.shape[0], count, dtype=torch.float32).scatter_(1, ids, weights)
    opened = product.linear(round_input(x), gate_up.view(count * double, -1)).unflatten(-1, (count, 2, double // 2))
    z = reference.swiglu(opened[:, :, 0], opened[:, :, 1], limit) * share.unsqueeze(-1)
    z = round_input(z.to(x.dtype)).flatten(1)
    return torch.mm(z, down.reshape(count * (double // 2), -1)).float()
