"""Pages on disk: what memory has no room for, and what is to survive a restart.

One file per page: a header in JSON, the tensors, and a digest of everything before it. A file appears under its name
whole or not at all (it is written beside and moved), so a process that is killed leaves at most a stray beginning,
which the next one sweeps away. What is read is checked before it is used: the digest, whose page it is, by which model
and numerics, and every shape and dtype. A file that fails any of it is deleted and its page computed again.

Files lie in a folder named after the model they belong to; all folders together stay below `limit_bytes`, and those
used longest ago go first. The disk is a convenience: when it refuses, the engine goes on without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from birkhoff.dtype_names import dtype_name

MAGIC = b"birkhoff page 1\n"
DIGEST_BYTES = 16
SUFFIX, STRAY = ".page", ".writing"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Tensors = Mapping[str, torch.Tensor]


class PageFiles:
    """The pages of one model under `root`, at most `limit_bytes` with everybody else's there."""

    def __init__(self, root: str | Path, identity: bytes, limit_bytes: int):
        self.folder = Path(root) / identity.hex()
        self.identity = identity.hex()
        self.limit_bytes = limit_bytes
        self.written = self.refused = self.failures = 0
        self.precious: Collection[bytes] = ()  # deleted only when nothing else is left
        self._files: OrderedDict[Path, int] = (
            OrderedDict()
        )  # all models' pages and their sizes, longest unused first
        self.held_bytes = 0
        with self._forgiving():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._look_round(Path(root))

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._files

    def write(self, key: bytes, tensors: Tensors) -> None:
        """Keep a page, unless it is there already."""
        path = self._path(key)
        if path in self._files:
            return
        data = encode(self.identity, key, tensors)
        if len(data) > self.limit_bytes:
            return
        with self._forgiving():
            self._make_room(len(data))
            beside = path.with_name(f"{path.stem}-{os.getpid()}{STRAY}")
            try:
                beside.write_bytes(data)
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
            self._files[path] = len(data)
            self.held_bytes += len(data)
            self.written += 1

    def read(self, key: bytes, expected: Tensors) -> dict[str, torch.Tensor] | None:
        """A page's tensors, or None. `expected` has the tensors that must be there, for their shapes and dtypes."""
        path = self._path(key)
        if path not in self._files:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            self._drop(path)
            return None
        found = decode(data, self.identity, key)
        whole = found is not None and all(
            name in found and found[name].shape == like.shape and found[name].dtype == like.dtype
            for name, like in expected.items()
        )
        if not whole:
            self.refused += 1
            self._drop(path)
            return None
        self._files.move_to_end(path)
        with self._forgiving():
            os.utime(path)  # the next process knows what was used last
        return found

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _look_round(self, root: Path) -> None:
        for stray in self.folder.glob(f"*{STRAY}"):
            stray.unlink(missing_ok=True)
        seen = []
        for path in root.glob(f"*/*{SUFFIX}"):
            status = path.stat()
            seen.append((status.st_mtime_ns, path, status.st_size))
        for _, path, size in sorted(seen):
            self._files[path] = size
            self.held_bytes += size
        self._make_room(0)

    def _make_room(self, wanted: int) -> None:
        if self.held_bytes + wanted <= self.limit_bytes:
            return
        kept = {self._path(key) for key in self.precious}
        for path in [*(p for p in self._files if p not in kept), *(p for p in self._files if p in kept)]:
            if self.held_bytes + wanted <= self.limit_bytes:
                return
            self._drop(path)

    def _drop(self, path: Path) -> None:
        self.held_bytes -= self._files.pop(path)
        with self._forgiving():
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _forgiving(self):
        try:
            yield
        except OSError:
            self.failures += 1


def encode(identity: str, key: bytes, tensors: Tensors) -> bytes:
    listed = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]
    header = json.dumps({"model": identity, "key": key.hex(), "tensors": listed}).encode()
    body = b"".join(
        t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values()
    )
    data = MAGIC + struct.pack("<Q", len(header)) + header + body
    return data + _digest(data)


def decode(data: bytes, identity: str, key: bytes) -> dict[str, torch.Tensor] | None:
    """The tensors of a file, or None when it is not wholly what it should be."""
    start = len(MAGIC) + 8
    if len(data) < start + DIGEST_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    if _digest(data[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        return None
    (length,) = struct.unpack("<Q", data[len(MAGIC) : start])
    try:
        header = json.loads(data[start : start + length])
        if header["model"] != identity or header["key"] != key.hex():
            return None
        body = memoryview(bytearray(data[start + length : -DIGEST_BYTES]))
        at = 0
        found = {}
        for name, dtype, shape in header["tensors"]:
            size = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
            part = body[at : at + size]
            at += size
            if size:
                found[name] = torch.frombuffer(part, dtype=_DTYPES[dtype]).view(shape)
            else:
                found[name] = torch.empty(shape, dtype=_DTYPES[dtype])
    except (
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ):  # a right digest over something that is no page of ours
        return None
    return found


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
