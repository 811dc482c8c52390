"""Gemma Scope's layouts: one jumprelu dictionary in `params.npz` (Gemma 2) or `params.safetensors` (Gemma 3).

`W_enc` is `[d, F]`, `W_dec` `[F, d]`, with `b_enc`, `b_dec` and `threshold`; matrices may be spelled `w_enc`, `w_dec`.
Nothing is subtracted from the input or scaled. The files say no site; the folders of the releases do: the collection
(res, mlp, att) and the layer. Dictionaries of the embedding were trained before the model multiplies it by sqrt(d),
which is folded in. Transcoders are refused. Archives are read by NumPy, which refuses pickled objects.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birkhoff.errors import SaeFileError
from birkhoff.sae.fold import SaeWeights
from birkhoff.sae.stored_parts import read_tensors
from birkhoff.small_file import check_regular

MAX_INFLATION = 10
NAMES = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")
_COLLECTION = re.compile(r"gemma-scope-[\w.-]*?-(res|mlp|att)(?![a-z])")
_FOLDER = re.compile(r"(?:^|/)(resid_post|mlp_out|attn_out)(?:_all)?/")
_HOOKS = {
    "res": "post_mlp",
    "resid_post": "post_mlp",
    "mlp": "mlp_out",
    "mlp_out": "mlp_out",
    "att": "attn_z",  # the heads side by side, before the output projection
    "attn_out": "attn_z",
}


def gemma_scope_file(path: Path) -> Path | None:
    """The file at a path, or None."""
    if path.is_file() and path.suffix == ".npz":
        return path
    names = ("params.npz", "params.safetensors")
    if path.is_file():
        return path if path.name in names else None
    return next((path / name for name in names if (path / name).is_file()), None)


def load_gemma_scope(path: Path) -> tuple[dict[str, Any], tuple[str, int] | None]:
    """Arguments of `Sae`, and the site that follows from the folders of the release."""
    folders = path.absolute().as_posix()
    if re.search(r"transcoder|/clt", folders):
        raise SaeFileError(
            f"{path} is a transcoder: it reads the input of an MLP and predicts its output, which is no dictionary of "
            "one site. Use one of the collections res, mlp or att."
        )
    stored = _read_archive(path) if path.suffix == ".npz" else read_tensors(path)
    tensors = {name.replace("w_", "W_"): tensor for name, tensor in stored.items()}
    missing = [name for name in NAMES if name not in tensors]
    if missing:
        raise SaeFileError(
            f"{path} lacks {', '.join(missing)}; a Gemma Scope dictionary has {', '.join(NAMES)}."
        )
    w = SaeWeights(
        tensors["W_enc"].T, tensors["b_enc"], tensors["W_dec"], tensors["b_dec"], tensors["threshold"]
    )
    site = _site(folders)
    if site is not None and "/embedding/" in folders:
        w = w.double().input_scale(w.decoder.shape[1] ** -0.5)
    return {"activation": "jumprelu", "metadata": {"prepend_bos": True}, **w.arguments()}, site


def _check_members(path: Path) -> None:
    """Refuse an archive that inflates to much more than its size: weights hardly compress, zeros do without end."""
    size = check_regular(path)
    with zipfile.ZipFile(path) as archive:
        inflated = sum(member.file_size for member in archive.infolist())
    if inflated > MAX_INFLATION * size:
        raise ValueError(f"it inflates from {size} to {inflated} bytes, expected arrays of weights")


def _site(folders: str) -> tuple[str, int] | None:
    kind = _COLLECTION.search(folders) or _FOLDER.search(folders)
    if kind is None:
        return None
    if "/embedding/" in folders and kind[1] == "res":
        return "pre_attn", 0
    layer = re.search(r"/layer_(\d{1,4})(?:/|_)", folders)
    return None if layer is None else (_HOOKS[kind[1]], int(layer[1]))


def _read_archive(path: Path) -> dict[str, torch.Tensor]:
    names = {*NAMES, "w_enc", "w_dec"}
    try:
        _check_members(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: torch.from_numpy(archive[name]) for name in archive if name in names}
    except Exception as error:  # whatever a damaged archive provokes: BadZipFile, zlib.error, struct.error
        raise SaeFileError(f"{path} cannot be read as an archive of plain arrays ({error}).") from None
