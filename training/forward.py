"""The training forward: ids [b, t] in, losses out, with every V4 mechanism, written for `torch.compile`.

Functions take the weights as a mapping from released names (experts stacked) to tensors. A layer receives only the
names of its own layer, so layers of one kind share one compiled graph. mHC, router, norms and losses are float32;
streams have the dtype of the embedding; matrix products follow the weights. Values that change during a run (dropout,
dense selection) are device scalars, so training and evaluation run the same graph.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from birkhoff.config import V4Config
from training.attention import Phases, Selection, attention, phases, rms_norm
from training.experts import Load, moe
from training.sinkhorn import sinkhorn

Weights = dict[str, Tensor]


class Mix(NamedTuple):
    """mHC coefficients of one sub-layer: read [b, t, 4], write [b, t, 4], comb [b, t, 4, 4]."""

    read: Tensor
    write: Tensor
    comb: Tensor


class Knobs(NamedTuple):
    """Device scalars of a step; None removes the mechanism from the graph."""

    dropout: Tensor | None = None
    dense: Tensor | None = None  # nonzero: CSA layers attend to every visible entry


def still(device: torch.device) -> Knobs:
    """Knobs without dropout and with sparse selection, for evaluation on the training graphs.

    Two separate tensors, as in a step: a graph compiled for two inputs is recompiled if one tensor is passed twice.
    """
    return Knobs(*torch.zeros(2, device=device).unbind())


class Trunk(NamedTuple):
    streams: Tensor  # [b, t, 4, hidden] after the last layer
    hidden: Tensor  # [b, t, hidden], input of the head
    index_losses: list[Tensor]
    loads: list[Load]


def enter(ids: Tensor, table: Tensor, *, count: int, dtype: torch.dtype) -> Tensor:
    """Return the embeddings of ids [b, t], copied to every stream."""
    return F.embedding(ids, table).to(dtype).unsqueeze(2).repeat(1, 1, count, 1)


def mhc_read(streams: Tensor, weights: Weights, name: str, config: V4Config) -> tuple[Tensor, Mix]:
    """Return the coefficients from the streams [b, t, 4, hidden], and the sub-layer's input."""
    count = config.hc_mult
    flat = streams.flatten(2).float()
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    logits = (flat @ weights[f"{name}_fn"].T) * norm
    scale = weights[f"{name}_scale"]
    base = weights[f"{name}_base"]
    read = torch.sigmoid(logits[..., :count] * scale[0] + base[:count]) + config.hc_eps
    write = 2 * torch.sigmoid(logits[..., count : 2 * count] * scale[1] + base[count : 2 * count])
    square = (logits[..., 2 * count :] * scale[2] + base[2 * count :]).unflatten(-1, (count, count))
    comb = sinkhorn(square, config.hc_sinkhorn_iters, config.hc_eps)
    return (read.unsqueeze(-1) * streams.float()).sum(2), Mix(read, write, comb)


def mhc_write(streams: Tensor, out: Tensor, mix: Mix) -> Tensor:
    """Return the streams after the sub-layer: target k gets comb[j, k] of stream j and write[k] of the output."""
    carried = (mix.comb.unsqueeze(-1) * streams.float().unsqueeze(3)).sum(2)
    return (mix.write.unsqueeze(-1) * out.float().unsqueeze(2) + carried).to(streams.dtype)


def mhc_head(streams: Tensor, weights: Weights, prefix: str, config: V4Config) -> Tensor:
    flat = streams.flatten(2).float()
    norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    logits = (flat @ weights[f"{prefix}hc_head_fn"].T) * norm
    share = (
        torch.sigmoid(logits * weights[f"{prefix}hc_head_scale"] + weights[f"{prefix}hc_head_base"])
        + config.hc_eps
    )
    return (share.unsqueeze(-1) * streams.float()).sum(2)


def _drop(out: Tensor, rate: Tensor | None) -> Tensor:
    if rate is None:
        return out
    keep = torch.rand(out.shape, device=out.device) >= rate
    return out * keep / (1 - rate)


def layer(
    weights: Weights,
    streams: Tensor,
    ids: Tensor,
    valid: Tensor,
    phase: Phases,
    knobs: Knobs,
    *,
    config: V4Config,
    ratio: int,
) -> tuple[Tensor, Selection | None, Load, tuple[Mix, Mix], tuple[Tensor, Tensor]]:
    """Run one layer; return streams, indexer, router and mHC values, and the outputs of the sub-layers."""
    dtype = weights["attn.wq_a.weight"].dtype
    eps = config.rms_norm_eps
    read, attention_mix = mhc_read(streams, weights, "hc_attn", config)
    x = rms_norm(read, weights["attn_norm.weight"], eps).to(dtype)
    attended, selection = attention(x, weights, config, ratio, phase, knobs.dense)
    attended = _drop(attended, knobs.dropout)
    streams = mhc_write(streams, attended, attention_mix)
    read, expert_mix = mhc_read(streams, weights, "hc_ffn", config)
    x = rms_norm(read, weights["ffn_norm.weight"], eps).to(dtype)
    thought, load = moe(x, weights, ids, valid, config)
    thought = _drop(thought, knobs.dropout)
    streams = mhc_write(streams, thought, expert_mix)
    return streams, selection, load, (attention_mix, expert_mix), (attended, thought)


def _brief(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None, Load]:
    """`layer` for training: returns only what the loss needs, so that nothing else stays in memory."""
    streams, selection, load, _, _ = layer(*args, **options)
    return streams, None if selection is None else selection.loss, load


def enter_mtp(streams: Tensor, next_ids: Tensor, table: Tensor, weights: Weights, config: V4Config) -> Tensor:
    """Return the MTP layer's input streams: each trunk stream and the next token's embedding, projected and added."""
    dtype = weights["e_proj.weight"].dtype
    eps = config.rms_norm_eps
    embedded = F.embedding(next_ids, table).to(streams.dtype)
    token = F.linear(rms_norm(embedded, weights["enorm.weight"], eps).to(dtype), weights["e_proj.weight"])
    state = F.linear(rms_norm(streams, weights["hnorm.weight"], eps).to(dtype), weights["h_proj.weight"])
    return (token.unsqueeze(2) + state).to(streams.dtype)


def collapse(streams: Tensor, weights: Weights, prefix: str, config: V4Config, dtype: torch.dtype) -> Tensor:
    """Reduce the streams to the normalised hidden rows that the head reads."""
    return rms_norm(
        mhc_head(streams, weights, prefix, config), weights[f"{prefix}norm.weight"], config.rms_norm_eps
    ).to(dtype)


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return nats per token [b, t], float32."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    return logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


class Forward:
    """The model's functions for one config and row length, plain or compiled."""

    def __init__(self, config: V4Config, length: int, device: torch.device | str, compiled: bool = False):
        self.config = config
        self.length = length
        self.device = torch.device(device)
        self.tables = {flag: phases(config, length, flag, self.device) for flag in (False, True)}
        self.choose(compiled)

    def choose(self, compiled: bool) -> None:
        """Select `torch.compile`d or plain functions; both compute the same."""
        config = self.config
        self.compiled = compiled
        wrap: Callable[..., Any] = (
            partial(torch.compile, fullgraph=True, dynamic=False) if compiled else (lambda f: f)
        )
        kinds = {(ratio, config.is_hash_routed(i)) for i, ratio in enumerate(config.compress_ratios)} | {
            (0, False)
        }
        self._layers = {
            (ratio, hashed): wrap(
                _named(partial(_brief, config=config, ratio=ratio), f"layer_{ratio}_{hashed}")
            )
            for ratio, hashed in kinds
        }
        self._embed = wrap(_named(enter, "enter"))
        self._collapse = wrap(_named(partial(collapse, config=config), "collapse"))
        self._enter = wrap(_named(partial(enter_mtp, config=config), "enter_mtp"))
        self._losses = wrap(token_losses)

    def trunk(
        self, weights: Weights, ids: Tensor, valid: Tensor, knobs: Knobs, stream_dtype: torch.dtype
    ) -> Trunk:
        config = self.config
        streams = self._embed(ids, weights["embed.weight"], count=config.hc_mult, dtype=stream_dtype)
        index_losses, loads = [], []
        for i, ratio in enumerate(config.compress_ratios):
            run = self._layers[ratio, config.is_hash_routed(i)]
            local = local_weights(weights, f"layers.{i}.")
            streams, index_loss, load = run(local, streams, ids, valid, self.tables[ratio > 0], knobs)
            loads.append(load)
            if index_loss is not None:
                index_losses.append(index_loss)
        root = {name: weights[name] for name in ROOT_NAMES}
        dtype = weights["layers.0.attn.wq_a.weight"].dtype
        return Trunk(streams, self._collapse(streams, root, "", dtype=dtype), index_losses, loads)

    def mtp(
        self, weights: Weights, streams: Tensor, next_ids: Tensor, valid: Tensor, knobs: Knobs
    ) -> tuple[Tensor, Load]:
        """Return hidden rows for the token after next, from the trunk's streams and the next tokens."""
        local = local_weights(weights, "mtp.0.")
        streams = self._enter(streams, next_ids, weights["embed.weight"], local)
        streams, _, load = self._layers[0, False](local, streams, next_ids, valid, self.tables[False], knobs)
        dtype = local["e_proj.weight"].dtype
        return self._collapse(streams, {name: local[name] for name in ROOT_NAMES}, "", dtype=dtype), load

    def losses(self, hidden: Tensor, weights: Weights, targets: Tensor) -> Tensor:
        return self._losses(hidden, weights["head.weight"], targets)


ROOT_NAMES = ("hc_head_fn", "hc_head_base", "hc_head_scale", "norm.weight")


def local_weights(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap a partial in a new function: `torch.compile` caches by code object, which these must not share."""

    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return types.FunctionType(
        call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__
    )
