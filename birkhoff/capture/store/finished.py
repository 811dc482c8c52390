"""Which requests of a capture directory are complete, and removal of the incomplete ones.

A request is complete if its sidecar says so, every row it claims is listed, none was dropped, and it was not cancelled.
A resumed run uses this to skip requests. `forget` removes the incomplete ones, so that they can be written again under
the same names. It may be killed at any time and run again: a sidecar is replaced atomically, and a request that was
removed from one shard is incomplete in the others. Both functions expect a repaired directory without a writer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from birkhoff.capture.store.disk import CREATE, Disk, opened, remove, write_all
from birkhoff.capture.store.naming import JOURNAL, OPEN, PAYLOAD, SIDECAR
from birkhoff.capture.store.sidecar import CaptureFile, PayloadRange
from birkhoff.small_file import SIDECAR_BYTES, read_json

_SHARD = re.compile(r"shard-.*\.json")


@dataclass(slots=True)
class Progress:
    """Progress of one request. `rows` are listed in sidecars, `claimed` is the total recorded at its end."""

    rows: int = 0
    nbytes: int = 0
    claimed: int | None = None
    ended: bool = False

    @property
    def finished(self) -> bool:
        return self.ended and self.claimed == self.rows

    def add(self, record: PayloadRange) -> None:
        self.rows += record.rows
        self.nbytes += record.nbytes

    def learn(self, facts: dict[str, Any]) -> None:
        """Add what one sidecar says about the request; its end may be recorded in any of its shards."""
        if facts.get("complete"):
            self.claimed = facts.get("rows")
            self.ended = facts.get("finish_reason") in ("stop", "length") and not facts.get("dropped_rows")


@dataclass
class Survey:
    """Every request of a tag by id, and the sidecars that mention it."""

    requests: dict[str, Progress] = field(default_factory=dict)

    @property
    def finished(self) -> dict[str, Progress]:
        return {name: progress for name, progress in self.requests.items() if progress.finished}

    @property
    def unfinished(self) -> list[str]:
        return sorted(name for name, progress in self.requests.items() if not progress.finished)


def survey(directory: str | os.PathLike[str]) -> Survey:
    """Read the sidecars of a tag's directory, one at a time, in any layout."""
    result = Survey()
    for sidecar in _sidecars(Path(directory)):
        with CaptureFile(sidecar, labels=False) as file:
            requests = file.facts.get("requests")
            if isinstance(requests, dict):  # a shard
                for name, facts in requests.items():
                    result.requests.setdefault(name, Progress()).learn(facts)
                for record in file.records:
                    result.requests.setdefault(str(record.request_id), Progress()).add(record)
            else:
                progress = result.requests.setdefault(str(file.facts.get("request_id")), Progress())
                progress.learn(file.facts)
                for record in file.records:
                    progress.add(record)
    return result


def forget(directory: str | os.PathLike[str], requests: Collection[str], disk: Disk | None = None) -> None:
    """Remove requests from a tag's directory. Their bytes in a shard remain, unreferenced."""
    disk, requested = disk or Disk(), frozenset(requests)
    for sidecar in list(_sidecars(Path(directory))) if requested else ():
        facts = read_json(sidecar, SIDECAR_BYTES)
        listed = facts.get("requests")
        if not isinstance(listed, dict):
            if str(facts.get("request_id")) in requested:
                _remove(disk, sidecar)
        elif requested & listed.keys():
            facts["requests"] = {name: known for name, known in listed.items() if name not in requested}
            facts["entries"] = [entry for entry in facts["entries"] if entry["request_id"] not in requested]
            if facts["requests"]:
                _replace(disk, sidecar, facts)
            else:
                _remove(disk, sidecar)
    _clear(disk, Path(directory))


def _clear(disk: Disk, directory: Path) -> None:
    """Remove payloads without sidecar and journal, and directories that become empty."""
    for folder in [directory, *directory.glob("*/")]:
        for payload in folder.glob("*" + PAYLOAD):
            if not payload.with_suffix(SIDECAR).exists() and not any(folder.glob("*" + JOURNAL)):
                remove(disk, str(payload))
        if folder != directory:
            with contextlib.suppress(OSError):  # the directory is not empty
                disk.rmdir(str(folder))


def _sidecars(directory: Path) -> Iterator[Path]:
    """Sidecars of the shards in the directory and of the requests in their own directories."""
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from sorted(path.glob("*" + SIDECAR))
        elif _SHARD.fullmatch(path.name):
            yield path


def _remove(disk: Disk, sidecar: Path) -> None:
    """Remove the sidecar first: a payload without one is invisible, a sidecar without a payload is an error."""
    remove(disk, str(sidecar))
    disk.sync_directory(str(sidecar.parent))
    remove(disk, str(sidecar.with_suffix(PAYLOAD)))


def _replace(disk: Disk, sidecar: Path, facts: dict[str, Any]) -> None:
    # The same form as the writer's: request ids precede the entries, where readers look for them.
    entries = facts.pop("entries")
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    text = json.dumps(facts)[:-1] + ', "entries": [\n' + lines + "\n]}\n"
    path = str(sidecar) + OPEN
    remove(disk, path)  # of an earlier attempt
    with opened(disk, path, CREATE) as file:
        write_all(disk, file, text.encode(), 0)
        disk.fsync(file)
    disk.rename(path, str(sidecar))
    disk.sync_directory(str(sidecar.parent))
