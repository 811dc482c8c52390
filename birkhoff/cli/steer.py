"""`--steer`: a line of steering on the command line.

Checked before a model is loaded for it. A name is a module of the engine, or the path of a vector file; what is neither
is refused with the names there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.errors import SteeringError, quoted

if TYPE_CHECKING:
    from birkhoff.api import Engine

Steer = Annotated[
    str | None,
    typer.Option(
        "--steer",
        help="Edit activations: '+2.0 calm @ mhc_streams_pre_attn[4] stream=1'; several joined by ';'. "
        "The name is a module's, or a vector file.",
        metavar="LINE",
        show_default=False,
    ),
]


def read_line(line: str | None) -> list[Any]:
    """The edits of a line, names not yet looked up."""
    if line is None:
        return []
    from birkhoff.steering.edit_syntax import parse_line

    return list(parse_line(line))


def with_vectors(edits: Sequence[Any], engine: Engine) -> list[Any]:
    """The same edits with names that this engine knows, and vectors read from files for the others."""
    from birkhoff.steering.vector_file import SteeringVector

    found = []
    for edit in edits:
        name = edit.vector
        if name in engine.modules:
            found.append(edit)
        elif Path(name).suffix == ".safetensors" or Path(name).is_file():
            found.append(replace(edit, vector=SteeringVector.load(name)))
        else:
            known = ", ".join(sorted(engine.modules)) or "none"
            raise SteeringError(
                f"--steer names {quoted(name)}, which is neither a module ({known}) nor a file. "
                "Make a vector: birkhoff vectors contrast"
            )
    return found
