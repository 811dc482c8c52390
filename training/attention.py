"""Attention for training: whole rows, all three layer kinds, one softmax over window, compressed entries and sink.

Shapes: `b` rows, `t` tokens, `h` heads, `d` head width, `c` compressed entries. The window is computed in blocks of
its own length against two blocks of keys, so no t x t score matrix exists; with one shared key/value vector per token,
heads become part of the row dimension of plain matrix products. `t` must be a multiple of the window and of 4. Scores,
softmax and pooling are float32; products use the dtype of the weights. The indexer reads detached inputs and is
trained by its own loss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from birkhoff.config import V4Config

Weights = dict[str, Tensor]  # local names of one layer, for instance "attn.wq_a.weight"


class Phases(NamedTuple):
    """cos and sin [positions, rope/2] of one rotary base."""

    cos: Tensor
    sin: Tensor


class Selection(NamedTuple):
    """Output of a CSA layer's indexer: its loss, and values for inspection."""

    loss: Tensor
    scores: Tensor  # [b, t, c], minus infinity where not visible
    allowed: Tensor  # [b, t, c] entries the query may attend
    mass: Tensor  # [b, t, c] attention on compressed entries, summed over heads


def phases(config: V4Config, length: int, compressed: bool, device: torch.device | str) -> Phases:
    """Rotary tables for positions 0..length-1; float64 angles, so that the table is exact to float32."""
    half = config.qk_rope_head_dim // 2
    theta = config.compress_rope_theta if compressed else config.rope_theta
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    if compressed and config.rope_scaling is not None:
        frequency = _yarn(frequency, theta, config)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return Phases(angle.cos().float().to(device), angle.sin().float().to(device))


def _yarn(frequency: Tensor, theta: float, config: V4Config) -> Tensor:
    scaling = config.rope_scaling
    width = config.qk_rope_head_dim
    assert scaling is not None

    def channel(beta: float) -> float:
        turns = scaling.original_max_position_embeddings / (2 * torch.pi * beta)
        return (
            width
            * float(torch.log(torch.tensor(turns, dtype=torch.float64)))
            / (2 * float(torch.log(torch.tensor(theta, dtype=torch.float64))))
        )

    low = max(int(channel(scaling.beta_fast) // 1), 0)
    high: float = min(int(-(-channel(scaling.beta_slow) // 1)), width - 1)
    high = high + 0.001 if high == low else high
    ramp = ((torch.arange(len(frequency), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return frequency * (1 - ramp) + frequency / scaling.factor * ramp


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last channels of x by adjacent pairs; cos and sin broadcast over [..., rope/2]."""
    width = 2 * cos.shape[-1]
    plain, turned = x[..., :-width], x[..., -width:].float()
    left, right = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((left * cos - right * sin, left * sin + right * cos), -1).flatten(-2)
    return torch.cat((plain, pairs.to(x.dtype)), -1)


def compress(x: Tensor, weights: Weights, name: str, ratio: int, phase: Phases, eps: float) -> Tensor:
    """Return pooled entries [b, c, d] of x [b, t, hidden]; tokens after the last whole block are ignored."""
    blocks = x.shape[1] // ratio
    x = x[:, : blocks * ratio]
    value = F.linear(x, weights[f"{name}.wkv.weight"]).float().unflatten(1, (blocks, ratio))
    gate = (
        F.linear(x, weights[f"{name}.wgate.weight"]).float().unflatten(1, (blocks, ratio))
        + weights[f"{name}.ape"]
    )
    if ratio == 4:  # the first half of the channels belongs to the next block, the second to its own
        width = value.shape[-1] // 2
        value = torch.cat((_previous(value[..., :width], 0.0), value[..., width:]), 2)
        gate = torch.cat((_previous(gate[..., :width], float("-inf")), gate[..., width:]), 2)
    pooled = (gate.softmax(2) * value).sum(2).to(x.dtype)
    pooled = rms_norm(pooled, weights[f"{name}.norm.weight"], eps)
    stop = blocks * ratio
    return rotate(pooled, phase.cos[:stop:ratio], phase.sin[:stop:ratio])


def _previous(blocks: Tensor, absent: float) -> Tensor:
    """Return each block's predecessor; `absent` precedes the first."""
    return F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0), value=absent)


def index_scores(x: Tensor, latent: Tensor, weights: Weights, config: V4Config, phase: Phases) -> Tensor:
    """Return indexer scores [b, t, c], float32, before masking."""
    heads, width = config.index_n_heads, config.index_head_dim
    keys = compress(x, weights, "attn.indexer.compressor", 4, phase, config.rms_norm_eps)
    query = F.linear(latent, weights["attn.indexer.wq_b.weight"]).unflatten(-1, (heads, width))
    query = rotate(query, phase.cos[:, None], phase.sin[:, None])
    dots = query.flatten(1, 2) @ keys.transpose(1, 2)  # [b, t * heads, c]
    share = (
        F.linear(x, weights["attn.indexer.weights_proj.weight"].to(x.dtype)).float() * (width * heads) ** -0.5
    )
    return (dots.unflatten(1, (-1, heads)).float().relu() * share.unsqueeze(-1)).sum(2)


def visible_entries(length: int, entries: int, ratio: int, device: torch.device) -> Tensor:
    """Return [t, c]: a block is visible from its own last token on."""
    closed = (torch.arange(length, device=device) + 1) // ratio
    return torch.arange(entries, device=device) < closed[:, None]


def select(scores: Tensor, visible: Tensor, count: int, dense: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return masked scores and the allowed entries: the top `count` visible ones, or all of them if `dense` is on."""
    masked = scores.masked_fill(~visible, float("-inf"))
    if count >= scores.shape[-1]:
        return masked, visible.expand_as(scores)
    best = masked.topk(count, -1, sorted=False).indices
    chosen = torch.zeros_like(masked, dtype=torch.bool).scatter(-1, best, True)
    if dense is not None:
        chosen = chosen | (dense > 0)
    return masked, chosen & visible


def index_loss(masked: Tensor, allowed: Tensor, mass: Tensor) -> Tensor:
    """KL from the attention on the entries (constant) to the softmax of the scores, over the allowed entries."""
    some = allowed.any(-1)
    target = mass / mass.sum(-1, keepdim=True).clamp_min(1e-9)
    # Rows without entries would give an empty softmax: allow everything there, then mask them out.
    scores = masked.masked_fill(~allowed, -1e9)
    divergence = (target * ((target + 1e-9).log() - scores.log_softmax(-1))).sum(-1)
    return (divergence * some).sum() / some.sum().clamp_min(1)


def attention(
    x: Tensor, weights: Weights, config: V4Config, ratio: int, phase: Phases, dense: Tensor | None = None
) -> tuple[Tensor, Selection | None]:
    """Apply one attention sub-layer to normalised x [b, t, hidden]. `dense` disables top-k selection in CSA layers."""
    batch, length, _ = x.shape
    heads = config.num_attention_heads
    width = config.head_dim
    window = config.sliding_window
    eps = config.rms_norm_eps
    latent = rms_norm(F.linear(x, weights["attn.wq_a.weight"]), weights["attn.q_norm.weight"], eps)
    query = F.linear(latent, weights["attn.wq_b.weight"]).unflatten(-1, (heads, width)).float()
    query = (query * torch.rsqrt(query.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    query = rotate(query, phase.cos[:, None], phase.sin[:, None])  # [b, t, h, d]
    key = rms_norm(F.linear(x, weights["attn.wkv.weight"]), weights["attn.kv_norm.weight"], eps)
    key = rotate(key, phase.cos, phase.sin)  # [b, t, d]

    blocks = length // window
    near = key.unflatten(1, (blocks, window))
    near = torch.cat((F.pad(near[:, :-1], (0, 0, 0, 0, 1, 0)), near), 2)  # [b, blocks, 2 window, d]
    rows = query.reshape(batch, blocks, window * heads, width)
    scale = width**-0.5
    window_logits = (rows @ near.transpose(2, 3)).float().reshape(batch, length, heads, 2 * window) * scale
    window_logits = window_logits.masked_fill(~_window_mask(length, window, x.device)[:, None], float("-inf"))

    entries = allowed = masked = None
    sink = weights["attn.attn_sink"][:, None]
    top = torch.maximum(window_logits.detach().amax(-1, keepdim=True), sink.detach())
    if ratio and length >= ratio:
        entries = compress(x, weights, "attn.compressor", ratio, phase, eps)  # [b, c, d]
        allowed = visible_entries(length, entries.shape[1], ratio, x.device)
        if ratio == 4:
            scores = index_scores(x.detach(), latent.detach(), weights, config, phase)
            masked, allowed = select(scores, allowed, config.index_topk, dense)
        far_logits = (query.flatten(1, 2) @ entries.transpose(1, 2)).float().unflatten(
            1, (length, heads)
        ) * scale
        far_logits = far_logits.masked_fill(~allowed.unsqueeze(-2), float("-inf"))
        top = torch.maximum(top, far_logits.detach().amax(-1, keepdim=True))

    window_mass = (window_logits - top).exp()
    total = window_mass.sum(-1, keepdim=True) + (sink - top).exp()
    if entries is not None:
        far_mass = (far_logits - top).exp()
        total = total + far_mass.sum(-1, keepdim=True)
        far_mass = far_mass / total
    window_mass = (window_mass / total).to(x.dtype).reshape(batch, blocks, window * heads, 2 * window)
    out = (window_mass @ near).reshape(batch, length, heads, width)
    selection = None
    if entries is not None:
        out = out + (far_mass.to(x.dtype).flatten(1, 2) @ entries).unflatten(1, (length, heads))
        if masked is not None and allowed is not None:
            mass = far_mass.detach().sum(2)
            selection = Selection(index_loss(masked, allowed, mass), masked, allowed, mass)

    out = rotate(out, phase.cos[:, None], -phase.sin[:, None])  # values carry the key's phase: rotate back
    grouped = out.reshape(batch, length, config.o_groups, -1)
    low = weights["attn.wo_a.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    narrow = torch.einsum("btgi,gri->btgr", grouped, low).flatten(2)
    return F.linear(narrow, weights["attn.wo_b.weight"]), selection


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[t, 2 window]: slot j of a block is position start - window + j; the last `window` up to t are visible."""
    position = torch.arange(length, device=device)[:, None]
    slot = position - position % window - window + torch.arange(2 * window, device=device)
    return (slot >= 0) & (slot <= position) & (slot > position - window)
