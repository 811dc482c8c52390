"""Compare two forward runs: error per site and of the logits, first diverging site, and verdict.

Expert selection is discontinuous: two router scores that differ by a float32 rounding error may be ranked either way,
and everything after them legitimately differs. So selections are compared first. Where they differ, the score gap
between the experts that only one side selected is reported; if it is a rounding error, rows from there on are left out
of the verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from birkhoff.config import V4Config
from birkhoff.errors import OptionError
from birkhoff.hooks.sites import BY_NAME, in_order
from birkhoff.validate.gates import ToleranceGate
from birkhoff.validate.runs import ForwardRun

TIE = 1e-4  # router score gaps below this are ties


@dataclass(frozen=True)
class SiteComparison:
    """Error of one site at one layer over the compared rows."""

    site: str
    layer: int
    rel_rmse: float
    max_abs: float
    cosine: float
    ok: bool


@dataclass(frozen=True)
class LogitsComparison:
    """Errors of the logits. `argmax` and `top20` are agreement shares; KL divergences are in nats."""

    rel_rmse: float
    median_row: float
    max_abs: float
    cosine: float
    argmax: float
    top20: float
    mean_kl: float
    p95_kl: float
    ok: bool


@dataclass(frozen=True)
class RoutingDifference:
    """A layer with different expert selections: number of rows, the first of them, and its score gap."""

    layer: int
    differing: int
    rows: int
    first: int
    gap: float


@dataclass
class Comparison:
    """The result of `compare`. `rows` were run, the first `compared_rows` of them enter the verdict."""

    first: str
    second: str
    gate: ToleranceGate
    rows: int
    compared_rows: int
    sites: list[SiteComparison]
    logits: LogitsComparison | None
    choices: list[RoutingDifference]
    stages: list[dict[str, Any]]
    explanations: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def diverging(self) -> SiteComparison | None:
        """The first site, in order of computation, that is outside the gate."""
        return next((row for row in self.sites if not row.ok), None)

    @property
    def ok(self) -> bool:
        flips = any(choice.gap > TIE for choice in self.choices) and self.gate.site is not None
        return not flips and self.diverging is None and (self.logits is None or self.logits.ok)

    def to_dict(self) -> dict[str, Any]:
        first = self.diverging
        return {
            "ok": self.ok,
            "first": self.first,
            "second": self.second,
            "gate": asdict(self.gate),
            "rows": self.rows,
            "compared_rows": self.compared_rows,
            "diverging": None if first is None else f"{first.site}[{first.layer}]",
            "logits": None if self.logits is None else asdict(self.logits),
            "stages": self.stages,
            "choices": [asdict(choice) for choice in self.choices],
            "explanations": [asdict(explanation) for explanation in self.explanations],
            "notes": self.notes,
            "sites": [asdict(row) for row in self.sites],
        }


def compare(
    first: ForwardRun,
    second: ForwardRun,
    gate: ToleranceGate,
    config: V4Config | None = None,
    biases: Mapping[int, torch.Tensor] | None = None,
) -> Comparison:
    """Compare `first` with the reference `second`. `biases` are the router biases by layer."""
    if first.tokens != second.tokens:
        raise OptionError(
            f"{first.label} ran on {len(first.tokens)} tokens and {second.label} on {len(second.tokens)} that are not "
            "the same. Give both the same token ids."
        )
    rows = len(first.tokens)
    choices = _choices(first, second, biases or {})
    kept = rows
    notes = []
    if choices and all(choice.gap <= TIE for choice in choices):
        kept = max(1, min(choice.first for choice in choices))
        notes.append(f"experts tie at row {kept}: rows from there on are shown but not judged")
    common = [key for key in second.sites if key in first.sites and key[0] != "moe_topk"]
    common.sort(key=_computation_order)
    sites = [_site_row(key, first.sites[key], second.sites[key], kept, gate) for key in common]
    missing = {name for name, _ in first.sites} - {name for name, _ in second.sites}
    if second.sites and missing:
        notes.append(f"{second.label} does not have {', '.join(sorted(missing))}")
    logits = None
    if first.logits is not None and second.logits is not None:
        logits = _logits_row(first.logits, second.logits, kept, gate)
    if not sites and logits is None:
        raise OptionError(
            f"{first.label} and {second.label} have no site in common and no logits to compare."
        )
    stages = _stages(sites, config) if config is not None and sites else []
    return Comparison(
        first.label, second.label, gate, rows, kept, sites, logits, choices, stages, notes=notes
    )


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    a, b = a.double(), b.double()
    size = float(b.norm())
    return float((a - b).norm()) / size if size else float(a.norm())


def _computation_order(key: tuple[str, int]) -> tuple[int, int]:
    hook, layer = key
    return in_order((hook, 1 << 30 if BY_NAME[hook].once else layer))


def _site_row(
    key: tuple[str, int], a: torch.Tensor, b: torch.Tensor, rows: int, gate: ToleranceGate
) -> SiteComparison:
    if a.shape != b.shape:
        raise OptionError(
            f"{key[0]}[{key[1]}] is {tuple(a.shape)} and {tuple(b.shape)}: these models differ in size."
        )
    a, b = a[:rows], b[:rows]
    error = relative_error(a, b)
    ok = error == error and (gate.site is None or error <= gate.site)
    return SiteComparison(key[0], key[1], error, float((a - b).abs().max()), _cosine(a, b), ok)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else float(torch.equal(a, b))


def _logits_row(a: torch.Tensor, b: torch.Tensor, rows: int, gate: ToleranceGate) -> LogitsComparison:
    if a.shape != b.shape:
        raise OptionError(f"logits are {tuple(a.shape)} and {tuple(b.shape)}: these models differ in size.")
    a, b = a[:rows].double(), b[:rows].double()
    per_row = (a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-300)
    count = min(20, a.shape[-1])
    ours, theirs = a.topk(count).indices, b.topk(count).indices
    overlap = (ours.unsqueeze(-1) == theirs.unsqueeze(-2)).any(-1).double().mean()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    kl = (log_b.exp() * (log_b - log_a)).sum(-1)
    argmax = float((a.argmax(-1) == b.argmax(-1)).double().mean())
    error = relative_error(a, b)
    median = float(per_row.median())
    mean_kl = float(kl.mean())
    ok = (
        bool(torch.isfinite(a).all())
        and (gate.logits is None or error <= gate.logits)
        and (gate.median_row is None or median <= gate.median_row)
        and argmax >= gate.argmax
        and (gate.mean_kl is None or mean_kl <= gate.mean_kl)
    )
    p95 = float(kl.quantile(0.95))
    return LogitsComparison(
        error, median, float((a - b).abs().max()), _cosine(a, b), argmax, float(overlap), mean_kl, p95, ok
    )


def _choices(
    first: ForwardRun, second: ForwardRun, biases: Mapping[int, torch.Tensor]
) -> list[RoutingDifference]:
    out = []
    for key in sorted(second.sites):
        if key[0] != "moe_topk" or key not in first.sites:
            continue
        ours, theirs = (run.sites[key][..., 0].long().sort(-1).values for run in (first, second))
        differs = (ours != theirs).any(-1).nonzero().flatten()
        if len(differs):
            at = int(differs[0])
            gap = _gap(second, key[1], at, ours[at], theirs[at], biases.get(key[1]))
            out.append(RoutingDifference(key[1], len(differs), len(ours), at, gap))
    return out


def _gap(
    run: ForwardRun, layer: int, row: int, ours: torch.Tensor, theirs: torch.Tensor, bias: torch.Tensor | None
) -> float:
    """Return the smallest score difference, bias included, between experts that only one side selected."""
    logits = run.sites.get(("moe_router_logits", layer))
    if logits is None:
        return float("inf")
    only_ours = [e for e in ours.tolist() if e not in theirs.tolist()]
    only_theirs = [e for e in theirs.tolist() if e not in ours.tolist()]
    scores = torch.nn.functional.softplus(logits[row].double()).sqrt()
    if bias is not None:
        scores = scores + bias.double()
    return float(min(abs(scores[a] - scores[b]) for a in only_ours for b in only_theirs))


def layer_stages(config: V4Config) -> list[tuple[str, list[int]]]:
    """Return layers 0 and last; the first and last of each layer kind; all."""
    last = config.num_hidden_layers - 1
    edges = {0, last}
    for kind in ("swa", "csa", "hca"):
        of_kind = [layer for layer in range(last + 1) if config.layer_kind(layer) == kind]
        edges |= {of_kind[0], of_kind[-1]} if of_kind else set()
    if 0 < config.num_hash_layers <= last:
        edges |= {config.num_hash_layers - 1, config.num_hash_layers}
    return [
        ("first and last", sorted({0, last})),
        ("edges of each kind", sorted(edges)),
        ("all", list(range(last + 1))),
    ]


def _stages(sites: list[SiteComparison], config: V4Config) -> list[dict[str, Any]]:
    out = []
    for name, layers in layer_stages(config):
        rows = [row for row in sites if row.layer in layers]
        worst = max(rows, key=lambda row: row.rel_rmse, default=None)
        if worst is not None:
            where = f"{worst.site}[{worst.layer}]"
            out.append(
                {
                    "stage": name,
                    "layers": layers,
                    "worst": worst.rel_rmse,
                    "at": where,
                    "ok": all(r.ok for r in rows),
                }
            )
    return out
