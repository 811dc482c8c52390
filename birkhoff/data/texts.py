"""Reads texts one at a time from the places where data sets are, each with its index and location.

    x.jsonl                        one object per line: "text" (or another field), "prompt" + "text" (concatenated), or
                                   "messages"
    x.txt                          one text per line, or the whole file as one
    x.jsonl.zst, x.txt.gz          the same, compressed
    x.parquet                      one row per text, with the columns of the same names
    folder                         its files of these kinds, in order of their names
    folder of `save_to_disk`       a data set of Hugging Face `datasets`; ?split=NAME if it has several
    datasets:NAME?split=train      what `datasets.load_dataset` finds under that name or path; its arguments follow the
                                   question mark: split, name, revision, data_dir, data_files, streaming=true

`open_texts` opens any of them, also a `datasets` object itself. Indices count all texts from 0, also invalid ones, so
that they do not depend on what is skipped; blank lines are not counted. An invalid text is not raised but yielded with
its `problem`, so that the caller decides whether to continue. Nothing is held in memory but a batch of records.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from birkhoff.data.hub_datasets import HubDataset, is_saved, load, num_rows, records_of, saved
from birkhoff.data.text_files import (
    ENDINGS,
    kind_of,
    open_lines,
    parquet_columns,
    parquet_records,
    parquet_rows,
)
from birkhoff.errors import DataError, OptionError, quoted

SCHEME = "datasets:"
SAMPLED = 64  # texts of a stream that are read to tell it from another one


@dataclass(frozen=True)
class DatasetText:
    """One text: a `prompt`, or `messages` for the chat format, or a `problem`.

    `index` is its index in the data set, `where` its location for error messages.
    """

    index: int
    where: str
    prompt: str | None = None
    messages: Any = None
    problem: str | None = None


class TextSource(Protocol):
    """Texts that can be read again and again, in the same order."""

    def __iter__(self) -> Iterator[DatasetText]: ...

    def describe(self) -> dict[str, Any]:
        """What identifies the texts; a resumed harvest compares it. `texts` is their number, None if unknown."""
        ...


def open_texts(source: Any, text_field: str = "text", whole_file: bool = False) -> TextSource:
    """Open a data set: a path, `datasets:NAME?split=train`, or an object of Hugging Face `datasets`.

    `text_field` is the field or column that holds the text; `whole_file` reads a .txt file as a single text.
    """
    if not isinstance(source, (str, os.PathLike)):
        if not hasattr(source, "column_names"):
            raise OptionError(
                f"texts are {quoted(source)}, expected a path, {SCHEME}NAME or a data set of `datasets`."
            )
        return _hub_texts(HubDataset(source, quoted(source)), text_field, whole_file)
    name = os.fspath(source)
    if name.startswith(SCHEME):
        return _hub_texts(load(name.removeprefix(SCHEME)), text_field, whole_file)
    path = Path(name)
    base, _, query = name.partition("?")
    if not path.exists() and query and is_saved(Path(base)):
        return _hub_texts(saved(Path(base), query), text_field, whole_file)
    if path.is_dir():
        if is_saved(path):
            return _hub_texts(saved(path, ""), text_field, whole_file)
        return TextFolder(path, text_field, whole_file)
    return TextFile(path, text_field, whole_file)


def read_texts(source: Any, text_field: str = "text") -> list[Any]:
    """Return every text, as a prompt or a list of messages. An invalid text is an `OptionError`."""
    texts = []
    for text in open_texts(source, text_field):
        if text.problem is not None:
            raise OptionError(f"{text.where} {text.problem}. Mend it.")
        texts.append(text.prompt if text.messages is None else text.messages)
    return texts


@dataclass(frozen=True)
class TextFile:
    """A file of texts. `whole_file` reads a .txt file as one text."""

    path: Path
    text_field: str = "text"
    whole_file: bool = False

    def __post_init__(self) -> None:
        kind = kind_of(self.path)
        if kind is None:
            raise DataError(
                f"{self.path} has the ending {self.path.suffix or 'of no kind'!r}, expected {', '.join(ENDINGS)}. "
                f"Convert it to one of these, or read it with `datasets`: {SCHEME}NAME"
            )
        if not self.path.is_file():
            what = "not a file" if self.path.exists() else "missing"
            raise DataError(f"{self.path} is {what}, expected a data file or a folder. Check the path.")
        if self.whole_file and kind != "txt":
            how = "row by row" if kind == "parquet" else "line by line"
            raise DataError(
                f"{self.path} is read {how}; the whole file as one text is for .txt. Leave it out."
            )

    def describe(self) -> dict[str, Any]:
        """Return digest and size of the content, number of texts and read options."""
        if kind_of(self.path) == "parquet":
            texts = parquet_rows(self.path)
            with self.path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256")
            size = self.path.stat().st_size
        else:
            digest, texts, size = hashlib.sha256(), 0, 0
            with open_lines(self.path) as lines:
                for line in lines:
                    digest.update(line)
                    texts += not line.isspace()
                    size += len(line)
        options: dict[str, Any] = (
            {"whole_file": self.whole_file}
            if kind_of(self.path) == "txt"
            else {"text_field": self.text_field}
        )
        return {
            "sha256": digest.hexdigest(),
            "bytes": size,
            "texts": 1 if self.whole_file else texts,
            **options,
        }

    def __iter__(self) -> Iterator[DatasetText]:
        kind = kind_of(self.path)
        if kind == "parquet":
            columns = _text_columns(parquet_columns(self.path), str(self.path), self.text_field)
            for index, record in enumerate(parquet_records(self.path, columns)):
                yield _of_columns(record, index, f"{self.path} row {index + 1}", self.text_field)
            return
        with open_lines(self.path) as lines:
            if self.whole_file:
                yield _plain(0, str(self.path), b"".join(lines))
                return
            index = 0
            for line_number, line in enumerate(lines, start=1):
                if not line.isspace():
                    where = f"{self.path} line {line_number}"
                    yield _plain(index, where, line) if kind == "txt" else self._object(index, where, line)
                    index += 1

    def _object(self, index: int, where: str, line: bytes) -> DatasetText:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return DatasetText(index, where, problem=f"is not JSON ({error})")
        return text_of(record, index, where, self.text_field)


@dataclass(frozen=True)
class TextFolder:
    """The data files of a folder, one after the other in order of their names; files of other kinds are ignored."""

    path: Path
    text_field: str = "text"
    whole_file: bool = False

    def __post_init__(self) -> None:
        if not self._files():
            raise DataError(
                f"{self.path} is a folder without data files, expected files with the endings {', '.join(ENDINGS)}. "
                f"Check the path, or read it with `datasets`: {SCHEME}{self.path}"
            )

    def describe(self) -> dict[str, Any]:
        parts = {str(file.path.relative_to(self.path)): file.describe() for file in self._files()}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return {
            "sha256": digest,
            "files": len(parts),
            "texts": sum(part["texts"] for part in parts.values()),
            "text_field": self.text_field,
        }

    def __iter__(self) -> Iterator[DatasetText]:
        index = 0
        for file in self._files():
            for text in file:
                yield replace(text, index=index)
                index += 1

    def _files(self) -> list[TextFile]:
        paths = sorted(path for path in self.path.rglob("*") if kind_of(path) is not None and path.is_file())
        return [TextFile(path, self.text_field, self.whole_file) for path in paths]


@dataclass(frozen=True)
class HubTexts:
    """The rows of a data set of Hugging Face `datasets`, streamed or not, as texts."""

    data: HubDataset
    text_field: str = "text"

    def describe(self) -> dict[str, Any]:
        """Return a digest of the texts; of a streamed data set, of its name and first texts, without their number."""
        count = num_rows(self.data)
        digest = hashlib.sha256()
        for text in self:
            if count is None and text.index == SAMPLED:
                break
            digest.update(json.dumps([text.prompt, text.messages, text.problem]).encode())
        named = {"streamed": self.data.name} if count is None else {}
        return {"sha256": digest.hexdigest(), "texts": count, "text_field": self.text_field, **named}

    def __iter__(self) -> Iterator[DatasetText]:
        columns = self.data.dataset.column_names
        if columns is not None:
            columns = _text_columns(columns, self.data.name, self.text_field)
        for index, record in enumerate(records_of(self.data, columns)):
            yield _of_columns(record, index, f"{self.data.name} row {index + 1}", self.text_field)


def text_of(record: Any, index: int, where: str, text_field: str = "text") -> DatasetText:
    """Convert one record (JSON object or row) to a text; an invalid one gets a `problem`."""
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


def _hub_texts(data: HubDataset, text_field: str, whole_file: bool) -> HubTexts:
    if whole_file:
        raise DataError(
            f"{data.name} is read row by row; the whole file as one text is for .txt. Leave it out."
        )
    return HubTexts(data, text_field)


def _text_columns(names: list[str], where: str, text_field: str) -> list[str]:
    """The columns that can hold a text; a table without any is a `DataError`."""
    if text_field not in names and "messages" not in names:
        present = quoted(", ".join(map(str, names)), 120)
        raise DataError(
            f"{where} has neither a column {text_field!r} nor 'messages', but {present}. Name the one that holds the "
            "texts: --text-field"
        )
    return [name for name in dict.fromkeys((text_field, "prompt", "messages")) if name in names]


def _of_columns(record: Mapping[str, Any], index: int, where: str, text_field: str) -> DatasetText:
    """A row of a table as a text; an empty cell means that the row does not have the field."""
    fields = {name: value for name, value in record.items() if value is not None}
    return text_of(fields, index, where, text_field)


def _plain(index: int, where: str, data: bytes) -> DatasetText:
    try:
        text = data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return DatasetText(index, where, problem=f"is not UTF-8 (byte {error.start})")
    return DatasetText(index, where, text) if text else DatasetText(index, where, problem="is empty")
