"""Circuits: the few nodes that a metric needs, found by attribution and verified by ablating all others.

Nodes are ranked by the size of their scores. The circuit is the shortest beginning of that list whose faithfulness is
at least the wanted share, and at most as much above 1, when every node outside of it is at its baseline; then nodes
that the others do without are dropped.
All of this is measured by running the model, not estimated:

    faithfulness   (m(circuit) - m(nothing)) / (m(all) - m(nothing)), where m(S) has all nodes but S ablated
    completeness   (m(all) - m(all but the circuit)) / (m(all) - m(nothing))
    random         the faithfulness of random sets of as many nodes

Edges go from the output of a sublayer (or from the embedding) through one residual stream into the input of a later
sublayer, or to the end. Their scores are estimates: what the node writes, carried by the mixers of this text as they
are, times the gradient of the metric at the reader's input through that reader alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.attribute import TextPasses, check_method, compare_text, score_nodes
from birkhoff.analysis.attribution import Node
from birkhoff.analysis.circuit_svg import circuit_svg
from birkhoff.analysis.forward import one_text
from birkhoff.analysis.gradients import Change
from birkhoff.analysis.metric import resolve_metric
from birkhoff.analysis.nodes import Nodes, SiteNodes
from birkhoff.errors import OptionError, quoted
from birkhoff.hooks.plan import Key
from birkhoff.model.transformer import Transformer
from birkhoff.option_checks import check_float, check_int
from birkhoff.records import Tabular

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

RANDOM_SETS = 16
PRUNE_ROUNDS = 4
EMBEDDING = "embedding"  # the source of edges that start at a token
OUTPUT = "output"
SMALLEST_SPAN = 1e-5  # relative difference of two metrics that is no more than rounding
SMALLEST_EDGE = 0.01  # of the total effect; smaller edges are left out


@dataclass(frozen=True)
class Edge:
    """From the node `source` to the node `target`, (hook, layer, position), through one stream; `EMBEDDING` and
    `OUTPUT` stand for the two ends."""

    source: tuple[str, int, int]
    target: tuple[str, int, int]
    stream: int
    score: float

    def to_json(self) -> dict[str, Any]:
        return {
            "source": list(self.source),
            "target": list(self.target),
            "stream": self.stream,
            "score": self.score,
        }


@dataclass(frozen=True)
class Faithfulness:
    """How much of a metric a set of nodes carries on one text: see the module."""

    faithfulness: float
    completeness: float
    full: float  # the metric with nothing ablated
    circuit: float  # with everything but the circuit ablated
    empty: float  # with every node ablated
    without: float  # with the circuit ablated

    def to_json(self) -> dict[str, float]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Circuit(Tabular):
    """The nodes that a metric needs on one text, sorted by the size of their scores.

    `candidates` counts the nodes that they were chosen from: all of `hooks` at every layer and position. `random` is
    the mean faithfulness of random sets of as many nodes; `curve` has that of the first k nodes of the ranking."""

    metric: str
    hooks: tuple[str, ...]
    nodes: list[Node]
    edges: list[Edge]
    measured: Faithfulness
    random: float
    candidates: int
    curve: list[tuple[int, float]]
    token_ids: list[int] = field(repr=False)
    tokens: list[str] | None = field(default=None, repr=False)

    @property
    def faithfulness(self) -> float:
        return self.measured.faithfulness

    @property
    def completeness(self) -> float:
        return self.measured.completeness

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return (
            f"Circuit({len(self)} of {self.candidates} nodes, faithfulness {self.faithfulness:.2f} (random sets: "
            f"{self.random:.2f}), completeness {self.completeness:.2f}, {len(self.edges)} edges)"
        )

    def evaluate(
        self, engine: Engine, prompt: Any, metric: Any, baseline: Any = None, steer: Any = None
    ) -> Faithfulness:
        """Measure the same nodes on another text of the same length."""
        ids = one_text(engine, prompt, "evaluate")
        if len(ids) != len(self.token_ids):
            raise OptionError(
                f"the text has {len(ids)} tokens, the circuit has nodes of {len(self.token_ids)} positions. Give a "
                "text of the same length."
            )
        passes = TextPasses(engine, [ids], [resolve_metric(engine, metric, len(ids))], [steer])
        nodes = compare_text(passes, self.hooks, "all", baseline, needs_change=True).nodes
        chosen = {(node.hook, node.layer, node.position, node.index) for node in self.nodes}
        return _measure(passes, nodes, torch.tensor([name in chosen for name in _names(nodes)]))

    def svg(self) -> str:
        """A picture over tokens, layers and streams: the text of an SVG file."""
        return circuit_svg(self)

    _repr_svg_ = svg

    def records(self) -> list[dict[str, Any]]:
        """A row for each node: hook, layer, position, the text of its token, and its score."""
        return [
            {**node.to_json(), **({} if self.tokens is None else {"token": self.tokens[node.position]})}
            for node in self.nodes
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "hooks": list(self.hooks),
            "nodes": [node.to_json() for node in self.nodes],
            "edges": [edge.to_json() for edge in self.edges],
            **self.measured.to_json(),
            "random": self.random,
            "candidates": self.candidates,
            "curve": [list(point) for point in self.curve],
            "token_ids": self.token_ids,
            "tokens": self.tokens,
        }


def find_circuit(
    engine: Engine,
    prompt: Any,
    metric: Any,
    over: str | Sequence[str],
    baseline: Any,
    faithfulness: float,
    method: str,
    steps: int,
    steer: Any,
    max_batch_tokens: int,
) -> Circuit:
    """See `Engine.circuit`."""
    check_float("faithfulness", faithfulness, 0.0, 1.0, exclude_low=True)
    check_int("max_batch_tokens", max_batch_tokens)
    check_method(method, steps)
    ids = one_text(engine, prompt, "circuit")
    passes = TextPasses(engine, [ids], [resolve_metric(engine, metric, len(ids))], [steer], max_batch_tokens)
    compared = compare_text(passes, over, "all", baseline, needs_change=True)
    nodes = compared.nodes
    if not all(isinstance(each, SiteNodes) for each in nodes):
        raise OptionError(
            f"over is {quoted(over)}; a circuit has nodes of sites, as sublayers or streams. Experts and features have "
            "attribution only."
        )
    scores = torch.cat([each.float().cpu() for each in score_nodes(passes, compared, method, steps)])
    order = scores.abs().argsort(descending=True, stable=True)
    ranking = _Ranking(passes, nodes, order)
    if abs(ranking.span) <= SMALLEST_SPAN * (1 + abs(ranking.full)):
        raise OptionError(
            "the metric is the same with every node at its baseline, so there is nothing to explain. Use a metric or a "
            "baseline that differ."
        )
    count = ranking.shortest(faithfulness)
    keep = ranking.prune(ranking.first(count), faithfulness)
    names = _names(nodes)
    found = [
        Node(hook, layer, position, index, float(scores[i]))
        for i, (hook, layer, position, index) in enumerate(names)
        if keep[i]
    ]
    found.sort(key=lambda node: -abs(node.score))
    generator = torch.Generator().manual_seed(0)
    sets = torch.stack([torch.randperm(len(scores), generator=generator) for _ in range(RANDOM_SETS)])
    random = torch.zeros(RANDOM_SETS, len(scores), dtype=torch.bool)
    random.scatter_(1, sets[:, : int(keep.sum())], True)
    return Circuit(
        passes.metric.name,
        tuple(dict.fromkeys(each.key[0] for each in nodes)),
        found,
        stream_edges(passes, baseline, found, abs(ranking.span)),
        _measure(passes, nodes, keep),
        float(ranking.faithfulness(random).mean()),
        len(scores),
        sorted(ranking.curve.items()),
        ids,
        engine.token_texts(ids),
    )


class _Ranking:
    """Nodes in an order, and the faithfulness of sets of them."""

    def __init__(self, passes: TextPasses, nodes: Sequence[Nodes], order: torch.Tensor):
        self._passes = passes
        self._nodes = nodes
        self._order = order
        count = len(order)
        ends = torch.stack([torch.ones(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)])
        self.full, self.empty = kept_metrics(passes, nodes, ends).tolist()
        self.span = self.full - self.empty
        self.curve: dict[int, float] = {0: 0.0, count: 1.0}

    def faithfulness(self, keep: torch.Tensor) -> torch.Tensor:
        """Of each set of nodes [S, N] bool."""
        shares: torch.Tensor = (kept_metrics(self._passes, self._nodes, keep) - self.empty) / self.span
        return shares

    def first(self, count: int) -> torch.Tensor:
        """The first nodes of the order, [N] bool."""
        keep = torch.zeros(len(self._order), dtype=torch.bool)
        keep[self._order[:count]] = True
        return keep

    def shortest(self, wanted: float) -> int:
        """The smallest count on a growing grid, then between its points, from which the wanted share is kept."""
        total = len(self._order)
        low, high = 0, total
        while high - low > 1:
            inner = sorted({low + 1 + round((high - low - 2) * (i / 15) ** 2) for i in range(16)})
            inner = [count for count in inner if low < count < high]
            shares = self.faithfulness(torch.stack([self.first(count) for count in inner])).tolist()
            self.curve |= dict(zip(inner, shares))
            enough = [count for count, share in zip(inner, shares) if _is_close(share, wanted)]
            bound = enough[0] if enough else high
            low = max([count for count in (low, *inner) if count < bound])
            high = bound
        return high

    def prune(self, keep: torch.Tensor, wanted: float) -> torch.Tensor:
        """Drop nodes that the rest does without, those that cost least first, while the wanted share is kept."""
        for _ in range(PRUNE_ROUNDS):
            inside = keep.nonzero().flatten()
            if len(inside) < 2:
                break
            single = keep.repeat(len(inside), 1)
            single[torch.arange(len(inside)), inside] = False
            cheapest = inside[self.faithfulness(single).argsort(descending=True, stable=True)]
            trials = keep.repeat(len(inside) - 1, 1)
            for count in range(1, len(inside)):
                trials[count - 1, cheapest[:count]] = False
            shares = self.faithfulness(trials).tolist()
            enough = [index for index, share in enumerate(shares) if _is_close(share, wanted)]
            if not enough:
                break
            keep = trials[enough[-1]]
        return keep


def _is_close(share: float, wanted: float) -> bool:
    """Whether a set keeps the wanted share; one that overshoots by more than that does not do what the model does."""
    return abs(share - 1) <= 1 - wanted + SMALLEST_SPAN


def kept_metrics(passes: TextPasses, nodes: Sequence[Nodes], keep: torch.Tensor) -> torch.Tensor:
    """The metric with every node outside of a set at its baseline, for each set [S, N] bool."""
    sizes = [len(each.index) for each in nodes]
    found = []
    for part in keep.split(passes.copies):
        changes: dict[Key, Change] = {}
        for each, kept in zip(nodes, part.split(sizes, dim=1)):
            assert isinstance(each, SiteNodes), "circuits have nodes of sites"
            copies, chosen = (~kept).nonzero(as_tuple=True)
            if len(chosen):
                changes[each.key] = _ablation(each, chosen, copies)
        found.append(passes.metrics(len(part), changes))
    return torch.cat(found)


def _ablation(nodes: SiteNodes, chosen: torch.Tensor, copies: torch.Tensor) -> Change:
    return lambda x: nodes.ablated(x, chosen, copies)


def _measure(passes: TextPasses, nodes: Sequence[Nodes], keep: torch.Tensor) -> Faithfulness:
    sets = torch.stack([torch.ones_like(keep), keep, torch.zeros_like(keep), ~keep])
    full, circuit, empty, without = kept_metrics(passes, nodes, sets).tolist()
    span = full - empty or float("nan")
    return Faithfulness((circuit - empty) / span, (full - without) / span, full, circuit, empty, without)


def _names(nodes: Sequence[Nodes]) -> list[tuple[str, int, int, tuple[tuple[str, int], ...]]]:
    """Hook, layer, position and index of every node, in order."""
    return [
        (*each.key, row[0], tuple(zip(each.axes, row[1:]))) for each in nodes for row in each.index.tolist()
    ]


def stream_edges(passes: TextPasses, baseline: Any, nodes: Sequence[Node], span: float) -> list[Edge]:
    """Edges between sublayers' outputs, the embedding and the end, each through one stream; largest first.

    Empty for nodes that are no outputs of sublayers of DeepSeek-V4."""
    model = passes.engine.model
    if not isinstance(model, Transformer) or not {node.hook for node in nodes} <= {"post_attn", "mlp_out"}:
        return []
    count = model.config.num_hidden_layers
    mixers = [
        (f"mhc_{kind}_{part}_mix", layer)
        for layer in range(count)
        for kind in ("attn", "ffn")
        for part in ("pre", "post", "res")
    ]
    outputs = [(hook, layer) for layer in range(count) for hook in ("post_attn", "mlp_out")]
    embedded: Key = ("mhc_streams_pre_attn", 0)
    compared = compare_text(passes, ["sublayers", embedded[0]], "all", baseline)
    differences = {each.key: each.difference for each in compared.nodes if isinstance(each, SiteNodes)}
    values, _ = passes.values(passes.texts, [*mixers, ("mhc_head_mix", count - 1)])[0]
    mixing = {key: value.float().cpu() for key, value in values.items()}
    readers = _reader_gradients(passes, nodes, count)

    def carried(written: torch.Tensor, position: int, sublayer: int) -> dict[int, torch.Tensor]:
        """What each later sublayer, and the end (2 * count), reads per stream of a unit written after `sublayer`."""
        shares = {}
        w = written  # [m]
        for later in range(sublayer + 1, 2 * count):
            kind, layer = ("attn", "ffn")[later % 2], later // 2
            shares[later] = w * mixing[f"mhc_{kind}_pre_mix", layer][position]
            w = w @ mixing[f"mhc_{kind}_res_mix", layer][position]
        shares[2 * count] = w * mixing["mhc_head_mix", count - 1][position]
        return shares

    found: list[Edge] = []
    length = len(passes.ids)
    sources = [(*outputs[_order(node)], node.position) for node in nodes]
    for source in [*sources, *((EMBEDDING, -1, position) for position in range(length))]:
        hook, layer, position = source
        if hook == EMBEDDING:
            difference, sublayer = differences[embedded][position, 0], -1
            written = torch.ones(model.config.hc_mult)
        else:
            difference, sublayer = differences[hook, layer][position], outputs.index((hook, layer))
            kind = "attn" if hook == "post_attn" else "ffn"
            written = mixing[f"mhc_{kind}_post_mix", layer][position]
        if not difference.any():
            continue
        for later, shares in carried(written, position, sublayer).items():
            for target, gradient in readers.get(later, {}).items():
                effect = float(difference.float() @ gradient[position].float())
                end = (OUTPUT, count, position) if target[0] == OUTPUT else target
                found += [
                    Edge(source, end, stream, effect * float(share))
                    for stream, share in enumerate(shares)
                    if abs(effect * float(share)) >= SMALLEST_EDGE * span
                ]
    return sorted(found, key=lambda edge: -abs(edge.score))


def _order(node: Node) -> int:
    """The number of a sublayer in the order of the forward pass."""
    return 2 * node.layer + (node.hook == "mlp_out")


def _reader_gradients(
    passes: TextPasses, nodes: Sequence[Node], count: int
) -> Mapping[int, Mapping[tuple[str, int, int], torch.Tensor]]:
    """For every sublayer of the circuit, and the end: gradients [T, d] of the metric at its input through one node."""
    inputs = {("post_attn", layer): ("pre_attn", layer) for layer in range(count)}
    inputs |= {("mlp_out", layer): ("mlp_in", layer) for layer in range(count)}
    end: Key = ("final_hidden", count - 1)
    used = {(node.hook, node.layer) for node in nodes}
    keys = [*used, *(inputs[key] for key in used), end]
    parts, gradients = passes.graph(keys)
    readers: dict[int, dict[tuple[str, int, int], torch.Tensor]] = {
        2 * count: {(OUTPUT, count, len(passes.ids) - 1): gradients[end]}
    }
    for node in nodes:
        key = (node.hook, node.layer)
        through = torch.zeros_like(gradients[key])
        through[node.position] = gradients[key][node.position]
        (gradient,) = torch.autograd.grad(parts[key], parts[inputs[key]], through, retain_graph=True)
        readers.setdefault(_order(node), {})[node.hook, node.layer, node.position] = gradient
    return readers
