"""Clamped SwiGLU experts (spec 7).

`glu(opened [n, 2i], limit, dtype) -> [n, i]`: `swiglu` of its halves, in that dtype.
`swiglu(a, b, limit) -> like a`: `silu(min(a, limit)) * clamp(b, -limit, limit)`, float32 inside, float32 out.
`route(logits [n, E], bias [E] | None, ids [n, k] | None, topk, factor) -> (ids [n, k], weights [n, k] float32)`:
    sqrt-softplus scores; chosen by score plus bias (ties: lowest id) or given by `ids` (hash routing); weights are the
    unbiased scores, normalised and scaled.
`experts(x [n, d], ids, weights, stack: Stack, limit, round_input, beside=None) -> [n, d]` float32:
    sum over the chosen experts, in ascending expert order whatever the batch holds; the routing weight multiplies
    before `down`. `round_input` is applied to what enters either product (None unless numerics are "released").
    With `beside` [n, d] (what the shared expert made) that is added too, and the result has its dtype.
    `Stack` gives each expert's matrices; packed ones are unpacked one at a time, or read by kernels where they lie.
"""

from birkhoff.kernels.experts.reference import Stack, experts, glu, route, swiglu

__all__ = ["Stack", "experts", "glu", "route", "swiglu"]
