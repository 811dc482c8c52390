"""Clamped SwiGLU experts (spec 7).

`swiglu(a, b, limit) -> like a`: `silu(min(a, limit)) * clamp(b, -limit, limit)`, float32 inside, float32 out.
`route(logits [n, E], bias [E] | None, ids [n, k] | None, topk, factor) -> (ids [n, k], weights [n, k] float32)`:
    sqrt-softplus scores; chosen by score plus bias (ties: lowest id) or given by `ids` (hash routing); weights are the
    unbiased scores, normalised and scaled.
`experts(x [n, d], ids, weights, stack: Stack, limit, round_input) -> [n, d]` float32:
    sum over the chosen experts, in ascending expert order whatever the batch holds; the routing weight multiplies
    before `down`. `round_input` is applied to what enters either product (None unless numerics are "released").
    `Stack` gives each expert's matrices; packed ones are unpacked one at a time, or read by kernels where they lie.
"""

from birkhoff.kernels.experts.reference import Stack, experts, route, swiglu

__all__ = ["Stack", "experts", "route", "swiglu"]
