"""Rows of one hook and layer of a whole run in batches, for training a probe or an SAE, in bounded memory.

Memory holds an index of 40 bytes per block of rows, at most 16 open files with their entries and, with shuffling, a
pool of rows. Shuffling permutes blocks over the whole run and then draws from the pool, which separates neighbouring
tokens while the disk still reads blocks; every row is returned exactly once, and one seed gives one order. Checksums
are compared when a record is first read. Labels are kept only on request. NumPy only.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from birkhoff.capture.spec.dtypes import Array
from birkhoff.capture.store.entry import CaptureEntry, concatenate
from birkhoff.capture.store.naming import per_file_stem
from birkhoff.capture.store.sidecar import CaptureFile, PayloadRange
from birkhoff.errors import CaptureFileError, OptionError, quoted
from birkhoff.option_checks import check_int

OPEN_FILES = 16
POOL_BATCHES = 16

_SIDECAR = re.compile(r"packed(-pp\d+)?\.json|shard-(pp\d+-)?\d+-\d+\.json|\d+_.+\.json")


class _RowBlock(NamedTuple):
    """Rows [start, stop) of record `record_index` of one file; `ordinal` counts records over all files."""

    sidecar: int
    record_index: int
    start: int
    stop: int
    ordinal: int


class RowFiles:
    """Open capture files by index, with least-recently-used eviction."""

    def __init__(self, sidecars: list[Path], labels: bool, most: int = OPEN_FILES):
        self.sidecars = sidecars
        self._labels = labels
        self._most = most
        self._open = OrderedDict[int, CaptureFile]()
        self.checked = bytearray()  # one flag per record, by ordinal

    def __getitem__(self, index: int) -> CaptureFile:
        if index not in self._open:
            while len(self._open) >= self._most:
                self._open.popitem(last=False)[1].close()
            self._open[index] = CaptureFile(self.sidecars[index], self._labels)
        self._open.move_to_end(index)
        return self._open[index]

    def rows(self, block: _RowBlock, verify: bool) -> tuple[CaptureFile, PayloadRange, CaptureEntry]:
        file = self[block.sidecar]
        if block.record_index >= len(file.records):
            raise CaptureFileError(f"{file.path} was replaced while it was read. Start the iteration again.")
        record = file.records[block.record_index]
        if verify and not self.checked[block.ordinal]:
            file.check(record)
            self.checked[block.ordinal] = 1
        return file, record, file.read_rows(record, block.start, block.stop)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def iter_rows(
    directory: str | os.PathLike[str],
    hook: str,
    layer: int,
    batch: int,
    shuffle: bool = False,
    seed: int = 0,
    *,
    dtype: str | None = None,
    labels: bool = False,
    verify: bool = True,
    drop_last: bool = False,
    pool_rows: int | None = None,
    part: tuple[int, int] = (0, 1),
) -> Iterator[CaptureEntry]:
    """Iterate over batches of `batch` rows from every capture under a directory of a tag or a request, in any layout.

    `dtype="float32"` decodes; otherwise rows are returned as stored and must have one dtype. With `labels`, batches
    have positions and token ids (-1 where a file has none) and the request of each row. The last batch may
    be short. `pool_rows` is the number of rows mixed at a time when shuffling, by default 16 batches. `part` (i, n)
    selects the i-th of n parts of about equal size for one of several readers; with one seed the parts are disjoint
    and together have every row.
    """
    check_int("batch", batch)
    if pool_rows is not None:
        check_int("pool_rows", pool_rows)
    check_int("part[1]", part[1])
    if not 0 <= part[0] < part[1]:
        raise OptionError(f"part is {quoted(part)}, expected (i, n) with 0 <= i < n.")
    if dtype not in (None, "float32"):
        raise OptionError(f"dtype is {quoted(dtype)}, expected None or 'float32'.")
    directory = Path(directory)
    files = RowFiles(sidecars_of(directory), labels)
    form, blocks = index_blocks(files, hook, layer, batch, dtype)
    if not len(blocks):
        files.close()
        raise CaptureFileError(
            f"{directory} holds no finished capture of {quoted(hook)}[{layer}]. Check hook and layer."
        )
    random = np.random.default_rng(seed)
    # All readers permute all blocks alike and take every n-th, so that shuffled parts differ from epoch to epoch.
    order = random.permutation(len(blocks)) if shuffle else np.arange(len(blocks))
    blocks = blocks[order[part[0] :: part[1]]]
    load = partial(_loaded, files, form=form, dtype=dtype, labels=labels, verify=verify)
    return _batches(files, blocks, load, batch, random if shuffle else None, pool_rows, drop_last)


@dataclass(frozen=True)
class StoredSite:
    """What a run holds of one hook and layer. `numbered`: all its requests are named by decimal numbers."""

    rows: int
    dtype: str
    row_shape: tuple[int, ...]
    axes: tuple[str, ...] | None
    numbered: bool


def stored_sites(directory: str | os.PathLike[str]) -> dict[tuple[str, int], StoredSite]:
    """The sites of all finished captures under a directory of a tag or a request, in any layout."""
    found: dict[tuple[str, int], StoredSite] = {}
    for sidecar in sidecars_of(Path(directory)):
        with CaptureFile(sidecar, labels=False) as file:
            for record in file.records:
                entry, known = record.unread, found.get(record.site)
                request = record.request_id or str(file.facts.get("request_id", ""))
                axes = None if entry.axes is None else tuple(entry.axes)
                found[record.site] = StoredSite(
                    record.rows + (0 if known is None else known.rows),
                    entry.dtype if known is None else known.dtype,
                    record.form[1] if known is None else known.row_shape,
                    axes if known is None else known.axes,
                    request.isdecimal() and (known is None or known.numbered),
                )
    if not found:
        raise CaptureFileError(f"{directory} holds no finished capture. Give the directory of a tag.")
    return dict(sorted(found.items()))


def _batches(
    files: RowFiles,
    blocks: Array,
    load: Callable[[_RowBlock], CaptureEntry],
    batch: int,
    random: np.random.Generator | None,
    pool_rows: int | None,
    drop_last: bool,
) -> Iterator[CaptureEntry]:
    """Read blocks in order; with `random`, draw batches from a pool of their rows."""
    most = batch if random is None else max(pool_rows or POOL_BATCHES * batch, batch)
    batches: list[CaptureEntry] = []
    count = 0
    try:
        for number, block in enumerate(blocks):
            last = number == len(blocks) - 1
            batches.append(load(_RowBlock(*block.tolist())))
            count += len(batches[-1])
            if count < most and not last:
                continue
            pool = concatenate(batches)
            order = np.arange(count) if random is None else random.permutation(count)
            # Keep half of a shuffled pool, so that its rows mix with rows read later.
            keep = 0 if last or random is None else count // 2
            first = 0
            while count - first >= batch and count - first > keep:
                yield pool.take(order[first : first + batch])
                first += batch
            batches, count = [pool.take(order[first:])], count - first  # a view would keep the pool alive
        if count and not drop_last:
            yield batches[0]
    finally:
        files.close()


def sidecars_of(directory: Path) -> list[Path]:
    """Sidecars of a tag: its shards and the files of its requests, ordered by name."""
    paths: list[Path] = []
    try:
        with os.scandir(directory) as entries:
            names = sorted(entries, key=lambda entry: entry.name)
        for entry in names:
            if entry.is_dir():
                paths += [directory / entry.name / name for name in sorted(os.listdir(entry.path))]
            else:
                paths.append(directory / entry.name)
    except OSError as error:
        raise CaptureFileError(
            f"{directory} cannot be listed ({error.strerror}). Give the directory of a finished capture, its --out, or "
            "of a tag."
        ) from None
    return [path for path in paths if _SIDECAR.fullmatch(path.name)]


def index_blocks(
    files: RowFiles,
    hook: str,
    layer: int,
    batch: int,
    dtype: str | None,
    each: Callable[[CaptureFile, PayloadRange], None] | None = None,
) -> tuple[tuple[str, tuple[int, ...]], Array]:
    """Dtype and row shape of the requested rows, and their blocks [n, 5] of at most a batch. `each` sees every record
    with rows."""
    form: tuple[str, tuple[int, ...]] | None = None
    blocks = array("q")
    for index, sidecar in enumerate(files.sidecars):
        if re.match(r"\d+_", sidecar.name) and sidecar.name != f"{per_file_stem(layer, hook)}.json":
            continue  # the file name belongs to another hook
        file = files[index]
        for record_index, record in enumerate(file.records):
            if record.site != (hook, layer) or not record.rows:
                continue
            form = form or record.form
            if record.form[1] != form[1] or (dtype is None and record.form[0] != form[0]):
                raise CaptureFileError(
                    f"{file.path}: {record.name} is {record.form[0]} {record.form[1]}, and rows before it "
                    f"were {form[0]} {form[1]}. Read them apart, or with dtype='float32' where only the dtypes differ."
                )
            for start in range(0, record.rows, batch):
                blocks.extend(
                    (index, record_index, start, min(start + batch, record.rows), len(files.checked))
                )
            files.checked.append(record.crc32 is None)
            if each is not None:
                each(file, record)
        del file  # with its labels, before the next one is read
    return form or ("float32", ()), np.frombuffer(blocks, np.int64).reshape(-1, 5)


def _loaded(
    files: RowFiles,
    block: _RowBlock,
    form: tuple[str, tuple[int, ...]],
    dtype: str | None,
    labels: bool,
    verify: bool,
) -> CaptureEntry:
    file, record, rows = files.rows(block, verify)
    if record.form[1] != form[1] or (dtype is None and record.form[0] != form[0]):
        raise CaptureFileError(f"{file.path} was replaced while it was read. Start the iteration again.")
    if dtype == "float32":
        rows = replace(rows, array=rows.values(), dtype="float32", scale=None)
    if not labels:
        return rows
    request = record.request_id or str(file.facts.get("request_id", ""))
    unknown = [-1] * len(rows)
    return replace(
        rows,
        positions=unknown if rows.positions is None else rows.positions,
        token_ids=unknown if rows.token_ids is None else rows.token_ids,
        requests=[request] * len(rows),
    )
