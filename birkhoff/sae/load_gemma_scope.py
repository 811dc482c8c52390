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

NAMES = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")


def gemma_scope_file(path: Path) -> Path | None:
    """The archive at a path, or None."""
    if path.is_file() and path.suffix == ".npz":
        return path
    return path / "params.npz" if (path / "params.npz").is_file() else None


def load_gemma_scope(path: Path) -> dict[str, Any]:
    """Arguments of `Sae`."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            tensors = {name: torch.from_numpy(archive[name]) for name in NAMES if name in archive}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
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
