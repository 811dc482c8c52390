"""Analysis of a journal and its payloads: the first half of a repair, which changes nothing.

Every number of a journal is checked before use, even though it passed the checksums: checksums detect accidents, not
intent. A payload is searched under its open name first and its final name second, because a crash can happen between
the two renames of sealing.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from typing import Any

from birkhoff.capture.store.disk import READ, Disk
from birkhoff.capture.store.journal import read_journal
from birkhoff.capture.store.naming import JOURNAL, LAYOUTS, OPEN, PAYLOAD, SIDECAR
from birkhoff.errors import CaptureFileError, quoted
from birkhoff.small_file import SIDECAR_BYTES, open_regular, read_json

_BLOCK = 1 << 20
_HEAD = 1 << 16  # sidecars of this package have the write id within their first bytes
_WRITE_ID = re.compile(rb'"write_id": "([0-9a-f]{32})"')


def write_id(directory: str, sidecar: str) -> str | None:
    """The write id of an existing sidecar: empty if it has none, None if there is no such file."""
    try:
        with open(open_regular(os.path.join(directory, sidecar)), "rb") as file:
            match = _WRITE_ID.search(file.read(_HEAD))
    except FileNotFoundError:
        return None
    return match[1].decode() if match else ""


class Findings:
    """What can be kept of one journal. `only` limits it to these requests; the others count as dropped."""

    def __init__(self, disk: Disk, directory: str, journal: str, only: frozenset[str] | None = None):
        self._disk = disk
        self.directory = directory
        self._only = only
        self._journal = journal
        self.stem = journal.removesuffix(JOURNAL)
        self.header: dict[str, Any] = {}
        self.good = bytearray()  # one flag per entry of the journal
        self.broken: set[str] = set()  # requests that lost a record
        self.finished: set[str] = set()
        self.ends: dict[str, int] = {}  # payload stem -> end of its last good record
        self.checked_bytes = 0
        self._seen: dict[str, None] = {}
        self._held: tuple[str, int | None] = ("", None)  # the payload that was read last
        try:
            for kind, text in read_journal(disk, os.path.join(directory, journal)):
                self._line(kind, json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CaptureFileError(
                f"{journal} in {directory} has the right checksums and is not a capture journal ({error!r}). "
                "It was not written by this program; move it away."
            ) from None
        finally:
            self._hold("", None)

    @property
    def stems(self) -> list[str]:
        """Names of the payloads of this journal, without their suffix."""
        return list(self._seen) if self.header.get("layout") == "per_file" else [self.stem]

    @property
    def published(self) -> bool:
        """Whether every sidecar is in place and only the clean-up was interrupted."""
        ours = self.header.get("write_id")
        return bool(self.stems) and all(
            write_id(self.directory, stem + SIDECAR) == ours for stem in self.stems
        )

    @property
    def worth_keeping(self) -> bool:
        """Whether there is something to seal and nothing better in its place."""
        if not self.header:
            return False
        if self.header["layout"] == "sharded":  # a request may end here and have its rows in an earlier shard
            return any(self.good) or bool(self.finished)
        complete = bool(self.finished) and not self.broken
        return complete or (any(self.good) and not self.would_replace())

    def would_replace(self) -> bool:
        """Whether another capture exists under the same name."""
        if self.header.get("layout") == "sharded":
            return False
        sidecars = [name for name in os.listdir(self.directory) if name.endswith(SIDECAR)]
        return any(
            write_id(self.directory, name) not in (None, self.header.get("write_id")) for name in sidecars
        )

    def keep(self, number: int, entry: dict[str, Any]) -> bool:
        return bool(self.good[number])

    def payload_name(self, stem: str) -> str | None:
        """The payload under its open name, or its final name unless that is another capture's."""
        path = os.path.join(self.directory, stem + PAYLOAD)
        if os.path.lexists(path + OPEN):
            return stem + PAYLOAD + OPEN
        ours = write_id(self.directory, stem + SIDECAR) in (None, self.header.get("write_id"))
        return stem + PAYLOAD if ours and os.path.lexists(path) else None

    def _line(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "open":
            if (
                self.header
                or body["layout"] not in LAYOUTS
                or not re.fullmatch("[0-9a-f]{32}", body["write_id"])
            ):
                raise ValueError(f"first line says {quoted(body)}")
            self.header = body
        elif not self.header:
            raise ValueError("the first line is missing")
        elif kind == "begin":
            if self._only is None and not self._continues(body["request_id"], body.get("continues", 0)):
                self.broken.add(body["request_id"])
        elif kind == "finish":
            if self._only is None or body["request_id"] in self._only:
                self.finished.add(body["request_id"])
        elif kind == "entry":
            request = body["request_id"] if self.header["layout"] == "sharded" else self.header["request_id"]
            stem = body["file"] if self.header["layout"] == "per_file" else self.stem
            if not isinstance(stem, str) or os.path.basename(stem) != stem or stem.startswith("."):
                raise ValueError(f"payload {quoted(stem)}")
            self._seen[stem] = None
            requested = self._only is None or request in self._only
            good = requested and request not in self.broken and self._intact(stem, body)
            if requested and not good:
                self.broken.add(request)
            self.good.append(good)

    def _continues(self, request: str, rows: int) -> bool:
        """Whether earlier shards of this slot hold all rows that the request had before this shard."""
        if not rows:
            return True
        slot, _, seq = self.stem.rpartition("-")
        earlier = [
            name
            for name in os.listdir(self.directory)
            if name.startswith(f"{slot}-") and name < f"{slot}-{seq}"
        ]
        if any(name.endswith(JOURNAL) for name in earlier):
            return True  # it could not be repaired, so nothing contradicts it
        for name in earlier:
            if name.endswith(SIDECAR):
                entries = read_json(os.path.join(self.directory, name), SIDECAR_BYTES)["entries"]
                rows -= sum(entry["shape"][0] for entry in entries if entry["request_id"] == request)
        return rows <= 0

    def _intact(self, stem: str, entry: dict[str, Any]) -> bool:
        offset = entry["offset"]
        left = entry["nbytes"]
        total = 0
        if (
            type(offset) is not int
            or type(left) is not int
            or min(offset, left) < 0
            or offset + left >= 1 << 62
        ):
            raise ValueError(f"bytes {quoted(offset)} + {quoted(left)}")
        end = offset + left
        if self._held[0] != stem:
            name = self.payload_name(stem)
            self._hold(
                stem, None if name is None else self._disk.open(os.path.join(self.directory, name), READ)
            )
        file = self._held[1]
        while left and file is not None:
            block = self._disk.read(file, min(left, _BLOCK), offset)
            if not block:
                break  # the payload is shorter than the journal says
            total = zlib.crc32(block, total)
            self.checked_bytes += len(block)
            offset, left = offset + len(block), left - len(block)
        if file is None or left or total != entry["crc32"]:
            return False
        self.ends[stem] = max(self.ends.get(stem, 0), end)
        return True

    def _hold(self, stem: str, file: int | None) -> None:
        if self._held[1] is not None:
            self._disk.close(self._held[1])
        self._held = (stem, file)
