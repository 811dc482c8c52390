"""Compare two forward runs: error per site and of the logits, first diverging site, and verdict.

Values that depend on a tie between experts or blocks (`selection.py`) are left out: the row of the tie and later rows,
at the sites computed after it. Everything before the tie is compared. The MTP block, which reads the trunk's streams,
is a comparison of its own inside that of the trunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from birkhoff.config import V4Config
from birkhoff.errors import OptionError
from birkhoff.validate.divergence import Divergence, describe, untested_parts
from birkhoff.validate.gates import ToleranceGate
from birkhoff.validate.runs import MTP, ForwardRun, layer_label, mtp_config, site_label
from birkhoff.validate.selection import (
    SelectionDifference,
    computation_order,
    judged_rows,
    selection_differences,
)

EXPLAINED = 0.02  # share of the difference that may remain for it to count as explained


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
class Explanation:
    """A known mistake; `left` is the share of the difference that remains when it is reproduced in form `variant`."""

    name: str
    variant: str
    left: float
    before: float
    after: float
    text: str

    @property
    def complete(self) -> bool:
        """Whether the mistake explains the difference."""
        return self.left <= EXPLAINED


@dataclass
class Comparison:
    """The result of `compare`. `rows` were run; `compared_rows` of them are compared at every site."""

    first: str
    second: str
    gate: ToleranceGate
    rows: int
    compared_rows: int
    sites: list[SiteComparison]
    logits: LogitsComparison | None
    choices: list[SelectionDifference]
    stages: list[dict[str, Any]]
    divergence: Divergence | None = None
    explanations: list[Explanation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mtp: Comparison | None = None

    @property
    def diverging(self) -> SiteComparison | None:
        """The first site, in order of computation, that is outside the gate; the MTP block comes after the trunk."""
        return next((row for row in self.all_sites if not row.ok), None)

    @property
    def all_sites(self) -> list[SiteComparison]:
        """The sites of the trunk, then those of the MTP block."""
        return self.sites if self.mtp is None else self.sites + self.mtp.sites

    @property
    def trunk_ok(self) -> bool:
        """The verdict without the MTP block."""
        flips = any(choice.verdict == "differs" for choice in self.choices) and self.gate.site is not None
        inside = all(row.ok for row in self.sites) and (self.logits is None or self.logits.ok)
        return self.compared_rows > 0 and not flips and inside

    @property
    def ok(self) -> bool:
        return self.trunk_ok and (self.mtp is None or self.mtp.ok)

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON; a number that is not finite becomes None."""
        first = self.diverging
        fields = {
            "ok": self.ok,
            "first": self.first,
            "second": self.second,
            "gate": asdict(self.gate),
            "rows": self.rows,
            "compared_rows": self.compared_rows,
            "diverging": None if first is None else site_label(first.site, first.layer),
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "logits": None if self.logits is None else asdict(self.logits),
            "stages": self.stages,
            "choices": [asdict(choice) for choice in self.choices],
            "explanations": [asdict(explanation) for explanation in self.explanations],
            "notes": self.notes,
            "sites": [asdict(row) for row in self.sites],
            "mtp": None if self.mtp is None else self.mtp.to_dict(),
        }
        finite: dict[str, Any] = _finite(fields)
        return finite


def _finite(value: Any) -> Any:
    """The value with None for every number in it that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(
    first: ForwardRun,
    second: ForwardRun,
    gate: ToleranceGate,
    config: V4Config | None = None,
    biases: Mapping[int, torch.Tensor] | None = None,
) -> Comparison:
    """Compare `first` with the reference `second`. `biases` are the router biases by layer, that of the MTP block at
    `MTP`."""
    if first.tokens != second.tokens:
        raise OptionError(
            f"{first.label} ran on {len(first.tokens)} tokens and {second.label} on {len(second.tokens)} that are not "
            "the same. Give both the same token ids."
        )
    both_mtp = first.mtp is not None and second.mtp is not None
    result = _compare_rows(first, second, gate, config, biases or {}, both_mtp)
    if config is not None:
        result.notes += untested_parts(config, result.rows)
    missing = {name for name, _ in first.sites} - {name for name, _ in second.sites}
    if second.sites and missing:
        result.notes.append(f"{second.label} does not have {', '.join(sorted(missing))}")
    _compare_mtp(result, first, second, config, biases or {})
    return result


def _compare_mtp(
    result: Comparison,
    first: ForwardRun,
    second: ForwardRun,
    config: V4Config | None,
    biases: Mapping[int, torch.Tensor],
) -> None:
    """Add the comparison of the MTP block, over the rows of the trunk that no tie leaves out."""
    if first.mtp is None or second.mtp is None:
        for run, other in ((first, second), (second, first)):
            if run.mtp is None and other.mtp is not None:
                result.notes.append(f"{run.label} does not have the MTP block: it is not compared")
        return
    if not result.compared_rows:
        return
    ours, theirs = (run.leading(result.compared_rows) for run in (first.mtp, second.mtp))
    gate = result.gate if result.gate.mtp_kl is None else replace(result.gate, mean_kl=result.gate.mtp_kl)
    block = None if config is None else mtp_config(config)
    result.mtp = _compare_rows(ours, theirs, gate, block, biases)
    result.divergence = result.divergence or result.mtp.divergence
    result.notes += result.mtp.notes
    if not result.sites and result.logits is None:
        result.notes.append(
            f"{second.label} has the MTP block alone: a difference may come from the trunk before it. Add "
            "mhc_streams_final to tell"
        )


def _compare_rows(
    first: ForwardRun,
    second: ForwardRun,
    gate: ToleranceGate,
    config: V4Config | None,
    biases: Mapping[int, torch.Tensor],
    may_be_empty: bool = False,
) -> Comparison:
    """Compare the sites and logits of two runs, without their MTP blocks."""
    _check_sites(first, second)
    rows = len(first.tokens)
    choices = selection_differences(first, second, biases, None if config is None else config.index_topk)
    ties = [choice for choice in choices if choice.verdict == "tie"] if gate.exact else []
    kept = min([rows, *(tie.first for tie in ties)])
    notes = _tie_notes(ties, kept)
    sites, divergence = _compare_sites(first, second, ties, gate, config)
    logits = None
    if first.logits is not None and second.logits is not None and kept:
        logits = _logits_row(first.logits, second.logits, kept, gate)
    if not sites and logits is None and kept and not may_be_empty:
        raise OptionError(
            f"{first.label} and {second.label} have no site in common and no logits to compare."
        )
    stages = _stages(sites, config) if config is not None and sites else []
    return Comparison(
        first.label, second.label, gate, rows, kept, sites, logits, choices, stages, divergence, notes=notes
    )


def _tie_notes(ties: Sequence[SelectionDifference], kept: int) -> list[str]:
    notes = [
        f"{tie.selected} of {layer_label(tie.layer)} tie at row {tie.first}: what is computed from them is not "
        "compared from that row on"
        for tie in ties
    ]
    return notes if kept else [*notes, "the tie leaves nothing to compare: run other tokens (--seed)"]


def _compare_sites(
    first: ForwardRun,
    second: ForwardRun,
    ties: Sequence[SelectionDifference],
    gate: ToleranceGate,
    config: V4Config | None,
) -> tuple[list[SiteComparison], Divergence | None]:
    """Compare the common sites in order of computation, and describe the first that is outside the gate."""
    sites: list[SiteComparison] = []
    divergence = None
    for key in sorted(second.sites, key=computation_order):
        count = judged_rows(ties, key, len(first.tokens))
        if key not in first.sites or not count:
            continue
        a, b = _comparable(key, first.sites[key][:count], second.sites[key][:count])
        row = _site_row(key, a, b, gate)
        if not row.ok and divergence is None:
            agreeing = site_label(sites[-1].site, sites[-1].layer) if sites else None
            divergence = describe(key, a, b, gate.site or 0.0, agreeing, config)
        sites.append(row)
    return sites, divergence


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||, in float64."""
    a, b = a.double(), b.double()
    size = float(b.norm())
    return float((a - b).norm()) / size if size else float(a.norm())


def _check_sites(first: ForwardRun, second: ForwardRun) -> None:
    """Refuse a reference with other shapes, or with values that the first run does not have, such as layers counted
    from 1."""
    for key in sorted(second.sites, key=computation_order) if first.sites else ():
        site, layer = key
        if key not in first.sites:
            layers = sorted(own for name, own in first.sites if name == site)
            has = f"it at layers {', '.join(map(str, layers))}" if layers else "no such values"
            hint = (
                ""
                if layer == MTP
                else " Layers are counted from 0; arrays of the MTP block are named mtp.HOOK."
            )
            raise OptionError(
                f"{second.label} holds {site} of {layer_label(layer)}, {first.label} has {has}.{hint}"
            )
        name = f"{site} of {layer_label(layer)}"
        _check_shape(name, first.sites[key], second.sites[key], first.label, second.label)
    if first.logits is not None and second.logits is not None:
        _check_shape("logits", first.logits, second.logits, first.label, second.label)


def _check_shape(name: str, ours: torch.Tensor, theirs: torch.Tensor, first: str, second: str) -> None:
    if ours.shape != theirs.shape:
        raise OptionError(
            f"{second} has {name} of shape {tuple(theirs.shape)}, expected {tuple(ours.shape)} as in {first}."
        )


def _comparable(key: tuple[str, int], a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values to compare: those of the site, of `moe_topk` the weight of every expert."""
    if key[0] != "moe_topk":
        return a, b
    count = 1 + int(max(a[..., 0].max(), b[..., 0].max()))
    ours, theirs = (
        torch.zeros(len(chosen), count).scatter(1, chosen[..., 0].long(), chosen[..., 1]) for chosen in (a, b)
    )
    return ours, theirs


def _site_row(key: tuple[str, int], a: torch.Tensor, b: torch.Tensor, gate: ToleranceGate) -> SiteComparison:
    error = relative_error(a, b)
    ok = error == error and (gate.site is None or error <= gate.site)
    return SiteComparison(key[0], key[1], error, float((a - b).abs().max()), _cosine(a, b), ok)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else float(torch.equal(a, b))


def _logits_row(a: torch.Tensor, b: torch.Tensor, rows: int, gate: ToleranceGate) -> LogitsComparison:
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
        worst = max(
            rows, key=lambda row: math.inf if math.isnan(row.rel_rmse) else row.rel_rmse, default=None
        )
        if worst is not None:
            out.append(
                {
                    "stage": name,
                    "layers": layers,
                    "worst": worst.rel_rmse,
                    "at": site_label(worst.site, worst.layer),
                    "ok": all(r.ok for r in rows),
                }
            )
    return out
