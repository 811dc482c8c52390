"""Attention of many query heads over one shared key/value vector per token, with a sink (spec 6.2).

`attend(queries [B, T, H, c], recent [B, P+T, c], oldest [B], entries [B, E, c] | None,
        chosen [B, T, E] bool | Picked | None, sink [H], window, scale) -> [B, T, H, c]`

Query `i` stands beside `recent[P+i]` and sees `recent[j]` for `P+i-window < j <= P+i` and `j >= oldest` (rows before
the start of the sequence are padding), plus the compressed `entries` chosen for it, by a mask or by number. Keys are
values. The sink is a logit without a value and is not scaled. Scores and sums are float32; in bfloat16 the
un-normalised probabilities are rounded before they meet the values and the quotient is taken last.

`attend_one(queries [B, H, c], recent [B, K, c], entries [B, E, c] | None, seen [B, K+E] bool | None, sink, scale)
        -> [B, H, c]`: one query per sequence against keys in any order; `seen=None` means every key is visible.
"""

from birkhoff.kernels.attend.reference import attend, attend_one
from birkhoff.kernels.attend.topk_indices import TopkIndices

__all__ = ["TopkIndices", "attend", "attend_one"]
