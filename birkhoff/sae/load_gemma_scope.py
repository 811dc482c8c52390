"""Gemma Scope's layout: one `params.npz` with a jumprelu dictionary.

`W_enc` is `[d, F]`, `W_dec` `[F, d]`, with `b_enc`, `b_dec` and `threshold`; nothing is subtracted from the input or
scaled. The archive is read by NumPy, which refuses pickled objects.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birkhoff.errors import SaeFileError
from birkhoff.sae.fold import SaeWeights
from birkhoff.small_file import check_regular

MAX_INFLATION = 10
NAMES = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")


def gemma_scope_file(path: Path) -> Path | None:
    """The archive at a path, or None."""
    if path.is_file() and path.suffix == ".npz":
        return path
    return path / "params.npz" if (path / "params.npz").is_file() else None


def load_gemma_scope(path: Path) -> dict[str, Any]:
    """Arguments of `Sae`."""
    try:
        _check_members(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            tensors = {name: torch.from_numpy(archive[name]) for name in NAMES if name in archive}
    except (OSError, ValueError, EOFError, TypeError, MemoryError, zipfile.BadZipFile) as error:
        raise SaeFileError(f"{path} cannot be read as an archive of plain arrays ({error}).") from None
    missing = [name for name in NAMES if name not in tensors]
    if missing:
        raise SaeFileError(
            f"{path} lacks {', '.join(missing)}; a Gemma Scope dictionary has {', '.join(NAMES)}."
        )
    w = SaeWeights(
        tensors["W_enc"].T, tensors["b_enc"], tensors["W_dec"], tensors["b_dec"], tensors["threshold"]
    )
    return {"activation": "jumprelu", **w.arguments()}


def _check_members(path: Path) -> None:
    """Refuse an archive that inflates to much more than its size: weights hardly compress, zeros do without end."""
    size = check_regular(path)
    with zipfile.ZipFile(path) as archive:
        inflated = sum(member.file_size for member in archive.infolist())
    if inflated > MAX_INFLATION * size:
        raise ValueError(f"it inflates from {size} to {inflated} bytes, expected arrays of weights")
