"""The settings a directory of captures was begun with: `harvest.json` at its root.

Rows of one store have to be of one kind, so a run that goes on where another ended must have the same settings, by
value and not by name: the model is known by a digest of its weights, the data by that of its bytes. What can change the
last bits without being a setting (versions, threads) is noted, and a difference is told instead of refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from birkhoff.errors import CaptureSettings
from birkhoff.model.transformer import Transformer

NAME = "harvest.json"
VERSION = 1
_SAMPLES = 64


def begin(root: Path, settings: Mapping[str, Any]) -> list[str]:
    """Note the settings in a new directory, or hold them against those it was begun with; what else has changed."""
    path, around = root / NAME, environment()
    known = read(root)
    if known is None:
        _write(path, {"version": VERSION, "settings": dict(settings), "environment": around})
        return []
    wanted = json.loads(json.dumps(settings))
    changed = list(_differences(known["settings"], wanted))
    if changed:
        raise CaptureSettings(
            f"{root} was begun with other settings: {'; '.join(changed)}. Use the same ones to go on, or another "
            "directory to begin anew."
        )
    return list(_differences(known.get("environment", {}), around))


def read(root: Path) -> dict[str, Any] | None:
    """The manifest; None where there is neither one nor anything else. Other files are not ours to write among."""
    path = root / NAME
    try:
        known = json.loads(path.read_bytes())
        if not isinstance(known["settings"], dict) or known["version"] != VERSION:
            raise ValueError(f"version {known['version']}")
    except (FileNotFoundError, NotADirectoryError):
        if root.exists() and (not root.is_dir() or any(not _passing(name) for name in os.listdir(root))):
            raise CaptureSettings(
                f"{root} is there and holds no {NAME}, so it was not made by a harvest. Choose a new directory."
            ) from None
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureSettings(
            f"{path} cannot be read ({error!r}). Restore it, or choose a new directory."
        ) from None
    return known


def environment() -> dict[str, Any]:
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}


def model_digest(model: Transformer) -> str:
    """128 bits of what the weights are: every tensor's name, shape and dtype, and some of its numbers."""
    digest = hashlib.sha256()
    for place in model.destinations():
        tensor = place.tensor.detach()
        flat = tensor.reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)]
        digest.update(f"{place.name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(some.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _passing(name: str) -> bool:
    """Files that a run leaves which was killed before it had noted its settings."""
    return name.startswith((".lock", NAME + "."))


def _differences(was: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name in sorted({*was, *now}):
        old, new = was.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{path}{name}.")
        elif old != new:
            yield f"{path}{name} was {_shown(old)} and is {_shown(new)}"


def _shown(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)


def _write(path: Path, value: Any) -> None:
    """Whole or not at all, also after a power cut."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
