"""mHC on a CPU for the few rows of a decoding step.

The Sinkhorn walk is 39 tiny normalisations one after the other; in PyTorch each costs three calls whatever the number
of rows. Here one normalisation is one product with a 0/1 matrix that sums rows (or columns) and spreads the sums back
to the entries, and one division, both in place in NumPy: a walk takes 35 us instead of 400. The eps of every
denominator rides along as an extra row of that matrix. The walk stops early once a round changes nothing.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from birkhoff.kernels.mhc import reference

FEW = 64  # rows up to which NumPy's calls cost less than PyTorch's
SETTLED = 1e-7  # a row sum this close to one: float32 cannot say it better


@cache
def _spread(m: int, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Matrices [m*m + 1, m*m] that give every entry its row's (its column's) sum plus eps."""
    entry = np.arange(m * m)
    rows = (entry[:, None] // m == entry // m).astype(np.float32)
    columns = (entry[:, None] % m == entry % m).astype(np.float32)
    tail = np.full((1, m * m), eps, np.float32)
    return np.concatenate((rows, tail)), np.concatenate((columns, tail))


def _walk(logits: np.ndarray, m: int, iters: int, eps: float) -> np.ndarray:
    """Sinkhorn of logits [n, m*m]; the same order of steps as the plain twin."""
    n = logits.shape[0]
    by_row, by_column = _spread(m, eps)
    held = np.ones((n, m * m + 1), np.float32)  # the last column carries eps into every sum
    mix = held[:, :-1]
    square = logits.reshape(n, m, m)
    np.exp(square - square.max(-1, keepdims=True), out=square)
    square /= square.sum(-1, keepdims=True)
    mix[:] = logits + np.float32(eps)
    sums = np.empty((n, m * m), np.float32)
    np.dot(held, by_column, out=sums)
    np.divide(mix, sums, out=mix)
    for step in range(iters - 1):
        np.dot(held, by_row, out=sums)
        if step % 4 == 3 and abs(sums - (1 + eps)).max() < SETTLED:
            break
        np.divide(mix, sums, out=mix)
        np.dot(held, by_column, out=sums)
        np.divide(mix, sums, out=mix)
    return mix.reshape(n, m, m)


def read(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, iters: int, eps: float, rms_eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, m, d = streams.shape
    if n > FEW:
        return reference.read(streams, fn, base, scale, iters, eps, rms_eps)
    flat = streams.reshape(n, m * d)
    flat = flat if flat.dtype is torch.float32 else flat.float()
    logits = torch.mm(flat, fn.T).numpy()
    rows = flat.numpy()
    mean = np.einsum("ni,ni->n", rows, rows) / np.float32(m * d)
    logits *= (1 / np.sqrt(mean + np.float32(rms_eps)))[:, None]
    scales, bases = scale.numpy(), base.numpy()
    gates = logits[:, : 2 * m]
    gates[:, :m] *= scales[0]
    gates[:, m:] *= scales[1]
    gates += bases[: 2 * m]
    gates = 1 / (1 + np.exp(-gates))
    gates[:, :m] += np.float32(eps)
    gates[:, m:] *= 2
    mix = _walk(logits[:, 2 * m :] * scales[2] + bases[2 * m :], m, iters, eps)
    both = torch.from_numpy(gates)
    pre, post = both[:, :m], both[:, m:]
    u = torch.bmm(pre.unsqueeze(1), flat.view(n, m, d)).squeeze(1)
    return u if u.dtype is streams.dtype else u.to(streams.dtype), pre, post, torch.from_numpy(mix)


def write(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    wide = streams if streams.dtype is torch.float32 else streams.float()
    out = torch.baddbmm(post.unsqueeze(-1) * y.unsqueeze(1), mix.transpose(1, 2), wide)
    return out if streams.dtype is torch.float32 else out.to(streams.dtype)
