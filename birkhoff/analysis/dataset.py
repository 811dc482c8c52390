"""Reads the texts of a data file one at a time, each with its index and location.

    .jsonl   one object per line: "text" (or another field), "prompt" + "text" (concatenated), or "messages"
    .txt     one text per line, or the whole file as one

Indices count all texts of the file from 0, also invalid ones, so that they do not depend on what is skipped; blank
lines are not counted. An invalid text is not raised but yielded with its `problem`, so that the caller decides
whether to continue.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.errors import DataError, quoted

EXTENSIONS = (".jsonl", ".txt")


@dataclass(frozen=True)
class DatasetText:
    """One text: a `prompt`, or `messages` for the chat format, or a `problem`.

    `index` is its index in the file, `where` its location for error messages.
    """

    index: int
    where: str
    prompt: str | None = None
    messages: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class DataFile:
    """A .jsonl or .txt file of texts. `whole_file` reads a .txt file as one text."""

    path: Path
    text_field: str = "text"
    whole_file: bool = False

    def __post_init__(self) -> None:
        if self.path.suffix not in EXTENSIONS:
            raise DataError(
                f"{self.path} has the ending {self.path.suffix or 'of no kind'!r}, expected .jsonl, .txt or .parquet. "
                "Convert it to one of these."
            )
        if not self.path.is_file():
            what = "not a file" if self.path.exists() else "missing"
            raise DataError(
                f"{self.path} is {what}, expected a .jsonl, .txt or .parquet file. Check the path."
            )
        if self.whole_file and self.path.suffix != ".txt":
            raise DataError(
                f"{self.path} is read line by line; the whole file as one text is for .txt. Leave it out."
            )

    def describe(self) -> dict[str, Any]:
        """Return digest, size, number of texts and read options; a resumed harvest compares them."""
        digest = hashlib.sha256()
        texts = 0
        size = 0
        with self.path.open("rb") as stream:
            for line in stream:
                digest.update(line)
                texts += not line.isspace()
                size += len(line)
        options = (
            {"text_field": self.text_field}
            if self.path.suffix == ".jsonl"
            else {"whole_file": self.whole_file}
        )
        return {
            "sha256": digest.hexdigest(),
            "bytes": size,
            "texts": 1 if self.whole_file else texts,
            **options,
        }

    def __iter__(self) -> Iterator[DatasetText]:
        if self.whole_file:
            yield _plain(0, str(self.path), self.path.read_bytes())
            return
        index = 0
        with self.path.open("rb") as stream:
            for line_number, line in enumerate(stream, start=1):
                if not line.isspace():
                    where = f"{self.path} line {line_number}"
                    plain = self.path.suffix == ".txt"
                    yield _plain(index, where, line) if plain else self._object(index, where, line)
                    index += 1

    def _object(self, index: int, where: str, line: bytes) -> DatasetText:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return DatasetText(index, where, problem=f"is not JSON ({error})")
        return text_of(record, index, where, self.text_field)


def text_of(record: Any, index: int, where: str, text_field: str = "text") -> DatasetText:
    """Convert one record (JSON object or Parquet row) to a text; an invalid one gets a `problem`."""
    if not isinstance(record, Mapping):
        return DatasetText(index, where, problem=f"is {quoted(record)}, expected an object")
    if text_field in record:
        parts = [record["prompt"]] if record.get("prompt") is not None and text_field != "prompt" else []
        parts.append(record[text_field])
        for name, part in zip(("prompt", text_field)[-len(parts) :], parts):
            if not isinstance(part, str):
                return DatasetText(index, where, problem=f"has {quoted(part)} as {name!r}, expected a text")
        joined = "".join(parts)
        return (
            DatasetText(index, where, joined)
            if joined
            else DatasetText(index, where, problem="has an empty text")
        )
    if "messages" in record:
        return DatasetText(index, where, messages=record["messages"])
    present = quoted(", ".join(map(str, record)), 120)
    return DatasetText(
        index,
        where,
        problem=f"has neither {text_field!r} nor 'messages', but {present}; name it: --text-field",
    )


def _plain(index: int, where: str, data: bytes) -> DatasetText:
    try:
        text = data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return DatasetText(index, where, problem=f"is not UTF-8 (byte {error.start})")
    return DatasetText(index, where, text) if text else DatasetText(index, where, problem="is empty")
