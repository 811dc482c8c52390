"""Tolerances for comparisons, one set per kind of comparison."""

from __future__ import annotations

from dataclasses import dataclass

from birkhoff.errors import OptionError


@dataclass(frozen=True)
class ToleranceGate:
    """Limits; None disables one. `site`, `logits` and `median_row` bound relative errors."""

    name: str
    site: float | None
    logits: float | None
    median_row: float | None
    argmax: float
    mean_kl: float | None
    about: str

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
            "trained", None, None, None, 0.98, 1e-3, "bfloat16 or 8-bit against float32, trained weights"
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
    first_dtype: str, second_dtype: str, rounded: bool = False, released: bool = False
) -> ToleranceGate:
    """Return the gate for these compute dtypes.

    `rounded`: one side stores rounded weights of the other. `released`: two implementations round activations, where
    a last bit may move a value to the next FP8 or FP4 code."""
    if not first_dtype == second_dtype == "float32":
        return GATES["bfloat16"]
    if released:
        return GATES["released"]
    return GATES["trained" if rounded else "float32"]
