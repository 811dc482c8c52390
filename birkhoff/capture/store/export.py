"""Export captures as safetensors files.

A tensor is named `hook.layer`, or as another tool names it; its labels are `.positions`, `.token_ids` (int64) and
`.scale` (float32, for fp8). bf16 stays bf16. The file appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from birkhoff.atomic_file import atomic_path, save_tensors
from birkhoff.capture.store.reader import CaptureEntry, read_request, rename, to_torch
from birkhoff.errors import CaptureFileError, CaptureWriteError
from birkhoff.hooks.site_names import Address

if TYPE_CHECKING:
    import torch


def to_safetensors(
    path_out: str | os.PathLike[str],
    source: str | os.PathLike[str] | Mapping[Address, CaptureEntry],
    *,
    names: str = "birkhoff",
) -> list[str]:
    """Write the capture in a request's directory, or entries already read, to one file. Returns the tensor names."""
    import torch
    from safetensors import SafetensorError

    entries = source if isinstance(source, Mapping) else read_request(source)
    if not entries:
        raise CaptureFileError("there are no entries to export. Give a request that captured something.")
    if names == "birkhoff":
        named = {f"{hook}.{layer}": entry for (hook, layer), entry in entries.items()}
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
    try:
        with atomic_path(Path(path_out), sync=False) as partial:
            save_tensors(partial, tensors, metadata or None)
    except (OSError, SafetensorError) as error:
        raise CaptureWriteError(f"{path_out} could not be written ({error}). Choose another place.") from None
    return list(tensors)
