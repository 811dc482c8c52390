"""Parts that files of dictionaries have in several layouts: a JSON object, tensors, and the labels of features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from birkhoff import small_file
from birkhoff.errors import SaeFileError, quoted
from birkhoff.sae.dictionary import Sae
from birkhoff.small_file import CONFIG_BYTES, MANIFEST_BYTES, check_regular

LABELS = "birkhoff_labels.json"


def read_json(path: Path, max_bytes: int = CONFIG_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `max_bytes`; `SaeFileError` if there is none."""
    try:
        value = small_file.read_json(path, max_bytes)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SaeFileError(f"{path} cannot be read as JSON ({reason}).") from None
    if not isinstance(value, dict):
        raise SaeFileError(f"{path} holds {quoted(value)}, expected an object.")
    return value


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; `SaeFileError` if it cannot be read."""
    try:
        check_regular(path)
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise SaeFileError(f"{path} cannot be read as safetensors ({error}). It may be cut short.") from None


def save_labels(sae: Sae, path: Path) -> None:
    """Write the labels of a dictionary of any layout; without labels there is no file."""
    (path / LABELS).unlink(missing_ok=True)
    if sae.labels:
        labels = {str(sae.feature_id(row)): label for row, label in sorted(sae.labels.items())}
        (path / LABELS).write_text(json.dumps(labels, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def read_labels(path: Path) -> dict[int, str]:
    """The labels in a directory, by feature; empty without a file of them."""
    if not (path / LABELS).is_file():
        return {}
    raw = read_json(path / LABELS, MANIFEST_BYTES)
    if not all(key.isdecimal() for key in raw):
        raise SaeFileError(f"{path / LABELS} names features by something else than their numbers.")
    return {int(key): label for key, label in raw.items()}
