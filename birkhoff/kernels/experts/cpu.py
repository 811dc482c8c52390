"""Experts on a CPU for many rows: rows are laid out by expert once, then each expert is two products on a slice."""

from __future__ import annotations

from collections.abc import Callable

import torch

from birkhoff.kernels.experts import reference
from birkhoff.kernels.experts.reference import Stack
from birkhoff.kernels.linear import cpu as product


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    if round_input is not None or x.dtype is not torch.float32:
        return reference.experts(x, ids, weights, stack, limit, round_input, beside)
    count, places = ids.shape
    order = ids.flatten().argsort(stable=True)
    visits = torch.bincount(ids.flatten(), minlength=stack.count).tolist()
    guests = x[order.div(places, rounding_mode="floor")]
    share = weights.flatten()[order].unsqueeze(-1)
    answers = torch.empty_like(guests)
    first = 0
    for expert, number in enumerate(visits):
        if number:
            rows = slice(first, first + number)
            a, b = product.linear(guests[rows], stack.gate_up(expert)).chunk(2, dim=-1)
            z = torch.nn.functional.silu(a.clamp(max=limit)).mul_(b.clamp(-limit, limit)).mul_(share[rows])
            torch.mm(z, stack.down(expert), out=answers[rows])
            first += number
    back = torch.empty_like(answers)
    back[order] = answers
    return reference.together(back.view(count, places, -1).sum(1), beside)
