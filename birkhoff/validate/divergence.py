"""Describe where two runs part: the site, the computation before it, the first row, and what is special about that row.

Most errors in a port begin at a row that names them: the sliding window drops its first token at row `sliding_window`,
the first compressed entry is finished at row 3 or 127, and the indexer leaves its first block out at row
`4 * index_topk + 3`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from birkhoff.config import V4Config
from birkhoff.hooks.sites import BY_NAME
from birkhoff.validate.runs import MTP, site_label

KIND_NAMES = {"swa": "sliding window only", "csa": "CSA, ratio 4", "hca": "HCA, ratio 128"}
SAME_IN_STREAMS = 0.01  # share of a difference that may not be common to all streams
ABOUT = {"index_scores": "score of the indexer for every finished block"}  # recorded as a matrix


@dataclass(frozen=True)
class Divergence:
    """The first site outside the gate. Rows are compared rows; `first_row` is the first outside the gate by itself."""

    site: str
    layer: int
    about: str
    kind: str | None
    last_agreeing: str | None
    first_row: int | None
    rows_outside: int
    rows: int
    hint: str | None

    def lines(self) -> list[str]:
        """The description as lines of text."""
        kind = f" ({self.kind})" if self.kind else ""
        out = [f"{site_label(self.site, self.layer)}{kind}: {self.about}"]
        if self.last_agreeing is not None:
            out[0] += f"; the last site before it that agrees is {self.last_agreeing}"
        if self.first_row is not None:
            hint = f": {self.hint}" if self.hint else ""
            out.append(
                f"{self.rows_outside} of {self.rows} rows are outside, the first is row {self.first_row}{hint}"
            )
        return out


def describe(
    key: tuple[str, int],
    a: torch.Tensor,
    b: torch.Tensor,
    tolerance: float,
    last_agreeing: str | None,
    config: V4Config | None,
) -> Divergence:
    """Describe the divergence at a site with values `a` and `b`."""
    site, layer = key
    outside = rows_outside(a, b, tolerance)
    first_row = int(outside[0]) if len(outside) else None
    kind = hint = None
    if config is not None:
        kind = None if BY_NAME[site].once else _kind(config, layer)
        hint = None if first_row is None else row_hint(config, layer, first_row)
    if first_row is not None and not bool((a[first_row] - b[first_row]).isfinite().all()):
        hint = "it holds values that are not finite"
    about = ABOUT.get(site, BY_NAME[site].doc)
    if key == ("mhc_streams_pre_attn", MTP):
        about = f"input of the MTP block, {_input_path(a, b)}"
    return Divergence(site, layer, about, kind, last_agreeing, first_row, len(outside), len(a), hint)


def _input_path(a: torch.Tensor, b: torch.Tensor) -> str:
    """Which summand of the MTP block's input differs: every stream gets the same embedding and its own projection."""
    difference = (a - b).double()
    own = difference - difference.mean(1, keepdim=True)
    if float(own.norm()) <= SAME_IN_STREAMS * float(difference.norm()):
        return "different by the same in every stream: look at the next token's embedding, enorm and e_proj"
    return "different in every stream by itself: look at the trunk's streams, hnorm and h_proj"


def rows_outside(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the indices of rows whose own relative error is above the tolerance or not a number."""
    error = (a.double() - b.double()).flatten(1).norm(dim=1)
    inside = error.isfinite() & (error <= tolerance * b.double().flatten(1).norm(dim=1))
    outside: torch.Tensor = (~inside).nonzero().flatten()
    return outside


def row_hint(config: V4Config, layer: int, row: int) -> str | None:
    """Return what a layer's attention does for the first time at this row; None if nothing."""
    ratio = config.compress_ratios[layer]
    window = config.sliding_window
    topk = config.index_topk
    hints = {
        window: f"the first whose sliding window of {window} tokens leaves one out",
        window - 1: f"the last whose sliding window of {window} tokens holds all",
    }
    if ratio:
        hints[ratio - 1] = f"the one that finishes the first compressed entry, of tokens 0 to {ratio - 1}"
        hints[ratio] = f"the one after the first compressed entry, of tokens 0 to {ratio - 1}"
    if ratio == 4:
        hints[7] = "the one that finishes the second compressed entry, the first with an overlap"
        hints[4 * topk - 1] = f"the one that finishes block {topk} of 4 tokens, as many as index_topk"
        hints[4 * topk + 3] = f"the first at which the indexer leaves a block out (index_topk {topk})"
    return hints.get(row)


def _kind(config: V4Config, layer: int) -> str:
    routing = "hash-routed" if layer != MTP and config.is_hash_routed(layer) else "routed by score"
    block = "MTP block, " if layer == MTP else ""
    return f"{block}{KIND_NAMES[config.layer_kind(layer)]}, {routing}"


def untested_parts(config: V4Config, tokens: int) -> list[str]:
    """Return notes on parts of the model that a sequence of this length does not reach."""
    kinds = {config.layer_kind(layer) for layer in range(config.num_hidden_layers)}
    notes = []
    if tokens <= config.sliding_window:
        notes.append(
            f"{tokens} tokens do not leave the sliding window of {config.sliding_window}: its limit is not tested"
        )
    if "hca" in kinds and tokens < 128:
        notes.append(f"{tokens} tokens finish no entry of 128: the compressor of HCA layers is not tested")
    if "csa" in kinds and tokens // 4 <= config.index_topk:
        enough = 4 * (config.index_topk + 1)
        notes.append(
            f"{tokens} tokens are {tokens // 4} blocks and index_topk is {config.index_topk}: the choice of the "
            f"indexer is not tested below {enough} tokens"
        )
    return notes
