"""Routing and experts in plain PyTorch: a loop over the experts in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from birkhoff.kernels.packed import PackedType
from birkhoff.kernels.packed.native import ExpertProducts
from birkhoff.kernels.quant.rounded_rows import Input


@dataclass(frozen=True)
class Stack:
    """The matrices of the routed experts. `dense` holds all of them as floats, unless they are packed. Packed ones may
    have `batches` for kernels: an iterator of (experts that are ready to be read, or None for all; addresses of the
    codes and scales of every expert at that time, [E, 4] int64). A batch is valid until the next one is requested.
    `types` are those of gate and up, and of down."""

    count: int
    gate_up: Callable[[int], torch.Tensor]  # expert -> [2i, d], gate above up
    down: Callable[[int], torch.Tensor]  # expert -> [i, d]; z @ down
    dense: tuple[torch.Tensor, torch.Tensor] | None = None  # [E, 2i, d], [E, i, d]
    batches: Callable[[], Iterable[tuple[Sequence[int] | None, torch.Tensor]]] | None = None
    inner: int = 0  # i
    types: tuple[PackedType, PackedType] | None = None
    products: Callable[[], ExpertProducts] | None = (
        None  # packed experts in host memory, for the native kernels
    )


def swiglu(a: torch.Tensor, b: torch.Tensor, limit: float) -> torch.Tensor:
    return F.silu(a.float().clamp(max=limit)) * b.float().clamp(-limit, limit)


def glu(gate_up: torch.Tensor, limit: float, dtype: torch.dtype, released: bool = False) -> Input:
    gate, up = gate_up.chunk(2, dim=-1)
    return swiglu(gate, up, limit).to(dtype)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor | None, topk: int, factor: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = F.softplus(logits).sqrt()
    if ids is None:
        biased = scores.detach() if bias is None else scores.detach() + bias
        ids = biased.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    selected = scores.gather(-1, ids)
    return ids, selected / selected.sum(-1, keepdim=True) * factor


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    stack: Stack,
    limit: float,
    round_input: Callable[[torch.Tensor], torch.Tensor] | None,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    round_or_keep = round_input or (lambda tensor: tensor)
    inputs = round_or_keep(x)
    for expert in ids.unique().tolist():
        rows, choices = (ids == expert).nonzero(as_tuple=True)
        a, b = F.linear(inputs[rows], stack.gate_up(expert)).chunk(2, dim=-1)
        z = swiglu(a, b, limit) * weights[rows, choices].unsqueeze(-1)
        y = round_or_keep(z.to(x.dtype)) @ stack.down(expert)
        out = out.index_add(0, rows, y.float())
    return add_shared(out, shared)


def add_shared(routed: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor:
    """Output of the routed experts [n, d] float32 plus that of the shared expert, in the dtype of the latter."""
    return routed if shared is None else (routed + shared.float()).to(shared.dtype)
