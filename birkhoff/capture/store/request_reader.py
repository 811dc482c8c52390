"""Rows of one hook and layer of a whole run, request by request: for readers that need a text's tokens together.

A request's rows can lie in several records of one or several files; the index holds their places, about 100 bytes per
request. Requests come in the order of their first record, so that files are read once from start to end. NumPy only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from birkhoff.capture.store.entry import CaptureEntry, concatenate
from birkhoff.capture.store.row_reader import RowFiles, index_blocks, sidecars_of
from birkhoff.errors import CaptureFileError, quoted

BLOCK_ROWS = 1 << 40  # a record is one block


class RequestReader:
    """The requests of a tag's directory that have rows of one hook and layer."""

    def __init__(self, directory: str | os.PathLike[str], hook: str, layer: int):
        self._directory, self._site = Path(directory), (hook, layer)
        self._files = RowFiles(sidecars_of(self._directory), True)
        try:
            _, blocks = index_blocks(self._files, hook, layer, BLOCK_ROWS, "float32")
            self._requests: dict[str, list[tuple[int, int]]] = {}
            for sidecar, record, *_ in blocks.tolist():
                file = self._files[sidecar]
                name = file.records[record].request_id or str(file.facts.get("request_id", ""))
                self._requests.setdefault(name, []).append((sidecar, record))
        except BaseException:
            self._files.close()
            raise
        if not self._requests:
            self._files.close()
            raise CaptureFileError(
                f"{directory} holds no finished capture of {quoted(hook)}[{layer}]. Check hook and layer."
            )

    def __len__(self) -> int:
        """Number of requests."""
        return len(self._requests)

    def names(self) -> list[str]:
        """Names of the requests, in the order of their first record."""
        return list(self._requests)

    def read(self, name: str, verify: bool = True) -> CaptureEntry:
        """One request with its rows as float32, positions and token ids."""
        parts = []
        for sidecar, record in self._requests[name]:
            file = self._files[sidecar]
            entry = file.read(file.records[record], verify)
            parts.append(replace(entry, array=entry.values(), dtype="float32", scale=None))
        return _labelled(parts)

    def labels(self) -> Iterator[tuple[str, CaptureEntry]]:
        """Every request with positions and token ids, without its rows."""
        for name, records in self._requests.items():
            parts = [self._files[sidecar].records[record].unread for sidecar, record in records]
            yield name, _labelled(parts)

    def rows(self, verify: bool = True) -> Iterator[tuple[str, CaptureEntry]]:
        """Every request with its rows as float32, positions and token ids."""
        for name in self._requests:
            yield name, self.read(name, verify)

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> RequestReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _labelled(parts: list[CaptureEntry]) -> CaptureEntry:
    """One entry of several; the tokens are needed, so their absence is an error."""
    if any(part.token_ids is None or part.positions is None for part in parts):
        first = parts[0]
        raise CaptureFileError(
            f"rows of {first.hook}[{first.layer}] were stored without token ids, which are needed here."
        )
    return concatenate(parts)
