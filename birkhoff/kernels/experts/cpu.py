"""Experts on a CPU for many rows: rows are sorted by expert once, then each expert is two products on a slice.

Packed experts are read as they are stored by the native kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from birkhoff.kernels.experts import reference
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.linear import cpu as linear_cpu
from birkhoff.kernels.packed import native


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    if round_input is not None or x.dtype is not torch.float32:
        return reference.experts(x, ids, weights, stack, limit, round_input, shared)
    if stack.products is not None and native.available():
        return reference.add_shared(stack.products().sum(x, ids, weights), shared)
    count, topk = ids.shape
    order = ids.flatten().argsort(stable=True)
    rows_per_expert = torch.bincount(ids.flatten(), minlength=stack.count).tolist()
    expert_rows = x[order.div(topk, rounding_mode="floor")]
    row_weights = weights.flatten()[order].unsqueeze(-1)
    outputs = torch.empty_like(expert_rows)
    first = 0
    for expert, size in enumerate(rows_per_expert):
        if size:
            rows = slice(first, first + size)
            a, b = linear_cpu.linear(expert_rows[rows], stack.gate_up(expert)).chunk(2, dim=-1)
            z = (
                torch.nn.functional.silu(a.clamp(max=limit))
                .mul_(b.clamp(-limit, limit))
                .mul_(row_weights[rows])
            )
            torch.mm(z, stack.down(expert), out=outputs[rows])
            first += size
    unsorted = torch.empty_like(outputs)
    unsorted[order] = outputs
    return reference.add_shared(unsorted.view(count, topk, -1).sum(1), shared)
