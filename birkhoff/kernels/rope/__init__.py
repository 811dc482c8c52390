"""Rotary embedding of the *last* channels of a vector, adjacent channels forming a pair (spec 5).

`frequencies(dim, theta, ...) -> [dim/2] float32`: base frequencies, with YaRN's blend when an original length is given
and never its magnitude factor. `phases(positions, omega) -> Phases` with `cos`, `sin` `[..., dim/2]` float32.
`rotate(x, phases, inverse=False, own=False) -> like x`: the first channels pass through, the last `dim` turn; float32
inside, rounded once. Of `own` rows nobody else needs what they were: they may be overwritten. The phases broadcast over
every axis of `x` between their own and the last.
"""

from birkhoff.kernels.rope.reference import Phases, frequencies, phases, rotate

__all__ = ["Phases", "frequencies", "phases", "rotate"]
