"""Data files by their ending. Parquet needs pyarrow, which only this file knows and nobody else asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.api.dataset import DataFile, Text, text_of
from birkhoff.errors import DataError


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

    def describe(self) -> dict[str, Any]:
        with self.path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size, texts = self.path.stat().st_size, self._open().metadata.num_rows
        return {"sha256": digest, "bytes": size, "texts": texts, "text_field": self.text_field}

    def __iter__(self) -> Iterator[Text]:
        file = self._open()
        wanted = [name for name in dict.fromkeys((self.text_field, "prompt", "messages")) if name in file.schema.names]
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for record in batch.to_pylist():
                present = {name: value for name, value in record.items() if value is not None}
                yield text_of(present, number, f"{self.path} row {number + 1}", self.text_field)
                number += 1

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
            raise DataError(f"{self.path} cannot be read as Parquet: {error}. Check the file.") from None
