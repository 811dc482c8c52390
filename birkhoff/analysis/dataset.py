"""Texts of a data file, one at a time, each with its number and the place it stands.

    .jsonl   one object per line: "text" (another field by choice), "prompt" + "text" (read as one), or "messages"
    .txt     one text per line, or the whole file as one

Numbers count the texts of the file from 0, good and bad, so that a text keeps its number whatever is skipped; blank
lines are no texts. What is wrong with a text is not raised here but comes with it, as `problem`: whoever reads decides
whether one bad line ends the work. `describe` reads the file once for what a resumed run has to find unchanged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.errors import DataError, quoted

KINDS = (".jsonl", ".txt")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class DatasetText:
    """One text: a `prompt`, or `messages` for the chat encoding, or a `problem` with neither."""

    number: int
    where: str
    prompt: str | None = None
    messages: Any = None
    problem: str | None = None


@dataclass(frozen=True)
class DataFile:
    """A file of texts and how it is read."""

    path: Path
    text_field: str = "text"
    whole_file: bool = False

    def __post_init__(self) -> None:
        if self.path.suffix not in KINDS:
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
        """What decides the texts: the file's bytes and how it is read. `texts` is how many there are."""
        digest = hashlib.sha256()
        texts = 0
        size = 0
        with self.path.open("rb") as stream:
            for line in stream:  # a line is a text, so holding one costs nothing more
                digest.update(line)
                texts += not line.isspace()
                size += len(line)
        read = (
            {"text_field": self.text_field}
            if self.path.suffix == ".jsonl"
            else {"whole_file": self.whole_file}
        )
        return {"sha256": digest.hexdigest(), "bytes": size, "texts": 1 if self.whole_file else texts, **read}

    def __iter__(self) -> Iterator[DatasetText]:
        if self.whole_file:
            yield _plain(0, str(self.path), self.path.read_bytes())
            return
        number = 0
        with self.path.open("rb") as stream:
            for line_number, line in enumerate(stream, start=1):
                if not line.isspace():
                    where = f"{self.path} line {line_number}"
                    plain = self.path.suffix == ".txt"
                    yield _plain(number, where, line) if plain else self._object(number, where, line)
                    number += 1

    def _object(self, number: int, where: str, line: bytes) -> DatasetText:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return DatasetText(number, where, problem=f"is not JSON ({error})")
        return text_of(record, number, where, self.text_field)


def text_of(record: Any, number: int, where: str, text_field: str = "text") -> DatasetText:
    """The text of one record."""
    if not isinstance(record, Mapping):
        return DatasetText(number, where, problem=f"is {quoted(record)}, expected an object")
    if text_field in record:
        parts = [record["prompt"]] if record.get("prompt") is not None and text_field != "prompt" else []
        parts.append(record[text_field])
        for name, part in zip(("prompt", text_field)[-len(parts) :], parts):
            if not isinstance(part, str):
                return DatasetText(number, where, problem=f"has {quoted(part)} as {name!r}, expected a text")
        joined = "".join(parts)
        return (
            DatasetText(number, where, joined)
            if joined
            else DatasetText(number, where, problem="has an empty text")
        )
    if "messages" in record:
        return DatasetText(number, where, messages=record["messages"])
    has = quoted(", ".join(map(str, record)), 120)
    return DatasetText(
        number, where, problem=f"has neither {text_field!r} nor 'messages', but {has}; name it: --text-field"
    )


def _plain(number: int, where: str, data: bytes) -> DatasetText:
    try:
        text = data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return DatasetText(number, where, problem=f"is not UTF-8 (byte {error.start})")
    return DatasetText(number, where, text) if text else DatasetText(number, where, problem="is empty")
