"""Rows for the training loop, generated ahead of time by background processes so that the device never waits.

There are two endless streams, "mixed" and "core", each a sequence of units (see `data.make_unit`). Each stream keeps
`ahead` units in progress, so switching between them is immediate. Units are cached: after `rewind`, the next run gets
the same rows without generating them again. Without workers, units are generated on demand in this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from birkhoff.errors import OptionError
from training.corpus import Corpus, read_corpus
from training.data import PARTS, Rows, make_unit, seeded
from training.tokenizer import load_tokenizer

PIECES = 12


class Maker:
    """Generates units from a corpus on disk; each worker has one."""

    def __init__(self, data: str | Path, tokenizer: str | Path, length: int, seed: int, share: float):
        self.corpus: Corpus = thin(read_corpus(data), share, seed)
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer)
        self.length = length
        self.seed = seed

    def unit(self, part: str, number: int) -> Rows:
        turn, piece = divmod(number, PIECES)
        return make_unit(self.corpus, self.tokenizer, self.length, part, self.seed, turn, piece, PIECES)


def thin(corpus: Corpus, share: float, seed: int) -> Corpus:
    """Keep a fixed share of core and general records; small talk and held-out text are kept whole."""
    if share >= 1:
        return corpus

    def some(records: tuple, name: str) -> tuple:
        kept = list(records)
        seeded(seed, "thin", name).shuffle(kept)
        return tuple(kept[: max(1, round(share * len(kept)))])

    return replace(corpus, core=some(corpus.core, "core"), general=some(corpus.general, "general"))


_maker: Maker | None = None  # one per worker process: a corpus is too large to send with every task


def _begin(*arguments: object) -> None:
    global _maker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _maker = Maker(*arguments)  # type: ignore[arg-type]


def _make(part: str, number: int) -> Rows:
    assert _maker is not None
    return _maker.unit(part, number)


class Feed:
    def __init__(
        self,
        data: str | Path,
        tokenizer: str | Path,
        length: int,
        seed: int,
        share: float = 1.0,
        workers: int = 0,
        ahead: int = 24,
    ):
        arguments = (str(data), str(tokenizer), length, seed, share)
        self._ahead = ahead
        self._pool = None
        self._units: dict[tuple[str, int], Future[Rows] | Rows] = {}
        self._make: Callable[[str, int], Rows]
        if workers:
            self._pool = ProcessPoolExecutor(
                workers, get_context("spawn"), initializer=_begin, initargs=arguments
            )
            for part in PARTS:
                self._order(part, 0)
        else:
            self._make = Maker(*arguments).unit
        self.rewind()

    def rewind(self) -> None:
        """Restart both streams at the first unit."""
        self._next_unit = dict.fromkeys(PARTS, 0)
        self._left: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {part: [] for part in PARTS}

    def batch(self, part: str, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the next `rows` rows of a stream: ids uint16 and roles uint8, both [rows, length]."""
        if part not in PARTS:
            raise OptionError(f"part is {part!r}, expected one of {', '.join(PARTS)}.")
        ids = []
        roles = []
        missing = rows
        while missing:
            if not self._left[part]:
                self._left[part] = [self._take(part)]
            have_ids, have_roles = self._left[part].pop()
            ids.append(have_ids[:missing])
            roles.append(have_roles[:missing])
            if len(have_ids) > missing:
                self._left[part] = [(have_ids[missing:], have_roles[missing:])]
            missing -= len(ids[-1])
        return np.concatenate(ids), np.concatenate(roles)

    def position(self) -> dict[str, tuple[int, int]]:
        """Return, per stream, units started and rows left in the last one; `seek` restores it."""
        return {part: (self._next_unit[part], sum(len(i) for i, _ in self._left[part])) for part in PARTS}

    def seek(self, position: dict[str, tuple[int, int]]) -> None:
        self.rewind()
        for part, (units, left) in position.items():
            if units:
                self._next_unit[part] = units - 1
                ids, roles = self._take(part)
                self._left[part] = [(ids[len(ids) - left :], roles[len(roles) - left :])] if left else []

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, part: str) -> tuple[np.ndarray, np.ndarray]:
        number = self._next_unit[part]
        self._next_unit[part] += 1
        if self._pool is None:
            unit = self._make(part, number)
        else:
            self._order(part, number)
            pending = self._units[part, number]
            unit = pending.result() if isinstance(pending, Future) else pending
            self._units[part, number] = unit
        return unit.ids, unit.roles

    def _order(self, part: str, number: int) -> None:
        assert self._pool is not None
        for ahead in range(number, number + self._ahead):
            if (part, ahead) not in self._units:
                self._units[part, ahead] = self._pool.submit(_make, part, ahead)
