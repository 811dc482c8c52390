"""Open a vector file of any kind: our container as it is, those of other tools with the words they lack.

.safetensors   our container, or plain tensors (op and hook stated)
.json          a steering module: lists of numbers or packed blobs, one vector per hook (op stated)
.gguf          a control vector (op stated)
.f32           raw float32 rows (op, hook and width stated)
.pt            a dictionary of plain tensors; nothing but tensors is ever unpickled (op and hook stated)
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from birkhoff.errors import SteeringError, VectorFileError
from birkhoff.steering import importers
from birkhoff.steering.vector_file import REQUIRED, SteeringVector
from birkhoff.weights.gguf import read_header

KINDS = (".safetensors", ".json", ".gguf", ".f32", ".pt", ".pth")


def import_vectors(
    path: str | Path,
    *,
    op: str | None = None,
    hook: str | None = None,
    layer: int | None = None,
    width: int | None = None,
    **said: Any,
) -> dict[str, SteeringVector]:
    """Every vector of a file, by a short name; most files hold one. `said` are fields of `SteeringVector`."""
    path = Path(path)
    if path.suffix not in KINDS:
        raise VectorFileError(
            f"{path} ends in {path.suffix or 'nothing'!r}, expected one of {', '.join(KINDS)}."
        )
    if not path.is_file():
        raise VectorFileError(f"{path} is {'not a file' if path.exists() else 'missing'}. Check the path.")
    try:
        if path.suffix == ".json":
            return importers.from_module_json(_json(path), op, **said)
        if path.suffix == ".gguf":
            header = read_header(path)
            tensors = {tensor.name: _gguf_tensor(tensor) for tensor in header.tensors}
            return {path.stem: importers.from_control_vector(tensors, header.keys, op, hook, **said)}
        if path.suffix == ".f32":
            if width is None:
                raise SteeringError("a raw file does not say how wide its rows are. State width.")
            return {path.stem: importers.from_raw(path.read_bytes(), width, op, hook, **said)}
        if path.suffix == ".safetensors":
            found = _safetensors(path)
            if isinstance(found, SteeringVector):
                return {path.stem: found}
            return {path.stem: importers.from_tensors(found, op, hook, layer, **said)}
        return {path.stem: importers.from_tensors(_torch_file(path), op, hook, layer, **said)}
    except VectorFileError:
        raise
    except SteeringError as error:
        raise VectorFileError(f"{path}: {error}") from None


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise VectorFileError(f"{path} is not JSON ({error}).") from None


def _gguf_tensor(tensor: Any) -> torch.Tensor:
    kinds = {"F32": "<f4", "F16": "<f2"}
    if tensor.kind not in kinds:
        raise SteeringError(f"{tensor.name} is stored as {tensor.kind}, expected F32 or F16.")
    count = int(np.prod(tensor.shape))
    values = np.fromfile(tensor.path, kinds[tensor.kind], count, offset=tensor.offset)
    return torch.from_numpy(values.astype(np.float32))


def _safetensors(path: Path) -> SteeringVector | dict[str, torch.Tensor]:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise VectorFileError(f"{path} cannot be read as safetensors ({error}).") from None
    return SteeringVector.load(path) if set(REQUIRED) & set(metadata) == set(REQUIRED) else tensors


def _torch_file(path: Path) -> dict[Any, torch.Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise VectorFileError(
            f"{path} holds more than plain tensors, or is no such file ({first}). Save a dictionary of tensors."
        ) from None
    if isinstance(found, torch.Tensor):
        return {"": found}
    if not isinstance(found, dict) or not found:
        raise VectorFileError(
            f"{path} holds a {type(found).__name__}, expected a dictionary of layer to tensor."
        )
    return found
