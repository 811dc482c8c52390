"""mHC in compiled loops: coefficients, Sinkhorn normalisation and collapse of a row in one pass.

Sinkhorn is 39 dependent normalisations of a 4 x 4 matrix: three PyTorch calls each (400 us for any number of rows), but
1.2 us per row in a compiled loop. The projection of many rows uses the matrix library.
"""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear import cpu as linear_cpu


@compiled
def mean_square(x, out):
    count, width = x.shape
    for row in range(count):
        source, total = x[row], np.float32(0)
        for k in range(width):
            total += source[k] * source[k]
        out[row] = total / width


@compiled
def coefficients_and_collapse(logits, mean, base, scale, iters, eps, rms_eps, streams, u, pre, post, mix):
    """Everything after the projection: logits [n, (2+m)m] -> pre, post, mix and u = sum_s pre[s] streams[s]."""
    count, m, width = streams.shape
    one = np.float32(1)
    for row in range(count):
        rho = np.float32(1 / np.sqrt(mean[row] + rms_eps))
        z = logits[row]
        for s in range(m):
            pre[row, s] = one / (one + np.exp(-(z[s] * rho * scale[0] + base[s]))) + eps
            post[row, s] = 2 / (one + np.exp(-(z[m + s] * rho * scale[1] + base[m + s])))
        mixer = mix[row]
        for j in range(m):
            top = np.float32(-np.inf)
            for k in range(m):
                i = 2 * m + m * j + k
                mixer[j, k] = z[i] * rho * scale[2] + base[i]
                top = max(top, mixer[j, k])
            total = np.float32(0)
            for k in range(m):
                mixer[j, k] = np.exp(mixer[j, k] - top)
                total += mixer[j, k]
            for k in range(m):
                mixer[j, k] = mixer[j, k] / total + eps
        for step in range(iters):
            if step:
                for j in range(m):
                    total = eps
                    for k in range(m):
                        total += mixer[j, k]
                    for k in range(m):
                        mixer[j, k] /= total
            for k in range(m):
                total = eps
                for j in range(m):
                    total += mixer[j, k]
                for j in range(m):
                    mixer[j, k] /= total
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
    fp32 = streams.float().contiguous()
    flat = fp32.view(n, m * d)
    logits, mean = linear_cpu.linear(flat, fn), torch.empty(n)
    mean_square(flat.numpy(), mean.numpy())
    u = torch.empty(n, d)
    pre = torch.empty(n, m)
    post = torch.empty(n, m)
    mix = torch.empty(n, m, m)
    coefficients_and_collapse(
        logits.numpy(),
        mean.numpy(),
        base.numpy(),
        scale.numpy(),
        iters,
        np.float32(eps),
        np.float32(rms_eps),
        fp32.numpy(),
        u.numpy(),
        pre.numpy(),
        post.numpy(),
        mix.numpy(),
    )
    return u.to(streams.dtype), pre, post, mix


@compiled
def mix_streams(streams, y, post, mix, out):
    count, m, width = streams.shape
    for row in range(count):
        for k in range(m):
            target = out[row, k]
            y_row = y[row]
            weight = post[row, k]
            for c in range(width):
                target[c] = weight * y_row[c]
            for j in range(m):
                source, coefficient = streams[row, j], mix[row, j, k]
                for c in range(width):
                    target[c] += coefficient * source[c]


def write(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    fp32 = streams.float().contiguous()
    out = torch.empty_like(fp32)
    mix_streams(fp32.numpy(), y.float().contiguous().numpy(), post.numpy(), mix.numpy(), out.numpy())
    return out.to(streams.dtype)
