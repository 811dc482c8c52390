"""Attribution: how much each part of the model contributes to a metric on a text.

A node (`nodes.py`) is scored by what the metric loses when the node is moved to its baseline. Four methods:

    gradient    attribution patching: (value - baseline) * gradient at the text; one forward and one backward pass
    integrated  the gradient is averaged over `steps` points of the straight way from the baseline to the value, for
                each site by itself: scores of a site sum to the effect of moving the whole site
    inputs      the gradient is averaged over `steps` points of the way from the baseline's embeddings to the text's,
                at all sites at once
    exact       activation patching: the node is moved and the text is run again, once per node

Passes are batched: copies of the text that differ in one site form a batch of at most `max_batch_tokens` tokens (fewer,
if the graph of gradients would keep more than `KEPT_BYTES`), so memory does not depend on the number of nodes, sites or
steps. If the graph of one copy is too large, layers are computed again in the backward pass: then memory does not grow
with the number of layers either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.attribution import Attribution, SiteScores
from birkhoff.analysis.forward import one_text, residual_hook, text_tap
from birkhoff.analysis.gradients import Change, GraphTensorsTap, SiteTensors, run_with_graph
from birkhoff.analysis.metric import ResolvedMetric, resolve_metric
from birkhoff.analysis.nodes import ExpertNodes, FeatureNodes, Nodes, SiteNodes, feature_context, mean_row
from birkhoff.errors import OptionError, PromptError, SiteError, did_you_mean, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.plan import Key
from birkhoff.model.transformer import Transformer
from birkhoff.option_checks import check_int

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
    """Forward and backward passes over copies of one text, with the same edits in every copy."""

    def __init__(
        self,
        engine: Engine,
        ids: list[int],
        metric: ResolvedMetric,
        steer: Any = None,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        recompute: bool | None = None,
    ):
        self.engine = engine
        self.ids = ids
        self.metric = metric
        self._steer = steer
        self.copies = max(1, max_batch_tokens // len(ids))
        kept = kept_bytes(engine.model, len(ids))
        self._recompute = kept > KEPT_BYTES if recompute is None else recompute
        self.graph_copies = self.copies if self._recompute else max(1, min(self.copies, KEPT_BYTES // kept))

    def values(self, ids: list[int], keys: Sequence[Key]) -> tuple[dict[Key, torch.Tensor], float]:
        """What leaves these sites in one pass of a text, and its metric."""
        tensors = SiteTensors(keys)
        with torch.no_grad():
            logits = self._logits(ids, 1, tensors)
            missing = [key for key in keys if key not in tensors.parts]
            if missing:
                raise SiteError(f"{missing[0][0]}[{missing[0][1]}] did not fire in a whole-text pass.")
            return {key: tensors[key].detach() for key in keys}, float(self.metric(logits)[0])

    def gradients(
        self, keys: Sequence[Key], copies: int = 1, changes: Mapping[Key, Change] | None = None
    ) -> dict[Key, torch.Tensor]:
        """Gradients of the metric at these sites for each copy, [copies, T, *row_shape] float32."""
        tensors = SiteTensors(keys, changes)
        with torch.enable_grad():
            total = self.metric(self._logits(self.ids, copies, tensors)).sum()
        found = tensors.gradients(total)
        return {key: found[key].float().unflatten(0, (copies, len(self.ids))) for key in keys}

    def graph(self, keys: Sequence[Key]) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
        """What leaves these sites, as nodes of a graph that is kept, and the gradient of the metric there."""
        tensors = SiteTensors(keys)
        with torch.enable_grad():
            total = self.metric(self._logits(self.ids, 1, tensors)).sum()
        gradients = tensors.gradients(total, retain=True)
        return {key: tensors[key] for key in keys}, gradients

    def metrics(self, copies: int, changes: Mapping[Key, Change]) -> torch.Tensor:
        """The metric of each copy, float32 on the host."""
        with torch.no_grad():
            logits = self._logits(self.ids, copies, SiteTensors((), changes))
            return self.metric(logits).float().cpu()

    def _logits(self, ids: list[int], copies: int, tensors: SiteTensors) -> torch.Tensor:
        model = self.engine.model
        tokens = torch.tensor(ids, device=model.device).expand(copies, -1)
        tap = GraphTensorsTap(
            text_tap(self.engine, ids, self.engine.resolve(self._steer, ids, 1), copies), tensors
        )
        return run_with_graph(model, tokens, tap, self._recompute and torch.is_grad_enabled())


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
    prompt: Any,
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
) -> Attribution:
    """See `Engine.attribute`. `max_exact_nodes` bounds the runs of the exact method."""
    check_int("max_batch_tokens", max_batch_tokens)
    check_method(method, steps)
    ids = one_text(engine, prompt, "attribute")
    passes = TextPasses(
        engine, ids, resolve_metric(engine, metric, len(ids)), steer, max_batch_tokens, recompute
    )
    compared = compare_texts(passes, over, layers, baseline, needs_change=method in ("integrated", "exact"))
    count = sum(len(nodes.index) for nodes in compared.nodes)
    if method == "exact" and max_exact_nodes is not None and count > max_exact_nodes:
        raise OptionError(
            f"method 'exact' would run the text {count} times, at most {max_exact_nodes} are allowed. Choose fewer "
            "layers or sites, or method 'gradient'."
        )
    scores = score_nodes(passes, compared, method, steps)
    return Attribution(
        passes.metric.name,
        method,
        compared.value,
        compared.baseline_value,
        ids,
        [
            SiteScores(nodes.key, nodes.axes, nodes.sizes, nodes.index, each.detach().float().cpu())
            for nodes, each in zip(compared.nodes, scores)
        ],
        engine.token_texts(ids),
        engine.config.num_hidden_layers,
        site_names.has_streams(engine.schema),
    )


def compare_texts(
    passes: TextPasses, over: Any, layers: Any, baseline: Any, needs_change: bool = False
) -> ComparedTexts:
    """Run the text and its baseline once, and build the nodes."""
    engine, ids = passes.engine, passes.ids
    keys, experts, features = _targets(engine, over, layers)
    if needs_change:
        fixed = sorted({hook for hook, _ in keys if not engine.schema[hook].replaceable})
        if fixed:
            raise OptionError(
                f"{fixed[0]} can be read, not changed, so it has gradients only. Use method 'gradient' or 'inputs'."
            )
    other = _baseline_ids(engine, baseline, ids)
    if baseline == "mean" and (experts or features):
        raise OptionError("baseline 'mean' is for sites. Experts and features take 'zero' or another text.")
    inputs: Key = (residual_hook(engine), 0)
    needed = dict.fromkeys([*keys, inputs, *experts, *features])
    for _, layer in experts:
        needed |= dict.fromkeys([("mlp_in", layer), ("moe_topk", layer)])
    for key, (_, view) in features.items():
        if view.needs_post:
            hook, layer = key
            written = ("mhc_attn_post_mix", layer) if hook == "mhc_streams_pre_mlp" else None
            last = layer if hook == "mhc_streams_final" else layer - 1
            needed[written or ("mhc_ffn_post_mix", last)] = None
    values, number = passes.values(ids, list(needed))
    theirs, their_number = (None, None) if other is None else passes.values(other, list(needed))

    nodes: list[Nodes] = []
    for key in keys:
        value = values[key]
        if theirs is not None:
            end = theirs[key]
        else:
            end = mean_row(value) if baseline == "mean" else torch.zeros_like(value)
        heads = getattr(engine.config, "num_attention_heads", 1)
        nodes.append(SiteNodes(key, engine.schema[key[0]].axes, value, end, heads))
    for key in experts:
        parts = expert_parts(engine.v4_model, key[1], values)
        their_parts = None if theirs is None else expert_parts(engine.v4_model, key[1], theirs)
        count = engine.v4_model.config.n_routed_experts
        nodes.append(ExpertNodes(key, values[key], *parts, count, their_parts))
    for key, (sae, view) in features.items():
        context = feature_context(engine.model, key, values)
        nodes.append(
            FeatureNodes(key, sae, view, values[key], None if theirs is None else theirs[key], context)
        )
    start = torch.zeros_like(values[inputs]) if theirs is None else theirs[inputs]
    if baseline == "mean":
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
        gradients = passes.gradients(keys)
        return [nodes.scores(gradients[nodes.key][0]) for nodes in compared.nodes]
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


def _targets(
    engine: Engine, over: Any, layers: Any
) -> tuple[list[Key], list[Key], dict[Key, tuple[Any, Any]]]:
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
    return list(keys), experts, features


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


def _baseline_ids(engine: Engine, baseline: Any, ids: list[int]) -> list[int] | None:
    """The token ids of a baseline text; None for zeros and means."""
    if baseline is None or (isinstance(baseline, str) and baseline in ("zero", "mean")):
        return None
    other = one_text(engine, baseline, "a baseline")
    if len(other) != len(ids):
        raise PromptError(
            f"the baseline has {len(other)} tokens and the text {len(ids)}; positions are compared one by one. Give a "
            "baseline of the same length, or 'zero' or 'mean'."
        )
    return other


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
