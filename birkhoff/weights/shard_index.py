"""The files of one checkpoint directory as one table of tensors, or the reasons why they are not one checkpoint.

With an index, shards and index must agree exactly: no shard missing, cut short or left over, every name once and where
the index says. Without an index, numbered shards must be complete. A partial download would otherwise load and talk
nonsense. Findings go to `complain`, which raises for a loader and collects for an inspector, so both see the same gate.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from birkhoff.errors import CheckpointError
from birkhoff.weights.safetensors import TensorEntry, load_json, read_header

Complain = Callable[[CheckpointError], None]
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_LISTED = 6


class ShardIndex(NamedTuple):
    tensors: dict[str, TensorEntry]  # in file order, so that reading in this order is reading forwards
    files: list[Path]
    notices: list[str]


def raise_it(error: CheckpointError) -> None:
    raise error


def some(names: list[str]) -> str:
    """The first few of a list of names, and how many more there are."""
    shown = ", ".join(names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"


def gather(path: Path, complain: Complain = raise_it) -> ShardIndex:
    """All tensors of a directory, or of the single safetensors file `path`."""
    if path.is_file():
        return _read([path], {}, complain)
    present = sorted(path.glob("*.safetensors"))
    indices = sorted(path.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        complain(
            CheckpointError(
                f"{path} holds {len(indices)} index files ({some([i.name for i in indices])}), "
                "expected one. Keep the one that belongs to the shards."
            )
        )
    if indices:
        return _indexed(path, indices[0], present, complain)
    if not present:
        complain(
            CheckpointError(
                f"{path} holds no safetensors files. A checkpoint is a directory with config.json and "
                "safetensors files; check the path."
            )
        )
    _check_numbering(present, complain)
    return _read(present, {}, complain)


def _indexed(path: Path, index: Path, present: list[Path], complain: Complain) -> ShardIndex:
    try:
        shard_of, announced = _read_index(index)
    except CheckpointError as error:
        complain(error)
        return _read(present, {}, complain)
    wanted = sorted(set(shard_of.values()))
    found = {file.name for file in present}
    missing = [name for name in wanted if name not in found]
    if missing:
        complain(
            CheckpointError(
                f"{len(missing)} of {len(wanted)} shards named by {index.name} are missing in {path}: "
                f"{some(missing)}. Download them again."
            )
        )
    extra = sorted(found - set(wanted))
    if extra:
        complain(
            CheckpointError(
                f"{path} holds an extra shard that {index.name} does not name: {some(extra)}. "
                "It belongs to another download; move it away or fetch the index again."
            )
        )
    shards = _read([file for file in present if file.name in wanted], shard_of, complain)
    total = sum(entry.nbytes for entry in shards.tensors.values())
    if announced is not None and not missing and announced != total:
        shards.notices.append(f"{index.name} announces {announced} bytes, the shards hold {total}.")
    return shards


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    try:
        # Names are compared with the shards one by one, so a repeated one cannot hide; looking for it costs memory.
        raw = load_json(index.read_bytes(), index.name, unique_keys=False)
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
        # A name with a path in it would let an index reach files outside its directory.
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{index.name} places {name} in {shard!r}, expected the name of a safetensors file "
                "in the same directory. Download it again."
            )
        weight_map[name] = sys.intern(shard)
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _check_numbering(present: list[Path], complain: Complain) -> None:
    """Files like NAME-00001-of-00046.safetensors say by themselves how many there should be."""
    numbered = [match for file in present if (match := _NUMBERED.fullmatch(file.name))]
    if not numbered:
        return
    extra = [file.name for file in present if not _NUMBERED.fullmatch(file.name)]
    series = {(match[1], match[3]) for match in numbered}
    if extra or len(series) > 1:
        names = extra or sorted(f"{stem}-*-of-{count}" for stem, count in series)
        complain(
            CheckpointError(
                f"the shards do not form one series; extra shard: {some(names)}. Keep the files of one checkpoint only."
            )
        )
        return
    count = int(numbered[0][3])
    have = {int(match[2]) for match in numbered}
    missing = [
        f"{numbered[0][1]}-{i:0{len(numbered[0][3])}}-of-{numbered[0][3]}.safetensors"
        for i in range(1, min(count, 100_000) + 1)
        if i not in have
    ]
    if missing:
        complain(
            CheckpointError(
                f"{len(missing)} of {count} shards are missing: {some(missing)}. Download them again."
            )
        )


def _read(files: list[Path], shard_of: dict[str, str], complain: Complain) -> ShardIndex:
    """Merge the headers. `shard_of`, where given, is used up: names left in it were promised but not found."""
    tensors: dict[str, TensorEntry] = {}
    unreadable: set[str] = set()
    check_index = bool(shard_of)
    for file in files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            unreadable.add(file.name)
            complain(error)
            continue
        unindexed = []
        for name, entry in header.tensors.items():
            if name in tensors:
                complain(
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
            complain(
                CheckpointError(
                    f"{file.name} holds {len(unindexed)} tensors which the index does not place "
                    f"there: {some(unindexed)}. Shards and index come from different downloads."
                )
            )
    read = {file.name for file in files} - unreadable
    absent = [f"{name} ({shard})" for name, shard in shard_of.items() if shard in read]
    if absent:
        complain(
            CheckpointError(
                f"{len(absent)} tensors are not in the shards the index places them in: "
                f"{some(absent)}. Shards and index come from different downloads."
            )
        )
    return ShardIndex(tensors, files, [])
