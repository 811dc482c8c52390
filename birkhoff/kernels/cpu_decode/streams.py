"""Residual streams of a few rows: read before a sublayer, merged before the head, and the input of the MTP block."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import matmul
from birkhoff.kernels.mhc.cpu import coefficients_and_collapse, mean_square
from birkhoff.kernels.norm.cpu import rms_norm_rows


@compiled
def read_streams(streams, fn, base, scale, iters, eps, rms_eps, u, pre, post, mix):
    """streams [n, m, d] -> u [n, d] and the coefficients pre [n, m], post [n, m], mix [n, from, to]."""
    count, m, width = streams.shape
    flat = streams.reshape(count, m * width)
    logits = np.empty((count, fn.shape[0]), np.float32)
    mean = np.empty(count, np.float32)
    matmul(flat, fn, logits)
    mean_square(flat, mean)
    coefficients_and_collapse(logits, mean, base, scale, iters, eps, rms_eps, streams, u, pre, post, mix)


@compiled
def merge_streams(streams, fn, base, scale, eps, rms_eps, merged, weights):
    """streams [n, m, d] -> merged [n, d] with read-out weights [n, m]."""
    count, m, width = streams.shape
    flat = streams.reshape(count, m * width)
    mean = np.empty(count, np.float32)
    one = np.float32(1)
    matmul(flat, fn, weights)
    mean_square(flat, mean)
    for row in range(count):
        rho = np.float32(1 / np.sqrt(mean[row] + rms_eps))
        target = merged[row]
        for c in range(width):
            target[c] = 0
        for s in range(m):
            weight = one / (one + np.exp(-(weights[row, s] * rho * scale[0] + base[s]))) + eps
            weights[row, s], source = weight, streams[row, s]
            for c in range(width):
                target[c] += weight * source[c]


@compiled
def norm_mtp_input(streams, embedded, hnorm, enorm, eps, normed, normed_token):
    """Streams [n, m, d] and token embeddings [n, d] of the MTP block, normalised, to [n * m, d] and [n, d]."""
    count, m, width = streams.shape
    rms_norm_rows(streams.reshape(count * m, width), hnorm, eps, normed)
    rms_norm_rows(embedded, enorm, eps, normed_token)
