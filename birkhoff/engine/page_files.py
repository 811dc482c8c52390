"""Cache pages on disk: pages that memory has no room for, and pages that survive a restart.

One file per page: a JSON header, the tensors, and a digest of everything before it. Files are written atomically; a
process that is killed leaves at most a partial file, which the next one deletes. On reading, the digest, the page key,
the model identity (weights and numerics) and every shape and dtype are checked. A file that fails a check is deleted
and its page is computed again.

Files are in a folder named after the identity of their model. All folders together stay below `limit_bytes`; least
recently used files are deleted first. When the disk fails, or a page is larger than all files may be, the engine
continues without it, and says so once; `failures` and `too_large` count these pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from birkhoff.atomic_file import remove_partials, write_atomic
from birkhoff.dtype_names import dtype_name
from birkhoff.small_file import read_bytes

MAGIC = b"birkhoff page 1\n"
DIGEST_BYTES = 16
SUFFIX = ".page"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Tensors = Mapping[str, torch.Tensor]


class PageFiles:
    """The pages of one model under `root`; `limit_bytes` bounds the pages of all models there."""

    def __init__(
        self, root: str | Path, identity: bytes, limit_bytes: int, report: Callable[[str], None] | None = None
    ):
        """`report` is called with a message when pages cannot be stored, once for each reason."""
        self.folder = Path(root) / identity.hex()
        self.identity = identity.hex()
        self.limit_bytes = limit_bytes
        self.written = self.refused = self.failures = self.too_large = 0
        self.protected: Collection[bytes] = ()  # keys that are deleted last
        # sizes of all models' pages, least recently used first
        self._files: OrderedDict[Path, int] = OrderedDict()
        self.held_bytes = 0
        self._report = report
        self._reported: set[str] = set()  # reasons
        with self._ignore_os_errors(report=True):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._scan(Path(root))

    def __contains__(self, key: bytes) -> bool:
        return self._path(key) in self._files

    def write(self, key: bytes, tensors: Tensors) -> None:
        """Store a page unless it is stored already."""
        path = self._path(key)
        if path in self._files:
            return
        data = encode(self.identity, key, tensors)
        if len(data) > self.limit_bytes:
            self.too_large += 1
            self._tell(
                "too large",
                f"a cache page takes {len(data)} bytes, and context_bytes allows {self.limit_bytes} in "
                f"{self.folder.parent}: it is not stored. Raise context_bytes.",
            )
            return
        with self._ignore_os_errors(report=True):
            self._make_room(len(data))
            write_atomic(path, data, sync=False)  # the digest detects what a crash leaves incomplete
            self._files[path] = len(data)
            self.held_bytes += len(data)
            self.written += 1

    def read(self, key: bytes, expected: Tensors) -> dict[str, torch.Tensor] | None:
        """The tensors of a page, or None. `expected` has tensors of the required shapes and dtypes."""
        path = self._path(key)
        if path not in self._files:
            return None
        try:
            data = read_bytes(path, self.limit_bytes)
        except OSError:
            self._delete(path)
            return None
        tensors = decode(data, self.identity, key)
        valid = tensors is not None and all(
            name in tensors and tensors[name].shape == like.shape and tensors[name].dtype == like.dtype
            for name, like in expected.items()
        )
        if not valid:
            self.refused += 1
            self._delete(path)
            return None
        self._files.move_to_end(path)
        with self._ignore_os_errors():
            os.utime(path)  # records the use for later processes
        return tensors

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _scan(self, root: Path) -> None:
        """Delete partial files of this model and list all pages by last use."""
        remove_partials(self.folder)
        pages = []
        for path in root.glob(f"*/*{SUFFIX}"):
            status = path.stat()
            pages.append((status.st_mtime_ns, path, status.st_size))
        for _, path, size in sorted(pages):
            self._files[path] = size
            self.held_bytes += size
        self._make_room(0)

    def _make_room(self, needed: int) -> None:
        if self.held_bytes + needed <= self.limit_bytes:
            return
        protected = {self._path(key) for key in self.protected}
        for path in sorted(self._files, key=lambda path: path in protected):  # stable: keeps the order of use
            if self.held_bytes + needed <= self.limit_bytes:
                return
            self._delete(path)

    def _delete(self, path: Path) -> None:
        self.held_bytes -= self._files.pop(path)
        with self._ignore_os_errors():
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _ignore_os_errors(self, report: bool = False) -> Iterator[None]:
        """Count failures of the disk; with `report`, also report the first one."""
        try:
            yield
        except OSError as error:
            self.failures += 1
            if report:
                self._tell(
                    "disk",
                    f"cache pages cannot be written to {self.folder.parent} ({error.strerror or error}); prompts whose "
                    "pages are not there are computed again. Free space there, lower context_bytes, or choose another "
                    "context_root.",
                )

    def _tell(self, reason: str, message: str) -> None:
        if self._report is not None and reason not in self._reported:
            self._reported.add(reason)
            self._report(message)


def encode(identity: str, key: bytes, tensors: Tensors) -> bytes:
    """The bytes of a page file."""
    entries = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in tensors.items()]
    header = json.dumps({"model": identity, "key": key.hex(), "tensors": entries}).encode()
    body = b"".join(
        t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors.values()
    )
    data = MAGIC + struct.pack("<Q", len(header)) + header + body
    return data + _digest(data)


def decode(data: bytes, identity: str, key: bytes) -> dict[str, torch.Tensor] | None:
    """The tensors of a page file, or None when it is damaged or belongs to another page or model."""
    start = len(MAGIC) + 8
    if len(data) < start + DIGEST_BYTES or data[: len(MAGIC)] != MAGIC:
        return None
    if _digest(data[:-DIGEST_BYTES]) != data[-DIGEST_BYTES:]:
        return None
    (length,) = struct.unpack("<Q", data[len(MAGIC) : start])
    tensors = {}
    try:
        header = json.loads(data[start : start + length])
        if header["model"] != identity or header["key"] != key.hex():
            return None
        body = memoryview(bytearray(data[start + length : -DIGEST_BYTES]))
        offset = 0
        for name, dtype, shape in header["tensors"]:
            size = torch.Size(shape).numel() * _DTYPES[dtype].itemsize
            part = body[offset : offset + size]
            offset += size
            if size:
                tensors[name] = torch.frombuffer(part, dtype=_DTYPES[dtype]).view(shape)
            else:
                tensors[name] = torch.empty(shape, dtype=_DTYPES[dtype])
    except (KeyError, TypeError, ValueError, RuntimeError):  # a valid digest over a malformed header
        return None
    return tensors


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
