"""A dictionary spliced into a site: all its uses of one step run together, and rows without a use keep their bits.

Units (rows, or streams of rows; see `views.py`) with a use are gathered into a dense block whose height comes from a
short list of sizes, changed, and written back. Both kinds of change are built from one term, the sum over clamped
features  D = sum_i (f'_i - f_i) w_i :

    delta, and full reconstruction that keeps the error    v + D         other features and the error are unchanged
    full reconstruction that drops the error               v^ + D        v^ = sum_i f_i w_i + b

(v^ + D + (v - v^) is v + D, so keeping the error needs no reconstruction, and without clamps it is exactly the
identity.) A dictionary that normalises rows computes v^ and D of the normalised row, and both are turned back
(`row_norm.py`). Clamps that only add have a constant D: nothing is encoded for them. The tensors that a step needs
(`SpliceData`) are gathered once for a set of uses and cached, since uses repeat from one decoded token to the next.

Eager steps (`SaeHost.run`) and recorded steps (`graph_sae.py`) both call `run_splice` with the same shapes, so their
results have equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from birkhoff.hooks.edit import Op, Path, SiteContext
from birkhoff.hooks.gating import SiteGate
from birkhoff.sae.clamps import ABSOLUTE, ClampParameters, ClampRow, clamp_parameters, feature_change
from birkhoff.sae.dictionary import Sae, weight_tensors
from birkhoff.sae.encode import (
    DeviceSae,
    FeatureRows,
    TopkFeatures,
    encode_topk,
    feature_columns,
    reconstruct,
)
from birkhoff.sae.graph_sae import GraphSae
from birkhoff.sae.row_norm import normalize_rows
from birkhoff.sae.views import View

# Heights of the block; beyond the last, multiples of half of it.
UNIT_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# Clamped features of all units together; beyond the last, multiples of it, which recorded steps do not take.
FEATURE_SIZES = (0, 4, 16, 64, 256, 1024)
MAX_CACHED_FEATURE_ROWS = 64
MAX_CACHED_DATA = 16

Uses = Sequence[tuple[Any, list[int]]]  # `SaeUse` and the rows of the step


def padded_units(units: int) -> int:
    """The height of the block for `units` units."""
    for size in UNIT_SIZES:
        if units <= size:
            return size
    step = UNIT_SIZES[-1] // 2
    return -(-units // step) * step


def _padded_features(features: int) -> int:
    for size in FEATURE_SIZES:
        if features <= size:
            return size
    return -(-features // FEATURE_SIZES[-1]) * FEATURE_SIZES[-1]


@dataclass(frozen=True, eq=False)
class SaeUse:
    """One request's use of a dictionary at one site, as a plan carries it."""

    host: SaeHost
    row: ClampRow
    op: Op
    path: Path = "both"
    error: str = "keep"  # "drop": the row is replaced by its reconstruction
    streams: tuple[int, ...] | None = None
    gate: SiteGate | None = None

    @property
    def needs_post(self) -> bool:
        return self.host.view.needs_post


class SpliceKind(NamedTuple):
    """The shapes of a step's uses."""

    error: str  # "keep" or "drop"
    units: int
    room: int  # columns for clamped features; 0 if nothing is encoded
    constant: bool  # nothing is encoded and D is a constant


@dataclass(frozen=True, eq=False)
class SpliceData:
    """The tensors of a step's uses. Spare units repeat the first one and write the same numbers again."""

    kind: SpliceKind
    index: torch.Tensor  # [units]
    clamps: ClampParameters | None  # [units, room] each
    features: FeatureRows | None
    constant: torch.Tensor | None  # [units, d]
    # What an eager step can leave out. A recorded step does not: the next uses it is filled with may need it.
    every_unit: bool = False  # `index` is 0, 1, ..., units - 1
    bounded: bool = True
    gated: bool = True

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.index
        if self.clamps is not None and self.features is not None:
            yield from self.clamps
            yield from self.features.tensors()
        if self.constant is not None:
            yield self.constant

    def clone(self) -> SpliceData:
        return SpliceData(
            self.kind,
            self.index.clone(),
            None if self.clamps is None else ClampParameters(*(tensor.clone() for tensor in self.clamps)),
            None if self.features is None else self.features.clone(),
            None if self.constant is None else self.constant.clone(),
        )


class SaeHost:
    """One dictionary at one site. `features` are those whose rows are on the device, None for all."""

    def __init__(
        self, sae: Sae, view: View, features: Sequence[int] | None, device: torch.device, order: int = 0
    ):
        self.view = view
        self.order = order
        self.device = torch.device(device)
        self.features = None if features is None else tuple(sorted(features))
        self._index_of = (
            None if self.features is None else {feature: index for index, feature in enumerate(self.features)}
        )
        self.weights = self._load(sae)
        self._feature_rows: dict[tuple[int, ...], FeatureRows] = {}
        self._data: dict[tuple[tuple[SaeUse, tuple[int, ...]], ...], SpliceData] = {}

    def _load(self, sae: Sae) -> DeviceSae:
        if self.features is None:
            return DeviceSae.of(sae, self.device)
        chosen = torch.tensor(self.features, dtype=torch.long)
        decoder = sae.decoder[chosen].to(self.device)
        bias = sae.decoder_bias.to(self.device)
        if sae.activation.whole_row:  # the k largest can only be found with the whole encoder
            return DeviceSae(
                sae.encoder.to(self.device),
                sae.encoder_bias.to(self.device),
                decoder,
                bias,
                sae.activation,
                sae.normalize,
            )
        encoder = sae.encoder[chosen].to(self.device)
        encoder_bias = sae.encoder_bias[chosen].to(self.device)
        activation = sae.activation.part(chosen).to(self.device)
        return DeviceSae(encoder, encoder_bias, decoder, bias, activation, sae.normalize)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in weight_tensors(self.weights))

    def _rows_of(self, features: Sequence[int]) -> torch.Tensor:
        """Indices of features among the rows on the device."""
        rows = features if self._index_of is None else [self._index_of[feature] for feature in features]
        return torch.tensor(rows, dtype=torch.long, device=self.device)

    def run(self, x: torch.Tensor, uses: Uses, context: SiteContext) -> torch.Tensor:
        """Return a new tensor with the named rows changed and all others bit-identical."""
        for error in ("keep", "drop"):  # requests that use both on one row are refused
            chosen = [(use, rows) for use, rows in uses if use.error == error and rows]
            if chosen:
                x = self.run_splice(x, self.splice_data(chosen), context)
        return x

    def run_splice(self, x: torch.Tensor, data: SpliceData, context: SiteContext) -> torch.Tensor:
        kind = data.kind
        if kind.error == "keep" and not kind.room and not kind.constant:
            return x  # nothing is clamped and the error is kept: the row itself
        rows = self.view.by_unit(x)
        every_unit = data.every_unit and len(rows) == kind.units
        units = self.view.read(rows, None if every_unit else data.index, context)
        normalized = normalize_rows(units.v, self.weights.normalize)
        v = normalized.rows
        topk = encode_topk(self.weights, v) if kind.room or kind.error == "drop" else None
        if kind.error == "drop":
            reconstruction = self._plus_change(reconstruct(self.weights, v, topk), v, data, topk)
            new = self.view.replaced(units, normalized.restore(reconstruction))
        elif units.share is None and normalized.scale is None:
            new = self._plus_change(units.old, v, data, topk)
        else:
            change = self._plus_change(torch.zeros_like(v), v, data, topk)
            new = self.view.changed(units, normalized.restore_change(change))
        new = new.to(x.dtype)
        return (new if every_unit else rows.index_copy(0, data.index, new)).view(x.shape)

    def _plus_change(
        self, base: torch.Tensor, v: torch.Tensor, data: SpliceData, topk: TopkFeatures | None
    ) -> torch.Tensor:
        """`base` + D, where D follows from the features of `v`."""
        if data.constant is not None:
            return base + data.constant
        if data.clamps is None or data.features is None:
            return base
        f = feature_columns(v, data.features, topk)  # [units, room]
        signed = self.weights.activation.whole_row
        change = feature_change(f, data.clamps, signed, data.bounded, data.gated)
        return torch.addmm(base, change, data.features.decoder)

    def splice_data(self, uses: Uses) -> SpliceData:
        """The tensors of uses with the same `error`."""
        key = tuple((use, tuple(rows)) for use, rows in uses)
        data = self._data.get(key)
        if data is None:
            # kept tensors are read by later passes with gradients, which refuse those made in inference mode
            with torch.inference_mode(False), torch.no_grad():
                data = self._build(uses)
            if data.kind.units <= UNIT_SIZES[-1]:  # those of prompts are large and do not repeat
                if len(self._data) >= MAX_CACHED_DATA:
                    self._data.clear()
                self._data[key] = data
        return data

    def _build(self, uses: Uses) -> SpliceData:
        index, lines, groups = self._group_units(uses)
        units = padded_units(len(index))
        spare = units - len(index)
        every_unit = index == list(range(units))
        index += index[:1] * spare
        lines += lines[:1] * spare
        index_tensor = torch.tensor(index, dtype=torch.long, device=self.device)
        line_index = torch.tensor(lines, dtype=torch.long)
        error = uses[0][0].error
        features = sorted({feature for group in groups for row in group for feature in row.features})
        if not features:
            return SpliceData(SpliceKind(error, units, 0, False), index_tensor, None, None, None)
        if all(row.only_adds for group in groups for row in group):
            shift = clamp_parameters(groups, features, len(features)).shift.to(self.device)
            constant = (shift @ self.weights.decoder[self._rows_of(features)])[line_index.to(self.device)]
            kind = SpliceKind(error, units, 0, True)
            return SpliceData(kind, index_tensor, None, None, constant, every_unit)
        room = _padded_features(len(features))
        by_line = clamp_parameters(groups, features, room)
        clamps = ClampParameters(*(tensor.to(self.device) for tensor in by_line.rows(line_index)))
        kind = SpliceKind(error, units, room, False)
        bounded = bool((by_line.low.isfinite() | by_line.high.isfinite()).any())
        gated = not bool(by_line.gate.isnan().all())
        feature_rows = self._gather(tuple(features), room)
        return SpliceData(kind, index_tensor, clamps, feature_rows, None, every_unit, bounded, gated)

    def _group_units(self, uses: Uses) -> tuple[list[int], list[int], list[list[ClampRow]]]:
        """The units that have a use, the line of each, and the clamps of every line. Units with the same uses share a
        line."""
        uses_of: dict[int, tuple[int, ...]] = {}
        for index, (use, rows) in enumerate(uses):
            for unit in self.view.unit_indices(rows, use.streams):
                uses_of[unit] = (*uses_of.get(unit, ()), index)
        line_of: dict[tuple[int, ...], int] = {}
        lines = [line_of.setdefault(indices, len(line_of)) for indices in uses_of.values()]
        return list(uses_of), lines, [[uses[index][0].row for index in indices] for indices in line_of]

    def _gather(self, features: tuple[int, ...], room: int) -> FeatureRows:
        rows = self._feature_rows.get(features)
        if rows is None:
            if len(self._feature_rows) >= MAX_CACHED_FEATURE_ROWS:
                self._feature_rows.clear()
            padded = [*features, *features[:1] * (room - len(features))]
            rows = FeatureRows.of(self.weights, features, self._rows_of(padded))
            self._feature_rows[features] = rows
        return rows

    def graph_kind(self, uses: Uses) -> SpliceKind | None:
        """The shapes of these uses, or None if a recorded step cannot run them."""
        active = [(use, rows) for use, rows in uses if rows]
        if len({use.error for use, _ in active}) != 1:
            return None
        kind = self.splice_data(active).kind
        return kind if kind.room <= FEATURE_SIZES[-1] else None

    def graph_splice(self, kind: SpliceKind) -> GraphSae:
        return GraphSae(self, kind)

    def warm(self) -> None:
        """Run encoder and decoder once on a row of zeros, so that nothing is set up inside a step."""
        v = torch.zeros(1, self.weights.decoder.shape[1], device=self.device)
        feature = 0 if self.features is None else self.features[0]
        clamp = ClampRow((feature,), (ABSOLUTE,), (0.0,), (0.0,), (False,))
        room = _padded_features(1)
        clamps = ClampParameters(
            *(tensor.to(self.device) for tensor in clamp_parameters([[clamp]], [feature], room))
        )
        topk = encode_topk(self.weights, v)
        features = self._gather((feature,), room)
        f = feature_columns(v, features, topk)
        feature_change(f, clamps, self.weights.activation.whole_row) @ features.decoder
        if self.features is None:
            reconstruct(self.weights, v, topk)
