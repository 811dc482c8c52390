"""Names of the number formats of outputs, the same for every target where the format is the same.

`fp4` is E2M1 in groups of 32 with E8M0 scales: the release's experts, and MXFP4 in a GGUF file. `mxfp4` is another name
of it.
"""

from __future__ import annotations

from birkhoff.errors import OptionError, quoted
from birkhoff.weights.layout import DENSE_FORMATS, EXPERT_FORMATS

ALIASES = {"mxfp4": "fp4"}
TARGETS = {"gguf": "a GGUF file", "safetensors": "a directory"}
FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "experts": {"gguf": ("fp4", "bf16", "f32"), "safetensors": EXPERT_FORMATS},
    "dense": {"gguf": ("q8_0", "bf16", "f32"), "safetensors": DENSE_FORMATS},
}
DEFAULTS = {"gguf": {"experts": "fp4", "dense": "q8_0"}, "safetensors": {"experts": "fp4", "dense": "fp8"}}


def resolve_format(option: str, name: object, to: str) -> str:
    """The format that `experts` or `dense` names, for a target `gguf` or `safetensors`."""
    name = ALIASES.get(name, name) if option == "experts" and isinstance(name, str) else name
    if isinstance(name, str) and name in FORMATS[option][to]:
        return name
    (other,) = (target for target in TARGETS if target != to)
    raise OptionError(
        f"{option} is {quoted(name)}, expected {_listed(option, to)} for {TARGETS[to]}; {TARGETS[other]} takes "
        f"{_listed(option, other)}."
    )


def _listed(option: str, to: str) -> str:
    names = [
        f"{name} (or {alias})" if (alias := _alias(name)) and option == "experts" else name
        for name in FORMATS[option][to]
    ]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _alias(name: str) -> str | None:
    return next((alias for alias, target in ALIASES.items() if target == name), None)
