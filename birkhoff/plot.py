"""Pictures of results with Matplotlib (the extra `plot`): mixers, lens, attention, sweeps, attribution.

Every function takes a result as the engine returns it and gives a Matplotlib `Figure`, which a notebook shows and
`save(figure, path)` writes as a picture or as an HTML page. With `axes` a picture is drawn into a figure of the
caller."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from birkhoff.atomic_file import write_atomic
from birkhoff.errors import OptionError, SiteError, quoted
from birkhoff.notebook import in_kernel
from birkhoff.option_checks import as_int, listed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from birkhoff.analysis.attention import AttentionPattern, AttentionReadout
    from birkhoff.analysis.lens import Lens
    from birkhoff.analysis.logit_attribution import LogitAttribution
    from birkhoff.analysis.patching import PatchSweep
    from birkhoff.trace import Trace

LONGEST_LABEL = 24  # characters
MAX_PANELS = 256  # heads in one picture
LABELLED_PANELS = 8  # heads up to which every one has the tokens at its sides
MIXERS = ("mhc_attn_res_mix", "mhc_ffn_res_mix")


def film_strip(trace: Trace, position: int = -1) -> Figure:
    """The mixers of one token in every layer: attention above, experts below, each [from, to] from 0 to 1."""
    missing = [hook for hook in MIXERS if not trace.layers(hook)]
    if missing:
        raise SiteError(
            f"the trace has no {', '.join(missing)}. Trace them: engine.trace(prompt, hooks={list(MIXERS)})."
        )
    layers = trace.layers(MIXERS[0])
    figure, grid = _figure(1.1 * len(layers) + 1, 2.8, rows=2, columns=len(layers))
    image: Any = None
    for row, hook in enumerate(MIXERS):
        for column, layer in enumerate(layers):
            axes = grid[row][column]
            mix = trace[hook, layer][position].float().cpu().numpy()
            image = axes.imshow(mix, vmin=0, vmax=1, cmap="viridis")
            axes.set_xticks([])
            axes.set_yticks([])
            if row == 0:
                axes.set_title(str(layer), fontsize=8)
        grid[row][0].set_ylabel("attention" if row == 0 else "experts", fontsize=8)
    name = f"{position}" if trace.tokens is None else f"{position}: {_label(trace.tokens[position])}"
    figure.suptitle(f"mixers by layer, token {name}", fontsize=9)
    figure.colorbar(image, ax=[axes for row in grid for axes in row], shrink=0.8, label="from row to column")
    return figure


def lens(result: Lens, of: int | str = "head", positions: int = 24, axes: Any = None) -> Figure:
    """The most likely token at every depth (the last depth on top) and its probability, for the last tokens."""
    chances, texts, depths = result.table(of, positions)
    width = len(chances[0])
    names = (result.tokens or [str(token) for token in result.token_ids])[-width:]
    figure, axes = _axes(axes, 0.75 * width + 2, 0.3 * len(depths) + 1.4)
    image = axes.imshow(chances, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    _ticks(axes, names, depths)
    axes.set_ylabel("depth")
    for row, (line, shares) in enumerate(zip(texts, chances)):
        for column, (text, share) in enumerate(zip(line, shares)):
            axes.text(
                column,
                row,
                _label(text),
                ha="center",
                va="center",
                fontsize=6,
                color="w" if share > 0.5 else "k",
            )
    figure.colorbar(image, ax=axes, label="probability")
    return figure


def attention(
    readouts: Sequence[AttentionReadout], tokens: Sequence[str] | None = None, axes: Any = None
) -> Figure:
    """Attention of one token by layer. A compressed block's weight is spread over its tokens; the sink is the last
    column. `tokens` are the texts of the tokens, by default those of the readouts."""
    tokens = readouts[0].tokens if tokens is None else tokens
    last = max(readout.first + len(readout.window) for readout in readouts)
    rows = np.zeros((len(readouts), last + 1))
    for row, readout in zip(rows, readouts):
        row[readout.first : readout.first + len(readout.window)] += readout.window.float().cpu().numpy()
        for entry, weight in enumerate(readout.entries.tolist()):
            block = slice(entry * readout.ratio, (entry + 1) * readout.ratio)
            row[block] += weight / readout.ratio
        row[last] = readout.sink
    if tokens is not None and len(tokens) < last:
        raise OptionError(
            f"there are {len(tokens)} tokens for {last} positions. Pass the tokens of the same text."
        )
    names = [*(list(tokens)[:last] if tokens is not None else map(str, range(last))), "sink"]
    figure, axes = _axes(axes, 0.32 * len(names) + 2, 0.28 * len(rows) + 1.4)
    image = axes.imshow(rows, vmin=0, cmap="magma", aspect="auto")
    _ticks(axes, names, range(len(rows)))
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="attention")
    return figure


def attention_patterns(
    patterns: AttentionPattern | Mapping[int, AttentionPattern],
    heads: int | Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    axes: Any = None,
) -> Figure:
    """Attention of every head from query (row) to key (column): a panel for each head, and a row of panels for each
    layer. A compressed block's weight is spread over its tokens; the sink is the last column.

    `patterns` are those of `engine.attention_patterns`, or one of them. `heads` are some of the heads, by default all;
    `tokens` the texts of the tokens, by default those of the patterns. With `axes` one head of one layer is drawn."""
    layers = dict(patterns) if isinstance(patterns, Mapping) else {patterns.layer: patterns}
    if not layers:
        raise OptionError(
            "there are no patterns. Ask for some: engine.attention_patterns(text, layers=[2, 6])."
        )
    first = next(iter(layers.values()))
    count, length = first.sink.shape
    chosen = list(range(count)) if heads is None else listed(heads)
    for head in chosen:
        if as_int(head) is None or not 0 <= head < count:
            raise OptionError(f"heads has {quoted(head)}, this model has heads 0..{count - 1}.")
    panels = len(layers) * len(chosen)
    if not panels or panels > MAX_PANELS or (axes is not None and panels > 1):
        most = "one, which is drawn into axes" if axes is not None else f"1 to {MAX_PANELS}"
        raise OptionError(f"these are {panels} heads, expected {most}. Choose layers and heads.")
    tokens = first.tokens if tokens is None else tokens
    if tokens is not None and len(tokens) != length:
        raise OptionError(
            f"there are {len(tokens)} tokens for {length} positions. Pass the tokens of the same text."
        )
    labelled = panels <= LABELLED_PANELS
    size = 0.2 * length + 1.4 if labelled else 1.2
    if axes is None:
        figure, grid = _figure(size * len(chosen) + 1, size * len(layers) + 0.6, len(layers), len(chosen))
    else:
        figure, grid = axes.figure, [[axes]]
    image: Any = None
    for row, (layer, pattern) in enumerate(layers.items()):
        weights = torch.cat((pattern.by_token(), pattern.sink.unsqueeze(-1)), -1).float().cpu().numpy()
        for column, head in enumerate(chosen):
            panel = grid[row][column]
            image = panel.imshow(weights[head], vmin=0, vmax=1, cmap="magma", aspect="auto")
            panel.set_title(f"{layer}.{head}", fontsize=8)
            if labelled:
                names = list(tokens) if tokens is not None else list(range(length))
                _ticks(panel, [*names, "sink"], names)
            else:
                panel.set_xticks([])
                panel.set_yticks([])
    figure.colorbar(image, ax=axes or [panel for line in grid for panel in line], label="attention")
    return figure


def patch_sweep(sweep: PatchSweep, recovered: bool = True, axes: Any = None) -> Figure:
    """A sweep as a heat map: what each patch recovers (0 corrupted, 1 clean), or the metric itself."""
    values, rows, columns = sweep.grid(recovered)
    figure, axes = _axes(axes, 0.4 * len(columns) + 3, 0.28 * len(rows) + 1.8)
    middle = 0.0 if recovered else sweep.corrupt
    spread = max(abs(value - middle) for row in values for value in row) or 1.0
    image = axes.imshow(values, vmin=middle - spread, vmax=middle + spread, cmap="RdBu", aspect="auto")
    _ticks(axes, columns, rows)
    figure.colorbar(image, ax=axes, label="recovered" if recovered else "metric")
    return figure


def steering_sweep(points: Mapping[float, Any], label: str = "metric", axes: Any = None) -> Figure:
    """What a strength of steering changes: one number for each scale, or several by name.

    plot.steering_sweep({0.0: 1.3, 1.0: 2.4}) or plot.steering_sweep({0.0: {"joy": 0.1, "loss": 2.0}, ...})."""
    if not isinstance(points, Mapping) or not points:
        raise OptionError(f"points is {quoted(points)}, expected numbers by scale: {{0.0: 1.3, 1.0: 2.4}}.")
    scales = sorted(points)
    named = {
        scale: dict(value) if isinstance(value, Mapping) else {label: float(value)}
        for scale, value in points.items()
    }
    names = list(named[scales[0]])
    if any(list(named[scale]) != names for scale in scales):
        raise OptionError("the scales have numbers of different names. Give the same names at every scale.")
    figure, axes = _axes(axes, 5, 3.2)
    for name in names:
        axes.plot(scales, [float(named[scale][name]) for scale in scales], marker="o", label=_label(name))
    axes.set_xlabel("scale")
    axes.set_ylabel(_label(label) if len(names) == 1 else "")
    axes.axvline(0, color="0.7", linewidth=0.8)
    if len(names) > 1:
        axes.legend()
    return figure


def attribution(terms: LogitAttribution, unit: str = "sublayer", k: int = 20, axes: Any = None) -> Figure:
    """The largest terms of a logit as bars."""
    top = list(reversed(terms.top(unit, k)))
    figure, axes = _axes(axes, 5, 0.24 * len(top) + 1)
    axes.barh([_label(name) for name, _ in top], [value for _, value in top])
    axes.axvline(0, color="0.4", linewidth=0.8)
    names = " - ".join(_label(repr(name)) for name in terms.names)
    axes.set_title(f"logit of {names}: {terms.logit:.3f}", fontsize=9)
    axes.tick_params(labelsize=7)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure to a file, by the ending of its name: .png, .svg, .pdf and others of Matplotlib, or .html, a page
    of its own. The file is complete under its name or absent."""
    ending = Path(path).suffix.lower().removeprefix(".")
    page = ending in ("html", "htm")
    known = [*figure.canvas.get_supported_filetypes(), "html"]
    if not page and ending not in known:
        raise OptionError(f"{path} has the ending {ending!r}, expected one of {', '.join(sorted(known))}.")
    content = io.BytesIO()
    figure.savefig(content, format="svg" if page else ending)
    if not page:
        write_atomic(path, content.getvalue())
        return
    picture = content.getvalue().decode().partition("<svg")[2]
    write_atomic(
        path,
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Birkhoff</title></head>\n'
        f"<body><svg{picture}</body>\n</html>\n",
    )


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure outside of pyplot's list of open figures, with its axes as rows of a grid."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError(
            "pictures are drawn with matplotlib, which is not installed. Install it: pip install 'birkhoff-v4[plot]'."
        ) from None
    if in_kernel():
        import matplotlib.pyplot  # noqa: F401  makes the kernel show figures
    figure = Figure(figsize=(min(width, 24), min(height, 24)), layout="constrained", dpi=110)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _axes(axes: Any, width: float, height: float) -> tuple[Figure, Any]:
    if axes is not None:
        return axes.figure, axes
    figure, grid = _figure(width, height)
    return figure, grid[0][0]


def _ticks(axes: Any, columns: Sequence[Any], rows: Sequence[Any]) -> None:
    axes.set_xticks(range(len(columns)), [_label(name) for name in columns], rotation=90, fontsize=7)
    axes.set_yticks(range(len(rows)), [_label(name) for name in rows], fontsize=7)


def _label(value: Any) -> str:
    """Text for a picture: no mathematics, line breaks as signs, and no characters that the font lacks."""
    from matplotlib import font_manager

    text = str(value).replace("\n", "\\n").replace("\t", "\\t")
    text = text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"
    known = font_manager.get_font(font_manager.findfont("DejaVu Sans")).get_charmap()
    return "".join(letter if ord(letter) in known else "\u25a1" for letter in text).replace("$", r"\$")
