"""Captures as safetensors files: what every other tool opens, in one piece and with names of the reader's choice.

A tensor is `hook.layer`, or the name another tool gives it, and its labels stand beside it: `.positions`, `.token_ids`
(int64) and `.scale` (float32, for fp8). bf16 stays bf16. The container is written by the safetensors library, under
another name first, so a half-written file is never found under the one asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from birkhoff.atomic_file import atomic_path
from birkhoff.capture.store.reader import Address, CaptureEntry, read_request, rename, to_torch
from birkhoff.errors import CaptureFileError, CaptureWriteError

if TYPE_CHECKING:
    import torch


def to_safetensors(
    path_out: str | os.PathLike[str],
    source: str | os.PathLike[str] | Mapping[Address, CaptureEntry],
    *,
    names: str = "birkhoff",
) -> list[str]:
    """Write a request's directory, or entries already read, to one file. Returns the names of the tensors."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    entries = dict(source) if isinstance(source, Mapping) else read_request(source)
    if not entries:
        raise CaptureFileError("there are no entries to export. Give a request that captured something.")
    if names == "birkhoff":
        named = {f"{hook}.{layer}": entry for (layer, hook), entry in entries.items()}
    else:
        named = rename(entries, names)
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in named.items():
        tensors[name] = to_torch(entry).contiguous()
        for label, dtype in (
            ("positions", torch.int64),
            ("token_ids", torch.int64),
            ("scale", torch.float32),
        ):
            values = getattr(entry, label)
            if values is not None:
                tensors[f"{name}.{label}"] = torch.as_tensor(values, dtype=dtype)
    facts = next(iter(entries.values())).meta
    metadata = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
    path_out = Path(path_out)
    try:
        with atomic_path(path_out, sync=False) as partial:
            save_file(tensors, str(partial), metadata or None)
    except (OSError, SafetensorError) as error:
        raise CaptureWriteError(f"{path_out} could not be written ({error}). Choose another place.") from None
    return list(tensors)
