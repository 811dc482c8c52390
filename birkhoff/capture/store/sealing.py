"""Sealing: the steps that turn an open capture into a visible one, used by the writer and by the repair.

The steps are separate so that many captures can share the directory syncs between them:

    write_sidecars    write the sidecar under its open name and sync it
    place_payloads    rename the payload                then sync the directory
    place_sidecars    rename the sidecar                then sync the directory
    remove_journal    remove the journal

A sidecar therefore implies a complete payload, also after a power failure. Each step can be repeated: sealing can
restart from the first step as long as the journal exists. Entries are copied from the journal as text, so sealing needs
the memory of one line, whatever the length of the capture.
"""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from birkhoff.capture.store.disk import CREATE, Disk, opened, remove, write_all
from birkhoff.capture.store.journal import read_journal
from birkhoff.capture.store.naming import OPEN, PAYLOAD, SIDECAR

FORMAT_VERSION = 1
# Reserved by the format: metadata of a request must not use these names.
RESERVED = frozenset(
    """layout dtype entries requests layer hook shape offset nbytes row_shape positions token_ids phase row_offset steps
    crc32 scale axes file file_crc32 complete write_id created_at format_version shard_idx seq request_id tag
    finish_reason dropped_rows rows continues error""".split()
)
_BLOCK = 1 << 20

Keep = Callable[[int, dict[str, Any]], bool]  # (index, entry) -> whether it goes into the sidecar


@dataclass
class SealedContents:
    """The content of a journal without its entries."""

    header: dict[str, Any] = field(default_factory=dict)
    # Metadata by request id; `complete` once finished.
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)
    stems: dict[str, None] = field(default_factory=dict)  # payloads with rows, in order of appearance
    num_entries: int = 0
    dtype: str = "float32"


class Seal:
    """Sealing of one journal's files. `keep` selects entries; requests in `broken` are marked as incomplete."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        journal: str,
        sync: bool = True,
        keep: Keep | None = None,
        broken: Collection[str] = (),
    ):
        self._disk = disk
        self.directory = directory
        self._sync = sync
        self._keep = keep
        self._broken = broken
        self._journal = os.path.join(directory, journal)
        self.contents = self._look()
        self.cleared = False  # whether a previous capture was removed

    @property
    def layout(self) -> str:
        return str(self.contents.header["layout"])

    @property
    def stems(self) -> list[str]:
        """Names of the payloads without suffix; a per_file capture without rows has none."""
        return list(self.contents.stems) if self.layout == "per_file" else [self.contents.header["stem"]]

    def write_sidecars(self) -> None:
        if self.layout == "per_file":
            for stem, text in self._per_file():
                self._write(stem, iter([text]))
        else:
            self._write(self.contents.header["stem"], self._index())

    def clear_previous(self) -> None:
        """Remove the capture that is replaced: its sidecars first, so that no sidecar describes foreign bytes."""
        for name in self._previous(SIDECAR):
            self.cleared = True
            remove(self._disk, os.path.join(self.directory, name))

    def place_payloads(self) -> None:
        for stem in self.stems:
            payload = os.path.join(self.directory, stem + PAYLOAD)
            if os.path.lexists(payload + OPEN):
                self._disk.rename(payload + OPEN, payload)

    def place_sidecars(self) -> None:
        for stem in self.stems:
            sidecar = os.path.join(self.directory, stem + SIDECAR)
            self._disk.rename(sidecar + OPEN, sidecar)

    def remove_journal(self) -> None:
        ours = {stem + PAYLOAD for stem in self.stems}
        for name in self._previous(PAYLOAD):
            if name not in ours:
                remove(self._disk, os.path.join(self.directory, name))
        remove(self._disk, self._journal)

    @property
    def replaces(self) -> bool:
        return bool(self.contents.header.get("replace"))

    def _previous(self, ending: str) -> list[str]:
        """Files of the capture that is replaced, and of an earlier attempt to replace it."""
        if not self.replaces:
            return []
        names = [name for name in os.listdir(self.directory) if name.endswith(ending)]
        # Stages share a directory; each replaces files with its own names.
        if self.contents.header["pp_size"] > 1:
            return [name for name in names if name.removesuffix(ending) in self.stems]
        return names

    def _entries(self) -> Iterator[bytes]:
        """The JSON of every entry that is kept."""
        number = 0
        for kind, text in read_journal(self._disk, self._journal):
            if kind == "entry":
                if self._keep is None or self._keep(number, json.loads(text)):
                    yield text
                number += 1

    def _look(self) -> SealedContents:
        contents = SealedContents()
        for kind, text in read_journal(self._disk, self._journal):
            if kind == "open":
                contents.header = json.loads(text)
            elif kind in ("begin", "finish"):
                facts = json.loads(text)
                known = contents.requests.setdefault(facts["request_id"], {"complete": False})
                intact = facts["request_id"] not in self._broken and "error" not in facts
                facts.pop("continues", None)  # used by the repair, not by readers
                known |= facts | {"complete": kind == "finish" and intact}
        for text in self._entries() if contents.header else ():
            if contents.num_entries == 0 or contents.header["layout"] == "per_file":
                entry = json.loads(text)
                contents.stems[entry.get("file", contents.header["stem"])] = None
                contents.dtype = entry["dtype"] if contents.num_entries == 0 else contents.dtype
            contents.num_entries += 1
        return contents

    def _facts(self) -> dict[str, Any]:
        """What the sidecar of a single request contains besides its rows."""
        facts: dict[str, Any] = {}
        for known in self.contents.requests.values():
            facts |= known
        header = self.contents.header
        return (
            facts
            | {name: header[name] for name in ("request_id", "tag", "created_at", "write_id")}
            | {"format_version": FORMAT_VERSION}
        )

    def _index(self) -> Iterator[bytes]:
        """A sidecar with entries: packed for one request, sharded for many."""
        header = self.contents.header
        if header["layout"] == "packed":
            top = {"layout": "packed", "dtype": self.contents.dtype, **self._facts()}
        else:
            names = ("tag", "created_at", "write_id", "shard_idx", "seq")
            top = {"layout": "sharded", "dtype": self.contents.dtype, "format_version": FORMAT_VERSION}
            top |= {name: header[name] for name in names} | {"requests": self._kept_requests()}
        yield json.dumps(top)[:-1].encode() + b', "entries": ['
        for number, text in enumerate(self._entries()):
            yield (b",\n" if number else b"\n") + text
        yield b"\n]}\n"

    def _kept_requests(self) -> dict[str, dict[str, Any]]:
        """Metadata by request; requests without kept entries are omitted."""
        requests = self.contents.requests
        if self._keep is not None:
            kept = {json.loads(text)["request_id"] for text in self._entries()}
            requests = {name: facts for name, facts in requests.items() if name in kept or facts["complete"]}
        return {
            name: {k: v for k, v in facts.items() if k != "request_id"} for name, facts in requests.items()
        }

    def _per_file(self) -> Iterator[tuple[str, bytes]]:
        """The sidecar of every (layer, hook), its parts joined."""
        joined: dict[str, dict[str, Any]] = {}
        for text in self._entries():
            _join(joined, json.loads(text))
        for stem, entry in joined.items():
            for name in _PER_ROW:
                if name in entry:
                    entry[name] = entry[name].tolist()
            if len(set(entry.get("phase", ()))) == 1:
                entry["phase"] = entry["phase"][0]
            yield stem, json.dumps(self._facts() | entry).encode() + b"\n"

    def _write(self, stem: str, pieces: Iterator[bytes]) -> None:
        path = os.path.join(self.directory, stem + SIDECAR + OPEN)
        remove(self._disk, path)  # of an earlier attempt
        with opened(self._disk, path, CREATE) as file:
            buffer, offset = bytearray(), 0
            for piece in pieces:
                buffer += piece
                if len(buffer) >= _BLOCK:
                    write_all(self._disk, file, buffer, offset)
                    offset += len(buffer)
                    buffer = bytearray()
            write_all(self._disk, file, buffer, offset)
            if self._sync:
                self._disk.fsync(file)


def publish(seals: list[Seal], disk: Disk, sync: bool) -> dict[Seal, OSError]:
    """Run all steps of sealing with directory syncs in between. One failure does not stop the others."""
    failed: dict[Seal, OSError] = {}

    def attempt(step: Callable[[Seal], None], chosen: list[Seal]) -> None:
        for seal in chosen:
            if seal not in failed:
                try:
                    step(seal)
                except OSError as error:
                    failed[seal] = error

    def step_and_sync(step: Callable[[Seal], None], chosen: list[Seal]) -> None:
        attempt(step, chosen)
        synced = (
            sync_directories(disk, [seal.directory for seal in chosen if seal not in failed]) if sync else {}
        )
        for seal in chosen:
            error = synced.get(seal.directory)
            if error is not None:
                failed.setdefault(seal, error)

    attempt(Seal.write_sidecars, seals)
    step_and_sync(Seal.clear_previous, [seal for seal in seals if seal.replaces])
    step_and_sync(Seal.place_payloads, seals)
    step_and_sync(Seal.place_sidecars, seals)
    for seal in seals:
        if seal not in failed:
            with contextlib.suppress(OSError):  # it is durable; the next repair removes the journal
                seal.remove_journal()
    return failed


def sync_directories(disk: Disk, directories: Iterable[str]) -> dict[str, OSError]:
    """Sync each directory once. Returns the failures; a retry could not tell whether data was lost."""
    failed: dict[str, OSError] = {}
    for directory in dict.fromkeys(directories):
        try:
            disk.sync_directory(directory)
        except OSError as error:
            failed[directory] = error
    return failed


_PER_ROW = {"positions": "q", "token_ids": "q", "scale": "f"}  # arrays while parts are joined


def _join(joined: dict[str, dict[str, Any]], part: dict[str, Any]) -> None:
    """Add one journal entry to the sidecar of its file."""
    stem, rows = part.pop("file"), part["shape"][0]
    for name in ("offset", "nbytes"):
        del part[name]
    part["crc32"] = part.pop("file_crc32")  # of the whole file up to and including this part
    if isinstance(part.get("phase"), str):
        part["phase"] = [part["phase"]] * rows
    for name, kind in _PER_ROW.items():
        if name in part:
            part[name] = array(kind, part[name])
    if stem not in joined:
        joined[stem] = part
        return
    whole = joined[stem]
    whole["shape"][0] += rows
    whole["crc32"] = part["crc32"]
    whole["steps"][1] = part["steps"][1]
    for name in (*_PER_ROW, "phase"):
        if name in whole and name in part:
            whole[name] += part[name]
        else:
            whole.pop(name, None)  # a partial list would label the wrong rows
