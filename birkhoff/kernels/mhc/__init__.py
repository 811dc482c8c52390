"""Manifold hyper-connections (spec 3): reading a sublayer's input from and writing its output to `m` residual streams.

Shapes: streams `[n, m, d]` in the model's dtype; `fn [(2+m)m, m*d]`, `base [(2+m)m]`, `scale [3]` float32.

`prepare(fn, dtype) -> fn` in the form that `read` is fastest with for streams of `dtype`; computed once per weight
`read(streams, fn, base, scale, iters, eps, rms_eps) -> (u [n, d], pre [n, m], post [n, m], mix [n, m, m])`
    `fn` as stored or as returned by `prepare`.
    `u` in the streams' dtype, the coefficients float32. `mix[j, k]` carries stream j to stream k.
`read_input(streams, ..., rms_eps, norm [d], norm_eps, released, inner=None) -> (x, post, mix)`
    `read` with `norm.norm_input` of u, which is not returned.
`write(streams, y [n, d], post, mix) -> [n, m, d]`
    `post[k] * y + sum_j mix[j, k] * streams[j]`, float32 inside, rounded once.
`reread(streams, u [n, d], pre, edited [n, m]) -> [n, d]`
    the input as read with edited weights; rows with unchanged weights, and `u` if `edited is pre`, keep their bits.
`head(streams, fn [m, m*d], base [m], scale [1], eps, rms_eps) -> (h [n, d], weights [n, m])`
`sinkhorn(logits [n, m, m], iters, eps) -> [n, m, m]`
    alternating row and column normalisation that ends on columns: columns sum to 1 within 2e-6, rows approximately.

All intermediate results are float32, whatever the dtype of the streams. Tolerance of fast twins against `reference`:
1e-5 absolute on coefficients, 1e-5 relative on streams in float32.
"""

from birkhoff.kernels.mhc.reference import coefficients, head, read, reread, sinkhorn, write

__all__ = ["coefficients", "head", "read", "reread", "sinkhorn", "write"]
