"""`harvest.json`: the settings a directory of captures was started with.

All rows of a store must be computed in the same way, so a resumed run must have equal settings, compared by value: the
model by a digest of its weights, the data by a digest of its bytes. Differences in the environment that can change the
last bits (versions, threads) are reported but allowed.
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

from birkhoff.atomic_file import write_atomic
from birkhoff.engine.language_model import LanguageModel
from birkhoff.errors import CaptureSettings
from birkhoff.small_file import MANIFEST_BYTES, read_json

NAME = "harvest.json"
PARTS = ".parts"  # folder of the parts of a harvest by several processes, until they are joined
VERSION = 1
_SAMPLES = 64


def begin(root: Path, settings: Mapping[str, Any]) -> list[str]:
    """Write the settings to a new directory, or compare them with the existing manifest.

    A manifest of a run that ended before it stored anything, such as one over a file with a bad first line, is
    replaced. Returns the differences of the environment; raises `CaptureSettings` if the settings differ.
    """
    return compare(root, {"version": VERSION, "settings": dict(settings), "environment": environment()})


def compare(root: Path, content: Mapping[str, Any]) -> list[str]:
    """`begin` with a whole manifest, which may be that of another process."""
    settings, current = content["settings"], content["environment"]
    manifest = read(root)
    changed = []
    if manifest is not None:
        changed = list(_differences(manifest["settings"], json.loads(json.dumps(settings))))
    if manifest is None or (changed and not _holds_files(root)):
        write_atomic(root / NAME, json.dumps(content, indent=1) + "\n")
        return []
    if changed:
        raise CaptureSettings(
            f"{root} was begun with other settings: {'; '.join(changed)}. Use the same ones to go on, or another "
            "directory to begin anew."
        )
    return list(_differences(manifest.get("environment", {}), current))


def read(root: Path) -> dict[str, Any] | None:
    """Return the manifest, or None for a missing or empty directory. Other content is a `CaptureSettings` error."""
    path = root / NAME
    try:
        manifest: dict[str, Any] = read_json(path, MANIFEST_BYTES)
        if not isinstance(manifest["settings"], dict) or manifest["version"] != VERSION:
            raise ValueError(f"version {manifest['version']}")
    except (FileNotFoundError, NotADirectoryError):
        if root.exists() and (not root.is_dir() or any(not _is_leftover(name) for name in os.listdir(root))):
            raise CaptureSettings(
                f"{root} is there and holds no {NAME}, so it was not made by a harvest. Choose a new directory."
            ) from None
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureSettings(
            f"{path} cannot be read ({error!r}). Restore it, or choose a new directory."
        ) from None
    return manifest


def environment() -> dict[str, Any]:
    """Versions and settings that can change the last bits of a row."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}


def model_digest(model: LanguageModel) -> str:
    """Return a 128-bit digest of every weight's name, shape, dtype and a sample of its values, as hex."""
    digest = hashlib.sha256()
    samples: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    weights = []
    for name, weight in model.named_weights():
        flat = weight.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLES)]
        sample = sample.view(torch.uint8) if sample.itemsize == 1 else sample
        samples.setdefault((sample.device, sample.dtype), []).append(sample)
        weights.append((f"{name} {tuple(weight.shape)} {weight.dtype}\n", sample))
    # One copy from the device for all of them: a model has thousands of experts.
    joined = {
        kind: iter(torch.cat(each).cpu().split([len(sample) for sample in each]))
        for kind, each in samples.items()
    }
    for described, sample in weights:
        digest.update(described.encode())
        values = next(joined[sample.device, sample.dtype])
        digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _holds_files(root: Path) -> bool:
    """Whether there are files besides the manifest and the lock, at any depth: rows, or parts of other processes."""
    for folder, _, names in os.walk(root):
        if any(Path(folder) != root or (name != NAME and not _is_leftover(name)) for name in names):
            return True
    return False


def _is_leftover(name: str) -> bool:
    """Whether a file can be left by a run killed before it wrote its manifest."""
    return name.startswith((".lock", NAME + ".")) or name == PARTS


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{path}{name}.")
        elif before != after:
            yield f"{path}{name} was {_format(before)} and is {_format(after)}"


def _format(value: Any) -> str:
    return "not given" if value is None else json.dumps(value)
