"""Captured rows as a `torch.utils.data` dataset, shuffled over the shards of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from birkhoff.capture.store.reader import to_torch
from birkhoff.capture.store.row_reader import iter_rows, stored_sites
from birkhoff.data.export_rows import site_name, tag_directory
from birkhoff.errors import CaptureFileError, OptionError
from birkhoff.option_checks import check_int

READ_ROWS = 1024  # rows of a read when single rows are handed out


class RowDataset(IterableDataset[dict[str, Any]]):
    """The rows of one hook and layer of a run, each once per epoch, in bounded memory.

    An item is a dictionary with `row` (a tensor), `position`, `token_id` and `request`; with `batch_rows` it holds that
    many rows, for `DataLoader(dataset, batch_size=None)`. Shuffling permutes blocks of rows over all shards and then
    draws from a pool; the order depends on `seed` and the epoch alone. The workers of a `DataLoader`, and the
    processes of a distributed run (`rank`, `world_size`), read disjoint parts. `dtype` converts rows; without it bf16
    and fp16 rows stay as stored, and fp8 rows become float32.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        hook: str,
        layer: int,
        *,
        batch_rows: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        pool_rows: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        verify: bool = True,
    ):
        super().__init__()
        if batch_rows is not None:
            check_int("batch_rows", batch_rows)
        check_int("world_size", world_size)
        if not 0 <= rank < world_size:
            raise OptionError(f"rank is {rank}, expected 0 to {world_size - 1}.")
        self._directory = tag_directory(run)
        sites = stored_sites(self._directory)
        if (hook, layer) not in sites:
            names = ", ".join(map(site_name, sites))
            raise CaptureFileError(
                f"{self._directory} holds no rows of {site_name((hook, layer))}, expected one of {names[:400]}."
            )
        self._site = (hook, layer)
        self.num_rows = sites[hook, layer].rows
        self.row_shape = sites[hook, layer].row_shape
        self._scaled = sites[hook, layer].dtype == "fp8_e4m3"
        self._batch_rows, self._shuffle, self._seed = batch_rows, shuffle, seed
        self._dtype, self._pool_rows, self._verify = dtype, pool_rows, verify
        self._rank, self._world_size = rank, world_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration. Call it before a `DataLoader` starts its workers."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = iter_rows(
            self._directory,
            *self._site,
            self._batch_rows or READ_ROWS,
            shuffle=self._shuffle,
            seed=self._seed * 1_000_003 + self._epoch,
            dtype="float32" if self._scaled else None,
            labels=True,
            verify=self._verify and self._epoch == 0,
            pool_rows=self._pool_rows,
            part=(self._rank * workers + number, self._world_size * workers),
        )
        for batch in batches:
            rows = to_torch(batch)
            item: dict[str, Any] = {
                "row": rows if self._dtype is None else rows.to(self._dtype),
                "position": torch.tensor(batch.positions),
                "token_id": torch.tensor(batch.token_ids),
                "request": batch.requests or [],
            }
            if self._batch_rows is not None:
                yield item
            else:
                for index in range(len(batch)):
                    yield {name: values[index] for name, values in item.items()}
