"""Rows of one hook and layer of a whole run, batch by batch: the feed of a probe or an SAE, in bounded memory.

What is held is an index of 40 bytes per record, a few open files and, when shuffling, a pool of rows. Shuffling permutes
blocks of rows over the whole run and then draws from the pool, so neighbours of a prompt part while the disk still reads
in blocks; every row comes exactly once, and the same seed gives the same order. Checksums are compared when a record is
first touched. Labels cost 16 bytes per row of index and are read only when asked for. NumPy only.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from birkhoff.capture.dtypes import STORED, Array, to_float32
from birkhoff.capture.sidecar import CaptureFile, Record
from birkhoff.errors import CaptureFileError, OptionError, quoted

OPEN_FILES = 64
POOL_BATCHES = 16

_SIDECAR = re.compile(r"packed(-pp\d+)?\.json|shard-(pp\d+-)?\d+-\d+\.json|\d+_.+\.json")


@dataclass(frozen=True)
class RowBatch:
    """`array` [rows, *row_shape] as stored, or float32. Labels are None unless asked for; -1 where a file has none."""

    array: Array
    positions: Array | None = None
    token_ids: Array | None = None
    requests: list[str] | None = None

    def __len__(self) -> int:
        return len(self.array)


@dataclass
class _Block:
    """Rows [start, stop) of record `number` of one file."""

    sidecar: int
    number: int
    start: int
    stop: int


class _Files:
    """Capture files by number, the least recently used closed first."""

    def __init__(self, sidecars: list[Path]):
        self.sidecars, self._open = sidecars, OrderedDict[int, CaptureFile]()
        self._checked: dict[int, set[int]] = {}

    def __getitem__(self, number: int) -> CaptureFile:
        if number not in self._open:
            while len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            self._open[number] = CaptureFile(self.sidecars[number])
        self._open.move_to_end(number)
        return self._open[number]

    def rows(self, block: _Block, verify: bool) -> tuple[CaptureFile, Record, Array]:
        file = self[block.sidecar]
        if block.number >= len(file.records):
            raise CaptureFileError(f"{file.path} was replaced while it was read. Start the iteration again.")
        record = file.records[block.number]
        if verify and record.crc32 is not None and block.number not in self._checked.setdefault(block.sidecar, set()):
            file.check(record)
            self._checked[block.sidecar].add(block.number)
        return file, record, file.read_rows(record, block.start, block.stop)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def iter_rows(
    directory: str | os.PathLike[str], hook: str, layer: int, batch: int, shuffle: bool = False, seed: int = 0, *,
    dtype: str | None = None, labels: bool = False, verify: bool = True, drop_last: bool = False,
    pool_rows: int | None = None,
) -> Iterator[RowBatch]:  # fmt: skip
    """Batches of `batch` rows from every capture under a tag's directory (or one request's), all layouts.

    `dtype="float32"` decodes; otherwise rows come as stored and must be of one dtype. The last batch may be short.
    `pool_rows` is how many rows are mixed at a time when shuffling, by default 16 batches.
    """
    for name, value in (("batch", batch), ("pool_rows", pool_rows)):
        if value is not None and (type(value) is not int or value < 1):
            raise OptionError(f"{name} is {quoted(value)}, expected a whole number from 1 up.")
    if dtype not in (None, "float32"):
        raise OptionError(f"dtype is {quoted(dtype)}, expected None or 'float32'.")
    directory = Path(directory)
    files = _Files(_sidecars(directory))
    form, blocks = _index(files, hook, layer, batch, dtype)
    if not blocks:
        files.close()
        raise CaptureFileError(f"{directory} holds no finished capture of {quoted(hook)}[{layer}]. Check hook and layer.")
    return _batches(files, form, blocks, batch, shuffle, seed, dtype, labels, verify, drop_last, pool_rows)


def _batches(
    files: _Files, form: tuple[str, tuple[int, ...]], blocks: list[_Block], batch: int, shuffle: bool, seed: int,
    dtype: str | None, labels: bool, verify: bool, drop_last: bool, pool_rows: int | None,
) -> Iterator[RowBatch]:  # fmt: skip
    random = np.random.default_rng(seed)
    order = random.permutation(len(blocks)) if shuffle else np.arange(len(blocks))
    most = max(pool_rows or POOL_BATCHES * batch, batch) if shuffle else batch
    held: list[RowBatch] = []
    count = 0
    try:
        for number in order:
            block = blocks[number]
            held.append(_loaded(files, block, form, dtype, labels, verify))
            count += len(held[-1])
            if count >= most:
                pool = _concatenated(held)
                if shuffle:
                    pool = _taken(pool, random.permutation(len(pool)))
                # Keep most of a shuffled pool, so that rows meet others that are read later.
                keep = max(count - count // 2, count % batch) if shuffle else 0
                first = 0
                while count - first >= batch and count - first > keep:
                    yield _taken(pool, slice(first, first + batch))
                    first += batch
                held, count = [_taken(pool, slice(first, None))], count - first
        pool = _concatenated(held)
        if shuffle:
            pool = _taken(pool, random.permutation(len(pool)))
        for first in range(0, len(pool), batch):
            piece = _taken(pool, slice(first, first + batch))
            if len(piece) and (len(piece) == batch or not drop_last):
                yield piece
    finally:
        files.close()


def _sidecars(directory: Path) -> list[Path]:
    """Finished captures of a tag: shards, and the files of its requests. Names decide the order, not the disk."""
    found: list[Path] = []
    try:
        with os.scandir(directory) as entries:
            names = sorted(entries, key=lambda entry: entry.name)
        for entry in names:
            if entry.is_dir():
                found += [directory / entry.name / name for name in sorted(os.listdir(entry.path))]
            else:
                found.append(directory / entry.name)
    except OSError as error:
        raise CaptureFileError(f"{directory} cannot be listed ({error.strerror}). Give a tag's directory.") from None
    return [path for path in found if _SIDECAR.fullmatch(path.name)]


def _index(
    files: _Files, hook: str, layer: int, batch: int, dtype: str | None
) -> tuple[tuple[str, tuple[int, ...]], list[_Block]]:
    """Dtype and row shape of what was asked for, and its rows in blocks of at most a batch."""
    form: tuple[str, tuple[int, ...]] | None = None
    blocks: list[_Block] = []
    for number, sidecar in enumerate(files.sidecars):
        if re.match(r"\d+_", sidecar.name) and sidecar.name != f"{layer}_{hook}.json":
            continue  # another hook's file; its name says so
        file = files[number]
        for place, record in enumerate(file.records):
            if (record.hook, record.layer) != (hook, layer) or not record.rows:
                continue
            found = (record.dtype, record.shape[1:])
            form = form or found
            if found[1] != form[1] or (dtype is None and found[0] != form[0]):
                raise CaptureFileError(
                    f"{file.path}: {record.name} is {found[0]} {found[1]}, and rows before it were {form[0]} {form[1]}. "
                    "Read them apart, or with dtype='float32' where only the dtypes differ."
                )
            blocks += [
                _Block(number, place, start, min(start + batch, record.rows)) for start in range(0, record.rows, batch)
            ]
    return form or ("float32", ()), blocks


def _loaded(
    files: _Files, block: _Block, form: tuple[str, tuple[int, ...]], dtype: str | None, labels: bool, verify: bool
) -> RowBatch:
    file, record, array = files.rows(block, verify)
    if record.shape[1:] != form[1] or (dtype is None and record.dtype != form[0]):
        raise CaptureFileError(f"{file.path} was replaced while it was read. Start the iteration again.")
    rows = slice(block.start, block.stop)
    if dtype == "float32":
        array = to_float32(array, record.dtype, None if record.scale is None else record.scale[rows])
    if not labels:
        return RowBatch(array)
    request = record.request_id or str(file.facts.get("request_id", ""))
    columns = [
        np.full(len(array), -1, np.int64) if values is None else np.array(values[rows], np.int64)
        for values in (record.positions, record.token_ids)
    ]
    return RowBatch(array, *columns, [request] * len(array))


def _concatenated(batches: list[RowBatch]) -> RowBatch:
    if not batches:
        return RowBatch(np.empty((0,), STORED["float32"]))
    first = batches[0]
    array = np.concatenate([batch.array for batch in batches])
    if first.positions is None:
        return RowBatch(array)
    return RowBatch(
        array,
        np.concatenate([batch.positions for batch in batches if batch.positions is not None]),
        np.concatenate([batch.token_ids for batch in batches if batch.token_ids is not None]),
        [name for batch in batches for name in batch.requests or ()],
    )


def _taken(batch: RowBatch, rows: Array | slice) -> RowBatch:
    if batch.positions is None or batch.token_ids is None or batch.requests is None:
        return RowBatch(batch.array[rows])
    chosen = batch.requests[rows] if isinstance(rows, slice) else [batch.requests[row] for row in rows]
    return RowBatch(batch.array[rows], batch.positions[rows], batch.token_ids[rows], chosen)
