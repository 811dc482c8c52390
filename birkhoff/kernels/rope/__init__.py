"""Rotary embedding of the *last* channels of a vector, adjacent channels forming a pair (spec 5).

`frequencies(dim, theta, ...) -> [dim/2] float32`: base frequencies, with YaRN's blend when an original length is given
without its magnitude factor. `phases(positions, omega) -> Phases` with `cos`, `sin` `[..., dim/2]` float32.
`rotate(x, phases, inverse=False, own=False) -> like x`: the first channels are copied, the last `dim` rotated; float32
inside, rounded once. With `own` x may be overwritten. The phases broadcast over every axis of `x` between their own
and the last.

Tolerances against `reference`, relative to the largest result (at least 1). CPU twin: 1e-6 in float32, 2^-8 (one
rounding) in bfloat16. Triton prefill kernel: 1e-5 in float32, 2^-9 in float16, 2^-6 in bfloat16.
"""

from birkhoff.kernels.rope.reference import Phases, frequencies, phases, rotate

__all__ = ["Phases", "frequencies", "phases", "rotate"]
