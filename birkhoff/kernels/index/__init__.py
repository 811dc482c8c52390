"""The lightning indexer: which compressed entries a query attends to (spec 6.5).

`score(queries [B, T, h, c], keys [B, E, c], weights [B, T, h]) -> [B, T, E]` float32:
    `sum_h weights_h * relu(query_h . key)`.
`topk_mask(scores [B, T, E], visible [B, T, E] bool, topk) -> [B, T, E] bool`: the `topk` visible entries with the
    highest score; ties go to the lower index, so that chunking and batching cannot change the selection.
`index_topk(queries, keys, weights, counts [B, T], topk) -> TopkIndices`: both at once, where query t sees the first
    `counts` entries; indices in ascending order instead of a mask.
`index_chunks(queries [n, h, c], weights [n, h], pages [P, entries per page, c], table [slots, pages], counts [n] int32,
    chunks: [IndexChunk], topk, scale) -> [n, topk] int32`: the same for chunks of several sequences with keys in pages
    and weights that are still to be scaled; queries outside of `chunks` keep their first entries.
`decode.score`, `decode.topk_entries`: the same for one new token per sequence, over pages.

Selections of fast twins are exact for equal scores. Tolerance of scores in float32: 1e-5 of the largest score (at
least 1).
"""

from birkhoff.kernels.index.reference import IndexChunk, index_chunks, index_topk, score, topk_mask

__all__ = ["IndexChunk", "index_chunks", "index_topk", "score", "topk_mask"]
