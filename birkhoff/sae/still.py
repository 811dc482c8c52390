"""A dictionary spliced into a site in fixed shapes, so that a step with it can be recorded and replayed.

`SaeHost.run` does as little as a step's uses allow, which makes its shapes follow from them. Here shapes come in a few
sizes: a block of so many units, and for each of them room for so many clamped features. Units, features and bounds are
data. Spare units repeat the first one and write the same numbers again; spare features have no clamp and change none.
Features are read by gathering their encoder rows for each unit, or, where who is live depends on all of them (top-k),
by encoding whole rows; reconstruction is two products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear

from birkhoff.hooks.edit import Around
from birkhoff.sae.clamps import ABSOLUTE, ADDITIVE, BOUND, MULTIPLY

if TYPE_CHECKING:
    from birkhoff.sae.splice import SaeHost

ROOM = (0, 4, 16, 64, 256)  # clamped features of a unit
MOST_GATHERED = 1 << 28  # numbers of encoder rows gathered at a time: 1 GiB


class Kind(NamedTuple):
    error: str  # "keep" or "drop"
    units: int
    room: int


def kind_of(host: SaeHost, uses: Sequence[tuple[Any, list[int]]], capacity) -> Kind | None:
    """The shapes that these uses need, or None when there are none."""
    errors = {use.error for use, rows in uses if rows}
    numbers, _, met = host._compact([(use, rows) for use, rows in uses if rows])
    most = max((sum(len(use.row.features) for use in line) for line in met), default=0)
    room = next((size for size in ROOM if most <= size), None)
    if len(errors) != 1 or room is None or not numbers:
        return None
    units = capacity(len(numbers))
    if units * room * host.held.decoder.shape[1] > MOST_GATHERED:
        return None
    return Kind(errors.pop(), units, room)


class StillSae:
    """Buffers and operations of one kind of use of one dictionary at one site."""

    def __init__(self, host: SaeHost, kind: Kind):
        self.host, self.kind = host, kind
        shape, device = (kind.units, kind.room), host.device
        self.index = torch.zeros(kind.units, dtype=torch.long, device=device)
        self.places, self.rows = (torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2))
        self.clamp = torch.zeros(shape, dtype=torch.int8, device=device)
        self.low, self.high = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
        self.gate = torch.zeros(shape, dtype=torch.bool, device=device)

    def fill(self, uses: Sequence[tuple[Any, list[int]]]) -> None:
        """From now on these uses are at work, and no others."""
        host, (_, units, room) = self.host, self.kind
        numbers, lines, met = host._compact([(use, rows) for use, rows in uses if rows])
        spare = units - len(numbers)
        at = torch.tensor(lines + lines[:1] * spare)
        self.index.copy_(torch.tensor(numbers + numbers[:1] * spare))
        if not room:
            return
        shape = (len(met), room)
        places, rows = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        clamp, gate = torch.zeros(shape, dtype=torch.int8), torch.zeros(shape, dtype=torch.bool)
        low, high = torch.zeros(shape), torch.zeros(shape)
        for line, together in enumerate(met):
            first = 0
            for row in (use.row for use in together):
                part = slice(first, first + len(row.features))
                places[line, part] = host._encoder_places(row.features).cpu()
                rows[line, part] = host._places(row.features).cpu()
                clamp[line, part] = torch.tensor(row.kinds, dtype=torch.int8)
                low[line, part], high[line, part] = torch.tensor(row.lows), torch.tensor(row.highs)
                gate[line, part] = torch.tensor(row.gates, dtype=torch.bool)
                first += len(row.features)
        for held, values in (
            (self.places, places), (self.rows, rows), (self.clamp, clamp), (self.low, low), (self.high, high),
            (self.gate, gate),
        ):  # fmt: skip
            held.copy_(values[at])

    def run(self, x: torch.Tensor, around: Around) -> torch.Tensor:
        host, held = self.host, self.host.held
        rows = host.view.laid_out(x)
        units = host.view.read(rows, self.index, around)
        dense = None
        if self.kind.error == "drop" or held.activation.whole_row:
            dense = held.activation(linear(units.v, held.encoder, held.encoder_bias))  # [units, F]
        delta = self._surgery(units.v, dense) if self.kind.room else torch.zeros_like(units.v)
        if self.kind.error == "keep":
            new = host.view.changed(units, delta)
        else:
            assert dense is not None
            new = host.view.replaced(units, torch.addmm(held.decoder_bias, dense, held.decoder) + delta)
        return rows.index_copy(0, self.index, new.to(x.dtype)).view(x.shape)

    def _surgery(self, v: torch.Tensor, dense: torch.Tensor | None) -> torch.Tensor:
        """sum over clamped features of (f' - f) w, [units, d]."""
        held = self.host.held
        if dense is not None:
            f = dense.gather(1, self.places)
        else:
            z = torch.einsum("ud,ukd->uk", v, held.encoder[self.places]) + held.encoder_bias[self.places]
            f = held.activation.part(self.places)(z)
        bound = torch.minimum(torch.maximum(f, self.low), self.high)
        change = torch.where(self.clamp == ABSOLUTE, self.low - f, 0.0)
        change = torch.where(self.clamp == ADDITIVE, self.low, change)
        change = torch.where(self.clamp == MULTIPLY, f * self.low - f, change)
        change = torch.where(self.clamp == BOUND, bound - f, change)
        live = f != 0 if held.activation.whole_row else f > 0
        change = torch.where(self.gate & ~live, 0.0, change)
        return torch.einsum("uk,ukd->ud", change, held.decoder[self.rows])
