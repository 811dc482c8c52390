"""Tensors from a file that `torch.save` wrote, for files that are not trusted.

`torch.load(weights_only=True)` runs no code of the file, but by itself it inflates compressed members without a
limit, reads the old pickle-only form, returns objects that are not tensors, and returns tensors that repeat a few
stored numbers any number of times. So the archive is checked before it is loaded, and the result after."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from birkhoff.errors import SaeFileError, quoted
from birkhoff.small_file import check_regular


def load_state_dict(path: Path) -> dict[str, Any]:
    """Tensors by name, with any numbers or texts stored beside them."""
    _check_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # Whatever a malformed file provokes: RuntimeError, UnpicklingError, KeyError, ...
    except Exception as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        if name is not None:
            raise SaeFileError(
                f"{path} names {quoted(name[1])}, which plain tensors do not need, so it is not read. "
                "Save the state_dict alone."
            ) from None
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise SaeFileError(f"{path}: its index makes no sense ({reason}).") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise SaeFileError(
            f"{path} holds {quoted(type(state).__name__)}, expected tensors by name (a state_dict)."
        )
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and tensor.nbytes > tensor.untyped_storage().nbytes():
            raise SaeFileError(f"{path}: {quoted(name)} repeats its numbers. Save it with .contiguous().")
    return dict(state)


def _check_archive(path: Path) -> None:
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise SaeFileError(
            f"{path} is not an archive that torch.save writes ({error}). Files of the old form are pickles and nothing "
            "else: save them again with a current torch."
        ) from None
    if sum(member.filename.rpartition("/")[2] == "data.pkl" for member in members) != 1:
        raise SaeFileError(f"{path} is an archive without the index of torch.save.")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise SaeFileError(
                f"{path}: {quoted(member.filename)} is compressed, which torch.save never does. Save it again."
            )
