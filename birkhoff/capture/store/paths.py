"""Directories of requests, and the handling of names that are taken.

Two different ids that map to the same safe name do not share a directory: the second gets a hash of its id appended.
The same id twice is a collision, resolved by `on_collision`: refuse, replace, or add a number. The owner of a directory
is read from its sidecars, so names are known across runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator

from birkhoff.capture.store.disk import Disk, ensure_directory
from birkhoff.capture.store.naming import JOURNAL, SIDECAR, short_hash, slug
from birkhoff.errors import CaptureExists, CaptureFileError, quoted
from birkhoff.json_limits import parse_json
from birkhoff.small_file import SIDECAR_BYTES, open_regular, read_bytes

Identity = tuple[str, str]  # tag and request id as given by the caller

_HEAD = 1 << 16


class PathAllocator:
    """Names claimed by one writer. A directory is released when its capture is sealed or discarded."""

    def __init__(self, disk: Disk, root: str, on_collision: str, stage: str):
        self._disk = disk
        self._root = root
        self._on_collision = on_collision
        self._stage = stage
        self._lock = threading.Lock()
        self._claimed: dict[str, Identity] = {}
        self._durable_tags: set[str] = set()  # directories whose entry in the root was synced by this run
        self._tags: dict[str, str] = {}  # directory -> tag, in this run
        self._directories: dict[str, str] = {}  # tag -> directory
        self._shard_ids: dict[str, set[int]] = {}  # tag directory -> hashes of the request ids in its shards

    def tag(self, tag: str) -> str:
        """The directory of a tag, relative to the root."""
        with self._lock:
            if tag not in self._directories:
                name = slug(tag)
                if self._tags.get(name, tag) != tag:
                    name = f"{name}-{short_hash(tag)}"
                self._tags[name], self._directories[tag] = tag, name
            name = self._directories[tag]
            ensure_directory(self._disk, os.path.join(self._root, name))
            return name

    def unsynced(self, tag_directory: str) -> set[str]:
        """Directories above a capture that must be synced for its name to be durable.

        This includes directories made by others: their creator may have died, or not have synced them yet.
        """
        return set() if tag_directory in self._durable_tags else {self._root}

    def settle(self, tag_directory: str) -> None:
        """Record that a capture in this tag, and thus the tag's own name, is durable."""
        self._durable_tags.add(tag_directory)

    def claim(self, tag: str, request_id: str) -> tuple[str, bool]:
        """Claim a directory for one request. Returns it, relative to the root, and whether it replaces a capture."""
        parent = self.tag(tag)
        identity = (tag, request_id)
        with self._lock:
            base = f"{parent}/{slug(request_id)}"
            if self._owner(base)[0] not in (None, identity):
                base += "-" + short_hash(f"{tag}/{request_id}")
            path = next(name for name in self._candidates(base) if self._free(name, identity))
            replaces = self._owner(path)[0] is not None
            self._claimed[path] = identity
        try:
            ensure_directory(self._disk, os.path.join(self._root, path))
        except BaseException:
            self.release(path)
            raise
        return path, replaces

    def release(self, path: str) -> None:
        with self._lock:
            self._claimed.pop(path, None)

    def claim_in_shards(self, tag_directory: str, request_id: str) -> str:
        """Claim the name of a request in the shards of a tag: its id, with a number if required."""
        with self._lock:
            if tag_directory not in self._shard_ids:
                self._shard_ids[tag_directory] = set(self._sealed_ids(tag_directory))
            taken = self._shard_ids[tag_directory]
            for name in _numbered(request_id):
                digest = _id_hash(name)
                if digest not in taken:
                    taken.add(digest)
                    return name
                if self._on_collision != "suffix":
                    break
        raise CaptureExists(
            f"request id {quoted(request_id)} is already in the shards of {tag_directory}, and shards cannot be "
            "overwritten. Use another request_id, or on_collision suffix."
        )

    def _candidates(self, base: str) -> Iterator[str]:
        yield base
        if self._on_collision == "suffix":
            yield from (f"{base}-{number}" for number in itertools.count(1))

    def _free(self, path: str, identity: Identity) -> bool:
        """Whether the capture may use this directory; raises if it is refused."""
        owner, on_disk = self._owner(path)
        if owner is None:
            return True
        if self._on_collision == "suffix":
            return False
        if self._on_collision == "overwrite" and on_disk and owner == identity:
            return True
        raise CaptureExists(
            f"request id {quoted(identity[1])} with tag {quoted(identity[0])} "
            f"{'already has a capture' if on_disk else 'is being captured right now'} in {path}. Use another "
            "request_id, or on_collision suffix or overwrite."
        )

    def _owner(self, path: str) -> tuple[Identity | None, bool]:
        """The owner of a directory, if any, and whether the capture is on disk rather than being written."""
        if path in self._claimed:
            return self._claimed[path], False
        full = os.path.join(self._root, path)
        try:
            names = sorted(os.listdir(full))
        except FileNotFoundError:
            return None, False
        for name in names:
            if name.endswith(SIDECAR) and not self._other_stage(name):
                tag, request = _identity(os.path.join(full, name))
                return (self._tags.get(path.split("/")[0], "") if tag is None else tag, request), True
        return None, any(name.endswith(JOURNAL) for name in names)

    def _other_stage(self, name: str) -> bool:
        """Whether a file belongs to another pipeline stage of the same run, which shares the directory."""
        return bool(self._stage) and name.startswith("packed-pp") and name != f"packed{self._stage}{SIDECAR}"

    def _sealed_ids(self, tag_directory: str) -> Iterator[int]:
        directory = os.path.join(self._root, tag_directory)
        for name in os.listdir(directory):
            if name.startswith(f"shard{self._stage}-") and name.endswith(SIDECAR):
                with contextlib.suppress(CaptureFileError):  # readers report damaged shards
                    yield from map(_id_hash, _shard_requests(os.path.join(directory, name)))


def _numbered(request_id: str) -> Iterator[str]:
    yield request_id
    yield from (f"{request_id}-{number}" for number in itertools.count(1))


def _id_hash(request_id: str) -> int:
    """Eight bytes instead of a name: a run may have millions."""
    return int(short_hash(request_id) + short_hash(request_id + "\0"), 16)


def _identity(sidecar: str) -> tuple[str | None, str]:
    """Tag and request id of a sidecar, read from its beginning if this package wrote it; it may be large."""
    with open(open_regular(sidecar), "rb") as file:
        head = file.read(_HEAD)
        identity = {name: _string(head, name) for name in ("tag", "request_id")}
        if identity["request_id"] is None:
            try:
                whole = parse_json(head + file.read(SIDECAR_BYTES), SIDECAR_BYTES)
                identity = {name: whole.get(name) for name in identity}
            except (ValueError, RecursionError, AttributeError):
                pass
    request = identity["request_id"]
    return identity["tag"], request if isinstance(request, str) else ""


def _string(head: bytes, name: str) -> str | None:
    start = head.find(f'"{name}": "'.encode())
    if start < 0:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(head[start + len(name) + 4 :].decode("ascii", "replace"))
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _shard_requests(sidecar: str) -> list[str]:
    """The request ids of a shard, without parsing its entries if the ids precede them."""
    try:
        text = read_bytes(sidecar, SIDECAR_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise CaptureFileError(f"{sidecar} cannot be read ({error.strerror}).") from None
    start = text.find('"requests": ')
    end = text.find('"entries": ')
    try:
        if 0 <= start < end:
            return list(json.JSONDecoder().raw_decode(text, start + len('"requests": '))[0])
        return [str(entry["request_id"]) for entry in json.loads(text)["entries"]]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        raise CaptureFileError(
            f"{sidecar} is not a shard's sidecar. Run the repair, or move it away."
        ) from None
