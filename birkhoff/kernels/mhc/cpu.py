"""mHC as compiled loops: a row's coefficients, its Sinkhorn walk and its collapse in one pass.

The walk is 39 tiny normalisations one after the other; PyTorch needs three calls for each, whatever the number of rows
(400 us), a compiled loop 1.2 us a row. With many rows the projection is left to the matrix library.
"""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear import cpu as product


@compiled
def square_mean(x, out):
    count, width = x.shape
    for row in range(count):
        source, total = x[row], np.float32(0)
        for k in range(width):
            total += source[k] * source[k]
        out[row] = total / width


@compiled
def finish(logits, mean, base, scale, iters, eps, rms_eps, streams, u, pre, post, mix):
    """Everything after the projection: logits [n, (2+m)m] -> pre, post, mix, and u = sum_s pre[s] streams[s]."""
    count, m, width = streams.shape
    one = np.float32(1)
    for row in range(count):
        rho = np.float32(1 / np.sqrt(mean[row] + rms_eps))
        z = logits[row]
        for s in range(m):
            pre[row, s] = one / (one + np.exp(-(z[s] * rho * scale[0] + base[s]))) + eps
            post[row, s] = 2 / (one + np.exp(-(z[m + s] * rho * scale[1] + base[m + s])))
        cell = mix[row]
        for j in range(m):
            top = np.float32(-np.inf)
            for k in range(m):
                i = 2 * m + m * j + k
                cell[j, k] = z[i] * rho * scale[2] + base[i]
                top = max(top, cell[j, k])
            total = np.float32(0)
            for k in range(m):
                cell[j, k] = np.exp(cell[j, k] - top)
                total += cell[j, k]
            for k in range(m):
                cell[j, k] = cell[j, k] / total + eps
        for step in range(iters):
            if step:
                for j in range(m):
                    total = eps
                    for k in range(m):
                        total += cell[j, k]
                    for k in range(m):
                        cell[j, k] /= total
            for k in range(m):
                total = eps
                for j in range(m):
                    total += cell[j, k]
                for j in range(m):
                    cell[j, k] /= total
        for c in range(width):
            u[row, c] = 0
        for s in range(m):
            weight, source = pre[row, s], streams[row, s]
            for c in range(width):
                u[row, c] += weight * source[c]


def read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, m, d = streams.shape
    wide = streams.float().contiguous()
    flat = wide.view(n, m * d)
    logits, mean = product.linear(flat, fn), torch.empty(n)
    square_mean(flat.numpy(), mean.numpy())
    u = torch.empty(n, d)
    pre = torch.empty(n, m)
    post = torch.empty(n, m)
    mix = torch.empty(n, m, m)
    finish(
        logits.numpy(),
        mean.numpy(),
        base.numpy(),
        scale.numpy(),
        iters,
        np.float32(eps),
        np.float32(rms_eps),
        wide.numpy(),
        u.numpy(),
        pre.numpy(),
        post.numpy(),
        mix.numpy(),
    )
    return u.to(streams.dtype), pre, post, mix


@compiled
def mix_back(streams, y, post, mix, out):
    count, m, width = streams.shape
    for row in range(count):
        for k in range(m):
            target = out[row, k]
            added = y[row]
            weight = post[row, k]
            for c in range(width):
                target[c] = weight * added[c]
            for j in range(m):
                source, share = streams[row, j], mix[row, j, k]
                for c in range(width):
                    target[c] += share * source[c]


def write(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    wide = streams.float().contiguous()
    out = torch.empty_like(wide)
    mix_back(wide.numpy(), y.float().contiguous().numpy(), post.numpy(), mix.numpy(), out.numpy())
    return out.to(streams.dtype)
