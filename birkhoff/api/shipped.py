"""What ships with an embedded model: its steering vectors and its dictionary of features, by name.

`load("nano")` has the vectors in `engine.modules` from the start; the dictionary is attached when it is asked for.
A model without such folders has none, and nothing else changes.
"""

from __future__ import annotations

from pathlib import Path

EMBEDDED = Path(__file__).parent.parent / "models"
VECTORS, DICTIONARY = "vectors", "sae"


def shipped_vectors(model: str) -> dict[str, Path]:
    """Vector files of an embedded model, by module name."""
    return {path.stem: path for path in sorted((EMBEDDED / model / VECTORS).glob("*.safetensors"))}


def shipped_dictionary(model: str) -> Path | None:
    """The directory of an embedded model's dictionary of features."""
    path = EMBEDDED / model / DICTIONARY
    return path if path.is_dir() else None
