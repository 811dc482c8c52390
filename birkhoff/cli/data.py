"""Data files by their ending. Parquet needs pyarrow, which only this file knows and nobody else asks for.

A Parquet file is read in batches of rows, the columns that can hold a text alone, so that neither its width nor its
length costs memory. Numbers, places and problems of its texts are those of `analysis/dataset.py`; what is wrong with the
file itself, also when it shows only half-way, is a `DataError` that names it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.analysis.dataset import DataFile, DatasetText, text_of
from birkhoff.errors import DataError, quoted

BATCH_ROWS = 1024


def open_data(path: Path, text_field: str, whole_file: bool) -> DataFile | ParquetFile:
    if path.suffix != ".parquet":
        return DataFile(path, text_field, whole_file)
    if whole_file:
        raise DataError(f"{path} is read row by row; the whole file as one text is for .txt. Leave it out.")
    return ParquetFile(path, text_field)


@dataclass(frozen=True)
class ParquetFile:
    """The rows of a Parquet file as texts, in batches."""

    path: Path
    text_field: str

    def __post_init__(self) -> None:
        if not self.path.is_file():
            what = "not a file" if self.path.exists() else "missing"
            raise DataError(
                f"{self.path} is {what}, expected a .jsonl, .txt or .parquet file. Check the path."
            )

    def describe(self) -> dict[str, Any]:
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
            has = quoted(", ".join(map(str, names)), 120)
            raise DataError(
                f"{self.path} has neither a column {self.text_field!r} nor 'messages', but {has}. Name the one that "
                "holds the texts: --text-field"
            )
        wanted = [name for name in dict.fromkeys((self.text_field, "prompt", "messages")) if name in names]
        number = 0
        for records in self._batches(file, wanted):
            for record in records:
                present = {name: value for name, value in record.items() if value is not None}
                yield text_of(present, number, f"{self.path} row {number + 1}", self.text_field)
                number += 1

    def _batches(self, file: Any, wanted: list[str]) -> Iterator[list[dict[str, Any]]]:
        from pyarrow import ArrowException

        batches = file.iter_batches(batch_size=BATCH_ROWS, columns=wanted)
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
                f"{self.path} is a Parquet file, and reading it needs pyarrow: pip install 'birkhoff[parquet]'. "
                "Or convert it to .jsonl."
            ) from None
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ArrowException) as error:
            raise self._unreadable(error) from None

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"{self.path} cannot be read as Parquet: {str(error)[:300]}. Check the file.")
