"""Routing and experts in plain PyTorch: a loop over the experts in use, never over tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Stack:
    """The routed experts' matrices. `dense` holds all of them as numbers, unless they are kept packed. Packed ones may
    have `turns` for kernels: experts that are ready to be read (None: all), and the addresses of everybody's codes and
    scales at that time, [E, 4] int64; each turn ends when the next is asked for."""

    count: int
    gate_up: Callable[[int], torch.Tensor]  # expert -> [2i, d], gate above up
    down: Callable[[int], torch.Tensor]  # expert -> [i, d], to be multiplied from the left
    dense: tuple[torch.Tensor, torch.Tensor] | None = None  # [E, 2i, d], [E, i, d]
    turns: Callable[[], Iterable[tuple[Sequence[int] | None, torch.Tensor]]] | None = None
    inner: int = 0  # i


def swiglu(a: torch.Tensor, b: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(a.float().clamp(max=limit)) * b.float().clamp(-limit, limit)


def glu(opened: torch.Tensor, limit: float, dtype: torch.dtype) -> torch.Tensor:
    gate, up = opened.chunk(2, dim=-1)
    return swiglu(gate, up, limit).to(dtype)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor | None, topk: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = F.softplus(logits).sqrt()
    if ids is None:
        biased = scores.detach() if bias is None else scores.detach() + bias
        ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    picked = scores.gather(-1, ids)
    return ids, picked / picked.sum(-1, keepdim=True) * factor


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    enter = round_input or (lambda tensor: tensor)
    entering = enter(x)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        a, b = F.linear(entering[rows], stack.gate_up(expert)).chunk(2, dim=-1)
        z = swiglu(a, b, limit) * weights[rows, places].unsqueeze(-1)
        y = enter(z.to(x.dtype)) @ stack.down(expert)
        out = out.index_add(0, rows, y.float())
    return together(out, beside)


def together(routed: torch.Tensor, beside: torch.Tensor | None) -> torch.Tensor:
    """What the routed experts made, [n, d] float32, and what stands beside it, in that one's dtype."""
    return routed if beside is None else (routed + beside.float()).to(beside.dtype)
