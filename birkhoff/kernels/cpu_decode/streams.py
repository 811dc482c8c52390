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
def mtp_input(streams, embedded, hnorm, enorm, eps, h_proj, e_proj, out):
    """Input of the MTP block: streams [n, m, d] and token embeddings [n, d], normalised, projected and summed in
    out."""
    count, m, width = streams.shape
    flat = streams.reshape(count * m, width)
    target = out.reshape(count * m, width)
    normed = np.empty_like(flat)
    normed_token = np.empty_like(embedded)
    projected = np.empty_like(embedded)
    rms_norm_rows(flat, hnorm, eps, normed)
    matmul(normed, h_proj, target)
    rms_norm_rows(embedded, enorm, eps, normed_token)
    matmul(normed_token, e_proj, projected)
    for row in range(count):
        for s in range(m):
            for c in range(width):
                target[row * m + s, c] += projected[row, c]
