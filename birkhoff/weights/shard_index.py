"""Read the headers of a checkpoint directory's safetensors files into one table of tensors.

With an index, shards and index must agree exactly: no shard missing, truncated or extra, and every name present once
in the shard that the index names. Without an index, numbered shards must be complete. This rejects partial downloads,
which would otherwise load and produce garbage. Errors are passed to `on_error`: the loader raises the first, the
inspector collects them all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from birkhoff.errors import CheckpointError
from birkhoff.small_file import INDEX_BYTES, read_bytes
from birkhoff.weights.safetensors import TensorEntry, load_json, read_header

ErrorHandler = Callable[[CheckpointError], None]
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_MAX_LISTED = 6


class ShardIndex(NamedTuple):
    """The tensors of all shards."""

    tensors: dict[str, TensorEntry]  # in file order, for sequential reads
    files: list[Path]
    notices: list[str]


def raise_error(error: CheckpointError) -> None:
    """The default error handler: raise."""
    raise error


def join_names(names: list[str]) -> str:
    """Join the first few names for a message, with the count of the rest."""
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"


def read_shards(path: Path, on_error: ErrorHandler = raise_error) -> ShardIndex:
    """Read the headers of a directory, or of the single safetensors file `path`."""
    if path.is_file():
        return _read([path], {}, on_error)
    present = sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        on_error(
            CheckpointError(
                f"{path} holds {len(indices)} index files ({join_names([i.name for i in indices])}), "
                "expected one. Keep the one that belongs to the shards."
            )
        )
    if indices:
        return _indexed(path, indices[0], present, on_error)
    if not present:
        on_error(
            CheckpointError(
                f"{path} holds no safetensors files. A checkpoint is a directory with config.json and "
                "safetensors files; check the path."
            )
        )
    _check_numbering(present, on_error)
    return _read(present, {}, on_error)


def _indexed(path: Path, index: Path, present: list[Path], on_error: ErrorHandler) -> ShardIndex:
    try:
        shard_of, announced = _read_index(index)
    except CheckpointError as error:
        on_error(error)
        return _read(present, {}, on_error)
    named = sorted(set(shard_of.values()))
    names = {file.name for file in present}
    missing = [name for name in named if name not in names]
    if missing:
        on_error(
            CheckpointError(
                f"{len(missing)} of {len(named)} shards named by {index.name} are missing in {path}: "
                f"{join_names(missing)}. Download them again."
            )
        )
    extra = sorted(names - set(named))
    if extra:
        on_error(
            CheckpointError(
                f"{path} holds an extra shard that {index.name} does not name: {join_names(extra)}. "
                "It belongs to another download; move it away or fetch the index again."
            )
        )
    shards = _read([file for file in present if file.name in named], shard_of, on_error)
    total = sum(entry.nbytes for entry in shards.tensors.values())
    if announced is not None and not missing and announced != total:
        shards.notices.append(f"{index.name} announces {announced} bytes, the shards hold {total}.")
    return shards


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    try:
        # Each name is compared with the shards below, so a repeated name is caught there; a check here costs memory.
        raw = load_json(read_bytes(index, INDEX_BYTES), index.name, INDEX_BYTES, unique_keys=False)
    except OSError as error:
        raise CheckpointError(
            f"{index} cannot be read ({error.strerror}). Check that it is a readable file."
        ) from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index.name} has no weight_map from tensor names to shards. Download it again."
        )
    for name, shard in weight_map.items():
        # A shard name with a path could refer to files outside the directory.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index.name} places {name} in {shard!r}, expected the name of a safetensors file "
                "in the same directory. Download it again."
            )
        weight_map[name] = sys.intern(shard)
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _check_numbering(present: list[Path], on_error: ErrorHandler) -> None:
    """Check that files named NAME-00001-of-00046.safetensors form one complete series."""
    numbered = [match for file in present if (match := _NUMBERED.fullmatch(file.name))]
    if not numbered:
        return
    extra = [file.name for file in present if not _NUMBERED.fullmatch(file.name)]
    series = {(match[1], match[3]) for match in numbered}
    if extra or len(series) > 1:
        names = extra or sorted(f"{stem}-*-of-{count}" for stem, count in series)
        on_error(
            CheckpointError(
                f"the shards do not form one series; extra shard: {join_names(names)}. "
                "Keep the files of one checkpoint only."
            )
        )
        return
    count = int(numbered[0][3])
    present_indices = {int(match[2]) for match in numbered}
    missing = [
        f"{numbered[0][1]}-{i:0{len(numbered[0][3])}}-of-{numbered[0][3]}.safetensors"
        for i in range(1, min(count, 100_000) + 1)
        if i not in present_indices
    ]
    if missing:
        on_error(
            CheckpointError(
                f"{len(missing)} of {count} shards are missing: {join_names(missing)}. Download them again."
            )
        )


def _read(files: list[Path], shard_of: dict[str, str], on_error: ErrorHandler) -> ShardIndex:
    """Merge the headers. Names are removed from `shard_of` as they are read; the rest are reported as absent."""
    tensors: dict[str, TensorEntry] = {}
    unreadable: set[str] = set()
    check_index = bool(shard_of)
    for file in files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            unreadable.add(file.name)
            on_error(error)
            continue
        unindexed = []
        for name, entry in header.tensors.items():
            if name in tensors:
                on_error(
                    CheckpointError(
                        f"{name} is in {tensors[name].path.name} and again in {file.name}, expected "
                        "once. Download the checkpoint again."
                    )
                )
                continue
            tensors[name] = entry
            if check_index and shard_of.pop(name, None) != file.name:
                unindexed.append(name)
        if unindexed:
            on_error(
                CheckpointError(
                    f"{file.name} holds {len(unindexed)} tensors which the index does not place "
                    f"there: {join_names(unindexed)}. Shards and index come from different downloads."
                )
            )
    read = {file.name for file in files} - unreadable
    absent = [f"{name} ({shard})" for name, shard in shard_of.items() if shard in read]
    if absent:
        on_error(
            CheckpointError(
                f"{len(absent)} tensors are not in the shards the index places them in: "
                f"{join_names(absent)}. Shards and index come from different downloads."
            )
        )
    return ShardIndex(tensors, files, [])
