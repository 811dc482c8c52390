"""Iterates over activation rows of many texts in bounded memory, for SAE training and probes.

Texts run as prompts in the engine's batches, with a bounded number in flight; rows are yielded in the order of the
texts, in batches of equal size. At most the rows of the texts in flight and one batch are held in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from birkhoff.capture.spec.request import Capture
from birkhoff.engine.request import Request
from birkhoff.errors import OptionError
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address
from birkhoff.option_checks import check_int

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.prompts import Prompt


@dataclass(frozen=True, eq=False)
class ActBatch:
    """Rows of every captured site for the same tokens: `batch[hook, layer]` is `[rows, *row_shape]`.

    `texts`, `positions` and `token_ids` give, for each row, the index of its text, its position and its token id.
    """

    rows: dict[Address, torch.Tensor]
    texts: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor

    def __getitem__(self, key: Address) -> torch.Tensor:
        return self.rows[key]

    def __len__(self) -> int:
        return len(self.texts)


def iter_activations(
    engine: Engine, texts: Iterable[Prompt], capture: Capture, batch_rows: int
) -> Iterator[ActBatch]:
    """Yield the captured rows of all texts in batches of `batch_rows` rows; the last one may be smaller."""
    check_int("batch_rows", batch_rows)
    if capture.reduce is not None:
        raise OptionError(
            "a feed hands out rows, so capture.reduce must be left out. Reduce the batches instead."
        )
    pending: list[ActBatch] = []
    count = 0
    for index, acts in enumerate(iter_captures(engine, ((text, capture) for text in texts))):
        batch = _text_batch(index, acts)
        if batch is None:
            continue
        pending.append(batch)
        count += len(batch)
        while count >= batch_rows:
            joined = _concat(pending)
            yield _slice(joined, 0, batch_rows)
            pending = [_slice(joined, batch_rows, count)] if count > batch_rows else []
            count -= batch_rows
    if count:
        yield _concat(pending)


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


def _text_batch(index: int, acts: Mapping[Address, SiteRows]) -> ActBatch | None:
    if not len(acts):
        return None
    first = next(iter(acts.values()))
    return ActBatch(
        {key: rows.tensor for key, rows in acts.items()},
        torch.full((len(first),), index),
        torch.tensor(first.positions),
        torch.tensor(first.token_ids),
    )


def _concat(batches: list[ActBatch]) -> ActBatch:
    if len(batches) == 1:
        return batches[0]
    return ActBatch(
        {key: torch.cat([batch.rows[key] for batch in batches]) for key in batches[0].rows},
        torch.cat([batch.texts for batch in batches]),
        torch.cat([batch.positions for batch in batches]),
        torch.cat([batch.token_ids for batch in batches]),
    )


def _slice(batch: ActBatch, start: int, stop: int) -> ActBatch:
    """Copy rows start..stop, so that the memory of the whole batch can be released."""
    rows = {key: tensor[start:stop].clone() for key, tensor in batch.rows.items()}
    return ActBatch(rows, batch.texts[start:stop], batch.positions[start:stop], batch.token_ids[start:stop])
