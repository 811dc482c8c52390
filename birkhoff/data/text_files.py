"""Opens data files by their ending: lines of plain and compressed files, rows of Parquet files.

Memory use depends neither on the width nor on the length of a file: compressed files are decoded in blocks, and of a
Parquet file only the requested columns are read, in batches of rows. An unreadable file is a `DataError` that names
it, also when a later part of it is damaged.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from birkhoff.errors import DataError
from birkhoff.extras import require

ENDINGS = (".jsonl", ".txt", ".parquet", ".jsonl.zst", ".jsonl.gz", ".txt.zst", ".txt.gz")
BATCH_ROWS = 1024


def kind_of(path: Path) -> str | None:
    """`jsonl`, `txt` or `parquet`; None for a file of another kind."""
    for ending in ENDINGS:
        if path.name.endswith(ending):
            return ending.split(".")[1]
    return None


@contextmanager
def open_lines(path: Path) -> Iterator[Iterator[bytes]]:
    """Yield the lines of a file, decompressed if its name ends with .zst or .gz."""
    with path.open("rb") as raw:
        if path.suffix == ".zst":
            zstandard = require("zstandard", f"reading {path}")
            # read_across_frames: tools that append and those that compress in parallel write several frames.
            decoded = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
            yield _checked(path, io.BufferedReader(decoded), (zstandard.ZstdError, OSError))
        elif path.suffix == ".gz":
            with gzip.open(raw) as unpacked:
                yield _checked(path, unpacked, (EOFError, zlib.error, OSError))
        else:
            yield iter(raw)


def _checked(path: Path, lines: Any, errors: tuple[type[Exception], ...]) -> Iterator[bytes]:
    while True:
        try:
            line = next(lines, None)
        except errors as error:
            raise DataError(f"{path} cannot be decompressed: {str(error)[:300]}. Check the file.") from None
        if line is None:
            return
        yield line


def parquet_rows(path: Path) -> int:
    """Number of rows of a Parquet file."""
    return int(_open_parquet(path).metadata.num_rows)


def parquet_columns(path: Path) -> list[str]:
    """Names of the columns of a Parquet file."""
    return list(_open_parquet(path).schema_arrow.names)


def parquet_records(path: Path, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file as dictionaries of these columns."""
    ArrowException = require("pyarrow", f"reading {path}").ArrowException
    batches = _open_parquet(path).iter_batches(batch_size=BATCH_ROWS, columns=columns)
    while True:
        try:
            batch = next(batches, None)
            records = None if batch is None else batch.to_pylist()
        except (OSError, UnicodeDecodeError, ArrowException) as error:
            raise _unreadable(path, error) from None
        if records is None:
            return
        yield from records


def _open_parquet(path: Path) -> Any:
    parquet = require("pyarrow.parquet", f"reading {path}")
    try:
        return parquet.ParquetFile(path)
    except (OSError, require("pyarrow", f"reading {path}").ArrowException) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as Parquet: {str(error)[:300]}. Check the file.")
