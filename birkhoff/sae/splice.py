"""A dictionary spliced into a site: all its uses of one step run together, and rows nobody opted in keep their bits.

Rows that opted in are gathered into a dense block whose height comes from a short ladder of sizes, changed, and put
back. Two changes are made of one piece, the surgery  D = sum over clamped i of (f'_i - f_i) w_i :

    delta, and full reconstruction that keeps the error    v + D         other features and the error stay as they are
    full reconstruction that drops it                      v^ + D        v^ = sum_i f_i w_i + b

(v^ + b + D + (v - v^) is v + D, so keeping the error needs no reconstruction, and without clamps it is exactly the
identity.) Clamps that only add are constants: nothing is encoded for them. What a step needs of the dictionary is
gathered once for a composition of uses and kept while compositions repeat, as they do from one decoded token to the
next. `plain` is the twin without any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from birkhoff.hooks.edit import Op, Path, SiteContext
from birkhoff.sae import graph_sae
from birkhoff.sae.clamps import ClampRow, ClampTable, LaidClamps
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.encode import DeviceSae, FeatureSubset, TopkFeatures, columns, kept, reconstruct
from birkhoff.sae.views import View

LADDER = (
    1,
    2,
    4,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
)  # heights of the block; beyond the last, multiples of half of it
MOST_COMPOSITIONS = 64
MOST_LAYOUTS = 16


def capacity(units: int) -> int:
    """The height of the block for so many units."""
    for size in LADDER:
        if units <= size:
            return size
    step = LADDER[-1] // 2
    return -(-units // step) * step


@dataclass(frozen=True, eq=False)
class SaeUse:
    """One request's use of a dictionary at one site, as a plan carries it."""

    host: SaeHost
    row: ClampRow
    op: Op
    path: Path = "both"
    error: str = "keep"  # "drop": the row is replaced by its reconstruction
    streams: tuple[int, ...] | None = None

    @property
    def needs_post(self) -> bool:
        return self.host.view.needs_post

    @cached_property
    def constant(self) -> torch.Tensor:
        """What clamps that only add come to, [d]."""
        return torch.tensor(self.row.lows, device=self.host.device) @ self.host.decoder_rows(
            self.row.features
        )


@dataclass(frozen=True, eq=False)
class _Composition:
    """What one set of lines needs. A line is the uses that meet in one unit; most lines hold one."""

    constants: torch.Tensor | None  # [lines, d]
    encodes: tuple[bool, ...]  # by line
    table: ClampTable
    chosen: FeatureSubset | None  # None when nothing has to be encoded
    decoder: torch.Tensor  # [C, d]


@dataclass(frozen=True, eq=False)
class _SpliceLayout:
    """Units of a step and what is done to each, as tensors. `index` is filled up to a fixed size by repeating the first
    unit; `picked` are the places whose features have to be found, None for all of them."""

    index: torch.Tensor
    units: torch.Tensor  # the first `count` of them, which are written
    count: int
    composition: _Composition
    encodes: bool
    picked: torch.Tensor | None
    clamps: LaidClamps | None
    constants: torch.Tensor | None  # [n, d]


class SaeHost:
    """One dictionary at one site. `features` are those whose rows are held, None for all."""

    def __init__(
        self, sae: Sae, view: View, features: Sequence[int] | None, device: torch.device, order: int = 0
    ):
        self.view = view
        self.order = order
        self.device = torch.device(device)
        self.features = None if features is None else tuple(sorted(features))
        self._place = (
            None if self.features is None else {name: place for place, name in enumerate(self.features)}
        )
        self.held = self._hold(sae)
        self._compositions: dict[tuple[tuple[bytes, ...], ...], _Composition] = {}
        self._layouts: dict[tuple[tuple[SaeUse, tuple[int, ...]], ...], _SpliceLayout] = {}

    def _hold(self, sae: Sae) -> DeviceSae:
        if self.features is None:
            return DeviceSae.of(sae, self.device)
        chosen = torch.tensor(self.features, dtype=torch.long)
        decoder = sae.decoder[chosen].to(self.device)
        bias = sae.decoder_bias.to(self.device)
        if sae.activation.whole_row:  # who is among the k largest takes all of the encoder to know
            return DeviceSae(
                sae.encoder.to(self.device), sae.encoder_bias.to(self.device), decoder, bias, sae.activation
            )
        encoder = sae.encoder[chosen].to(self.device)
        c = sae.encoder_bias[chosen].to(self.device)
        return DeviceSae(encoder, c, decoder, bias, sae.activation.part(chosen).to(self.device))

    @property
    def num_bytes(self) -> int:
        held = self.held
        tensors = [
            held.encoder,
            held.encoder_bias,
            held.decoder,
            held.decoder_bias,
            *held.activation.tensors().values(),
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def decoder_rows(self, features: Sequence[int]) -> torch.Tensor:
        return self.held.decoder[self._places(features)]

    def _places(self, features: Sequence[int]) -> torch.Tensor:
        places = features if self._place is None else [self._place[name] for name in features]
        return torch.tensor(places, dtype=torch.long, device=self.device)

    def run(
        self, x: torch.Tensor, uses: Sequence[tuple[Any, list[int]]], around: SiteContext
    ) -> torch.Tensor:
        """A new tensor with the named rows changed and all others bit-identical."""
        for error in (
            "keep",
            "drop",
        ):  # of one dictionary a row is in one of the two: requests are refused otherwise
            chosen = [(use, rows) for use, rows in uses if use.error == error and len(rows)]
            if chosen:
                x = self._run(x, chosen, around, error)
        return x

    def _run(
        self, x: torch.Tensor, uses: list[tuple[SaeUse, list[int]]], around: SiteContext, error: str
    ) -> torch.Tensor:
        laid_out = self._layout(uses)
        if not laid_out.count:
            return x
        rows = self.view.laid_out(x)
        units = self.view.read(rows, laid_out.index, around)
        found = kept(self.held, units.v) if error == "drop" or laid_out.encodes else None
        delta = self._surgery(units.v, laid_out, found)
        if error == "keep":
            new = self.view.changed(units, delta)
        else:
            new = self.view.replaced(units, reconstruct(self.held, units.v, found) + delta)
        new = new if new.dtype is x.dtype else new.to(x.dtype)
        return rows.index_copy(0, laid_out.units, new[: laid_out.count]).view(x.shape)

    def _layout(self, uses: list[tuple[SaeUse, list[int]]]) -> _SpliceLayout:
        """Where a step's uses meet the units. Requests that decode meet the same ones step after step."""
        key = tuple((use, tuple(rows)) for use, rows in uses)
        known = self._layouts.get(key)
        if known is None:
            known = self._lay_out(uses)
            if known.count <= LADDER[-1]:  # those of prompts are large and do not come again
                if len(self._layouts) >= MOST_LAYOUTS:
                    self._layouts.clear()
                self._layouts[key] = known
        return known

    def _lay_out(self, uses: list[tuple[SaeUse, list[int]]]) -> _SpliceLayout:
        numbers, lines, met = self._compact(uses)
        composition = self._composition(met)
        spare = capacity(len(numbers)) - len(numbers) if numbers else 0
        lines += lines[:1] * spare
        return self._laid(numbers + numbers[:1] * spare, lines, composition, len(numbers))

    def _laid(
        self, index: list[int], lines: list[int], composition: _Composition, count: int
    ) -> _SpliceLayout:
        where = [place for place, line in enumerate(lines) if composition.encodes[line]]
        encodes = bool(where) and composition.chosen is not None
        everywhere = len(where) == len(lines)
        at = torch.tensor(lines, dtype=torch.long, device=self.device)
        picked = (
            torch.tensor(where, dtype=torch.long, device=self.device) if encodes and not everywhere else None
        )
        clamps = composition.table.at(at if picked is None else at[picked]) if encodes else None
        constants = None if composition.constants is None else composition.constants[at]
        units = torch.tensor(index, dtype=torch.long, device=self.device)
        return _SpliceLayout(units, units[:count], count, composition, encodes, picked, clamps, constants)

    def _compact(
        self, uses: list[tuple[SaeUse, list[int]]]
    ) -> tuple[list[int], list[int], list[tuple[SaeUse, ...]]]:
        """The units that opted in, the line of each, and the uses that every line holds."""
        meeting: dict[int, tuple[int, ...]] = {}
        for number, (use, rows) in enumerate(uses):
            for unit in self.view.numbers(rows, use.streams):
                meeting[unit] = (*meeting.get(unit, ()), number)
        line_of: dict[tuple[int, ...], int] = {}
        lines = [line_of.setdefault(together, len(line_of)) for together in meeting.values()]
        return list(meeting), lines, [tuple(uses[number][0] for number in together) for together in line_of]

    def _composition(self, met: list[tuple[SaeUse, ...]]) -> _Composition:
        key = tuple(tuple(use.row.content for use in line) for line in met)
        known = self._compositions.get(key)
        if known is None:
            if len(self._compositions) >= MOST_COMPOSITIONS:
                self._compositions.clear()
            known = self._compositions[key] = self._compose(met)
        return known

    def _compose(self, met: list[tuple[SaeUse, ...]]) -> _Composition:
        adding = [[use for use in line if use.row.only_adds] for line in met]
        rest = [[use.row for use in line if not use.row.only_adds] for line in met]
        constants = None
        if any(use.row.features for line in adding for use in line):
            zero = torch.zeros(self.held.decoder.shape[1], device=self.device)
            constants = torch.stack([sum((use.constant for use in line), zero) for line in adding])
        table = ClampTable.of(rest, self.device)
        features = table.features.tolist()
        encodes = tuple(any(row.features for row in line) for line in rest)
        chosen = FeatureSubset.of(self.held, self._encoder_places(features)) if features else None
        return _Composition(constants, encodes, table, chosen, self.decoder_rows(features))

    def _encoder_places(self, features: Sequence[int]) -> torch.Tensor:
        if self.held.activation.whole_row:
            return torch.tensor(list(features), dtype=torch.long, device=self.device)
        return self._places(features)

    def _surgery(self, v: torch.Tensor, laid: _SpliceLayout, found: TopkFeatures | None) -> torch.Tensor:
        """sum over clamped features of (f' - f) w, [n, d]."""
        composition = laid.composition
        picked = laid.picked
        constants = laid.constants
        if laid.clamps is None or composition.chosen is None:
            return torch.zeros_like(v) if constants is None else constants
        part = v if picked is None else v[picked]
        found = found if picked is None or found is None else found.rows(picked)
        f = columns(part, composition.table.features, composition.chosen, found)
        change = (laid.clamps.apply(f, self.held.activation.whole_row) - f) @ composition.decoder
        if picked is None:
            return change if constants is None else constants + change
        return (torch.zeros_like(v) if constants is None else constants).index_add(0, picked, change)

    def graph_kind(self, uses: Sequence[tuple[Any, list[int]]]) -> graph_sae.GraphSaeKind | None:
        """Which fixed shapes these uses fit, or None."""
        return graph_sae.kind_of(self, uses, capacity)

    def still(self, kind: graph_sae.GraphSaeKind) -> graph_sae.GraphSae:
        return graph_sae.GraphSae(self, kind)

    def warm(self) -> None:
        """Run everything once on a row of zeros, so that nothing is set up inside a step."""
        v = torch.zeros(1, self.held.decoder.shape[1], device=self.device)
        first = 0 if self.features is None else self.features[0]
        row = ClampRow((first,), (1,), (0.0,), (0.0,), (False,))
        composition = self._compose([(SaeUse(self, row, "delta"),)])
        found = kept(self.held, v)
        self._surgery(v, self._laid([0], [0], composition, 1), found)
        if self.features is None:
            reconstruct(self.held, v, found)


def plain(sae: Sae, v: torch.Tensor, row: ClampRow, error: str) -> torch.Tensor:
    """The twin: every feature of rows `[n, d]` that share their clamps, dense, by the definitions."""
    f = sae.encode(v)
    table = ClampTable.of([[row]], v.device)
    lines = torch.zeros(len(v), dtype=torch.long)
    changed = f.clone()
    changed[:, table.features] = table.at(lines).apply(f[:, table.features], sae.activation.whole_row)
    lost = v.float() - sae.decode(f) if error == "keep" else 0.0
    return sae.decode(changed) + lost
