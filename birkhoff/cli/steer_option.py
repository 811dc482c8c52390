"""The `--steer` option of `generate` and `chat`.

The line is parsed before a model is loaded. A name in it is a module of the engine or the path of a vector file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.errors import SteeringError, did_you_mean, quoted

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


def _complete_steer(incomplete: str) -> list[str]:
    """Names of nano's vectors for the shell's completion; other models bring files, which the shell completes."""
    from birkhoff.embedded import shipped_vectors

    return [name for name in shipped_vectors("nano") if name.startswith(incomplete)]


Steer = Annotated[
    str | None,
    typer.Option(
        "--steer",
        help="Edit activations: spooky, or '+2.0 spooky @ mhc_streams_pre_attn[3] stream=1'; join several with ';'. "
        "The name is a module or a vector file.",
        metavar="LINE",
        autocompletion=_complete_steer,
    ),
]


def parse_steer(line: str | None) -> list[Any]:
    """Parse a steering line to edits; vector names are not resolved yet."""
    if line is None:
        return []
    from birkhoff.steering.edit_syntax import parse_line

    return list(parse_line(line))


def load_vectors(edits: Sequence[Any], engine: Engine) -> list[Any]:
    """Return the edits with file names replaced by the loaded vectors; names of engine modules are kept."""
    resolved = []
    for edit in edits:
        edit = _loaded(edit, engine)
        gate = getattr(edit, "when", None)
        resolved.append(edit if gate is None else replace(edit, when=_loaded(gate, engine)))
    return resolved


def _loaded(named: Any, engine: Engine) -> Any:
    """An edit or a gate with its vector loaded, if it names a file."""
    from birkhoff.steering.vector_file import SteeringVector

    name = getattr(named, "vector", None)
    if not isinstance(name, str) or name in engine.modules:
        return named
    if Path(name).suffix == ".safetensors" or Path(name).is_file():
        return replace(named, vector=SteeringVector.load(name))
    known = ", ".join(sorted(engine.modules)) or "none"
    raise SteeringError(
        f"--steer names {quoted(name)}, which is neither a module ({known}) nor a file."
        f"{did_you_mean(name, engine.modules)} "
        "Make a vector: birkhoff vectors contrast"
    )
