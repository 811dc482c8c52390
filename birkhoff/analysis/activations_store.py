"""Iterates over activation rows of many texts in bounded memory, for SAE training and probes.

Texts run as prompts in the engine's batches, with a bounded number in flight. Rows stay on the device that computed
them until a batch is complete, and longer if their consumer is there too; for a consumer on the host a batch crosses in
one asynchronous copy into pinned memory while the next one is computed.

Rows come in the order of the texts, or shuffled over a buffer of `shuffle_rows` rows: the buffer is filled with the
rows of consecutive texts, handed out in an order that depends on the seed and on how many buffers came before, and
filled again. No text is in flight when a buffer begins, so a buffer depends on nothing before it: a stream that is
resumed from `state()` computes the buffer it was in again and gives the same batches, bit for bit, as one that was
never interrupted. A text at the end of a buffer is computed again for the rest of its rows in the next."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.capture.sinks.pinned_copy import PinnedCopy
from birkhoff.capture.spec.request import Capture
from birkhoff.engine.request import Request
from birkhoff.errors import OptionError, quoted
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address, layers_with
from birkhoff.option_checks import check_int

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.prompts import Prompt

MAX_ROW_BYTES = 8 << 30  # of rows that are in flight, besides the buffer
# Texts are read ahead for this many steps, so that the engine never waits for the next one.
STEPS_IN_FLIGHT = 4


@dataclass(frozen=True, eq=False)
class ActBatch:
    """Rows of every captured site for the same tokens: `batch[hook, layer]` is `[rows, *row_shape]`.

    `texts`, `positions` and `token_ids` give, for each row, the index of its text, its position and its token id.
    """

    sites: dict[Address, SiteRows]
    texts: torch.Tensor

    def __getitem__(self, key: Address) -> torch.Tensor:
        return self.sites[key].tensor

    def __len__(self) -> int:
        return len(self.texts)

    def _ipython_key_completions_(self) -> list[Address]:
        return list(self.sites)

    def __repr__(self) -> str:
        sites = ", ".join(f"{hook}[{layer}]" for hook, layer in self.sites)
        return f"ActBatch({len(self)} rows of {len(set(self.texts.tolist()))} texts: {sites})"

    @property
    def positions(self) -> torch.Tensor:
        return torch.tensor(next(iter(self.sites.values())).positions)

    @property
    def token_ids(self) -> torch.Tensor:
        return torch.tensor(next(iter(self.sites.values())).token_ids)


@dataclass(frozen=True)
class StreamPosition:
    """`batches` were handed out of buffer number `buffer`, whose first row is row `row` of text `text`."""

    buffer: int = 0
    text: int = 0
    row: int = 0
    batches: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any] | None) -> StreamPosition:
        names = set(cls.__dataclass_fields__)
        if state is None:
            return cls()
        if not isinstance(state, Mapping) or set(state) != names:
            raise OptionError(
                f"resume is {quoted(state)}, expected the state of a stream: {', '.join(sorted(names))}."
            )
        return cls(**{name: check_int(f"resume.{name}", value, 0) for name, value in state.items()})


class ActStream(Iterator[ActBatch]):
    """The batches of a stream; `state()` after any of them is where another stream can resume."""

    def __init__(self, batches: Iterator[tuple[ActBatch, StreamPosition]], position: StreamPosition):
        self._batches = batches
        self._position = position

    def __next__(self) -> ActBatch:
        batch, self._position = next(self._batches)
        return batch

    def __repr__(self) -> str:
        return f"ActStream(at text {self._position.text}, row {self._position.row}; iterate over its batches)"

    def state(self) -> dict[str, int]:
        """Plain numbers, for a checkpoint."""
        return dict(vars(self._position))

    def close(self) -> None:
        """Cancel the texts in flight."""
        self._batches.close()  # type: ignore[attr-defined]


def iter_activations(
    engine: Engine,
    texts: Iterable[Prompt],
    capture: Capture,
    batch_rows: int,
    *,
    device: torch.device | str | None = None,
    shuffle_rows: int = 0,
    seed: int = 0,
    resume: Mapping[str, Any] | None = None,
) -> ActStream:
    """The captured rows of all texts in batches of `batch_rows` rows; the last one may be smaller. See the module."""
    check_int("batch_rows", batch_rows)
    check_int("shuffle_rows", shuffle_rows, 0)
    check_int("seed", seed, None)
    if capture.reduce is not None:
        raise OptionError(
            "a feed hands out rows, so capture.reduce must be left out. Reduce the batches instead."
        )
    _check_ragged(engine, capture)
    target = torch.device("cpu") if device is None else _checked_device(device)
    position = StreamPosition.of(resume)
    source = _Batches(engine, texts, capture, batch_rows, shuffle_rows, seed)
    return ActStream(_moved(source.from_position(position), target), position)


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionError(f"device is {quoted(device)}, expected cpu or cuda.") from None
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"device is {quoted(str(device))}, but PyTorch sees no CUDA device. Use cpu.")
    return checked


class _Batches:
    """Fills buffers with the rows of texts and hands them out in batches."""

    def __init__(
        self,
        engine: Engine,
        texts: Iterable[Prompt],
        capture: Capture,
        batch_rows: int,
        shuffle_rows: int,
        seed: int,
    ):
        self._engine = engine
        self._texts = texts
        self._capture = capture
        self._batch_rows = batch_rows
        self._shuffled = shuffle_rows > 0
        self._buffer_rows = -(-max(shuffle_rows, batch_rows) // batch_rows) * batch_rows
        self._seed = seed

    def from_position(self, position: StreamPosition) -> Iterator[tuple[ActBatch, StreamPosition]]:
        texts = enumerate(itertools.islice(self._texts, position.text, None), position.text)
        feed = _TextFeed(self._engine, texts, self._capture)
        drop, done = position.row, position.batches  # of the first text, and of the first buffer
        try:
            for number in itertools.count(position.buffer):
                buffer = _RowBuffer(self._buffer_rows)
                start: tuple[int, int] | None = None
                while not buffer.full:
                    acts = feed.next(buffer.room if self._shuffled else None, drop)
                    if acts is None:
                        break
                    index, rows = acts
                    if start is None:
                        start = index, drop
                    taken = buffer.add(index, rows, drop)
                    drop = 0
                    if taken is not None:  # the buffer is full before the text is
                        drop = taken
                        feed.again(index, keep_rows=None if self._shuffled else rows)
                if start is None:
                    return
                here = StreamPosition(number, *start)
                order = self._order(number, len(buffer))
                for count, batch in enumerate(buffer.batches(order, self._batch_rows), start=1):
                    if count > done:
                        yield batch, replace(here, batches=count)
                done = 0
        finally:
            feed.close()

    def _order(self, number: int, rows: int) -> torch.Tensor | None:
        if not self._shuffled:
            return None
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + number) % (1 << 63))
        return torch.randperm(rows, generator=generator)


class _TextFeed:
    """Runs texts in order, with a bounded number of them and of their rows in flight."""

    def __init__(self, engine: Engine, texts: Iterator[tuple[int, Prompt]], capture: Capture):
        self._engine = engine
        self._texts = texts
        self._capture = capture
        self._planner = engine.device_captures()
        self._max_tokens = STEPS_IN_FLIGHT * engine.settings["max_batch_tokens"]
        self._in_flight: deque[tuple[int, Prompt, Request, int, int]] = deque()
        self._waiting: deque[tuple[int, Prompt]] = deque()
        self._last: tuple[int, Prompt] | None = None
        self._kept: tuple[int, Mapping[Address, SiteRows]] | None = None
        self._rows = self._bytes = self._tokens = 0  # in flight; of rows, at most

    def next(self, room: int | None, drop: int) -> tuple[int, Mapping[Address, SiteRows]] | None:
        """The rows of the next text that has some; None after the last. With `room`, no more texts are started than
        fill it; the first `drop` rows of the next text do not count."""
        if self._kept is not None:
            kept = self._kept
            self._kept = None
            return kept
        while True:
            self._submit(None if room is None else room + drop)
            if not self._in_flight:
                return None
            index, prompt, request, rows, num_bytes = self._in_flight.popleft()
            self._rows -= rows
            self._bytes -= num_bytes
            self._tokens -= len(request.prompt_ids)
            self._last = index, prompt
            acts = self._engine.wait_for_acts(request)
            if len(acts):
                return index, acts

    def again(self, index: int, keep_rows: Mapping[Address, SiteRows] | None) -> None:
        """Return the last text once more: its rows if they are given, else by computing it again."""
        if keep_rows is not None:
            self._kept = index, keep_rows
            return
        assert self._last is not None
        started = [(index, prompt) for index, prompt, *_ in self._in_flight]
        self.close()
        self._waiting.extend([self._last, *started])

    def close(self) -> None:
        for _, _, request, _, _ in self._in_flight:
            self._engine.cancel(request)
        self._in_flight.clear()
        self._rows = self._bytes = self._tokens = 0

    def _submit(self, room: int | None) -> None:
        while len(self._in_flight) < 2 * self._engine.max_requests:
            if self._in_flight and (
                self._bytes >= MAX_ROW_BYTES
                or self._tokens >= self._max_tokens
                or (room is not None and self._rows >= room)
            ):
                return
            item = self._waiting.popleft() if self._waiting else next(self._texts, None)
            if item is None:
                return
            index, prompt = item
            request = self._engine.submit_prompt(prompt, self._capture, self._planner)
            rows, num_bytes = _planned_rows(request)
            self._in_flight.append((index, prompt, request, rows, num_bytes))
            self._rows += rows
            self._bytes += num_bytes
            self._tokens += len(request.prompt_ids)


def _planned_rows(request: Request) -> tuple[int, int]:
    """Upper bounds of the rows of one site, and of the bytes of all sites, that a text will have."""
    (job,) = request.results.captures
    estimate, sites = job.resolved.estimate, max(1, len(job.resolved.addresses))  # type: ignore[attr-defined]
    return -(-estimate.rows // sites), estimate.bytes


class _RowBuffer:
    """Rows of all sites with their labels, up to `size` of each."""

    def __init__(self, size: int):
        self._size = size
        self._count = 0
        self._tensors: dict[Address, torch.Tensor] = {}
        self._scales: dict[Address, torch.Tensor] = {}
        self._positions: list[int] = []
        self._token_ids: list[int] = []
        self._texts: list[tuple[int, int]] = []  # index and number of rows

    def __len__(self) -> int:
        return self._count

    @property
    def room(self) -> int:
        return self._size - self._count

    @property
    def full(self) -> bool:
        return self._count == self._size

    def add(self, index: int, acts: Mapping[Address, SiteRows], drop: int) -> int | None:
        """Add the rows of a text after the first `drop`; returns how many of its rows are here or were dropped, if some
        are left."""
        total = len(next(iter(acts.values())))
        taken = min(total - drop, self.room)
        stop = drop + taken
        for key, rows in acts.items():
            self._put(self._tensors, key, rows.tensor[drop:stop])
            if rows.scale is not None:
                self._put(self._scales, key, rows.scale[drop:stop])
        labels = next(iter(acts.values()))
        self._positions += labels.positions[drop:stop]
        self._token_ids += labels.token_ids[drop:stop]
        self._texts.append((index, taken))
        self._count += taken
        return stop if stop < total else None

    def _put(self, table: dict[Address, torch.Tensor], key: Address, rows: torch.Tensor) -> None:
        if key not in table:
            table[key] = rows.new_empty(self._size, *rows.shape[1:])
        table[key][self._count : self._count + len(rows)] = rows

    def batches(self, order: torch.Tensor | None, batch_rows: int) -> Iterator[ActBatch]:
        positions, token_ids = torch.tensor(self._positions), torch.tensor(self._token_ids)
        texts = torch.cat([torch.full((count,), index) for index, count in self._texts])
        for first in range(0, self._count, batch_rows):
            stop = min(first + batch_rows, self._count)
            which = torch.arange(first, stop) if order is None else order[first:stop]
            labels = tuple(positions[which].tolist()), tuple(token_ids[which].tolist())
            # Without an order the buffer is one batch: its memory is handed out.
            at = slice(first, stop) if order is None else self._index(which)
            scales = {key: scale[at] for key, scale in self._scales.items()}
            sites = {
                key: SiteRows(*key, tensor[at], *labels, scales.get(key))
                for key, tensor in self._tensors.items()
            }
            yield ActBatch(sites, texts[which])

    def _index(self, which: torch.Tensor) -> torch.Tensor:
        """The index on the device of the rows, in pinned memory first: the copy does not wait."""
        device = next(iter(self._tensors.values())).device
        if device.type != "cuda":
            return which
        return which.pin_memory().to(device, non_blocking=True)


def _moved(
    batches: Iterator[tuple[ActBatch, StreamPosition]], device: torch.device
) -> Iterator[tuple[ActBatch, StreamPosition]]:
    """The batches on another device. Rows of a GPU go to the host one batch ahead of the consumer."""
    copy = PinnedCopy()
    copying: deque[tuple[ActBatch, StreamPosition]] = deque()
    try:
        for batch, position in batches:
            sites = {key: _on(rows, device, copy) for key, rows in batch.sites.items()}
            copying.append((replace(batch, sites=sites), position))
            if all(rows.ready is None for rows in sites.values()) or len(copying) > 1:
                yield _complete(*copying.popleft())
        while copying:
            yield _complete(*copying.popleft())
    finally:
        batches.close()  # type: ignore[attr-defined]


def _on(rows: SiteRows, device: torch.device, copy: PinnedCopy) -> SiteRows:
    if rows.tensor.device.type == device.type:
        return rows
    if device.type == "cpu":
        return copy(rows)
    scale = None if rows.scale is None else rows.scale.to(device)
    return replace(rows, tensor=rows.tensor.to(device), scale=scale)


def _complete(batch: ActBatch, position: StreamPosition) -> tuple[ActBatch, StreamPosition]:
    for rows in batch.sites.values():
        rows.wait()
    return batch, position


def _check_ragged(engine: Engine, capture: Capture) -> None:
    """A batch has the same rows of every site; rows of ragged hooks are not those of any other site."""
    schema, layers = engine.schema, engine.config.num_hidden_layers
    ragged = [hook for hook in capture.hooks if hook in schema and schema[hook].ragged is not None]
    if ragged and (
        len(capture.hooks) > 1 or len(layers_with(ragged[0], capture.hooks[ragged[0]], schema, layers)) > 1
    ):
        raise OptionError(
            f"{ragged[0]} has any number of rows for a token, so a feed of it has one hook at one layer. Use one feed "
            "for each."
        )


def iter_captures(
    engine: Engine, prompts: Iterable[tuple[Prompt, Capture]]
) -> Iterator[Mapping[Address, SiteRows]]:
    """Run prompts and yield the captured rows of each, in order, with at most `2 * max_requests` in flight."""
    in_flight: deque[Request] = deque()
    try:
        for prompt, capture in prompts:
            in_flight.append(engine.submit_prompt(prompt, capture))
            if len(in_flight) >= 2 * engine.max_requests:
                yield engine.wait_for_acts(in_flight.popleft())
        while in_flight:
            yield engine.wait_for_acts(in_flight.popleft())
    finally:
        for request in in_flight:
            engine.cancel(request)
