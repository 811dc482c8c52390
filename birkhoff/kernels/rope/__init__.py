"""Rotary embedding of the *last* channels of a vector, adjacent channels forming a pair (spec 5).

`frequencies(dim, theta, scaling) -> [dim/2] float32`: base frequencies, with YaRN's blend when `scaling` is given and
never its magnitude factor. `phases(positions, omega) -> (cos, sin)`, each `[..., dim/2]` float32.
`rotate(x, cos, sin, inverse=False) -> like x`: the first channels pass through, the last `2 * cos.shape[-1]` turn;
float32 inside, rounded once. `cos` broadcasts over every axis of `x` between its own and the last.
"""

from birkhoff.kernels.rope.reference import frequencies, phases, rotate

__all__ = ["frequencies", "phases", "rotate"]
