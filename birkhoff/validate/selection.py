"""Compare what two runs selected: experts of the router and blocks of the indexer.

Selection is discontinuous: two scores that differ by a float32 rounding error may be ranked either way, and every value
that is computed from the selection legitimately differs. So where selections differ, the score gap between the elements
that only one side selected decides: a tie excuses the values computed after it in that row and in later ones, a larger
gap is a difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from birkhoff.hooks.sites import BY_NAME, in_order
from birkhoff.kernels.index.reference import topk_mask
from birkhoff.validate.runs import ForwardRun, finished_blocks

TIE = 1e-4  # score gaps below this are ties
Masks = tuple[torch.Tensor, torch.Tensor]  # what each side selected: rows [T, candidates]
SELECTED_BY = {"moe_topk": "experts", "index_scores": "blocks"}


@dataclass(frozen=True)
class SelectionDifference:
    """Rows of one layer with different selections: their count, the first of them, and its score gap.

    `site` is where the selection was compared; gaps of blocks are relative to the row's largest score. `verdict`: the
    scores tie, the row follows from an earlier tie, or the selection differs."""

    site: str
    layer: int
    differing: int
    rows: int
    first: int
    gap: float
    verdict: Literal["tie", "follows", "differs"]

    @property
    def selected(self) -> str:
        """What was selected: `experts` or `blocks`."""
        return SELECTED_BY[self.site]


def computation_order(key: tuple[str, int]) -> tuple[int, int]:
    """Sort key of (hook, layer); hooks of the head come after every layer."""
    hook, layer = key
    return in_order((hook, 1 << 30 if BY_NAME[hook].once else layer))


def selection_differences(
    first: ForwardRun, second: ForwardRun, biases: Mapping[int, torch.Tensor], index_topk: int | None
) -> list[SelectionDifference]:
    """Return the differences in order of computation; gaps are taken from the scores of `second`."""
    out: list[SelectionDifference] = []
    for key in sorted(second.sites, key=computation_order):
        site, layer = key
        if key not in first.sites or site not in SELECTED_BY:
            continue
        if site == "moe_topk":
            masks, scores = _experts(first, second, layer, biases.get(layer))
        elif index_topk is not None:
            masks, scores = _blocks(first.sites[key], second.sites[key], index_topk)
        else:
            continue
        differs = (masks[0] != masks[1]).any(-1).nonzero().flatten()
        if len(differs):
            row = int(differs[0])
            gap = _gap(None if scores is None else scores[row], masks[0][row], masks[1][row])
            verdict: Literal["tie", "follows", "differs"] = "tie" if gap <= TIE else "differs"
            if row >= judged_rows(out, key, len(first.tokens)):
                verdict = "follows"
            out.append(SelectionDifference(site, layer, len(differs), len(masks[0]), row, gap, verdict))
    return out


def judged_rows(differences: Sequence[SelectionDifference], key: tuple[str, int], rows: int) -> int:
    """Return how many leading rows of a site do not depend on a tie. `moe_topk` is itself the selection."""
    before = [
        difference.first
        for difference in differences
        if difference.verdict == "tie"
        and (
            computation_order((difference.site, difference.layer)) < computation_order(key)
            or (difference.site, difference.layer) == key == ("moe_topk", key[1])
        )
    ]
    return min([rows, *before])


def _experts(
    first: ForwardRun, second: ForwardRun, layer: int, bias: torch.Tensor | None
) -> tuple[Masks, torch.Tensor | None]:
    """Return what each side selected, [T, E] bool, and the scores, bias included."""
    ids = [run.sites["moe_topk", layer][..., 0].long() for run in (first, second)]
    logits = second.sites.get(("moe_router_logits", layer))
    count = logits.shape[-1] if logits is not None else 1 + max(int(each.max()) for each in ids)
    ours, theirs = (torch.zeros(len(each), count, dtype=torch.bool).scatter(1, each, True) for each in ids)
    if logits is None:
        return (ours, theirs), None
    scores = torch.nn.functional.softplus(logits.double()).sqrt()
    return (ours, theirs), scores if bias is None else scores + bias.double()


def _blocks(first: torch.Tensor, second: torch.Tensor, topk: int) -> tuple[Masks, torch.Tensor]:
    """Return what each side selected, [T, blocks] bool, and the scores of the second, largest 1 in each row."""
    finished = finished_blocks(len(second))
    ours, theirs = (topk_mask(scores, finished, topk) for scores in (first, second))
    largest = second.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (ours, theirs), second.double() / largest


def _gap(scores: torch.Tensor | None, ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the smallest score difference between elements that only one side selected."""
    only_ours = (ours & ~theirs).nonzero().flatten()
    only_theirs = (theirs & ~ours).nonzero().flatten()
    if scores is None or not len(only_ours) or not len(only_theirs):
        return float("inf")
    return float((scores[only_ours].unsqueeze(-1) - scores[only_theirs]).abs().min())
