"""Activation patching: run one text with activations of another.

`patch_sweep` patches one site at a time and measures each: the cells of the sweep are copies of the same text that run
side by side in one forward pass, each with its own edit, so that a sweep takes as many passes as its tokens fill and
not as many as it has cells. The cells of several pairs of texts share passes as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch

from birkhoff import notebook
from birkhoff.analysis.forward import logits, one_text, passes, run_texts, texts_of, trace
from birkhoff.analysis.metric import ResolvedMetric, metrics_of_texts, resolve_metric
from birkhoff.errors import OptionError, PromptError, SiteError, quoted
from birkhoff.hooks.layers import is_list, parse_layers
from birkhoff.hooks.plan import Edit
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.site_names import refusal, select
from birkhoff.option_checks import as_int, listed
from birkhoff.records import Tabular
from birkhoff.result_file import FileParts, SavedResult, join_parts, split_parts
from birkhoff.steering.position_rows import align_tokens
from birkhoff.steering.resolver import per_prompt_edits
from birkhoff.steering.vector_edits import Patch
from birkhoff.text.prompts import is_single
from birkhoff.trace import Trace

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


@dataclass(frozen=True, eq=False)
class PatchSweep(SavedResult, Tabular):
    """The metric of every patched run. `values` has one axis for each of `axes`, whose `labels` name the entries.

    `clean` and `corrupt` are the metric of the two texts unpatched, `tokens` the corrupted text, `passes` the number of
    forward passes that the cells took."""

    kind: ClassVar[str] = "patch sweep"
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
    def spans(self) -> bool:
        """Whether the two texts differ in the metric by more than rounding, so that there is something to recover."""
        return abs(self.clean - self.corrupt) >= 1e-4 * max(1.0, abs(self.clean))

    @property
    def recovered(self) -> torch.Tensor:
        """How far each patch moves the metric from the corrupted text (0) to the clean one (1)."""
        span = self.clean - self.corrupt
        if not self.spans:
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

    def records(self) -> list[dict[str, Any]]:
        """A row for each cell: its labels, the text of its token, the metric, and how much of it is recovered (None if
        the metric is the same for both texts)."""
        cells = product(*(self.labels[axis] for axis in self.axes))
        recovered = self.recovered.flatten().tolist() if self.spans else [None] * self.cells
        rows = []
        for labels, value, share in zip(cells, self.values.flatten().tolist(), recovered, strict=True):
            row = dict(zip(self.axes, labels))
            if self.tokens is not None and "position" in row:
                row["token"] = self.tokens[row["position"]]
            rows.append({**row, "value": value, "recovered": share})
        return rows

    def to_json(self) -> dict[str, Any]:
        """All fields; `values` are nested lists, one level for each axis."""
        tensors, facts = self.file_parts()
        return {**facts, "values": tensors["values"].tolist()}

    def file_parts(self) -> FileParts:
        """The values; facts: everything else, the labels in the order of the axes."""
        facts = {
            "axes": list(self.axes),
            "labels": {axis: list(self.labels[axis]) for axis in self.axes},
            "clean": self.clean,
            "corrupt": self.corrupt,
            "tokens": None if self.tokens is None else list(self.tokens),
            "passes": self.passes,
        }
        return FileParts({"values": self.values}, facts)

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> PatchSweep:
        facts = {**parts.facts, "axes": tuple(parts.facts["axes"])}
        return cls(values=parts.tensors["values"], **facts)

    def _repr_html_(self) -> str:
        values, rows, columns = self.grid()
        moved = [[value - self.corrupt for value in row] for row in values]
        texts = [[f"{value:.2f}" for value in row] for row in values]
        title = (
            f"clean {self.clean:.4g}, corrupt {self.corrupt:.4g}; {self.cells} cells in {self.passes} passes"
        )
        return f"<b>Patch sweep</b>: {title}" + notebook.heat(moved, rows, columns, texts)

    def __repr__(self) -> str:
        counts = [(len(self.labels[axis]), axis) for axis in self.axes]
        shape = " x ".join(f"{count} {axis}{'s' if count > 1 else ''}" for count, axis in counts)
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
    run = _runs_of(engine, [source], {hook: "all" if layers is None else layers})[0]
    edit = Patch(run, hook, layers, **options)
    return trace(engine, [ids], hooks, [[edit, *_as_list(steer)]])[0]


class PatchSweepBatch(Sequence[PatchSweep], SavedResult, Tabular):
    """The sweeps of several pairs of texts, from one call, all with the same axes.

    `batch[0]` is the `PatchSweep` of the first pair, `batch.values` `[pairs, ...]` are those of all of them, and
    `batch.mean` is a `PatchSweep` of their mean: values, clean and corrupt metrics are means over the pairs, so
    `batch.mean.recovered` compares means and is not the mean of ratios. `passes` is the number of forward passes that
    the cells of all pairs took."""

    kind = "patch sweep batch"

    def __init__(self, sweeps: Sequence[PatchSweep], passes: int):
        self._sweeps = list(sweeps)
        self.passes = passes

    def file_parts(self) -> FileParts:
        parts = join_parts(self._sweeps)
        return FileParts(parts.tensors, {"pairs": parts.facts, "passes": self.passes})

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> PatchSweepBatch:
        pairs = split_parts(FileParts(parts.tensors, parts.facts["pairs"]))
        return cls([PatchSweep.from_file_parts(each) for each in pairs], parts.facts["passes"])

    def __len__(self) -> int:
        return len(self._sweeps)

    @overload
    def __getitem__(self, key: int) -> PatchSweep: ...
    @overload
    def __getitem__(self, key: slice) -> list[PatchSweep]: ...
    def __getitem__(self, key: Any) -> Any:
        return self._sweeps[key]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of each sweep; `values` has one more, the pairs, before them."""
        return self._sweeps[0].axes

    @property
    def labels(self) -> Mapping[str, Sequence[Any]]:
        return self._sweeps[0].labels

    @property
    def values(self) -> torch.Tensor:
        """[pairs, *axes]"""
        return torch.stack([sweep.values for sweep in self._sweeps])

    @property
    def mean(self) -> PatchSweep:
        """The means over the pairs. `tokens` are those that all corrupted texts have, as a rule none: then None."""
        first = self._sweeps[0]
        same = all(sweep.tokens == first.tokens for sweep in self._sweeps)
        return PatchSweep(
            self.values.double().mean(0).float(),
            first.axes,
            first.labels,
            sum(sweep.clean for sweep in self._sweeps) / len(self),
            sum(sweep.corrupt for sweep in self._sweeps) / len(self),
            first.tokens if same else None,
            self.passes,
        )

    def records(self) -> list[dict[str, Any]]:
        """The rows of every pair's sweep, with the number of the pair."""
        return [{"pair": pair, **row} for pair, sweep in enumerate(self._sweeps) for row in sweep.records()]

    def to_json(self) -> dict[str, Any]:
        """The mean as a sweep, and under `pairs` the sweep of every pair."""
        return {**self.mean.to_json(), "pairs": [sweep.to_json() for sweep in self._sweeps]}

    def _repr_html_(self) -> str:
        return f"<b>Mean of {len(self)} pairs.</b> " + self.mean._repr_html_()

    def __repr__(self) -> str:
        return f"PatchSweepBatch({len(self)} pairs in {self.passes} passes; mean {self.mean!r})"


@dataclass(frozen=True, eq=False)
class _Pair:
    """One corrupted text, the run its patches come from, and how its cells are measured."""

    run: Mapping[Any, Any]
    target: list[int]
    labels: Mapping[str, Sequence[Any]]
    measure: ResolvedMetric
    clean: float
    plain: tuple[Edit, ...]  # edits of every cell

    def cells(self) -> list[dict[str, Any]]:
        return [dict(zip(self.labels, values)) for values in product(*self.labels.values())]


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
) -> PatchSweep | PatchSweepBatch:
    """Patch every selected site of `corrupt` with its activation in `clean`, one at a time, and measure each run; for
    one pair of texts, or for a list of clean and a list of corrupted ones."""
    targets, single = texts_of(engine, corrupt)
    sources = [clean] if single else _clean_sources(clean, len(targets))
    texts = [_text_of(engine, source) for source in sources]
    if positions is not None and not single:
        _check_lengths([(len(text), len(target)) for text, target in zip(texts, targets, strict=True)])
    heads = head_hook(engine) if over == "heads" else None
    sites = _sites(engine, over if heads is None else heads[0], layers)
    hooks = {hook: list(rows) for hook, rows in sites.items()}
    chosen = _streams(engine, streams)
    metrics = [metric] if single else metrics_of_texts(metric, len(targets))
    edits = [steer] if single else per_prompt_edits(steer, len(targets))

    def pair(index: int, run: Mapping[Any, Any]) -> _Pair:
        target = targets[index]
        # Captured rows have no logits: their text is run again.
        clean_logits = run.logits if isinstance(run, Trace) else logits(engine, [texts[index]], None)[0]
        labels: dict[str, Sequence[Any]] = {"hook": list(sites)} if is_list(over) else {}
        labels["layer"] = list(next(iter(sites.values())))
        places = _positions(positions, texts[index], target, align)
        for axis, entries in (("position", places), ("stream", chosen)):
            if entries is not None:
                labels[axis] = entries
        if heads is not None:
            labels["head"] = list(range(heads[1]))
        before = resolve_metric(engine, metrics[index], len(texts[index]), gradients=False)
        measure = resolve_metric(engine, metrics[index], len(target), gradients=False)
        plain = engine.resolve(edits[index], target, 1)
        return _Pair(run, target, labels, measure, float(before(clean_logits.unsqueeze(0))), plain)

    def patched(each: _Pair, cell: Mapping[str, Any]) -> ResolvedEdit:
        hook = cell.get("hook", next(iter(sites)))
        where = [cell["position"]] if "position" in cell else None
        of_streams = [cell["stream"]] if "stream" in cell else None
        edit = Patch(each.run, hook, [cell["layer"]], where=where, streams=of_streams, align=align)
        found = edit.resolve(engine.schema, engine.config.num_hidden_layers, {}, each.target, 1)
        if heads is None:
            return found
        width = engine.schema[hook].width // heads[1]
        entries = tuple(range(cell["head"] * width, (cell["head"] + 1) * width))
        return replace(
            found, sites={key: replace(site, entries=entries) for key, site in found.sites.items()}
        )

    sweeps: list[PatchSweep] = []
    total, done, advance = 0, 0, None
    for group in passes(targets):  # bounds the clean activations that are kept
        runs = _runs_of(engine, [sources[i] for i in group], hooks)
        pairs = [pair(i, run) for i, run in zip(group, runs)]
        if any(each.labels != pairs[0].labels for each in pairs) or (
            sweeps and pairs[0].labels != sweeps[0].labels
        ):
            raise PromptError(
                "align is 'tokens', and the pairs do not have the same aligned positions, so there is no mean. Give "
                "positions that all pairs have, positions=None for all together, or sweep the pairs one by one."
            )
        # The last run of each pair is the corrupted text without a patch.
        runs_of = [(each, cell) for each in pairs for cell in (*each.cells(), None)]
        values: list[float] = []
        used: dict[int, int] = {}
        if advance is None:
            advance = notebook.progress("patching cells", len(runs_of) // len(pairs) * len(targets))
        with torch.no_grad():
            for together in passes([each.target for each, _ in runs_of]):
                total += 1
                some = [runs_of[i] for i in together]
                changes = [
                    each.plain if cell is None else (patched(each, cell), *each.plain) for each, cell in some
                ]
                hidden = run_texts(engine, [each.target for each, _ in some], changes)
                values += [each.measure.of_hidden(engine, rows) for (each, _), rows in zip(some, hidden)]
                for name in {id(each) for each, _ in some}:
                    used[name] = used.get(name, 0) + 1
                if advance is not None:
                    advance(done + len(values))
        done += len(values)
        for each, own in zip(pairs, torch.tensor(values, dtype=torch.float64).view(len(pairs), -1)):
            shape = [len(entries) for entries in each.labels.values()]
            sweeps.append(
                PatchSweep(
                    own[:-1].view(shape).float(),
                    tuple(each.labels),
                    each.labels,
                    each.clean,
                    float(own[-1]),
                    engine.token_texts(each.target),
                    used[id(each)],
                )
            )
    return sweeps[0] if single else PatchSweepBatch(sweeps, total)


def _clean_sources(clean: Any, count: int) -> list[Any]:
    """The clean prompts or runs, one for each of `count` corrupted texts."""
    one = isinstance(clean, Mapping) or (
        is_single(clean) and not (isinstance(clean[0], Mapping) and "role" not in clean[0])
    )
    if one or len(clean) != count:
        seen = "one text" if one else f"{len(clean)} texts"
        raise PromptError(
            f"clean has {seen} and corrupt {count}; each corrupted text is patched from its own clean one. Give two "
            "lists of equal length."
        )
    return list(clean)


def _text_of(engine: Engine, source: Any) -> list[int]:
    """The token ids of a clean prompt or run. Captured rows have them if a site has a row of every token."""
    if not isinstance(source, Mapping):
        return one_text(engine, source, "patching")
    if isinstance(source, Trace):
        return source.token_ids
    for rows in source.values():
        ids = list(getattr(rows, "token_ids", ()))
        if ids and list(rows.positions) == list(range(len(ids))):
            return ids
    raise PromptError(
        f"clean is {quoted(source)}, which does not have a row of every token of its text, so its metric is not known. "
        'Give the text itself, engine.trace(text, hooks), or rows captured at positions="all_prompt".'
    )


def _check_lengths(lengths: Sequence[tuple[int, int]]) -> None:
    """Refuse pairs of texts whose positions do not correspond."""
    expected = lengths[0][1]
    wrong = next((i for i, pair in enumerate(lengths) if pair != (expected, expected)), None)
    if wrong is not None:
        clean, corrupt = lengths[wrong]
        raise PromptError(
            f"pair {wrong} has {clean} clean and {corrupt} corrupted tokens, expected {expected} as in the first "
            "corrupted text: positions are averaged over pairs. Give texts of one length, or positions=None to patch "
            "all positions together."
        )


def _as_list(steer: Any) -> list[Any]:
    return [] if steer is None else list(steer) if isinstance(steer, (list, tuple)) else [steer]


def _runs_of(engine: Engine, sources: Sequence[Any], hooks: Mapping[str, Any]) -> list[Any]:
    """Runs as they are, and the traces of prompts."""
    texts = [one_text(engine, each, "patching") for each in sources if not isinstance(each, Mapping)]
    traces = iter(trace(engine, texts, hooks, None) if texts else ())
    return [each if isinstance(each, Mapping) else next(traces) for each in sources]


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
    streams = listed(streams)
    if streams is None or is_list(streams):
        return None if streams is None else list(streams)
    raise OptionError(
        f'streams is {quoted(streams)}, expected "each", a list of streams, or None for all together.'
    )
