"""Reads vector files of any supported format; metadata that a format lacks must be given.

.safetensors   Birkhoff's vector file, or plain tensors (op and hook required)
.json          a steering module: lists of numbers or packed blobs, one vector per hook (op required)
.gguf          a control vector (op required)
.f32           raw float32 rows (op, hook and width required)
.pt            a dictionary of plain tensors, loaded with `weights_only=True` (op and hook required)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from birkhoff.errors import SteeringError, VectorFileError
from birkhoff.small_file import VECTOR_BYTES, check_regular, read_bytes, read_json
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
    **metadata: Any,
) -> dict[str, SteeringVector]:
    """Return the vectors of a file by name; most files hold one. `metadata` are fields of `SteeringVector`."""
    path = Path(path)
    if path.suffix not in KINDS:
        raise VectorFileError(
            f"{path} ends in {path.suffix or 'nothing'!r}, expected one of {', '.join(KINDS)}."
        )
    if not path.is_file():
        raise VectorFileError(f"{path} is {'not a file' if path.exists() else 'missing'}. Check the path.")
    try:
        if path.suffix == ".json":
            return importers.from_module_json(_json(path), op, **metadata)
        if path.suffix == ".gguf":
            header = read_header(path)
            tensors = {tensor.name: _gguf_tensor(tensor) for tensor in header.tensors}
            return {path.stem: importers.from_control_vector(tensors, header.keys, op, hook, **metadata)}
        if path.suffix == ".f32":
            if width is None:
                raise SteeringError("a raw file does not say how wide its rows are. State width.")
            return {
                path.stem: importers.from_raw(read_bytes(path, VECTOR_BYTES), width, op, hook, **metadata)
            }
        if path.suffix == ".safetensors":
            content = _safetensors(path)
            if isinstance(content, SteeringVector):
                return {path.stem: content}
            return {path.stem: importers.from_tensors(content, op, hook, layer, **metadata)}
        return {path.stem: importers.from_tensors(_torch_file(path), op, hook, layer, **metadata)}
    except VectorFileError:
        raise
    except OSError as error:
        raise VectorFileError(f"{path} cannot be read ({error.strerror}).") from None
    except SteeringError as error:
        raise VectorFileError(f"{path}: {error}") from None


def _json(path: Path) -> Any:
    try:
        return read_json(path, VECTOR_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        raise VectorFileError(f"{path} is not JSON ({error}).") from None


def _gguf_tensor(tensor: Any) -> torch.Tensor:
    dtypes = {"F32": "<f4", "F16": "<f2"}
    if tensor.kind not in dtypes:
        raise SteeringError(f"{tensor.name} is stored as {tensor.kind}, expected F32 or F16.")
    count = int(np.prod(tensor.shape))
    values = np.fromfile(tensor.path, dtypes[tensor.kind], count, offset=tensor.offset)
    return torch.from_numpy(values.astype(np.float32))


def _safetensors(path: Path) -> SteeringVector | dict[str, torch.Tensor]:
    try:
        check_regular(path, VECTOR_BYTES)
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise VectorFileError(f"{path} cannot be read as safetensors ({error}).") from None
    return SteeringVector.load(path) if set(REQUIRED) & set(header) == set(REQUIRED) else tensors


def _torch_file(path: Path) -> dict[Any, torch.Tensor]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    # Whatever a damaged file provokes: UnpicklingError, RuntimeError, IndexError, ...
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise VectorFileError(
            f"{path} holds more than plain tensors, or is no such file ({first}). Save a dictionary of tensors."
        ) from None
    if isinstance(content, torch.Tensor):
        return {"": content}
    if not isinstance(content, dict) or not content:
        raise VectorFileError(
            f"{path} holds a {type(content).__name__}, expected a dictionary of layer to tensor."
        )
    return content
