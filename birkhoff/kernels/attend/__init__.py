"""Attention of many query heads over one shared key/value vector per token, with a sink (spec 6.2).

`attend(queries [B, T, H, c], recent [B, P+T, c], oldest [B], entries [B, E, c] | None,
        selected [B, T, E] bool | TopkIndices | None, sink [H], window, scale) -> [B, T, H, c]`

Query `i` has the position of `recent[P+i]` and sees `recent[j]` for `P+i-window < j <= P+i` and `j >= oldest` (rows
before the start of the sequence are padding), plus the compressed `entries` selected for it, by a mask or by index.
Keys are also values. The sink is a logit without a value and is not scaled. Scores and sums are float32; in bfloat16
the unnormalised probabilities are rounded before they multiply the values, and the division comes last.

`attend_one(queries [B, H, c], recent [B, K, c], entries [B, E, c] | None, seen [B, K+E] bool | None, sink, scale)
        -> [B, H, c]`: one query per sequence against keys in any order; `seen=None` means every key is visible.
`attend_paged(queries [n, H, c], keys [n, c], ring [slots, R, c], pages [P, entries per page, c] | None, table
        [slots, pages], rows: RowIndex, selected: TopkIndices | None, sink, window, scale, phases) -> [n, H, c]`: chunks
of several sequences at once, rotated back by the phases of the queries. A query sees the keys of its chunk, older ones
in the ring of its slot (position modulo R), and its selected entries in the pages that the table lists for its slot;
`selected` has counts [n] and indices [n, K].
`decode.attend`: the same for a decode step on a GPU, split over the keys (flash decoding).

Kernels of decode steps take rules per row: `counts [n] int32`, `table [n, most, 3 + words] int32` and `sink [n, H]
float32`, which is added to the logit of the sink. A rule is a kind, a range first .. stop - 1, and the heads it holds
for as bits of 32-bit words. Kinds: 0, keys at these positions get no weight; 1, entries with these numbers get none; 2,
the same, and the indexer never chooses them; 3, the indexer always chooses them; 4, they are zeros. A head that is left
without keys and sink gives zeros.

Tolerances, as differences of the result. CPU twin against float64: 2e-6 * (1 + scale * |query| * |key|), with the
largest norms, in float32; 2^-7 of the largest key in bfloat16. Triton prefill kernel against `reference`, relative to
the largest result (at least 1): 1e-5 in float32, 2^-9 in float16, 2^-6 in bfloat16. CUDA decode kernel against the
Triton one: 2^-7 in norm.
"""

from birkhoff.kernels.attend.reference import attend, attend_one, attend_paged
from birkhoff.kernels.attend.topk_indices import TopkIndices

__all__ = ["TopkIndices", "attend", "attend_one", "attend_paged"]
