"""Measure whether mHC, router and indexer are in use, on real rows, layer by layer.

Streams: share of their energy in the mean over streams (1: four copies, mHC idle; 0.25: unrelated streams). Gates:
mean write and read weights per sub-layer. Mixing: Frobenius distance of the comb matrices from the identity (no
mixing) and from uniform (full averaging); the two are 1.73 apart. Indexer: attention mass kept by its selection,
compared with the best possible and a random one. Experts: load of the most and least used relative to an even share.
Padding biases these values, so rows have none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from birkhoff.config import V4Config
from training.attention import Selection
from training.forward import Knobs, Mix, layer, local_weights, phases

Weights = dict[str, Tensor]
LATE = 400  # later positions have enough entries to select from


@torch.no_grad()
def liveness(
    weights: Weights, ids: Tensor, config: V4Config, stream_dtype: torch.dtype
) -> list[dict[str, float]]:
    """Return one record per trunk layer for rows `ids` [b, t], from the uncompiled layers."""
    tables = {flag: phases(config, ids.shape[1], flag, ids.device) for flag in (False, True)}
    streams = weights["embed.weight"][ids].to(stream_dtype).unsqueeze(2).expand(-1, -1, config.hc_mult, -1)
    valid, out = torch.ones_like(ids), []
    # All entries visible: in a sparse pass, unselected entries have no mass and recall is always one.
    knobs = Knobs(dense=torch.ones((), device=ids.device))
    for i, ratio in enumerate(config.compress_ratios):
        local = local_weights(weights, f"layers.{i}.")
        streams, selection, load, mixes, outputs = layer(
            local, streams, ids, valid, tables[ratio > 0], knobs, config=config, ratio=ratio
        )
        record = {"layer": i, "ratio": ratio, "stream_mean_share": mean_share(streams)}
        record["stream_norm"] = float(streams.float().norm(dim=-1).mean())
        for name, mix, output in zip(("attn", "ffn"), mixes, outputs):
            record |= {f"{name}_{key}": value for key, value in _gates(mix, output).items()}
        record["busiest_expert"] = float(load.share.max() * config.n_routed_experts)
        record["idlest_expert"] = float(load.share.min() * config.n_routed_experts)
        if selection is not None:
            record |= _indexer(selection, config.index_topk)
        out.append(
            {key: round(value, 4) if isinstance(value, float) else value for key, value in record.items()}
        )
    return out


def mean_share(streams: Tensor) -> float:
    """Return the energy of the mean over streams as a share of the energy of all streams [.., streams, hidden]."""
    wide = streams.float()
    return float(wide.mean(-2).square().sum() * wide.shape[-2] / wide.square().sum())


def _gates(mix: Mix, output: Tensor) -> dict[str, float]:
    comb = mix.comb.flatten(0, -3)
    identity = torch.eye(comb.shape[-1], device=comb.device)
    return {
        "write": float(mix.write.mean()),
        "read": float(mix.read.mean()),
        "from_identity": float((comb - identity).norm(dim=(-2, -1)).mean()),
        "from_uniform": float((comb - 1 / comb.shape[-1]).norm(dim=(-2, -1)).mean()),
        "gate_x_output": float((mix.write.norm(dim=-1) * output.float().norm(dim=-1)).mean()),
    }


def _indexer(selection: Selection, count: int) -> dict[str, float]:
    """Return the shares of attention mass on compressed entries that selecting `count` keeps, at late positions."""
    late = slice(min(LATE, selection.mass.shape[1] // 2), None)
    mass = selection.mass[:, late]
    scores = selection.scores[:, late]
    total = mass.sum(-1).clamp_min(1e-9)
    count = min(count, mass.shape[-1])
    kept = mass.gather(-1, scores.topk(count, -1).indices).sum(-1)
    best = mass.topk(count, -1).values.sum(-1)
    visible = scores.isfinite().sum(-1)
    chance = (count / visible.clamp_min(1)).clamp(max=1)
    return {
        "index_kept": float((kept / total).mean()),
        "index_best": float((best / total).mean()),
        "index_chance": float(chance.float().mean()),
    }
