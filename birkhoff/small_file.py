"""The one way to read small files that others wrote: configs, indices, manifests, headers, sidecars.

Only regular files are opened, and without blocking: a FIFO would block its reader for ever, a device has no end. The
size is limited before anything is read, and JSON is limited in depth and in the memory of its values
(`json_limits.py`), so that refusing a file takes at most ten times the limit of its kind. Errors are `OSError` and
`ValueError` with a short reason; callers turn them into their own typed error.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, Final

from birkhoff.json_limits import MAX_DEPTH, PairsHook, parse_json

MIB: Final = 1 << 20
# Limits by kind, in bytes.
CONFIG_BYTES = 1 * MIB  # config.json, cfg.json of an SAE, settings of a run
MANIFEST_BYTES = 16 * MIB  # manifests and labels of SAEs, expert counts, modules of vectors
TOKENIZER_BYTES = 64 * MIB  # tokenizer.json
INDEX_BYTES = 64 * MIB  # model.safetensors.index.json
VECTOR_BYTES = 256 * MIB  # files of steering vectors
SIDECAR_BYTES = 512 * MIB  # sidecars of captures
HEADER_BYTES = 100_000_000  # headers of safetensors files, the limit of that library

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | Path) -> int:
    """A descriptor of a regular file, opened for reading. Anything else is an OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    kind = next((name for test, name in _KINDS if test(mode)), "not a file")
    raise OSError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))


def check_regular(path: str | Path, max_bytes: int | None = None) -> int:
    """The size of a regular file that a library is about to open; OSError for anything else or a larger one."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if max_bytes is not None and size > max_bytes:
        raise _too_large(path, size, max_bytes)
    return size


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`."""
    with open(open_regular(path), "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise _too_large(path, size, max_bytes)
        parts, left = [], max_bytes + 1  # one more, to notice a file that grows
        while left > 0 and (part := file.read(min(left, size + 1))):
            parts.append(part)
            left -= len(part)
    raw = parts[0] if len(parts) == 1 else b"".join(parts)
    if len(raw) > max_bytes:
        raise _too_large(path, len(raw), max_bytes)
    return raw


def read_text(path: str | Path, max_bytes: int) -> str:
    """The text of a regular file in UTF-8 of at most `max_bytes`."""
    return read_bytes(path, max_bytes).decode("utf-8")


def read_json(
    path: str | Path,
    max_bytes: int = CONFIG_BYTES,
    max_depth: int = MAX_DEPTH,
    object_pairs_hook: PairsHook | None = None,
) -> Any:
    """The JSON value in a regular file of at most `max_bytes`."""
    return parse_json(read_bytes(path, max_bytes), max_bytes, max_depth, object_pairs_hook)


def _too_large(path: str | Path, size: int, max_bytes: int) -> OSError:
    return OSError(errno.EFBIG, f"it has {size} bytes, at most {max_bytes} are read", str(path))
