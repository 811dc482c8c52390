"""What ships with an embedded model: its steering vectors and its dictionary of features, by name.

`load("nano")` has the vectors in `engine.modules` from the start; the dictionary is attached when it is asked for.
A model without such folders has none, and nothing else changes.
"""

from __future__ import annotations

from pathlib import Path

EMBEDDED = Path(__file__).parent / "models"
VECTORS, DICTIONARY = "vectors", "sae"


def shipped_vectors(model: object) -> dict[str, Path]:
    """Vector files of an embedded model, by module name."""
    folder = _embedded(model)
    return (
        {}
        if folder is None
        else {path.stem: path for path in sorted((folder / VECTORS).glob("*.safetensors"))}
    )


def shipped_dictionary(model: object) -> Path | None:
    """The directory of an embedded model's dictionary of features; None for anything that is not such a name."""
    folder = _embedded(model)
    return None if folder is None or not (folder / DICTIONARY).is_dir() else folder / DICTIONARY


def _embedded(model: object) -> Path | None:
    """The folder of a model that ships inside: a bare name, never a path."""
    if not isinstance(model, str) or not model.isidentifier() or not (EMBEDDED / model).is_dir():
        return None
    return EMBEDDED / model
