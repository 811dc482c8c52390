"""Tables and an SVG grid for `vectors contrast` and `vectors search`: class separation and search trials.

Input are the entries of `steering.extract` and `analysis.vector_search`; every number is printed, colour only repeats
it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from birkhoff.analysis.expert_contrast import ExpertSeparation, ExpertTrial
from birkhoff.analysis.vector_search import Trial
from birkhoff.cli.charts import cell_style
from birkhoff.steering.extract import Separation

CELL_WIDTH = 64
CELL_HEIGHT = 26
LEFT = 90
TOP = 50


def _table(title: str, columns: str) -> Table:
    """An empty table; columns of text are aligned left, and "*" is the unnamed one of a mark."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in columns.split(","):
        left = name in ("*", "site", "way")
        table.add_column(name.strip("*"), justify="left" if left else "right")
    return table


def separation_table(separations: Sequence[Separation]) -> Table:
    """One row per layer: d' and AUC of the whole row, then of each stream; the best d' is marked."""
    streams = sorted({entry.stream for entry in separations if entry.stream is not None})
    best = max((entry.d_prime for entry in separations), default=0.0)
    columns = ("layer", "whole row", *(f"stream {stream}" for stream in streams), "size")
    table = _table(f"{separations[0].hook}: d' (AUC), on texts left out", ",".join(columns))
    for layer in sorted({entry.layer for entry in separations}):
        entries = {entry.stream: entry for entry in separations if entry.layer == layer}
        cells = [_cell(entries[stream], best) for stream in (None, *streams)]
        whole = entries[None]
        table.add_row(str(layer), *cells, f"{whole.norm / max(whole.row_norm, 1e-9):.2f}")
    table.caption = "size: the difference of means over the mean row"
    return table


def _cell(entry: Separation, best: float) -> Text:
    mark = "*" if entry.d_prime == best else " "
    style = cell_style(max(entry.d_prime, 0.0), best or 1.0)
    return Text(f"{mark}{entry.d_prime:5.2f} ({entry.auc:.2f})", style=style)


def trials_table(trials: Sequence[Trial], best: Trial | None) -> Table:
    """One row per trial: share of answers moved, change of the measure, change of the loss."""
    table = _table("what each vector does to answers", "*,site,streams,strength,moved,measure,loss")
    for trial in trials:
        streams = "all" if trial.streams is None else ",".join(map(str, trial.streams))
        table.add_row(
            "*" if trial is best else "",
            f"{trial.hook}[{trial.layer}]",
            streams,
            f"{trial.strength:g}",
            f"{trial.moved:.0%}",
            f"{trial.gained:+.3f}",
            f"{trial.loss_gained:+.2f}",
        )
    return table


def expert_table(separations: Sequence[ExpertSeparation]) -> Table:
    """Experts by d': the share of tokens that get each one in the positive and in the negative texts."""
    table = _table("experts that separate the texts", "layer,expert,positive,negative,d',AUC")
    for entry in separations:
        shares = (f"{entry.positive:.1%}", f"{entry.negative:.1%}")
        table.add_row(
            str(entry.layer), str(entry.expert), *shares, f"{entry.d_prime:+.2f}", f"{entry.auc:.2f}"
        )
    return table


def expert_trials_table(trials: Sequence[ExpertTrial], best: ExpertTrial | None) -> Table:
    """One row per trial: experts of each side, way, strength, and the effect on answers."""
    table = _table("what each edit does to answers", "*,experts,way,strength,moved,fell,measure,loss")
    for trial in trials:
        table.add_row(
            "*" if trial is best else "",
            str(trial.count),
            trial.way,
            f"{trial.strength:g}",
            f"{trial.moved:.0%}",
            f"{trial.fell:.0%}",
            f"{trial.gained:+.3f}",
            f"{trial.loss_gained:+.2f}",
        )
    return table


def separation_svg(separations: Sequence[Separation]) -> str:
    """SVG grid of layers by streams, shaded by d'; each cell has its numbers as a tooltip."""
    streams: list[int | None] = [
        None,
        *sorted({entry.stream for entry in separations if entry.stream is not None}),
    ]
    layers = sorted({entry.layer for entry in separations})
    best = max((entry.d_prime for entry in separations), default=0.0) or 1.0
    width = LEFT + len(streams) * CELL_WIDTH + 10
    height = TOP + len(layers) * CELL_HEIGHT + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="16" font-size="12">{separations[0].hook}: d\' by layer and stream</text>',
    ]
    for column, stream in enumerate(streams):
        name = "whole row" if stream is None else f"stream {stream}"
        lines.append(f'<text x="{LEFT + column * CELL_WIDTH}" y="{TOP - 8}" font-size="10">{name}</text>')
    for row, layer in enumerate(layers):
        top = TOP + row * CELL_HEIGHT
        lines.append(f'<text x="8" y="{top + 17}" font-size="11">layer {layer}</text>')
        for entry in (entry for entry in separations if entry.layer == layer):
            level = min(max(entry.d_prime / best, 0.0), 1.0)
            red, green, blue = (round(255 - (255 - full) * level) for full in (200, 90, 20))
            left = LEFT + streams.index(entry.stream) * CELL_WIDTH
            lines.append(
                f'<rect x="{left}" y="{top}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" '
                f'fill="rgb({red},{green},{blue})"><title>layer {layer} stream {entry.stream}: '
                f"d' {entry.d_prime:.3f}, AUC {entry.auc:.3f}</title></rect>"
                f'<text x="{left + 6}" y="{top + 16}" font-size="10">{entry.d_prime:.2f}</text>'
            )
    return "\n".join([*lines, "</svg>\n"])
