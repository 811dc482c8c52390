"""Prompts that were given a name, so that they stay: the keys of their pages, the last used last.

A name belongs to the prompt it was used with last. Names are kept in one small file beside the pages, replaced whole;
a file that cannot be read is as good as none, since pages are found by their keys and names only say which to keep.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from birkhoff.errors import OptionError, quoted

MOST_NAMES = 64
LONGEST_NAME = 200


def check_name(name: object) -> str | None:
    """A context's name as given by a caller."""
    if name is None:
        return None
    if not isinstance(name, str) or not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise OptionError(
            f"context is {quoted(name)}, expected a name of 1 to {LONGEST_NAME} printable characters, or None."
        )
    return name


class Contexts:
    def __init__(self, file: Path | None = None):
        self._file = file
        self._keys: OrderedDict[str, list[bytes]] = OrderedDict()
        if file is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                read = json.loads(file.read_text(encoding="utf-8"))
                self._keys.update(
                    {str(name): [bytes.fromhex(key) for key in keys] for name, keys in read.items()}
                )

    @property
    def names(self) -> list[str]:
        return list(self._keys)

    @property
    def precious(self) -> set[bytes]:
        """Keys of every page that a name holds."""
        return {key for keys in self._keys.values() for key in keys}

    def bind(self, name: str, keys: Sequence[bytes]) -> None:
        """Let a name stand for these pages; the name unused longest goes when there are too many."""
        changed = self._keys.get(name) != list(keys)
        self._keys[name] = list(keys)
        self._keys.move_to_end(name)
        while len(self._keys) > MOST_NAMES:
            self._keys.popitem(last=False)
        if changed:
            self._save()

    def forget(self, name: str) -> None:
        if self._keys.pop(name, None) is not None:
            self._save()

    def _save(self) -> None:
        if self._file is None:
            return
        said = json.dumps({name: [key.hex() for key in keys] for name, keys in self._keys.items()})
        beside = self._file.with_name(f"{self._file.name}-{os.getpid()}.writing")
        with contextlib.suppress(OSError):  # the disk is a convenience
            beside.write_text(said, encoding="utf-8")
            beside.replace(self._file)
