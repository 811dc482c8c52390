"""Activation patching: run one text with activations of another.

`patch_sweep` patches one site at a time and measures each: the cells of the sweep are copies of the same text that run
side by side in one forward pass, each with its own edit, so that a sweep takes as many passes as its tokens fill and
not as many as it has cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from birkhoff import notebook
from birkhoff.analysis.forward import one_text, passes, run_texts, trace
from birkhoff.analysis.metric import resolve_metric
from birkhoff.errors import OptionError, SiteError, quoted
from birkhoff.hooks.layers import is_list, parse_layers
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.site_names import refusal, select
from birkhoff.option_checks import as_int
from birkhoff.steering.position_rows import align_tokens
from birkhoff.steering.vector_edits import Patch
from birkhoff.trace import Trace

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


@dataclass(frozen=True, eq=False)
class PatchSweep:
    """The metric of every patched run. `values` has one axis for each of `axes`, whose `labels` name the entries.

    `clean` and `corrupt` are the metric of the two texts unpatched, `tokens` the corrupted text, `passes` the number of
    forward passes that the cells took."""

    values: torch.Tensor
    axes: tuple[str, ...]
    labels: Mapping[str, Sequence[Any]]
    clean: float
    corrupt: float
    tokens: Sequence[str] | None
    passes: int

    @property
    def cells(self) -> int:
        """The number of patched runs."""
        return self.values.numel()

    @property
    def recovered(self) -> torch.Tensor:
        """How far each patch moves the metric from the corrupted text (0) to the clean one (1)."""
        span = self.clean - self.corrupt
        if abs(span) < 1e-4 * max(1.0, abs(self.clean)):  # rounding
            raise OptionError(
                "the metric is the same for both texts, so nothing can be recovered. Use `values`."
            )
        return (self.values - self.corrupt) / span

    def top(self, k: int = 10) -> list[tuple[dict[str, Any], float]]:
        """The k cells that move the metric the furthest from the corrupted text, furthest first, as (labels, value)."""
        moved = (self.values - self.corrupt).abs().flatten()
        best = moved.topk(min(k, len(moved))).indices.tolist()
        places = [torch.unravel_index(torch.tensor(index), self.values.shape) for index in best]
        return [
            (
                {axis: self.labels[axis][int(i)] for axis, i in zip(self.axes, place)},
                float(self.values[tuple(int(i) for i in place)]),
            )
            for place in places
        ]

    def grid(self, normalized: bool = False) -> tuple[list[list[float]], list[str], list[str]]:
        """The values as a table: rows, their names, and the names of the columns (the last axis)."""
        values = self.recovered if normalized else self.values
        *lead, last = self.axes
        table = values.reshape(-1, values.shape[-1]).tolist()
        rows = [
            ", ".join(f"{axis} {label}" for axis, label in zip(lead, place))
            for place in product(*(self.labels[axis] for axis in lead))
        ]
        texts = self.tokens if last == "position" else None
        columns = [
            str(label) if texts is None else f"{label} {texts[label]!r}" for label in self.labels[last]
        ]
        return table, rows, columns

    def _repr_html_(self) -> str:
        values, rows, columns = self.grid()
        moved = [[value - self.corrupt for value in row] for row in values]
        texts = [[f"{value:.2f}" for value in row] for row in values]
        title = (
            f"clean {self.clean:.4g}, corrupt {self.corrupt:.4g}; {self.cells} cells in {self.passes} passes"
        )
        return f"<b>Patch sweep</b>: {title}" + notebook.heat(moved, rows, columns, texts)

    def __repr__(self) -> str:
        shape = " x ".join(f"{len(self.labels[axis])} {axis}s" for axis in self.axes) or "1 cell"
        return (
            f"PatchSweep({shape}, clean {self.clean:.4g}, corrupt {self.corrupt:.4g}, "
            f"values {self.values.min():.4g}..{self.values.max():.4g}, {self.passes} passes)"
        )


def patch(
    engine: Engine,
    prompts: Any,
    source: Any,
    hook: str,
    layers: Any,
    hooks: Any,
    steer: Any,
    options: Mapping[str, Any],
) -> Trace:
    """Run a prompt with activations of `source`, a run or another prompt."""
    ids = one_text(engine, prompts, "patch")
    edit = Patch(
        _run_of(engine, source, {hook: "all" if layers is None else layers}), hook, layers, **options
    )
    return trace(engine, [ids], hooks, [[edit, *_as_list(steer)]])[0]


def patch_sweep(
    engine: Engine,
    clean: Any,
    corrupt: Any,
    metric: Any,
    over: Any,
    layers: Any,
    positions: Any,
    streams: Any,
    align: str,
    steer: Any,
) -> PatchSweep:
    """Patch every selected site of `corrupt` with its activation in `clean`, one at a time, and measure each run."""
    target = one_text(engine, corrupt, "patch_sweep")
    heads = head_hook(engine) if over == "heads" else None
    sites = _sites(engine, over if heads is None else heads[0], layers)
    run = _run_of(engine, clean, {hook: list(rows) for hook, rows in sites.items()})
    measure = resolve_metric(engine, metric, len(target), gradients=False)
    labels: dict[str, list[Any]] = {}
    if is_list(over):
        labels["hook"] = list(sites)
    labels["layer"] = list(next(iter(sites.values())))
    places = _positions(positions, run.token_ids, target, align)
    if places is not None:
        labels["position"] = places
    streams = _streams(engine, streams)
    if streams is not None:
        labels["stream"] = streams
    if heads is not None:
        labels["head"] = list(range(heads[1]))

    def patched(cell: Mapping[str, Any]) -> ResolvedEdit:
        hook = cell.get("hook", next(iter(sites)))
        where = [cell["position"]] if "position" in cell else None
        chosen = [cell["stream"]] if "stream" in cell else None
        edit = Patch(run, hook, [cell["layer"]], where=where, streams=chosen, align=align)
        found = edit.resolve(engine.schema, engine.config.num_hidden_layers, {}, target, 1)
        if heads is None:
            return found
        width = engine.schema[hook].width // heads[1]
        entries = tuple(range(cell["head"] * width, (cell["head"] + 1) * width))
        return replace(
            found, sites={key: replace(site, entries=entries) for key, site in found.sites.items()}
        )

    cells = [dict(zip(labels, values)) for values in product(*labels.values())]
    plain = engine.resolve(steer, target, 1)
    texts = [target] * (len(cells) + 1)  # the last is the corrupted text without a patch
    everything = [*((patched(cell), *plain) for cell in cells), plain]
    values: list[float] = []
    count = 0
    advance = notebook.progress("patching cells", len(texts))
    with torch.no_grad():
        for together in passes(texts):
            count += 1
            hidden = run_texts(engine, [texts[i] for i in together], [everything[i] for i in together])
            values += [measure.of_hidden(engine, rows) for rows in hidden]
            if advance is not None:
                advance(len(values))
    shape = [len(each) for each in labels.values()]
    return PatchSweep(
        torch.tensor(values[:-1], dtype=torch.float64).view(shape).float(),
        tuple(labels),
        labels,
        float(resolve_metric(engine, metric, len(run.logits), gradients=False)(run.logits.unsqueeze(0))),
        values[-1],
        engine.token_texts(target),
        count,
    )


def _as_list(steer: Any) -> list[Any]:
    return [] if steer is None else list(steer) if isinstance(steer, (list, tuple)) else [steer]


def _run_of(engine: Engine, source: Any, hooks: Mapping[str, Any]) -> Any:
    """A run as it is, or the trace of a prompt."""
    if isinstance(source, Mapping):
        return source
    return trace(engine, [one_text(engine, source, "patching")], hooks, None)[0]


def head_hook(engine: Engine) -> tuple[str, int]:
    """The hook that holds the outputs of the heads side by side, and their number."""
    if "attn_head_out" in engine.schema:
        return "attn_head_out", engine.schema["attn_head_out"].logical_shape[0]
    if "attn_z" not in engine.schema:
        raise SiteError("over is 'heads', but this model has no hook of its heads' outputs. Name a hook.")
    return "attn_z", engine.config.num_attention_heads  # type: ignore[attr-defined]


def _sites(engine: Engine, over: Any, layers: Any) -> dict[str, dict[int, Any]]:
    """The addresses of each hook, by layer."""
    names = over if is_list(over) else [over]
    found: dict[str, dict[int, Any]] = {}
    for hook in names:
        why = (
            refusal(hook, engine.schema) if isinstance(hook, str) else f"{quoted(hook)} is no name of a hook."
        )
        if why is not None:
            raise SiteError(why)
        found[hook] = select(hook, parse_layers(layers), engine.schema, engine.config.num_hidden_layers)
    if not found or len({tuple(rows) for rows in found.values()}) > 1:
        raise OptionError(
            f"over is {quoted(over)}: these hooks do not have the same layers. Sweep over one hook at a time."
        )
    return found


def _positions(positions: Any, source: Sequence[int], target: Sequence[int], align: str) -> list[int] | None:
    """The patched positions one by one, or None for all of them together."""
    if positions is None:
        return None
    matches = align_tokens(source, target) if align == "tokens" else range(min(len(source), len(target)))
    if isinstance(positions, str):
        if positions != "each":
            raise OptionError(
                f'positions is {quoted(positions)}, expected "each", a list of positions, or None for all together.'
            )
        return sorted(matches)
    chosen = []
    for position in positions if isinstance(positions, Iterable) else [positions]:
        index = as_int(position)
        if index is None or not -len(target) <= index < len(target) or index % len(target) not in matches:
            raise OptionError(
                f"positions holds {quoted(position)}; patched can be {sorted(matches)} of {len(target)} tokens, where "
                "both texts have one."
            )
        chosen.append(index % len(target))
    if not chosen:
        raise OptionError("positions is an empty list. Name at least one, or leave it out.")
    return chosen


def _streams(engine: Engine, streams: Any) -> list[int] | None:
    if isinstance(streams, str) and streams == "each":
        if engine.num_streams is None:
            raise OptionError("streams is 'each', but this model has one residual. Leave streams out.")
        return list(range(engine.num_streams))
    if streams is None or is_list(streams):
        return None if streams is None else list(streams)
    raise OptionError(
        f'streams is {quoted(streams)}, expected "each", a list of streams, or None for all together.'
    )
