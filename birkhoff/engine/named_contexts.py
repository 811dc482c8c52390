"""Named prompts: maps a context name to the keys of its pages, least recently used first.

A name belongs to the prompt it was last used with. Names are stored in one small file next to the page files, replaced
atomically. An unreadable file is treated as empty: pages are found by their keys, and names only say which to keep.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from birkhoff.atomic_file import write_atomic
from birkhoff.small_file import MANIFEST_BYTES, read_json

MAX_NAMES = 64


class NamedContexts:
    def __init__(self, file: Path | None = None):
        self._file = file
        self._keys: OrderedDict[str, list[bytes]] = OrderedDict()
        if file is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                stored = read_json(file, MANIFEST_BYTES)
                self._keys.update(
                    {str(name): [bytes.fromhex(key) for key in keys] for name, keys in stored.items()}
                )

    @property
    def names(self) -> list[str]:
        return list(self._keys)

    @property
    def page_keys(self) -> set[bytes]:
        """Keys of all pages that have a name."""
        return {key for keys in self._keys.values() for key in keys}

    def bind(self, name: str, keys: Sequence[bytes]) -> None:
        """Bind a name to the keys of a prompt's pages; drops the least recently used of too many names."""
        changed = self._keys.get(name) != list(keys)
        self._keys[name] = list(keys)
        self._keys.move_to_end(name)
        while len(self._keys) > MAX_NAMES:
            self._keys.popitem(last=False)
        if changed:
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        text = json.dumps({name: [key.hex() for key in keys] for name, keys in self._keys.items()})
        with contextlib.suppress(OSError):  # a full or read-only disk loses names only
            write_atomic(self._file, text, sync=False)
