"""Nodes: the parts of a site's tensor that attribution scores one by one.

    SiteNodes      a row of a site; where a row has several streams, heads or entries, each of them
    ExpertNodes    what one routed expert adds to `mlp_out`
    FeatureNodes   what one active feature of a dictionary adds to its site

A node is ablated by moving its part of the tensor to the baseline: zeros, the mean over the text, or the same part in
a run of another text. With all nodes of a site ablated the tensor is `end`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from birkhoff.hooks.edit import SiteContext
from birkhoff.hooks.plan import Key
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.row_norm import normalize_rows
from birkhoff.sae.views import Units, View

_REDUCED = ("hidden", "channel")  # axes of a row whose numbers are one node together
CHUNK = 4096  # nodes of a dictionary scored at a time


class Nodes(Protocol):
    """The nodes of one site of one text. `index` [N, 1 + axes]: position, then one number for each of `axes`, below its
    entry of `sizes`."""

    key: Key
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    index: torch.Tensor
    end: torch.Tensor  # [T, *row_shape]: the tensor with every node removed

    def scores(self, gradient: torch.Tensor) -> torch.Tensor:
        """[N]: gradient [T, *row_shape] times what removing the node takes away."""
        ...

    def ablated(self, x: torch.Tensor, chosen: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        """x [B * T, *row_shape] with chosen nodes at their baseline, each in its copy of the text."""
        ...


class SiteNodes:
    def __init__(
        self, key: Key, axes: tuple[str, ...], value: torch.Tensor, baseline: torch.Tensor, heads: int = 1
    ):
        """`axes` name the dimensions of a row; `value` and `baseline` are [T, *row_shape]. A row of heads side by side
        is divided into `heads`."""
        self.key = key
        self.end = baseline
        if axes == ("head_and_channel",):
            axes = ("head", "channel")
            value, baseline = (each.unflatten(-1, (heads, -1)) for each in (value, baseline))
        self.axes = tuple(axis for axis in axes if axis not in _REDUCED)
        self.difference = value - baseline
        self._reduced = [1 + i for i, axis in enumerate(axes) if axis in _REDUCED]
        kept = [size for i, size in enumerate(value.shape) if i not in self._reduced]
        self.sizes = tuple(kept[1:])
        self.index = torch.cartesian_prod(*(torch.arange(size) for size in kept)).view(-1, len(kept))

    def scores(self, gradient: torch.Tensor) -> torch.Tensor:
        products = self.difference * gradient.view(self.difference.shape)
        return (products.sum(self._reduced) if self._reduced else products).flatten()

    def ablated(self, x: torch.Tensor, chosen: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        length, shape = len(self.end), self.difference.shape[1:]
        rows, line = (copies * length + self.index[chosen, 0]).to(x.device).unique(return_inverse=True)
        own = self._mask(chosen)
        mask = own.new_zeros((len(rows), *own.shape[1:]), dtype=torch.int32).index_add(0, line, own.int()) > 0
        end, old = (each.view(-1, *shape) for each in (self.end[rows % length].to(x.dtype), x[rows]))
        return x.index_copy(0, rows, torch.where(mask, end, old).view(-1, *x.shape[1:]))

    def _mask(self, chosen: torch.Tensor) -> torch.Tensor:
        """[n, *row_shape], broadcast along reduced axes: the numbers of each node."""
        mask = torch.ones((len(chosen), *(1 for _ in self.difference.shape[1:])), dtype=torch.bool)
        column = 1
        for axis in range(1, self.difference.dim()):
            if axis in self._reduced:
                continue
            size = self.difference.shape[axis]
            shape = [len(chosen), *(size if i == axis else 1 for i in range(1, self.difference.dim()))]
            own = torch.arange(size) == self.index[chosen, column].unsqueeze(-1)
            mask = mask & own.view(shape)
            column += 1
        return mask.to(self.difference.device)


class ExpertNodes:
    axes: tuple[str, ...] = ("expert",)

    def __init__(
        self,
        key: Key,
        value: torch.Tensor,
        ids: torch.Tensor,
        parts: torch.Tensor,
        experts: int,
        baseline: Baseline = None,
    ):
        """`value` [T, d] of `mlp_out`; `ids` [T, k] and `parts` [T, k, d] of the chosen ones of `experts` experts.
        `baseline` are ids and parts of another run, whose experts are put back in their place."""
        self.key = key
        self.sizes: tuple[int, ...] = (experts,)
        positions = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(ids)
        pairs, parts = torch.stack((positions, ids), -1).flatten(0, 1), parts.flatten(0, 1)
        if baseline is not None:
            others = torch.stack((positions, baseline[0]), -1).flatten(0, 1)
            pairs, parts = torch.cat((pairs, others)), torch.cat((parts, -baseline[1].flatten(0, 1)))
        index, line = pairs.unique(dim=0, return_inverse=True)
        self._parts = parts.new_zeros(len(index), parts.shape[-1]).index_add(0, line, parts)
        self.index = index.cpu()
        self._rows = index[:, 0]
        self.end = value.index_add(0, self._rows, -self._parts.to(value.dtype))

    def scores(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self._parts * gradient[self._rows]).sum(-1)

    def ablated(self, x: torch.Tensor, chosen: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        return _without(x, self, chosen, copies, self._parts[chosen.to(self._parts.device)])


Baseline = tuple[torch.Tensor, torch.Tensor] | None


class FeatureNodes:
    def __init__(
        self,
        key: Key,
        sae: Sae,
        view: View,
        value: torch.Tensor,
        baseline: torch.Tensor | None,
        context: SiteContext,
    ):
        """`value` and `baseline` are the site's tensors of the two runs; without the second, features become 0."""
        self.key = key
        self._sae = sae
        self._view = view
        units = view.read(view.by_unit(value), None, context)
        self._share = units.share
        self._scale = normalize_rows(units.v, sae.normalize).scale
        f = sae.encode(units.v)
        if baseline is not None:
            f = f - sae.encode(view.read(view.by_unit(baseline), None, context).v)
        units_of, rows = f.nonzero(as_tuple=True)
        self._amount = f[units_of, rows]
        if self._scale is not None:
            self._amount = self._amount * self._scale[units_of, 0]
        self._unit, self._row = units_of, rows
        per_stream = view.name == "per_stream"
        self.axes: tuple[str, ...] = ("stream", "feature") if per_stream else ("feature",)
        self.sizes: tuple[int, ...] = (sae.total_features,)
        if per_stream:
            self.sizes = (view.streams, *self.sizes)
        numbers = torch.tensor([sae.feature_id(row) for row in rows.tolist()], dtype=torch.long)
        unit = units_of.cpu()
        columns = (unit // view.streams, unit % view.streams) if per_stream else (unit,)
        self.index = torch.stack((*columns, numbers), -1).view(-1, len(self.axes) + 1)
        total = torch.zeros_like(units.v).float()
        for part in torch.arange(len(rows), device=rows.device).split(CHUNK):
            total.index_add_(0, units_of[part], self._vectors(part))
        self.end = self._view.changed(Units(units.old, units.v, units.share), -total).view(value.shape)
        self.end = self.end.to(value.dtype)
        self._shape = value.shape[1:]

    def _vectors(self, chosen: torch.Tensor) -> torch.Tensor:
        """Amount times decoder row of each chosen node, [n, d]."""
        decoder = self._sae.decoder[self._row[chosen].cpu()].to(self._amount.device)
        return self._amount[chosen].unsqueeze(-1) * decoder

    def scores(self, gradient: torch.Tensor) -> torch.Tensor:
        g = self._view.by_unit(gradient).float()
        if self._share is not None:  # a change of the unit reaches every stream by its share
            g = (self._share * g).sum(1)
        scores = torch.zeros(len(self.index), device=g.device)
        for part in torch.arange(len(self.index), device=g.device).split(CHUNK):
            scores[part] = (self._vectors(part) * g[self._unit[part]]).sum(-1)
        return scores

    def ablated(self, x: torch.Tensor, chosen: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
        return _without(x, self, chosen, copies, self._removed(chosen))

    def _removed(self, chosen: torch.Tensor) -> torch.Tensor:
        """What each chosen node adds to its row, [n, *row_shape]."""
        chosen = chosen.to(self._amount.device)
        vectors, units = self._vectors(chosen), self._unit[chosen]
        if self._view.name == "per_stream":
            whole = vectors.new_zeros(len(chosen), *self._shape)
            whole[torch.arange(len(chosen)), units % self._view.streams] = vectors
            return whole
        if self._share is None:
            return vectors.view(-1, *self._shape)
        share = self._share if self._share.dim() == 0 else self._share[units]
        return (share * vectors.unsqueeze(1)).expand(-1, *self._shape)


def _without(
    x: torch.Tensor, nodes: Nodes, chosen: torch.Tensor, copies: torch.Tensor, removed: torch.Tensor
) -> torch.Tensor:
    """x without what each chosen node adds to its row."""
    rows = copies * len(nodes.end) + nodes.index[chosen, 0]
    return x.index_add(0, rows.to(x.device), -removed.to(x.dtype))


def mean_row(value: torch.Tensor) -> torch.Tensor:
    """The mean over the positions of a text, at every position."""
    return value.mean(0, keepdim=True).expand_as(value)


def feature_context(model: Any, key: Key, values: Mapping[Key, torch.Tensor]) -> SiteContext:
    """What views that read with live weights need at a stream site of DeepSeek-V4; nothing at other sites."""
    hook, layer = key
    if not hook.startswith("mhc_streams"):
        return SiteContext()
    if hook == "mhc_streams_final":
        return SiteContext(values.get(("mhc_ffn_post_mix", layer)), model.hc_head.weights)
    block = model.layers[layer]
    if hook == "mhc_streams_pre_mlp":
        return SiteContext(values.get(("mhc_attn_post_mix", layer)), block.hc_ffn.weights)
    return SiteContext(values.get(("mhc_ffn_post_mix", layer - 1)), block.hc_attn.weights)
