"""A dictionary spliced into a site in fixed shapes, so that a step with it can be recorded and replayed.

`SaeHost.run` does as little as a step's uses allow, which makes its shapes follow from them. Here shapes come in a few
sizes: a block of so many units, and room for so many clamped features. Units, features and bounds are data, and so are
the rows of the dictionary: those of the features that somebody clamps are gathered when uses change (`fill`), not in a
step. Spare units repeat the first one and write the same numbers again; features that a unit does not clamp change by
nothing. Where who is live depends on all features (top-k), whole rows are encoded; reconstruction is two products.

Every kind of clamp is one piece of arithmetic, the change of a feature
    f' - f = scale f + shift, held between low - f and high - f
and nothing where f is at `gate`: at most zero (top-k: zero) under `only_if_active`, never where `gate` is no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import linear

from birkhoff.hooks.edit import SiteContext
from birkhoff.sae.clamps import ABSOLUTE, ADDITIVE, BOUND, MULTIPLY, ClampTable

if TYPE_CHECKING:
    from birkhoff.sae.splice import SaeHost

ROOM = (0, 4, 16, 64, 256, 1024)  # clamped features of all units together


class GraphSaeKind(NamedTuple):
    error: str  # "keep" or "drop"
    units: int
    room: int


def kind_of(host: SaeHost, uses: Sequence[tuple[Any, list[int]]], capacity) -> GraphSaeKind | None:
    """The shapes that these uses need, or None when there are none."""
    errors = {use.error for use, rows in uses if rows}
    numbers, _, met = host._compact([(use, rows) for use, rows in uses if rows])
    features = {feature for line in met for use in line for feature in use.row.features}
    room = next((size for size in ROOM if len(features) <= size), None)
    if len(errors) != 1 or room is None or not numbers:
        return None
    return GraphSaeKind(errors.pop(), capacity(len(numbers)), room)


class GraphSae:
    """Buffers and operations of one kind of use of one dictionary at one site."""

    def __init__(self, host: SaeHost, kind: GraphSaeKind):
        self.host = host
        self.kind = kind
        held, device = host.held, host.device
        self.whole = kind.error == "drop" or held.activation.whole_row  # every feature is encoded
        self.index = torch.zeros(kind.units, dtype=torch.long, device=device)
        self.places = torch.zeros(kind.room, dtype=torch.long, device=device)  # of the clamped features
        self.clamps = torch.zeros(5, kind.units, kind.room, device=device)
        self.decoder = held.decoder.new_zeros(kind.room, held.decoder.shape[1])
        if not self.whole:
            self.encoder = held.encoder.new_zeros(kind.room, held.encoder.shape[1])
            self.bias = held.encoder_bias.new_zeros(kind.room)
            self.activation = held.activation.part(self.places)

    def fill(self, uses: Sequence[tuple[Any, list[int]]]) -> None:
        """From now on these uses are at work, and no others."""
        host, held, (_, units, room) = self.host, self.host.held, self.kind
        numbers, lines, met = host._compact([(use, rows) for use, rows in uses if rows])
        spare = units - len(numbers)
        self.index.copy_(torch.tensor(numbers + numbers[:1] * spare))
        if not room:
            return
        table = ClampTable.of([[use.row for use in line] for line in met], torch.device("cpu"))
        self.clamps.copy_(_arithmetic(table, room)[:, lines + lines[:1] * spare])
        features = table.features.tolist()
        features += features[:1] * (room - len(features))
        self.places.copy_(host._encoder_places(features))
        torch.index_select(held.decoder, 0, host._places(features), out=self.decoder)
        if not self.whole:
            torch.index_select(held.encoder, 0, self.places, out=self.encoder)
            torch.index_select(held.encoder_bias, 0, self.places, out=self.bias)
            own = self.activation.tensors()
            all_of_them = held.activation.tensors()
            for name, buffer in own.items():
                torch.index_select(all_of_them[name], 0, self.places, out=buffer)

    def run(self, x: torch.Tensor, around: SiteContext) -> torch.Tensor:
        host, held = self.host, self.host.held
        rows = host.view.laid_out(x)
        units = host.view.read(rows, self.index, around)
        dense = None
        if self.whole:
            dense = held.activation(linear(units.v, held.encoder, held.encoder_bias))  # [units, F]
        delta = self._surgery(units.v, dense) if self.kind.room else None
        if self.kind.error == "drop":
            assert dense is not None
            made = torch.addmm(held.decoder_bias, dense, held.decoder)
            new = host.view.replaced(units, made if delta is None else made + delta)
        elif delta is not None:
            new = host.view.changed(units, delta)
        else:
            return x  # nothing is clamped, and the error is kept: that is the row itself
        return rows.index_copy(0, self.index, new.to(x.dtype)).view(x.shape)

    def _surgery(self, v: torch.Tensor, dense: torch.Tensor | None) -> torch.Tensor:
        """sum over clamped features of (f' - f) w, [units, d]."""
        if dense is None:
            f = self.activation(linear(v, self.encoder, self.bias))  # [units, room]
        else:
            f = dense.index_select(1, self.places)
        scale, shift, low, high, gate = self.clamps
        change = torch.clamp(torch.addcmul(shift, scale, f), low - f, high - f)
        still = f == gate if self.host.held.activation.whole_row else f <= gate
        return change.masked_fill_(still, 0.0) @ self.decoder


def _arithmetic(table: ClampTable, room: int) -> torch.Tensor:
    """Scale, shift, low, high and gate of the features of every line, [5, lines, room]; features behind change none."""
    kind = table.kind
    low = table.low
    high = table.high
    lines, count = kind.shape
    found = torch.zeros(5, lines, room)
    found[2], found[3], found[4] = -torch.inf, torch.inf, torch.nan
    scale, shift, least, most, gate = found[:, :, :count]
    scale.copy_(torch.where(kind == ABSOLUTE, -1.0, torch.where(kind == MULTIPLY, low - 1, 0.0)))
    shift.copy_(torch.where((kind == ABSOLUTE) | (kind == ADDITIVE), low, 0.0))
    least.copy_(torch.where(kind == BOUND, low, -torch.inf))
    most.copy_(torch.where(kind == BOUND, high, torch.inf))
    gate.copy_(torch.where(table.gate, 0.0, torch.nan))
    return found
