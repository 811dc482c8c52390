"""What attribution returns: a score for every node of a text, and ways to sum, sort and compare them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, overload

import torch

from birkhoff import notebook
from birkhoff.errors import OptionError, SiteError, quoted
from birkhoff.hooks.plan import Key
from birkhoff.hooks.site_names import address_of, from_tool
from birkhoff.option_checks import check_int
from birkhoff.records import Tabular
from birkhoff.result_file import FileParts, SavedResult, join_parts, split_parts


@dataclass(frozen=True)
class Node:
    """One scored part of the model at one token. `index` names it within its row: a stream, head, expert, feature."""

    hook: str
    layer: int
    position: int
    index: tuple[tuple[str, int], ...]
    score: float

    def __str__(self) -> str:
        parts = "".join(f" {axis} {number}" for axis, number in self.index)
        return f"{self.hook}[{self.layer}]{parts} at {self.position}: {self.score:+.4f}"

    def to_json(self) -> dict[str, Any]:
        named = dict(self.index)
        return {
            "hook": self.hook,
            "layer": self.layer,
            "position": self.position,
            **named,
            "score": self.score,
        }


@dataclass(frozen=True, eq=False)
class SiteScores:
    """The nodes of one site: `index` [N, 1 + axes] (position first) and `scores` [N], on the host. `sizes` are those of
    `axes`: all experts of the layer, not only the chosen ones."""

    key: Key
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    index: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class Agreement:
    """Two attributions of the same nodes: rank correlation of all scores, and how many of the `k` nodes with the
    largest scores (by size) both have."""

    spearman: float
    overlap: int
    k: int
    nodes: int

    def to_json(self) -> dict[str, Any]:
        return {"spearman": self.spearman, "overlap": self.overlap, "k": self.k, "nodes": self.nodes}


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(SavedResult, Tabular):
    """Scores of nodes for one metric on one text.

    A score estimates (method "exact": is) how much the metric falls when the node alone is moved to its baseline:
    positive nodes support the metric. `value` is the metric of the text, `baseline_value` that of the baseline text,
    if there is one."""

    kind: ClassVar[str] = "attribution"
    metric: str
    method: str
    value: float
    baseline_value: float | None
    token_ids: list[int]
    sites: list[SiteScores] = field(repr=False)
    tokens: list[str] | None = field(default=None, repr=False)
    num_layers: int = field(default=0, repr=False)
    streams: bool = field(default=True, repr=False)  # whether the model has several residual streams
    num_tokens: int = field(default=0, repr=False)  # of the text; a mean over texts has no token ids

    def __len__(self) -> int:
        return sum(len(site.scores) for site in self.sites)

    def __iter__(self) -> Iterator[Node]:
        for site in self.sites:
            for row, score in zip(site.index.tolist(), site.scores.tolist()):
                yield Node(*site.key, row[0], tuple(zip(site.axes, row[1:])), score)

    @property
    def scores(self) -> torch.Tensor:
        """The scores of all nodes, [N], in the order of iteration."""
        return torch.cat([site.scores for site in self.sites])

    def __getitem__(self, key: Key | str) -> torch.Tensor:
        """Scores of one site as a dense tensor: [T], or [T, streams], [T, heads], [T, experts], [T, features]. Keys are
        those of a `Trace`: (hook, layer) with negative layers, or the name of one tensor in another tool."""
        named = from_tool(key, self.num_layers, self.streams) if isinstance(key, str) else key
        address = address_of(named, self.num_layers, self.streams)
        for site in self.sites:
            if site.key == address:
                dense = torch.zeros(self.num_tokens, *site.sizes)
                dense[tuple(site.index.T)] = site.scores
                return dense
        hooks = ", ".join(f"{hook}[{layer}]" for hook, layer in (site.key for site in self.sites))
        raise SiteError(f"{quoted(key)} was not attributed over. This attribution holds {hooks}.")

    def top(self, k: int = 20, sign: str = "both") -> list[Node]:
        """The `k` nodes with the largest scores: by size, or only "positive" or "negative" ones."""
        check_int("k", k)
        if sign not in ("both", "positive", "negative"):
            raise OptionError(f"sign is {quoted(sign)}, expected both, positive or negative.")
        chosen = [
            node
            for node in self
            if sign == "both" or (node.score > 0 if sign == "positive" else node.score < 0)
        ]
        return sorted(chosen, key=lambda node: -abs(node.score))[:k]

    def sum(self, by: Sequence[str] = ("hook", "layer")) -> dict[tuple[Any, ...], float]:
        """Scores summed over everything but `by`: hook, layer, position, stream, head, expert, feature."""
        names = [by] if isinstance(by, str) else list(by)
        known = {"hook", "layer", "position", *(axis for site in self.sites for axis in site.axes)}
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise OptionError(f"by is {quoted(by)}, expected some of {', '.join(sorted(known))}.")
        totals: dict[tuple[Any, ...], float] = {}
        for node in self:
            parts = {"hook": node.hook, "layer": node.layer, "position": node.position, **dict(node.index)}
            group = tuple(parts.get(name) for name in names)
            totals[group] = totals.get(group, 0.0) + node.score
        return totals

    def agreement(self, other: Attribution, k: int = 20) -> Agreement:
        """Compare with another attribution of the same nodes, as exact patching."""
        check_int("k", k)
        mine, theirs = self.scores, other.scores
        same = [(site.key, site.index.tolist()) for site in self.sites] == [
            (site.key, site.index.tolist()) for site in other.sites
        ]
        if not same:
            raise OptionError(
                "the two attributions have different nodes. Attribute over the same sites and text."
            )
        top = [set(scores.abs().topk(min(k, len(scores))).indices.tolist()) for scores in (mine, theirs)]
        return Agreement(spearman(mine, theirs), len(top[0] & top[1]), min(k, len(mine)), len(mine))

    def file_parts(self) -> FileParts:
        """Tensors named `SITE/index` and `SITE/scores`, with SITE a number: several kinds of nodes may be at one hook
        and layer. Facts: everything else."""
        tensors, sites = {}, []
        for number, site in enumerate(self.sites):
            tensors[f"{number}/index"], tensors[f"{number}/scores"] = site.index, site.scores
            sites.append({"key": list(site.key), "axes": list(site.axes), "sizes": list(site.sizes)})
        names = ("metric", "method", "value", "baseline_value", "token_ids", "tokens")
        facts = {name: getattr(self, name) for name in (*names, "num_layers", "streams", "num_tokens")}
        return FileParts(tensors, {**facts, "sites": sites})

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> Attribution:
        sites = [
            SiteScores(
                (site["key"][0], int(site["key"][1])),
                tuple(site["axes"]),
                tuple(site["sizes"]),
                parts.tensors[f"{number}/index"],
                parts.tensors[f"{number}/scores"],
            )
            for number, site in enumerate(parts.facts["sites"])
        ]
        return cls(**{**parts.facts, "sites": sites})

    def records(self) -> list[dict[str, Any]]:
        """A row for each node: hook, layer, position, the text of its token, its index (None where nodes of its kind
        have none) and its score."""
        axes = list(dict.fromkeys(axis for site in self.sites for axis in site.axes))
        return [
            {
                "hook": node.hook,
                "layer": node.layer,
                "position": node.position,
                **({} if self.tokens is None else {"token": self.tokens[node.position]}),
                **{axis: dict(node.index).get(axis) for axis in axes},
                "score": node.score,
            }
            for node in self
        ]

    def _ipython_key_completions_(self) -> list[Key]:
        return [site.key for site in self.sites]

    def _named(self, node: Node) -> str:
        token = "" if self.tokens is None else f" {self.tokens[node.position]!r}"
        parts = "".join(f" {axis} {number}" for axis, number in node.index)
        return f"{node.hook}[{node.layer}]{parts} at {node.position}{token}"

    def _repr_html_(self) -> str:
        baseline = "" if self.baseline_value is None else f", baseline {self.baseline_value:.4g}"
        title = (
            f"{self.metric}: {self.value:.4g}{baseline}; the largest of {len(self)} nodes by {self.method}"
        )
        return notebook.bars([(self._named(node), node.score) for node in self.top(24)], title)

    def __repr__(self) -> str:
        largest = ", ".join(f"{self._named(node)} {node.score:+.3f}" for node in self.top(3))
        return f"Attribution({self.metric}: {self.value:.4g}; {len(self)} nodes by {self.method}: {largest}, ...)"

    def to_json(self, k: int | None = None) -> dict[str, Any]:
        """JSON with the `k` largest nodes, or with all of them."""
        nodes = self.top(k) if k is not None else list(self)
        return {
            "metric": self.metric,
            "method": self.method,
            "value": self.value,
            "baseline_value": self.baseline_value,
            "token_ids": self.token_ids,
            "tokens": self.tokens,
            "num_nodes": len(self),
            "nodes": [node.to_json() for node in nodes],
        }


class AttributionBatch(Sequence[Attribution], SavedResult, Tabular):
    """The attributions of several texts of one length, from one call.

    `batch[0]` is the `Attribution` of the first text, `batch[hook, layer]` `[texts, T, ...]` are the scores of all of
    them, and `batch.mean` is an `Attribution` of the mean scores."""

    kind = "attribution batch"

    def __init__(self, results: Sequence[Attribution]):
        self._results = list(results)

    def file_parts(self) -> FileParts:
        return join_parts(self._results)

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> AttributionBatch:
        return cls([Attribution.from_file_parts(each) for each in split_parts(parts)])

    def __len__(self) -> int:
        return len(self._results)

    @overload
    def __getitem__(self, key: int) -> Attribution: ...
    @overload
    def __getitem__(self, key: slice) -> list[Attribution]: ...
    @overload
    def __getitem__(self, key: Key | str) -> torch.Tensor: ...
    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)) and not isinstance(key, bool):
            return self._results[key]
        return torch.stack([each[key] for each in self._results])

    @property
    def mean(self) -> Attribution:
        """The means over the texts; an expert or a feature that is not active in a text counts as 0 there. Token ids
        and tokens are those that all texts have, or none."""
        first, count = self._results[0], len(self)
        baselines = [each.baseline_value for each in self._results if each.baseline_value is not None]
        same = all(each.token_ids == first.token_ids for each in self._results)
        names = dict.fromkeys(each.metric for each in self._results)
        return replace(
            first,
            metric=first.metric if len(names) == 1 else f"mean of {len(names)} metrics",
            value=sum(each.value for each in self._results) / count,
            baseline_value=sum(baselines) / count if len(baselines) == count else None,
            token_ids=first.token_ids if same else [],
            tokens=first.tokens if same else None,
            sites=[_mean_scores(sites) for sites in zip(*(each.sites for each in self._results))],
        )

    def records(self) -> list[dict[str, Any]]:
        """The rows of every text's attribution, with the number of the text."""
        return [{"text": text, **row} for text, each in enumerate(self._results) for row in each.records()]

    def _ipython_key_completions_(self) -> list[Key]:
        return [site.key for site in self._results[0].sites]

    def _repr_html_(self) -> str:
        return f"<b>Mean of {len(self)} texts.</b> " + self.mean._repr_html_()

    def to_json(self, k: int | None = None) -> dict[str, Any]:
        """The mean as an attribution, and under `texts` that of every text; each with its `k` largest nodes, or all."""
        return {**self.mean.to_json(k), "texts": [each.to_json(k) for each in self._results]}

    def __repr__(self) -> str:
        return f"AttributionBatch({len(self)} texts; mean {self.mean!r})"


def _mean_scores(sites: Sequence[SiteScores]) -> SiteScores:
    """The mean scores of one site of several texts, over all nodes that any of them has."""
    index, line = torch.cat([site.index for site in sites]).unique(dim=0, return_inverse=True)
    scores = torch.cat([site.scores for site in sites]).double()
    total = torch.zeros(len(index), dtype=torch.float64).index_add(0, line, scores)
    return replace(sites[0], index=index, scores=(total / len(sites)).float())


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    """Rank correlation of two vectors; equal numbers share the mean of their ranks. NaN if one is constant."""
    first, second = (_ranks(values.double()) for values in (a, b))
    first, second = first - first.mean(), second - second.mean()
    return float((first @ second) / (first.norm() * second.norm()))


def _ranks(values: torch.Tensor) -> torch.Tensor:
    _, line, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks: torch.Tensor = (last - (counts.double() - 1) / 2)[line]
    return ranks
