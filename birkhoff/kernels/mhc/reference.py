"""mHC in plain PyTorch, in the notation of section 3 of the paper."""

from __future__ import annotations

import torch


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)  # iterations end on columns, which are exact
    for _ in range(iters - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def _project(streams: torch.Tensor, fn: torch.Tensor, rms_eps: float) -> torch.Tensor:
    flat = streams.flatten(-2).float()  # [n, m*d], stream-major
    rho = (flat.square().mean(-1, keepdim=True) + rms_eps).rsqrt()  # one statistic over all streams
    return (flat @ fn.T) * rho  # scaled after the product


def coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = streams.shape[-2]
    logits = _project(streams, fn, rms_eps)
    pre = torch.sigmoid(logits[..., :m] * scale[0] + base[:m]) + eps
    post = 2 * torch.sigmoid(logits[..., m : 2 * m] * scale[1] + base[m : 2 * m])
    mix = sinkhorn((logits[..., 2 * m :] * scale[2] + base[2 * m :]).unflatten(-1, (m, m)), iters, eps)
    return pre, post, mix


def _collapse(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("...m,...md->...d", weights, streams.float()).to(streams.dtype)


def reread(
    streams: torch.Tensor, collapsed: torch.Tensor, weights: torch.Tensor, edited: torch.Tensor
) -> torch.Tensor:
    if edited is weights:
        return collapsed
    parts = [edited[..., s, None] * streams[..., s, :].float() for s in range(streams.shape[-2])]
    changed = (edited != weights).any(-1, keepdim=True)
    return torch.where(changed, sum(parts[1:], parts[0]).to(streams.dtype), collapsed)


def read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pre, post, mix = coefficients(streams, fn, base, scale, iters, eps, rms_eps)
    return _collapse(streams, pre), pre, post, mix


def prepare(fn: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fn


def write(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    carried = torch.einsum("...jk,...jd->...kd", mix, streams.float())  # the sum runs over the source stream
    return (carried + post.unsqueeze(-1) * y.float().unsqueeze(-2)).to(streams.dtype)


def head(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    rms_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.sigmoid(_project(streams, fn, rms_eps) * scale + base) + eps
    return _collapse(streams, weights), weights
