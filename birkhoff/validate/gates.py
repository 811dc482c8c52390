"""Tolerances for comparisons, one set per kind of comparison.

The gates of stored types are about twice the worst of five to eight runs over 290 random tokens on the embedded
model, trunk and MTP block together. Random tokens make a trained model choose between experts and tokens that are
nearly equal, so its KL divergence is four to ten times that on text: the gate `trained` is for text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from birkhoff.errors import OptionError


@dataclass(frozen=True)
class ToleranceGate:
    """Limits; None disables one. `site`, `logits` and `median_row` bound relative errors.

    `mtp_kl` replaces `mean_kl` for the MTP block, where one row in which another expert is chosen may decide the
    mean."""

    name: str
    site: float | None
    logits: float | None
    median_row: float | None
    argmax: float
    mean_kl: float | None
    about: str
    mtp_kl: float | None = None

    @property
    def exact(self) -> bool:
        """Whether every row must agree, except after a tie."""
        return self.argmax == 1.0


GATES = {
    gate.name: gate
    for gate in (
        ToleranceGate(
            "float32",
            1e-5,
            1e-4,
            None,
            1.0,
            None,
            "two implementations or builds with the same float32 numbers",
        ),
        ToleranceGate("engine", None, 1e-4, None, 1.0, None, "another engine's logits, float32 throughout"),
        ToleranceGate("bfloat16", None, None, 3e-2, 0.94, None, "bfloat16 against float32, random weights"),
        ToleranceGate(
            "trained",
            None,
            None,
            None,
            0.98,
            1e-3,
            "bfloat16 or 8-bit against float32, trained weights on text",
            8e-3,
        ),
        ToleranceGate(
            "f16", None, None, 1e-3, 0.99, 1e-4, "F16 weights against those they were rounded from"
        ),
        ToleranceGate(
            "q8_0", None, None, 1.5e-2, 0.94, 1.2e-2, "8-bit weights against those they were rounded from"
        ),
        ToleranceGate(
            "q5_0", None, None, 0.1, 0.8, 6e-2, "5- or 6-bit weights against those they were rounded from"
        ),
        ToleranceGate(
            "q4_0", None, None, 0.2, 0.65, 0.16, "4-bit weights against those they were rounded from"
        ),
        ToleranceGate(
            "released",
            None,
            1e-2,
            None,
            0.98,
            None,
            "the release's activation rounding against its own kernels",
        ),
    )
}


def find_gate(name: str) -> ToleranceGate:
    """Return a gate by name."""
    if name not in GATES:
        raise OptionError(f"gate is {name!r}, expected one of {', '.join(GATES)}.")
    return GATES[name]


def default_gate(
    first_dtype: str,
    second_dtype: str,
    rounded: str | None = None,
    released: bool = False,
    text: bool = False,
) -> ToleranceGate:
    """Return the gate for these compute dtypes.

    `rounded`: the coarsest type in which one side stores rounded weights of the other. `released`: two implementations
    round activations, where a last bit may move a value to the next FP8 or FP4 code. `text`: the tokens are text."""
    bits = type_bits(rounded) if rounded is not None else 32
    if bits < 8:
        return GATES["q5_0" if bits > 4 else "q4_0"]
    if not first_dtype == second_dtype == "float32":
        return GATES["bfloat16"]
    if released:
        return GATES["released"]
    if rounded is None:
        return GATES["float32"]
    return GATES["f16" if bits == 16 else "trained" if text else "q8_0"]


def type_bits(name: str) -> int:
    """Bits of a value in a GGUF type, by its name: 16 for F16, 8 for Q8_0, 4 for IQ4_XS, 2 for TQ2_0."""
    match = re.fullmatch(r"(?:I?Q|TQ|F)(\d+)(?:_\w+)?", name)
    assert match is not None, name
    return int(match[1])
