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
from birkhoff.hooks.site_names import Address, layers_with
from birkhoff.option_checks import check_int

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.prompts import Prompt


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

    @property
    def positions(self) -> torch.Tensor:
        return torch.tensor(next(iter(self.sites.values())).positions)

    @property
    def token_ids(self) -> torch.Tensor:
        return torch.tensor(next(iter(self.sites.values())).token_ids)


def iter_activations(
    engine: Engine, texts: Iterable[Prompt], capture: Capture, batch_rows: int
) -> Iterator[ActBatch]:
    """Yield the captured rows of all texts in batches of `batch_rows` rows; the last one may be smaller."""
    check_int("batch_rows", batch_rows)
    if capture.reduce is not None:
        raise OptionError(
            "a feed hands out rows, so capture.reduce must be left out. Reduce the batches instead."
        )
    _check_ragged(engine, capture)
    pending: list[ActBatch] = []
    count = 0
    for index, acts in enumerate(iter_captures(engine, ((text, capture) for text in texts))):
        if not len(acts):
            continue
        rows = len(next(iter(acts.values())))
        pending.append(ActBatch(dict(acts), torch.full((rows,), index)))
        count += rows
        while count >= batch_rows:
            joined = _concat(pending)
            # Copies, so that the memory of the whole is released with its last part.
            yield _concat([_slice(joined, 0, batch_rows)])
            pending = [_concat([_slice(joined, batch_rows, count)])] if count > batch_rows else []
            count -= batch_rows
    if count:
        yield _concat(pending)


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


def _concat(batches: list[ActBatch]) -> ActBatch:
    """The rows of several batches, copied."""
    sites = {key: SiteRows.concatenate([batch.sites[key] for batch in batches]) for key in batches[0].sites}
    return ActBatch(sites, torch.cat([batch.texts for batch in batches]))


def _slice(batch: ActBatch, start: int, stop: int) -> ActBatch:
    sites = {key: rows.part(start, stop) for key, rows in batch.sites.items()}
    return ActBatch(sites, batch.texts[start:stop])
