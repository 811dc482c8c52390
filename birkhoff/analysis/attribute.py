"""Attribution: how much each part of the model contributes to a metric on a text, or on several.

A node (`nodes.py`) is scored by what the metric loses when the node is moved to its baseline. Four methods:

    gradient    attribution patching: (value - baseline) * gradient at the text; one forward and one backward pass
    integrated  the gradient is averaged over `steps` points of the straight way from the baseline to the value, for
                each site by itself: scores of a site sum to the effect of moving the whole site
    inputs      the gradient is averaged over `steps` points of the way from the baseline's embeddings to the text's,
                at all sites at once
    exact       activation patching: the node is moved and the text is run again, once per node

Passes are batched: several texts, or copies of one that differ in one site, form a batch of at most `max_batch_tokens`
tokens (fewer, if the graph of gradients would keep more than `KEPT_BYTES`), so memory does not depend on the number of
nodes, sites or steps. If the graph of one copy is too large, layers are computed again in the backward pass: then
memory does not grow with the number of layers either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.attribution import Attribution, AttributionBatch, SiteScores
from birkhoff.analysis.forward import one_text, residual_hook, text_tap, texts_of
from birkhoff.analysis.gradients import Change, GraphTensorsTap, SiteTensors, run_with_graph
from birkhoff.analysis.metric import ResolvedMetric, metrics_of_texts, resolve_metric
from birkhoff.analysis.nodes import ExpertNodes, FeatureNodes, Nodes, SiteNodes, feature_context, mean_row
from birkhoff.errors import OptionError, PromptError, SiteError, did_you_mean, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.plan import Edit, Key
from birkhoff.model.transformer import Transformer
from birkhoff.option_checks import check_int
from birkhoff.steering.resolver import per_prompt_edits
from birkhoff.text.prompts import is_single

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

METHODS = ("gradient", "integrated", "inputs", "exact")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "sublayers": ("attn_out", "post_attn", "mlp_out"),
    "streams": ("mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final"),
    "mixers": ("mhc_attn_res_mix", "mhc_ffn_res_mix"),
    "heads": ("attn_head_out", "attn_z"),
}
MAX_BATCH_TOKENS = 2048
EXPERTS = "experts"
FEATURES = "features:"
KEPT_BYTES = 2 << 30  # of a graph: batches are cut to stay below it, and above it layers are computed again
ROWS_KEPT = 16  # streams that a graph keeps per token and layer; measured on nano: 14.8


class TextPasses:
    """Forward and backward passes over several texts of equal length, or over copies of the first of them. A text has
    the same edits in every copy; `steer` and `metrics` have one entry per text."""

    def __init__(
        self,
        engine: Engine,
        texts: Sequence[list[int]],
        metrics: Sequence[ResolvedMetric],
        steer: Sequence[Any],
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        recompute: bool | None = None,
    ):
        self.engine = engine
        self.texts = texts
        self._metrics = metrics
        self._steer = steer
        length = len(texts[0])
        self.copies = max(1, max_batch_tokens // length)
        kept = kept_bytes(engine.model, length)
        self._recompute = kept > KEPT_BYTES if recompute is None else recompute
        self.graph_copies = self.copies if self._recompute else max(1, min(self.copies, KEPT_BYTES // kept))

    def part(self, start: int, stop: int) -> TextPasses:
        """Passes over some of the texts."""
        chosen = copy(self)
        chosen.texts = self.texts[start:stop]
        chosen._metrics = self._metrics[start:stop]
        chosen._steer = self._steer[start:stop]
        return chosen

    @property
    def ids(self) -> list[int]:
        """The first text."""
        return self.texts[0]

    @property
    def metric(self) -> ResolvedMetric:
        """The metric of the first text."""
        return self._metrics[0]

    def values(
        self, texts: Sequence[list[int]], keys: Sequence[Key]
    ) -> list[tuple[dict[Key, torch.Tensor], float]]:
        """What leaves these sites in one pass of texts, one in place of each own text, and the metric of each."""
        tensors = SiteTensors(keys)
        with torch.no_grad():
            metrics = self._measured(self._logits(texts, self._steer, tensors))
            missing = [key for key in keys if key not in tensors.parts]
            if missing:
                raise SiteError(f"{missing[0][0]}[{missing[0][1]}] did not fire in a whole-text pass.")
            by_text = {key: tensors[key].detach().unflatten(0, (len(texts), -1)) for key in keys}
            return [
                ({key: tensor[index] for key, tensor in by_text.items()}, metric)
                for index, metric in enumerate(metrics.tolist())
            ]

    def text_gradients(self, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
        """Gradients of each text's own metric at these sites, [texts, T, *row_shape] float32."""
        tensors = SiteTensors(keys)
        with torch.enable_grad():
            total = self._measured(self._logits(self.texts, self._steer, tensors)).sum()
        return self._by_text(tensors.gradients(total), keys, len(self.texts))

    def gradients(
        self, keys: Sequence[Key], copies: int, changes: Mapping[Key, Change] | None = None
    ) -> dict[Key, torch.Tensor]:
        """Gradients of the metric at these sites for each copy, [copies, T, *row_shape] float32."""
        tensors = SiteTensors(keys, changes)
        with torch.enable_grad():
            total = self.metric(self._copies(copies, tensors)).sum()
        return self._by_text(tensors.gradients(total), keys, copies)

    def graph(self, keys: Sequence[Key]) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
        """What leaves these sites, as nodes of a graph that is kept, and the gradient of the metric there."""
        tensors = SiteTensors(keys)
        with torch.enable_grad():
            total = self.metric(self._copies(1, tensors)).sum()
        gradients = tensors.gradients(total, retain=True)
        return {key: tensors[key] for key in keys}, gradients

    def metrics(self, copies: int, changes: Mapping[Key, Change]) -> torch.Tensor:
        """The metric of each copy, float32 on the host."""
        with torch.no_grad():
            return self.metric(self._copies(copies, SiteTensors((), changes))).float().cpu()

    def _measured(self, logits: torch.Tensor) -> torch.Tensor:
        """The metric of each text, [texts]."""
        return torch.cat([metric(logits[i : i + 1]) for i, metric in enumerate(self._metrics)])

    @staticmethod
    def _by_text(
        found: Mapping[Key, torch.Tensor], keys: Sequence[Key], count: int
    ) -> dict[Key, torch.Tensor]:
        return {key: found[key].float().unflatten(0, (count, -1)) for key in keys}

    def _copies(self, copies: int, tensors: SiteTensors) -> torch.Tensor:
        return self._logits([self.ids] * copies, [self._steer[0]] * copies, tensors)

    def _logits(self, texts: Sequence[list[int]], steer: Sequence[Any], tensors: SiteTensors) -> torch.Tensor:
        engine = self.engine
        resolved: dict[tuple[int, int], tuple[Edit, ...]] = {}  # of a text and its copies once
        names = [(id(ids), id(edits)) for ids, edits in zip(texts, steer)]
        for name, ids, edits in zip(names, texts, steer):
            if name not in resolved:
                resolved[name] = engine.resolve(edits, ids, 1)
        tap = GraphTensorsTap(text_tap(engine, texts, [resolved[name] for name in names]), tensors)
        tokens = torch.tensor(texts, device=engine.model.device)
        return run_with_graph(engine.model, tokens, tap, self._recompute and torch.is_grad_enabled())


@dataclass(frozen=True, eq=False)
class ComparedTexts:
    """A text and its baseline: the values of every site that is attributed over, and the nodes there."""

    nodes: list[Nodes]
    value: float
    baseline_value: float | None
    start: torch.Tensor | None  # of the streams entering layer 0 in the baseline's run
    inputs: Key


def attribute(
    engine: Engine,
    prompts: Any,
    metric: Any,
    over: str | Sequence[str],
    layers: Any,
    baseline: Any,
    method: str,
    steps: int,
    steer: Any,
    max_batch_tokens: int,
    recompute: bool | None,
    max_exact_nodes: int | None = None,
) -> Attribution | AttributionBatch:
    """See `Engine.attribute`. `max_exact_nodes` bounds the runs of the exact method, for each text."""
    check_int("max_batch_tokens", max_batch_tokens)
    check_method(method, steps)
    texts, single = texts_of(engine, prompts)
    _check_lengths(texts)
    metrics = [metric] if single else metrics_of_texts(metric, len(texts))
    resolved = [resolve_metric(engine, each, len(ids)) for each, ids in zip(metrics, texts)]
    edits = [steer] if single else per_prompt_edits(steer, len(texts))
    targets = _targets(engine, over, layers, baseline, method in ("integrated", "exact"))
    others = _baselines(engine, baseline, texts, single)
    every = TextPasses(engine, texts, resolved, edits, max_batch_tokens, recompute)
    results: list[Attribution] = []
    for start in range(0, len(texts), every.graph_copies):  # as many texts as a graph holds
        stop = start + every.graph_copies
        passes = every.part(start, stop)
        compared = compare_texts(passes, targets, None if others is None else others[start:stop])
        for each in compared:
            count = sum(len(nodes.index) for nodes in each.nodes)
            if method == "exact" and max_exact_nodes is not None and count > max_exact_nodes:
                raise OptionError(
                    f"method 'exact' would run the text {count} times, at most {max_exact_nodes} are allowed. Choose "
                    "fewer layers or sites, or method 'gradient'."
                )
        if method == "gradient":
            scores = _gradient_scores(passes, compared)
        else:
            scores = [
                score_nodes(passes.part(i, i + 1), each, method, steps) for i, each in enumerate(compared)
            ]
        for i, (each, of_sites) in enumerate(zip(compared, scores)):
            ids = passes.texts[i]
            results.append(
                Attribution(
                    resolved[start + i].name,
                    method,
                    each.value,
                    each.baseline_value,
                    ids,
                    [
                        SiteScores(
                            nodes.key, nodes.axes, nodes.sizes, nodes.index, own.detach().float().cpu()
                        )
                        for nodes, own in zip(each.nodes, of_sites)
                    ],
                    engine.token_texts(ids),
                    engine.config.num_hidden_layers,
                    site_names.has_streams(engine.schema),
                    len(ids),
                )
            )
    return results[0] if single else AttributionBatch(results)


@dataclass(frozen=True, eq=False)
class _Targets:
    """What is attributed over: sites, layers whose experts are, sites of dictionaries; and every site that is read."""

    keys: list[Key]
    experts: list[Key]
    features: dict[Key, tuple[Any, Any]]
    baseline: Any
    inputs: Key

    @property
    def read(self) -> list[Key]:
        needed = dict.fromkeys([*self.keys, self.inputs, *self.experts, *self.features])
        for _, layer in self.experts:
            needed |= dict.fromkeys([("mlp_in", layer), ("moe_topk", layer)])
        for key, (_, view) in self.features.items():
            if view.needs_post:
                hook, layer = key
                written = ("mhc_attn_post_mix", layer) if hook == "mhc_streams_pre_mlp" else None
                last = layer if hook == "mhc_streams_final" else layer - 1
                needed[written or ("mhc_ffn_post_mix", last)] = None
        return list(needed)


def compare_text(
    passes: TextPasses, over: Any, layers: Any, baseline: Any, needs_change: bool = False
) -> ComparedTexts:
    """Run one text and its baseline once, and build the nodes."""
    targets = _targets(passes.engine, over, layers, baseline, needs_change)
    return compare_texts(passes, targets, _baselines(passes.engine, baseline, passes.texts, single=True))[0]


def compare_texts(
    passes: TextPasses, targets: _Targets, baselines: Sequence[list[int]] | None
) -> list[ComparedTexts]:
    """Run texts and their baselines once, and build the nodes of each."""
    read = targets.read
    values = passes.values(passes.texts, read)
    theirs = [None] * len(values) if baselines is None else passes.values(baselines, read)
    return [_compared(passes.engine, targets, *own, other) for own, other in zip(values, theirs)]


def _compared(
    engine: Engine,
    targets: _Targets,
    values: Mapping[Key, torch.Tensor],
    number: float,
    other: tuple[Mapping[Key, torch.Tensor], float] | None,
) -> ComparedTexts:
    theirs, their_number = (None, None) if other is None else other
    mean = isinstance(targets.baseline, str) and targets.baseline == "mean"
    nodes: list[Nodes] = []
    for key in targets.keys:
        value = values[key]
        if theirs is not None:
            end = theirs[key]
        else:
            end = mean_row(value) if mean else torch.zeros_like(value)
        heads = getattr(engine.config, "num_attention_heads", 1)
        nodes.append(SiteNodes(key, engine.schema[key[0]].axes, value, end, heads))
    for key in targets.experts:
        parts = expert_parts(engine.v4_model, key[1], values)
        their_parts = None if theirs is None else expert_parts(engine.v4_model, key[1], theirs)
        count = engine.v4_model.config.n_routed_experts
        nodes.append(ExpertNodes(key, values[key], *parts, count, their_parts))
    for key, (sae, view) in targets.features.items():
        context = feature_context(engine.model, key, values)
        nodes.append(
            FeatureNodes(key, sae, view, values[key], None if theirs is None else theirs[key], context)
        )
    inputs = targets.inputs
    start = torch.zeros_like(values[inputs]) if theirs is None else theirs[inputs]
    if mean:
        start = mean_row(values[inputs])
    return ComparedTexts(nodes, number, their_number, start, inputs)


def check_method(method: str, steps: int) -> None:
    """Refuse methods that do not exist and numbers of steps that make no sense."""
    if method not in METHODS:
        raise OptionError(
            f"method is {quoted(method)}, expected one of {', '.join(METHODS)}.{did_you_mean(method, METHODS)}"
        )
    check_int("steps", steps, 1, 4096)


def score_nodes(passes: TextPasses, compared: ComparedTexts, method: str, steps: int) -> list[torch.Tensor]:
    """The scores [N] of the nodes of each site."""
    keys = [nodes.key for nodes in compared.nodes]
    if method == "gradient":
        return _gradient_scores(passes, [compared])[0]
    if method == "inputs":
        assert compared.start is not None
        mean = _mean_gradients(passes, keys, compared.inputs, compared.start, steps)
        return [nodes.scores(mean[nodes.key]) for nodes in compared.nodes]
    if method == "integrated":
        return [
            nodes.scores(_mean_gradients(passes, [nodes.key], nodes.key, nodes.end, steps)[nodes.key])
            for nodes in compared.nodes
        ]
    return [compared.value - _ablated_metrics(passes, nodes) for nodes in compared.nodes]


def _gradient_scores(passes: TextPasses, compared: Sequence[ComparedTexts]) -> list[list[torch.Tensor]]:
    """The scores of the nodes of each text by gradients at the texts, from one pass."""
    gradients = passes.text_gradients(list(dict.fromkeys(nodes.key for nodes in compared[0].nodes)))
    return [
        [nodes.scores(gradients[nodes.key][index]) for nodes in each.nodes]
        for index, each in enumerate(compared)
    ]


def _mean_gradients(
    passes: TextPasses, keys: Sequence[Key], at: Key, end: torch.Tensor, steps: int
) -> dict[Key, torch.Tensor]:
    """Gradients at `keys`, averaged over the midpoints of `steps` parts of the way from `end` to the site's value."""
    total: dict[Key, torch.Tensor] = {}
    shares = (torch.arange(steps) + 0.5) / steps
    for part in shares.split(passes.graph_copies):

        def between(x: torch.Tensor, part: torch.Tensor = part) -> torch.Tensor:
            share = part.to(x.device).view(-1, *(1 for _ in end.shape))
            copies = x.view(len(part), -1, *x.shape[1:])
            return (end + share * (copies - end)).flatten(0, 1).to(x.dtype)

        for key, gradient in passes.gradients(keys, len(part), {at: between}).items():
            total[key] = total.get(key, 0) + gradient.sum(0) / steps
    return total


def _ablated_metrics(passes: TextPasses, nodes: Nodes) -> torch.Tensor:
    """The metric with each node by itself at its baseline, [N]."""
    found = []
    for chosen in torch.arange(len(nodes.index)).split(passes.copies):

        def without(x: torch.Tensor, chosen: torch.Tensor = chosen) -> torch.Tensor:
            return nodes.ablated(x, chosen, torch.arange(len(chosen)))

        found.append(passes.metrics(len(chosen), {nodes.key: without}))
    return torch.cat(found) if found else torch.zeros(0)


def expert_parts(
    model: Transformer, layer: int, values: Mapping[Key, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [T, k] of the chosen experts and what each adds to the output of the layer, [T, k, d] float32."""
    block = model.blocks()[layer]
    topk = values["moe_topk", layer]
    ids, weights = topk[..., 0].long(), topk[..., 1]
    with torch.no_grad():
        x = block.ffn_norm(values["mlp_in", layer])
        parts = []
        for choice in range(ids.shape[1]):
            only = torch.zeros_like(weights)
            only[:, choice] = weights[:, choice]
            parts.append(block.ffn.experts(x, ids, only).float())
        return ids, torch.stack(parts, 1)


def _targets(engine: Engine, over: Any, layers: Any, baseline: Any, needs_change: bool) -> _Targets:
    """The sites, the layers' expert outputs and the dictionaries' sites that `over` names."""
    names = [over] if isinstance(over, str) or not isinstance(over, Sequence) else list(over)
    if not names:
        raise OptionError(
            "over is empty, expected hooks, sublayers, streams, mixers, experts or features:NAME."
        )
    count = engine.config.num_hidden_layers
    chosen = parse_layers(layers).expand(count)
    keys: dict[Key, None] = {}
    experts: list[Key] = []
    features: dict[Key, tuple[Any, Any]] = {}
    for name in names:
        if not isinstance(name, str):
            raise OptionError(f"over holds {quoted(name)}, expected the name of a hook or of a group.")
        if name == EXPERTS:
            engine.v4_model  # noqa: B018  raises for models without routed experts of our own
            experts += [("mlp_out", layer) for layer in chosen]
        elif name.startswith(FEATURES):
            module = engine.saes.registry[name.removeprefix(FEATURES)]
            for key, sae in module.saes.items():
                if key[1] in chosen:
                    features[key] = (sae, module.hosts[key].view)
        else:
            for hook in _hooks_of(engine, name):
                once = hook in engine.schema and engine.schema[hook].once
                for layer in [count - 1] if once else chosen:
                    keys[site_names.resolve(hook, layer, engine.schema, count)] = None
    if not keys and not experts and not features:
        raise OptionError(f"over is {quoted(over)}, which has no site in layers {list(chosen)}.")
    fixed = sorted({hook for hook, _ in keys if not engine.schema[hook].replaceable})
    if needs_change and fixed:
        raise OptionError(
            f"{fixed[0]} can be read, not changed, so it has gradients only. Use method 'gradient' or 'inputs'."
        )
    if isinstance(baseline, str) and baseline == "mean" and (experts or features):
        raise OptionError("baseline 'mean' is for sites. Experts and features take 'zero' or another text.")
    return _Targets(list(keys), experts, features, baseline, (residual_hook(engine), 0))


def _hooks_of(engine: Engine, name: str) -> list[str]:
    if name in GROUPS:
        hooks = [hook for hook in GROUPS[name] if hook in engine.schema]
        if "attn_out" in hooks and "post_attn" in hooks:  # there the latter is the residual, not an output
            hooks.remove("post_attn")
        if hooks:
            return hooks
        raise OptionError(f"over is {name!r}, and this model has none of {', '.join(GROUPS[name])}.")
    why = site_names.refusal(name, engine.schema)
    if why is not None:
        groups = ", ".join((*GROUPS, EXPERTS, FEATURES + "NAME"))
        raise SiteError(f"{why} Groups: {groups}.")
    return [name]


def _check_lengths(texts: Sequence[list[int]]) -> None:
    """Refuse texts of different length, whose positions do not correspond."""
    expected = len(texts[0])
    for index, ids in enumerate(texts):
        if len(ids) != expected:
            raise PromptError(
                f"text {index} has {len(ids)} tokens and the first {expected}; positions are averaged over texts. Give "
                "texts of one length, or attribute them one by one."
            )


def _baselines(
    engine: Engine, baseline: Any, texts: Sequence[list[int]], single: bool
) -> list[list[int]] | None:
    """The token ids of the baseline of each text, from one for all or one for each; None for zeros and means."""
    if baseline is None or (isinstance(baseline, str) and baseline in ("zero", "mean")):
        return None
    if single or is_single(baseline):
        others = [one_text(engine, baseline, "a baseline")] * len(texts)
    else:
        others = texts_of(engine, baseline)[0]
    if len(others) != len(texts):
        raise PromptError(
            f"baseline has {len(others)} texts for {len(texts)} prompts. Give one for all, or one for each."
        )
    for index, (ids, other) in enumerate(zip(texts, others)):
        if len(other) != len(ids):
            which = "the text" if single else f"text {index}"
            raise PromptError(
                f"the baseline has {len(other)} tokens and {which} {len(ids)}; positions are compared one by one. Give "
                "a baseline of the same length, or 'zero' or 'mean'."
            )
    return others


def kept_bytes(model: Any, tokens: int) -> int:
    """About how many bytes the graph of a pass of `tokens` tokens keeps: rows of the streams by token and layer, and
    weights that are stored as codes, as numbers."""
    config, item = model.config, model.dtype.itemsize
    streams = config.hc_mult if isinstance(model, Transformer) else 1
    rows: int = ROWS_KEPT * tokens * config.num_hidden_layers * streams * config.hidden_size * item
    if not isinstance(model, Transformer) or not any(stack.packed for stack in model.expert_stacks()):
        return rows
    each: int = 3 * config.hidden_size * config.moe_intermediate_size * item
    chosen: int = min(config.n_routed_experts, tokens * config.num_experts_per_tok)
    return rows + int(config.num_hidden_layers) * chosen * each
