"""Opens data files by extension: .jsonl and .txt through `analysis/dataset.py`, .parquet through pyarrow.

A Parquet file is read in batches of rows and only the columns that can hold a text, so that memory use depends
neither on its width nor on its length. Text indices, locations and problems follow `analysis/dataset.py`. An
unreadable file is a `DataError` that names it, also when a later part of the file is damaged. This is the only module
that imports pyarrow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.analysis.dataset import DataFile, DatasetText, text_of
from birkhoff.errors import DataError, OptionError, quoted

BATCH_ROWS = 1024


def open_data(path: Path, text_field: str = "text", whole_file: bool = False) -> DataFile | ParquetFile:
    """Open a data file. `whole_file` reads a .txt file as a single text."""
    if path.suffix != ".parquet":
        return DataFile(path, text_field, whole_file)
    if whole_file:
        raise DataError(f"{path} is read row by row; the whole file as one text is for .txt. Leave it out.")
    return ParquetFile(path, text_field)


def read_texts(path: Path) -> list[Any]:
    """Return every text of a file, as a prompt or a list of messages. An invalid text is an `OptionError`."""
    texts = []
    for text in open_data(path):
        if text.problem is not None:
            raise OptionError(f"{text.where} {text.problem}. Mend it.")
        texts.append(text.prompt if text.messages is None else text.messages)
    return texts


@dataclass(frozen=True)
class ParquetFile:
    """The rows of a Parquet file as texts, read in batches."""

    path: Path
    text_field: str

    def __post_init__(self) -> None:
        if not self.path.is_file():
            what = "not a file" if self.path.exists() else "missing"
            raise DataError(
                f"{self.path} is {what}, expected a .jsonl, .txt or .parquet file. Check the path."
            )

    def describe(self) -> dict[str, Any]:
        """Return the file's digest, size, number of texts and text column; a resumed harvest compares them."""
        texts = self._open().metadata.num_rows
        with self.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {
            "sha256": digest,
            "bytes": self.path.stat().st_size,
            "texts": texts,
            "text_field": self.text_field,
        }

    def __iter__(self) -> Iterator[DatasetText]:
        file = self._open()
        names = file.schema_arrow.names
        if self.text_field not in names and "messages" not in names:
            present = quoted(", ".join(map(str, names)), 120)
            raise DataError(
                f"{self.path} has neither a column {self.text_field!r} nor 'messages', but {present}. Name the one "
                "that holds the texts: --text-field"
            )
        columns = [name for name in dict.fromkeys((self.text_field, "prompt", "messages")) if name in names]
        index = 0
        for records in self._batches(file, columns):
            for record in records:
                fields = {name: value for name, value in record.items() if value is not None}
                yield text_of(fields, index, f"{self.path} row {index + 1}", self.text_field)
                index += 1

    def _batches(self, file: Any, columns: list[str]) -> Iterator[list[dict[str, Any]]]:
        from pyarrow import ArrowException

        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
        while True:
            try:
                batch = next(batches, None)
                records = None if batch is None else batch.to_pylist()
            except (OSError, UnicodeDecodeError, ArrowException) as error:
                raise self._unreadable(error) from None
            if records is None:
                return
            yield records

    def _open(self) -> Any:
        try:
            from pyarrow import ArrowException, parquet
        except ImportError:
            raise DataError(
                f"{self.path} is a Parquet file, and reading it needs pyarrow: pip install 'birkhoff-v4[parquet]'. "
                "Or convert it to .jsonl."
            ) from None
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ArrowException) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self.path} cannot be read as Parquet: {str(error)[:300]}. Check the file.")
