"""What the files of the served model hold, for APIs that list models: bytes, format, parameters and a digest.

Everything is read from the files, so it does not depend on the device, dtype or memory the model is loaded with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from birkhoff.hf.checkpoint import read_config, runs_here
from birkhoff.hf.inspect_model import inspect_model
from birkhoff.weights.checkpoint import is_gguf
from birkhoff.weights.inspect import inspect_checkpoint
from birkhoff.weights.shard_index import read_shards
from birkhoff.weights.tensor_ref import BYTES

WHOLE_BYTES = 64 << 20  # files up to this size are hashed as a whole, of larger ones a sample
SAMPLES = 512
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class ModelFiles:
    format: str  # gguf or safetensors
    size: int
    modified: datetime
    digest: str  # sha256 of the config and of every file: as a whole, or of its size and a sample
    parameters: int
    quantization: str  # the type most of the model is stored in


def describe_files(path: Path) -> ModelFiles:
    """Describe the checkpoint at `path`; reads headers, and the files themselves for the digest."""
    config = path / "config.json"
    if config.is_file() and runs_here(read_config(path)):
        report = inspect_model(path)
        files, parameters, types = read_shards(path).files, report["parameters"], report["dtypes"]
    else:
        inspection = inspect_checkpoint(path)
        files, parameters = list(inspection.paths), inspection.parameters
        types = inspection.bytes_by_type
    files = sorted(files)
    stored = max(types, key=lambda name: types[name])
    return ModelFiles(
        format="gguf" if is_gguf(path) else "safetensors",
        size=sum(file.stat().st_size for file in files),
        modified=datetime.fromtimestamp(max(file.stat().st_mtime for file in files), UTC),
        digest=_digest([config, *files] if config.is_file() else files),
        parameters=parameters,
        quantization="FP4" if stored in BYTES else stored.upper(),
    )


def _digest(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{size}\n".encode())
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            for index in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
