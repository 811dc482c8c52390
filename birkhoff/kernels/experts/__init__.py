"""Routing and clamped SwiGLU experts (spec 7).

`swiglu(gate, up, limit) -> like gate`: `silu(min(gate, limit)) * clamp(up, -limit, limit)`, float32 in and out.
`glu(gate_up [n, 2i], limit, dtype, released=False) -> [n, i] | RoundedRows`: `swiglu` of its two halves, in `dtype`; on
    a GPU with released numerics together with its FP8 codes.
`route(logits [n, E], bias [E] | None, ids [n, k] | None, topk, factor) -> (ids [n, k], weights [n, k] float32)`:
    sqrt-softplus scores; experts selected by biased score (ties: lowest id) or given by `ids` (hash routing); weights
    are the unbiased scores, normalised and scaled.
`experts(x [n, d], ids, weights, stack: Stack, limit, round_input, shared=None) -> [n, d]` float32:
    sum over the selected experts, in ascending expert order for any batch; the routing weight is applied before `down`.
    `round_input` is applied to the input of both products (None unless numerics are "released"). With `shared` [n, d]
    (the output of the shared expert) that is added, and the result has its dtype. `Stack` provides the matrices of each
    expert; packed ones are dequantised one at a time, or read in place by kernels.
`decode.route`, `decode.gate_up`, `decode.down`: the same for a decode step, over a routing plan.

Tolerances of `experts` and `glu`, relative to the largest result (at least 1 for Triton kernels): 1e-5 in float32
(absolute for the CPU twin), 2^-9 in float16, 2^-6 in bfloat16. With `round_input`, a tie may change a value by one FP8
step. Selected ids are equal for equal logits; routing weights differ by at most 1e-5.
"""

from birkhoff.kernels.experts.reference import Stack, experts, glu, route, swiglu

__all__ = ["Stack", "experts", "glu", "route", "swiglu"]
