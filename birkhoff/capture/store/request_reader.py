"""Rows of one hook and layer of a whole run, request by request: for readers that need a text's tokens together.

A request's rows can lie in several records of one or several files; the index holds their places, 16 bytes per record
(about 130 while it is made). Requests come in the order of their first record, so that files are read once from start
to end. NumPy only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from birkhoff.capture.store.entry import CaptureEntry, concatenate
from birkhoff.capture.store.row_reader import OPEN_FILES, RowFiles, index_blocks, sidecars_of
from birkhoff.capture.store.sidecar import CaptureFile, PayloadRange
from birkhoff.errors import CaptureFileError, quoted

BLOCK_ROWS = 1 << 40  # a record is one block


class RequestReader:
    """The requests of a tag's directory that have rows of one hook and layer, by number.

    An open file holds the labels of its rows, about 100 bytes each. Reading in order needs one open file."""

    def __init__(
        self, directory: str | os.PathLike[str], hook: str, layer: int, open_files: int = OPEN_FILES
    ):
        self._files = RowFiles(sidecars_of(Path(directory)), True, open_files)
        try:
            keys = bytearray()

            def add_key(file: CaptureFile, record: PayloadRange) -> None:
                keys.extend(hashlib.blake2b(_name(file, record).encode(), digest_size=16).digest())

            _, blocks = index_blocks(self._files, hook, layer, BLOCK_ROWS, "float32", add_key)
            if not len(blocks):
                raise CaptureFileError(
                    f"{directory} holds no finished capture of {quoted(hook)}[{layer}]. Check hook and layer."
                )
        except BaseException:
            self._files.close()
            raise
        _, first, which = np.unique(np.frombuffer(keys, "V16"), return_index=True, return_inverse=True)
        first_record = first[which]
        order = np.argsort(first_record, kind="stable")
        self._records = blocks[order, :2].astype(np.int32)
        self._bounds = np.append(np.flatnonzero(np.diff(first_record[order], prepend=-1)), len(order))

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._bounds) - 1

    def numbers(self) -> dict[str, int]:
        """The numbers of the requests by their names."""
        return {name: number for number, (name, _) in enumerate(self.labels())}

    def read(self, number: int, verify: bool = True) -> CaptureEntry:
        """One request with its rows as float32, positions and token ids."""
        parts = []
        for file, record in self._parts(number):
            entry = file.read(record, verify)
            parts.append(replace(entry, array=entry.values(), dtype="float32", scale=None))
        return _labelled(parts)

    def labels(self) -> Iterator[tuple[str, CaptureEntry]]:
        """Every request with its name, positions and token ids, without its rows."""
        for number in range(len(self)):
            named = [(_name(file, record), record.unread) for file, record in self._parts(number)]
            yield named[0][0], _labelled([part for _, part in named])

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> RequestReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parts(self, number: int) -> Iterator[tuple[CaptureFile, PayloadRange]]:
        """Files and records of a request."""
        for sidecar, record in self._records[self._bounds[number] : self._bounds[number + 1]].tolist():
            file = self._files[sidecar]
            yield file, file.records[record]


def _name(file: CaptureFile, record: PayloadRange) -> str:
    return record.request_id or str(file.facts.get("request_id", ""))


def _labelled(parts: list[CaptureEntry]) -> CaptureEntry:
    """One entry of several; the tokens are needed, so their absence is an error."""
    if any(part.token_ids is None or part.positions is None for part in parts):
        first = parts[0]
        raise CaptureFileError(
            f"rows of {first.hook}[{first.layer}] were stored without token ids, which are needed here."
        )
    return concatenate(parts)
