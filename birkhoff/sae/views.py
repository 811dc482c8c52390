"""How a dictionary applies to the rows of a site: what it encodes, and how changes are written back.

    single      the row itself, at hooks of width d
    flat        the m streams concatenated, one row of m * d
    per_stream  every stream is a row of its own, with shared weights
    read        u = sum_i a_i X_i, the input that the next sublayer reads with its weights a
    mean        the mean of the streams

A view turns the rows of a step into `units` that are encoded one by one. `single`, `flat` and `per_stream` replace
the unit; `read` and `mean` have fewer numbers than the streams, so they add the change: `mean` to every stream,
`read` by its spread. Spread `read` adds a_i / sum a^2 of the change to stream i, the smallest change after which
the same weights read exactly the new u; `post` adds the write-out weight p_i of it, as if the last sublayer had
written it; `uniform` adds all of it, as `mean` does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from birkhoff.errors import SaeError
from birkhoff.hooks.edit import SiteContext
from birkhoff.hooks.schema import HookSchema


@dataclass(frozen=True, eq=False)
class Units:
    """The encoded rows `v` [r, d], and what is needed to write back: the old rows and the share of each stream."""

    old: torch.Tensor  # float32 [r, d], or [r, m, d] of the views that add
    v: torch.Tensor
    share: torch.Tensor | None = None  # [r, m, 1]


@dataclass(frozen=True)
class View:
    name: str
    spread: str | None
    streams: int  # m, or 1 at a hook without streams

    @property
    def adds(self) -> bool:
        return self.name in ("read", "mean")

    @property
    def needs_post(self) -> bool:
        return self.spread == "post"

    def by_unit(self, x: torch.Tensor) -> torch.Tensor:
        """A view of a site's tensor whose first dimension is units."""
        if self.name == "per_stream":
            return x.flatten(0, 1)
        return x.flatten(1) if self.name == "flat" else x

    def unit_indices(self, rows: Sequence[int], streams: tuple[int, ...] | None) -> list[int]:
        """The units of these rows of the step."""
        if self.name != "per_stream":
            return list(rows)
        chosen = range(self.streams) if streams is None else streams
        return [row * self.streams + stream for row in rows for stream in chosen]

    def read(self, x: torch.Tensor, index: torch.Tensor | None, context: SiteContext) -> Units:
        """Read the units at `index` of a tensor from `by_unit`, or all of them."""
        rows = _select(x, index)
        old = rows.float()
        if self.name == "mean":
            return Units(old, old.mean(1), old.new_ones(()))
        if self.name != "read":
            return Units(old, old)
        assert context.read is not None, "attaching refuses this view where nothing reads streams"
        weights = context.read(rows).float()  # [r, m]
        u = torch.einsum("rm,rmd->rd", weights, old)
        if self.spread == "read":
            share = weights / weights.square().sum(-1, keepdim=True)
        elif self.spread == "post":
            assert context.post is not None, (
                "attaching refuses this spread where nothing has written the streams"
            )
            share = _select(context.post, index).float()
        else:
            share = torch.ones_like(weights)
        return Units(old, u, share.unsqueeze(-1))

    def changed(self, units: Units, delta: torch.Tensor) -> torch.Tensor:
        """The rows after `v` became `v + delta`."""
        return units.old + (delta if units.share is None else units.share * delta.unsqueeze(1))

    def replaced(self, units: Units, new: torch.Tensor) -> torch.Tensor:
        """The rows after `v` became `new`."""
        return new if units.share is None else self.changed(units, new - units.v)


def _select(x: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return x if index is None else x.index_select(0, index)


def make_view(name: str, spread: str | None, d_model: int, hook: str, layer: int, row: HookSchema) -> View:
    """The view for rows of a hook; refuses views that do not fit."""
    has_streams = hook.startswith("mhc_streams")
    if (name == "single") == has_streams:
        fitting = "flat, per_stream, read or mean" if has_streams else "single"
        kind = f"{row.logical_shape[0]} streams" if has_streams else "one stream"
        raise SaeError(f"view is {name!r}, and {hook} has {kind}: use {fitting}.")
    streams, hidden = row.logical_shape if has_streams else (1, row.width)
    width = row.width if name == "flat" else hidden
    if d_model != width:
        what = f"m*d = {streams}*{hidden} = {width}" if name == "flat" else str(width)
        raise SaeError(
            f"this dictionary encodes rows of {d_model}, and view {name!r} of {hook} has rows of {what}."
        )
    if spread == "post" and (hook, layer) == ("mhc_streams_pre_attn", 0):
        raise SaeError(
            "spread 'post' at mhc_streams_pre_attn[0]: no sublayer has written those streams yet. Use a later layer, "
            "or another spread."
        )
    return View(name, spread, streams)
