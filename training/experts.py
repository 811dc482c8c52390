"""Mixture of experts for training: every expert computes every token, and the gate masks those not selected.

With 16 small experts this is exact, needs no sorting, and is two plain matrix products per layer (the shared expert is
one more expert in them). The router is float32. Ties go to the lowest expert id, as in `birkhoff.kernels.experts`.
`Load` holds what balancing needs: the selection counts, and the sequence-wise balance loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from birkhoff.config import V4Config

Weights = dict[str, Tensor]


class Load(NamedTuple):
    share: Tensor  # [experts] share of the selected slots, without padding
    loss: Tensor  # [] sequence-wise balance


def route(x: Tensor, weights: Weights, ids: Tensor, config: V4Config) -> tuple[Tensor, Tensor, Tensor]:
    """Map x [b, t, hidden] to gates [b, t, experts] (zero if not selected), a 0/1 selection mask, and scores."""
    scores = F.softplus(x.float() @ weights["ffn.gate.weight"].float().T).sqrt()
    if "ffn.gate.tid2eid" in weights:
        picks = weights["ffn.gate.tid2eid"][ids]  # [b, t, k]
        experts = torch.arange(config.n_routed_experts, device=x.device)
        chosen = (picks.unsqueeze(-1) == experts).any(-2)
    else:
        chosen = best_experts((scores + weights["ffn.gate.bias"]).detach(), config.num_experts_per_tok)
    picked = scores * chosen
    gates = picked / picked.sum(-1, keepdim=True) * config.routed_scaling_factor
    return gates, chosen.float(), scores


def best_experts(ranked: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` largest along the last axis, lowest index first on ties, without sorting."""
    candidate, other = ranked.unsqueeze(-1), ranked.unsqueeze(-2)
    index = torch.arange(ranked.shape[-1], device=ranked.device)
    ahead = (other > candidate) | ((other == candidate) & (index < index[:, None]))
    return ahead.sum(-1) < count


def moe(x: Tensor, weights: Weights, ids: Tensor, valid: Tensor, config: V4Config) -> tuple[Tensor, Load]:
    """Map normalised x [b, t, hidden] to the output of all experts and the load. `valid` [b, t] marks real tokens."""
    gates, chosen, scores = route(x, weights, ids, config)
    count = config.n_routed_experts
    inner = config.moe_intermediate_size
    limit = config.swiglu_limit
    gate_up = []
    for part in ("w1", "w3"):
        shared = weights[f"ffn.shared_experts.{part}.weight"]
        every = torch.cat(
            (weights[f"ffn.experts.{part}"].flatten(0, 1), shared)
        )  # [(experts + 1) * inner, hidden]
        gate_up.append(F.linear(x, every).float().unflatten(-1, (count + 1, inner)))
    gate, up = gate_up
    hidden = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    hidden = (hidden * F.pad(gates, (0, 1), value=1.0).unsqueeze(-1)).to(x.dtype).flatten(-2)
    down = torch.cat(
        (weights["ffn.experts.w2"].transpose(0, 1).flatten(1), weights["ffn.shared_experts.w2.weight"]), 1
    )
    return F.linear(hidden, down), _load(chosen, scores, valid, config)


def _load(chosen: Tensor, scores: Tensor, valid: Tensor, config: V4Config) -> Load:
    """DeepSeek-V3 balance loss: per row, selection frequency times mean score of each expert."""
    real = valid.float().unsqueeze(-1)
    tokens = real.sum(1).clamp_min(1)
    frequency = (chosen * real).sum(1) / tokens * (config.n_routed_experts / config.num_experts_per_tok)
    mean_score = (scores / scores.sum(-1, keepdim=True) * real).sum(1) / tokens
    share = (chosen * real).sum((0, 1)) / (real.sum() * config.num_experts_per_tok).clamp_min(1)
    return Load(share, (frequency * mean_score).sum(-1).mean())
