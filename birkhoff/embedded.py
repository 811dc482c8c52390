"""Files that ship with an embedded model: steering vectors and an SAE, by model name.

`load("nano")` registers the vectors in `engine.modules`; the SAE is attached on request. A model without such folders
has none.
"""

from __future__ import annotations

import json
from pathlib import Path

EMBEDDED = Path(__file__).parent / "models"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "n_routed_experts")
VECTORS, DICTIONARY, CROSSCODERS = "vectors", "sae", "crosscoders"


def shipped_vectors(model: object) -> dict[str, Path]:
    """Vector files of an embedded model, by module name; empty for any other model."""
    folder = _embedded(model)
    if folder is None:
        return {}
    return {path.stem: path for path in sorted((folder / VECTORS).glob("*.safetensors"))}


def shipped_dictionary(model: object) -> Path | None:
    """The directory of an embedded model's SAE, or None."""
    folder = _embedded(model)
    return None if folder is None or not (folder / DICTIONARY).is_dir() else folder / DICTIONARY


def shipped_crosscoders(model: object) -> dict[str, Path]:
    """Directories of an embedded model's crosscoders and transcoders, by name; empty for any other model."""
    folder = _embedded(model)
    if folder is None or not (folder / CROSSCODERS).is_dir():
        return {}
    return {path.name: path for path in sorted((folder / CROSSCODERS).iterdir()) if path.is_dir()}


def dictionary_path(name: str | Path) -> Path:
    """The directory or file a caller names: an existing path, else the SAE of an embedded model of that name."""
    path = Path(name)
    return path if path.exists() else shipped_dictionary(str(name)) or path


def vector_path(name: str | Path) -> Path:
    """The vector file a caller names: an existing path, else one that ships with an embedded model."""
    path = Path(name)
    if path.exists():
        return path
    shipped = {
        name: file for model in EMBEDDED.iterdir() for name, file in shipped_vectors(model.name).items()
    }
    return shipped.get(str(name), path)


def has_sizes_of(model: str, config: object) -> bool:
    """Whether a checkpoint has the sizes of an embedded model, as every conversion of it has under whatever name."""
    sizes = json.loads((EMBEDDED / model / "config.json").read_text(encoding="utf-8"))
    return all(getattr(config, name, None) == sizes[name] for name in _SIZES)


def _embedded(model: object) -> Path | None:
    """The folder of an embedded model; `model` must be a bare name, not a path."""
    if not isinstance(model, str) or not model.isidentifier() or not (EMBEDDED / model).is_dir():
        return None
    return EMBEDDED / model
