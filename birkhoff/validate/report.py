"""Format a comparison for the terminal and as a standalone HTML file.

Both show the verdict, the first diverging site, the explanation if there is one, the stages, the logits, and the
relative error by layer on a logarithmic scale with the gate as a line.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from birkhoff.validate.compare import Comparison, Explanation, LogitsComparison, SiteComparison
from birkhoff.validate.runs import MTP, layer_label, site_label

PLOTTED_SITES = ("mhc_streams_pre_attn", "post_attn", "mhc_streams_pre_mlp", "mlp_out")
COLOURS = ("#3b6ea5", "#c2571a", "#2f8f5b", "#8a4fa3")
FLOOR = 1e-9  # the plot's lower limit, below float32 rounding
SHOWN_CHOICES = 3
_BARS = "▁▂▃▄▅▆▇█"


def headline(result: Comparison) -> str:
    """Return the verdict as one line."""
    if result.ok:
        return f"{result.first} agrees with {result.second} (gate {result.gate.name})"
    first = result.diverging
    where = f"; they part at {site_label(first.site, first.layer)}" if first is not None else ""
    return f"{result.first} does not agree with {result.second} (gate {result.gate.name}){where}"


def lines(result: Comparison) -> list[str]:
    """Return the report as lines of plain text."""
    out = [headline(result)]
    if result.divergence is not None:
        out += result.divergence.lines()
    out += [f"{explanation.name} {explained(explanation)}" for explanation in result.explanations]
    if not result.ok and not any(explanation.complete for explanation in result.explanations):
        out.append("none of the known mistakes explains it")
    for stage in result.stages:
        mark = "ok" if stage["ok"] else "OUTSIDE"
        out.append(f"{stage['stage']:<20} {mark:<8} worst {stage['worst']:.2e} at {stage['at']}")
    choices = result.choices + (result.mtp.choices if result.mtp is not None else [])
    for choice in choices[:SHOWN_CHOICES]:
        out.append(
            f"{choice.selected} of {layer_label(choice.layer)} differ in {choice.differing} of {choice.rows} rows, "
            f"first at row {choice.first} where the scores are {choice.gap:.1e} apart"
        )
    if len(choices) > SHOWN_CHOICES:
        out.append(f"experts or blocks differ in {len(choices) - SHOWN_CHOICES} more places")
    for name in PLOTTED_SITES:
        rows = [row for row in result.sites if row.site == name]
        if rows:
            out.append(f"{name:<21}{sparkline(rows)}  {rows[0].rel_rmse:.1e} … {rows[-1].rel_rmse:.1e}")
    if result.logits is not None:
        out.append(f"logits  {_logits(result.logits)}")
    if result.mtp is not None:
        out += _mtp_lines(result.mtp, result.trunk_ok)
    return out + list(result.notes)


def _mtp_lines(mtp: Comparison, trunk_ok: bool) -> list[str]:
    """The MTP block in one or two lines: its worst site, and its logits."""
    out = []
    if mtp.sites:
        worst = max(mtp.sites, key=lambda row: math.inf if math.isnan(row.rel_rmse) else row.rel_rmse)
        mark = "ok" if all(row.ok for row in mtp.sites) else "OUTSIDE"
        where = site_label(worst.site, worst.layer)
        out.append(f"{'MTP block':<20} {mark:<8} worst {worst.rel_rmse:.2e} at {where}")
        if mark != "ok" and not trunk_ok:
            out[0] += "; it reads the trunk's streams, which differ"
    if mtp.logits is not None:
        out.append(f"MTP logits  {_logits(mtp.logits)}")
    return out


def _logits(row: LogitsComparison) -> str:
    return (
        f"relative {row.rel_rmse:.2e} (median row {row.median_row:.2e}), max {row.max_abs:.2e}, cosine "
        f"{row.cosine:.8f}, argmax {100 * row.argmax:.1f} %, top-20 {100 * row.top20:.1f} %, KL {row.mean_kl:.2e} "
        f"(p95 {row.p95_kl:.2e}): {'ok' if row.ok else 'OUTSIDE'}"
    )


def explained(explanation: Explanation) -> str:
    """Return what an explanation says after its name."""
    effect = f"takes the distance from {explanation.before:.2e} to {explanation.after:.2e}"
    if explanation.complete:
        return f"({explanation.variant}): {explanation.text}. Making this mistake on purpose {effect}."
    return (
        f"({explanation.variant}) comes close, look near it: {explanation.text}. Making this mistake on purpose "
        f"{effect}, {100 * explanation.left:.0f} % of the difference remain."
    )


def sparkline(rows: Sequence[SiteComparison]) -> str:
    """Return one bar per layer, from 1e-9 to 1."""
    return "".join(_BARS[min(7, int(8 * (1 - _depth(row.rel_rmse))))] for row in rows)


def _depth(error: float) -> float:
    """Return where an error is on the logarithmic scale: 0 for 1 and above, or not a number; 1 for FLOOR and below."""
    shown = min(max(error, FLOOR), 1.0) if error == error else 1.0
    return math.log10(shown) / math.log10(FLOOR)


def to_html(result: Comparison) -> str:
    """Return a page without scripts or external references."""
    causes = "".join(
        f"<p class=why><b>{html.escape(e.name)}</b> {html.escape(explained(e))}</p>"
        for e in result.explanations
    )
    words = "".join(
        f"<li>{html.escape(line)}</li>"
        for line in lines(result)[1:]
        if not any(line.startswith(f"{e.name} ") for e in result.explanations)
    )
    rows = "".join(
        f"<tr class={'ok' if row.ok else 'bad'}><td>{html.escape(row.site)}"
        f"<td>{'MTP' if row.layer == MTP else row.layer}<td>{row.rel_rmse:.3e}"
        f"<td>{row.max_abs:.3e}<td>{row.cosine:.9f}</tr>"
        for row in result.all_sites
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(headline(result))}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }}
h1 {{ font-size: 1.3rem }} .ok h1 {{ color: #2f8f5b }} .bad h1 {{ color: #b3261e }}
.why {{ background: #fff4e5; border-left: 4px solid #c2571a; padding: .5rem 1rem }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
td, th {{ padding: .1rem .8rem; text-align: left }}
tr.bad td {{ background: #fde8e6 }} svg text {{ font: 12px system-ui, sans-serif }}
</style></head>
<body class="{"ok" if result.ok else "bad"}"><h1>{html.escape(headline(result))}</h1>
{causes}{plot(result)}
<ul>{words}</ul>
<table><tr><th>site<th>layer<th>relative<th>largest<th>cosine</tr>{rows}</table>
</body></html>
"""


def plot(result: Comparison) -> str:
    """Return the relative error by layer as SVG; empty if no site was compared."""
    layers = sorted({row.layer for row in result.sites if row.site in PLOTTED_SITES})
    if not layers:
        return ""
    width = 860
    height = 300
    left = 60
    top = 12
    span = max(len(layers) - 1, 1)

    def x(layer: int) -> float:
        return left + (width - left - 12) * layers.index(layer) / span

    def y(error: float) -> float:
        return top + (height - top) * _depth(error)

    parts = [f'<svg viewBox="0 0 {width} {height + 60}" role="img" aria-label="relative error by layer">']
    for power in range(0, -10, -1):
        at = y(10.0**power)
        parts.append(f'<line x1="{left}" x2="{width - 12}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>')
    if result.gate.site is not None:
        at = y(result.gate.site)
        parts.append(
            f'<line x1="{left}" x2="{width - 12}" y1="{at:.1f}" y2="{at:.1f}" stroke="#b3261e" stroke-dasharray="6 4"/>'
        )
    for index, (name, colour) in enumerate(zip(PLOTTED_SITES, COLOURS)):
        rows = [row for row in result.sites if row.site == name]
        points = " ".join(f"{x(row.layer):.1f},{y(row.rel_rmse):.1f}" for row in rows)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        dots = "".join(
            f'<circle cx="{x(r.layer):.1f}" cy="{y(r.rel_rmse):.1f}" r="3" fill="{colour}"/>' for r in rows
        )
        parts.append(dots + f'<text x="{left + 200 * index}" y="{height + 48}" fill="{colour}">{name}</text>')
    step = max(1, len(layers) // 12)
    for layer in layers[::step]:
        parts.append(f'<text x="{x(layer):.1f}" y="{height + 24}" text-anchor="middle">{layer}</text>')
    return "".join(parts) + "</svg>"
