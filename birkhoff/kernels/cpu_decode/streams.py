"""Streams of a few rows: read before a sublayer, written after it, merged before the head."""

from __future__ import annotations

import numpy as np

from birkhoff.kernels.jit import compiled
from birkhoff.kernels.linear.cpu import rows_by_weight
from birkhoff.kernels.mhc.cpu import finish, square_mean
from birkhoff.kernels.norm.cpu import normalise


@compiled
def read_streams(streams, fn, base, scale, iters, eps, rms_eps, u, pre, post, mix):
    """streams [n, m, d] -> u [n, d] and the coefficients pre [n, m], post [n, m], mix [n, from, to]."""
    count, m, width = streams.shape
    flat = streams.reshape(count, m * width)
    logits = np.empty((count, fn.shape[0]), np.float32)
    mean = np.empty(count, np.float32)
    rows_by_weight(flat, fn, logits)
    square_mean(flat, mean)
    finish(logits, mean, base, scale, iters, eps, rms_eps, streams, u, pre, post, mix)


@compiled
def merge_streams(streams, fn, base, scale, eps, rms_eps, merged, weights):
    """streams [n, m, d] -> merged [n, d] by read-out weights [n, m]."""
    count, m, width = streams.shape
    flat = streams.reshape(count, m * width)
    mean = np.empty(count, np.float32)
    one = np.float32(1)
    rows_by_weight(flat, fn, weights)
    square_mean(flat, mean)
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
    """MTP's entrance: streams [n, m, d] and embedded tokens [n, d], normalised and projected, added up in out."""
    count, m, width = streams.shape
    flat = streams.reshape(count * m, width)
    target = out.reshape(count * m, width)
    quiet = np.empty_like(flat)
    token = np.empty_like(embedded)
    added = np.empty_like(embedded)
    normalise(flat, hnorm, eps, quiet)
    rows_by_weight(quiet, h_proj, target)
    normalise(embedded, enorm, eps, token)
    rows_by_weight(token, e_proj, added)
    for row in range(count):
        for s in range(m):
            for c in range(width):
                target[row * m + s, c] += added[row, c]
