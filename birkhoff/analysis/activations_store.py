"""A feed of activation rows over many texts, in bounded memory: what SAE training and probes read.

Texts run as prompts in the engine's own batches; a few are in flight at a time and rows come out in the order of the
texts, cut into batches of one size. At most the rows of the texts in flight and one batch are held.
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

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.prompts import Prompt


@dataclass(frozen=True, eq=False)
class ActBatch:
    """Rows of every captured site for the same tokens: `batch[hook, layer]` is `[rows, *row_shape]`.

    `texts`, `positions` and `token_ids` say, row by row, which token of which text it is."""

    rows: dict[Address, torch.Tensor]
    texts: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor

    def __getitem__(self, key: Address) -> torch.Tensor:
        return self.rows[key]

    def __len__(self) -> int:
        return len(self.texts)


def feed(engine: Engine, texts: Iterable[Prompt], capture: Capture, batch_rows: int) -> Iterator[ActBatch]:
    if isinstance(batch_rows, bool) or not isinstance(batch_rows, int) or batch_rows < 1:
        raise OptionError(f"batch_rows is {batch_rows!r}, expected a positive whole number.")
    if capture.reduce is not None:
        raise OptionError(
            "a feed hands out rows, so capture.reduce must be left out. Reduce the batches instead."
        )
    held: list[ActBatch] = []
    count = 0
    for number, acts in enumerate(_run(engine, texts, capture)):
        part = _part(number, acts)
        if part is None:
            continue
        held.append(part)
        count += len(part)
        while count >= batch_rows:
            joined = _join(held)
            yield _cut(joined, 0, batch_rows)
            held = [_cut(joined, batch_rows, count)] if count > batch_rows else []
            count -= batch_rows
    if count:
        yield _join(held)


def _run(engine: Engine, texts: Iterable[Prompt], capture: Capture) -> Iterator[Mapping[Address, SiteRows]]:
    """Captured rows of each text, in order; as many in flight as the engine runs at once."""
    flying: deque[Request] = deque()
    source = iter(texts)
    try:
        while True:
            while len(flying) < 2 * engine.max_requests:
                text = next(source, None)
                if text is None:
                    break
                flying.append(engine.submit_prompt(text, capture))
            if not flying:
                return
            first = flying.popleft()
            yield engine.wait_for_acts(first)
    finally:
        for request in flying:
            engine.cancel(request)


def _part(number: int, acts: Mapping[Address, SiteRows]) -> ActBatch | None:
    if not len(acts):
        return None
    some = next(iter(acts.values()))
    return ActBatch(
        {key: rows.tensor for key, rows in acts.items()},
        torch.full((len(some),), number),
        torch.tensor(some.positions),
        torch.tensor(some.token_ids),
    )


def _join(parts: list[ActBatch]) -> ActBatch:
    if len(parts) == 1:
        return parts[0]
    rows = {key: torch.cat([part.rows[key] for part in parts]) for key in parts[0].rows}
    whose, positions, ids = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("texts", "positions", "token_ids")
    )
    return ActBatch(rows, whose, positions, ids)


def _cut(batch: ActBatch, start: int, stop: int) -> ActBatch:
    """Rows start..stop, copied when a remainder is kept, so that the whole it came from can go."""
    rows = {key: tensor[start:stop].clone() for key, tensor in batch.rows.items()}
    return ActBatch(rows, batch.texts[start:stop], batch.positions[start:stop], batch.token_ids[start:stop])
