"""The attention of single tokens of a step, for reads and edits: which keys a token sees, with which weights.

The sublayer computes its output with kernels that keep no weights. Where a token is captured or its attention is
changed, an `AttentionRows` computes the attention of that token again in plain operations, from the same projections
and the same state. The sublayer's own output is used for every token that is not changed, so reading changes no bit.

An `AttentionRows` is made before the sublayer runs, because a long chunk overwrites the rings that it continues, and is
asked afterwards, when keys and entries are stored. Every sequence is computed by itself, so a token's result does not
depend on the other sequences of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from birkhoff.hooks import sites
from birkhoff.hooks.attention_change import AttentionChange, Blocks, Ranges
from birkhoff.hooks.schema import pooled_tokens
from birkhoff.hooks.tap import RowReader, Tap
from birkhoff.kernels import index
from birkhoff.kernels.quant.rounded_rows import rows_of
from birkhoff.kernels.rope import Phases
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import ENTRY, INDEX, Fresh, LayerState

if TYPE_CHECKING:
    from birkhoff.model.attention import Attention

Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]]
Changes = tuple[AttentionChange, ...]
MAX_QUERIES = 64  # tokens computed at a time ...
MAX_SPAN = 256  # ... whose positions differ by less than this: bounds the memory of weights
SINK = -1  # first token and end of the sink's row


@dataclass(frozen=True, eq=False)
class _Queries:
    """Some tokens of one chunk: their rows of the step, and their positions, ascending [R]."""

    chunk: SequenceChunk
    rows: list[int]
    positions: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Attended:
    """Attention of some tokens: weights [R, h, K + E + 1] over window keys from position `first` on, entries and the
    sink; `values` [K + E, c]; which window keys [R, K] and entries [R, E] a token sees."""

    first: int
    weights: torch.Tensor
    values: torch.Tensor
    window: torch.Tensor
    chosen: torch.Tensor


class AttentionRows:
    """Tokens of one step as they attend in one layer. `projected`: what `Attention.project` returned, or None to
    compute it when needed."""

    def __init__(
        self,
        attention: Attention,
        x: torch.Tensor,
        phases: Phases,
        batch: Batch,
        state: LayerState | Fresh,
        projected: Projected | None = None,
    ):
        self._attention = attention
        self._x = x
        self._phases = phases
        self._batch = batch
        self._state = state
        self._known = projected
        self._older_keys: dict[int, torch.Tensor] = {}  # by first row of a long chunk
        self._older_raw: dict[int, torch.Tensor] = {}
        self._changes: dict[int, Changes] = {}
        if isinstance(state, LayerState):
            for chunk, row in zip(batch.chunks, batch.offsets):
                if len(chunk.token_ids) > 1 and chunk.start:
                    self._keep_older(chunk, row, state)

    def _keep_older(self, chunk: SequenceChunk, row: int, state: LayerState) -> None:
        first = max(chunk.start - self._attention.window + 1, 0)
        self._older_keys[row] = state.keys.span(chunk.slot, first, chunk.start)
        if self._attention.ratio:
            first = max(chunk.start - pooled_tokens(self._attention.ratio) + 1, 0)
            self._older_raw[row] = state.raw[ENTRY].span(chunk.slot, first, chunk.start)

    def run(self, tap: Tap, attended: torch.Tensor, changed: bool = False) -> torch.Tensor:
        """Apply the tap's changes to `attended` [n, h, c], after the inverse rotation, unless they were (`changed`),
        and let it read ragged sites."""
        for change, rows in tap.changes(sites.ATTN_WEIGHTS):
            for row in rows:
                self._changes[row] = (*self._changes.get(row, ()), change)
        if self._changes and not changed:
            attended = self._change(attended)
        tap.read(sites.ATTN_WEIGHTS, self._weights(False), self._weights(True))
        if self._attention.compressor is not None:
            tap.read(sites.ENTRY_TOKENS, self._entry_tokens)
        if self._attention.indexer is not None:
            tap.read(sites.INDEX_SCORES, self._index_scores)
            tap.read(sites.INDEX_BLOCKS, self._blocks(False), self._blocks(True))
        return attended

    def _change(self, attended: torch.Tensor) -> torch.Tensor:
        """`attended` with the changed rows computed again."""
        rows = sorted(self._changes)  # the groups are in this order too
        mixed = []
        for queries, own in self._groups(rows, self._changes):
            attention = self._attend(queries, own)
            mixed.append(attention.weights[..., :-1] @ attention.values)
        at = torch.tensor(rows, device=attended.device)
        phases = self._phases.view(lambda part: part[at])
        new = self._attention.kernels.rotate(torch.cat(mixed).to(attended.dtype), phases, inverse=True)
        return attended.index_copy(0, at, new)

    def _weights(self, changed: bool) -> RowReader:
        """A reader of `attn_weights`, with or without the changes: rows [k, 2 + h] for each token."""

        def read(rows: Sequence[int]) -> list[torch.Tensor]:
            return self._by_row(rows, changed, self._weight_rows)

        return read

    def _index_scores(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Reader of `index_scores`: rows [k, 2] for each token."""
        return self._by_row(rows, False, self._score_rows)

    def _blocks(self, changed: bool) -> RowReader:
        """A reader of `index_blocks`, with or without the changes: rows [k, 3] for each token."""

        def read(rows: Sequence[int]) -> list[torch.Tensor]:
            return self._by_row(rows, changed, self._block_rows)

        return read

    def _entry_tokens(self, rows: Sequence[int]) -> list[torch.Tensor]:
        """Reader of `entry_tokens`: rows [k, 2 + c] for each token, none where it completes no entry."""
        return self._by_row(rows, False, self._pooling_rows)

    def _by_row(
        self, rows: Sequence[int], changed: bool, read: Callable[[_Queries, Changes], Iterator[torch.Tensor]]
    ) -> list[torch.Tensor]:
        changes = self._changes if changed else {}
        by_row: dict[int, torch.Tensor] = {}
        for queries, own in self._groups(sorted(set(rows)), changes):
            by_row.update(zip(queries.rows, read(queries, own)))
        return [by_row[row] for row in rows]

    def _groups(self, rows: Sequence[int], changes: dict[int, Changes]) -> Iterator[tuple[_Queries, Changes]]:
        """Ascending rows in groups of one chunk with the same changes, close enough to be computed together."""
        group: list[int] = []
        for row in [*rows, -1]:
            if group and (row < 0 or not self._fits(group, row, changes)):
                chunk, first = self._chunk_of(group[0])
                positions = torch.tensor(
                    [chunk.start + each - first for each in group], device=self._x.device
                )
                yield _Queries(chunk, group, positions), changes.get(group[0], ())
                group = []
            group.append(row)

    def _fits(self, group: list[int], row: int, changes: dict[int, Changes]) -> bool:
        first = group[0]
        return (
            len(group) < MAX_QUERIES
            and row - first < MAX_SPAN
            and self._chunk_of(first) == self._chunk_of(row)
            and changes.get(first) == changes.get(row)
        )

    def _chunk_of(self, row: int) -> tuple[SequenceChunk, int]:
        """The chunk of a row, and the chunk's first row."""
        at = bisect_right(self._batch.offsets, row) - 1
        return self._batch.chunks[at], self._batch.offsets[at]

    @property
    def _projected(self) -> Projected:
        if self._known is None:
            queries, keys, latent, raw = self._attention.project(self._x, self._phases)
            self._known = queries, keys, rows_of(latent), raw
        return self._known

    def _window(self, queries: _Queries) -> tuple[int, torch.Tensor]:
        """Position of the first key that a token of the group sees, and the keys up to the last token's, [K, c]."""
        chunk = queries.chunk
        first = max(int(queries.positions[0]) - self._attention.window + 1, 0)
        stop = int(queries.positions[-1]) + 1
        if len(chunk.token_ids) == 1 and isinstance(self._state, LayerState):
            return first, self._state.keys.span(chunk.slot, first, stop)  # draft tokens before it included
        _, row = self._chunk_of(queries.rows[0])
        own = self._projected[1][row + max(first - chunk.start, 0) : row + stop - chunk.start]
        older = self._older_keys.get(row)
        if older is None or first >= chunk.start:
            return first, own
        return first, torch.cat((older[first - chunk.start :].to(own.dtype), own))

    def _entries(self, kind: str, queries: _Queries) -> torch.Tensor:
        """The entries that the last token of the group sees, [E, width] float32."""
        count = (int(queries.positions[-1]) + 1) // self._attention.ratio
        return self._state.sequence_entries(kind, queries.chunk.slot, count).float()

    def _attend(self, queries: _Queries, changes: Changes) -> _Attended:
        attention = self._attention
        positions = queries.positions.unsqueeze(-1)
        first, window_keys = self._window(queries)
        key_at = torch.arange(first, first + len(window_keys), device=positions.device)
        window = (key_at <= positions) & (key_at > positions - attention.window)  # [R, K]
        values = window_keys.float()
        chosen = window.new_zeros(len(window), 0)
        if attention.ratio and int(queries.positions[-1]) + 1 >= attention.ratio:
            entries = self._entries(ENTRY, queries)
            chosen = self._chosen(queries, changes)
            values = torch.cat((values, _zeroed(entries, changes, attention.ratio)))
        seen = torch.cat((window, chosen), dim=-1).unsqueeze(1).repeat(1, attention.heads, 1)  # [R, h, K + E]
        sink = attention.attn_sink.float().clone()
        for change in changes:
            heads = list(range(attention.heads)) if change.heads is None else list(change.heads)
            masked = torch.cat(
                (
                    _inside(change.mask, key_at),
                    _masked_entries(change, chosen.shape[1], attention.ratio, seen.device),
                )
            )
            seen[:, heads] &= ~masked
            if change.sink is not None:
                sink[heads] += torch.tensor(change.sink, device=sink.device).log()
        logits = (
            torch.einsum("rhc,kc->rhk", self._projected[0][queries.rows].float(), values) * attention.scale
        )
        logits = logits.masked_fill(~seen, -torch.inf)
        logits = torch.cat((logits, sink.view(1, -1, 1).expand(len(logits), -1, 1)), dim=-1)
        weights = logits.softmax(-1).nan_to_num(0.0)  # a head that sees nothing contributes nothing
        return _Attended(first, weights, values, window, chosen)

    def _chosen(self, queries: _Queries, changes: Changes) -> torch.Tensor:
        """The entries that each token attends to, [R, E] bool."""
        attention = self._attention
        count = (int(queries.positions[-1]) + 1) // attention.ratio
        entry = torch.arange(count, device=queries.positions.device)
        visible = entry < ((queries.positions + 1) // attention.ratio).unsqueeze(-1)
        forced = torch.zeros_like(entry, dtype=torch.bool)
        for change in changes:
            visible = visible & ~_in_blocks(change.forbid, entry, attention.ratio)
            if change.ablation == "remove":
                visible = visible & ~_in_blocks(change.ablate, entry, attention.ratio)
            forced |= _in_blocks(change.force, entry, attention.ratio)
        if attention.indexer is None or count <= attention.indexer.topk:
            return visible
        scores = self._scores(queries).masked_fill(forced, torch.inf)
        return index.topk_mask(scores.unsqueeze(0), visible.unsqueeze(0), attention.indexer.topk)[0]

    def _scores(self, queries: _Queries) -> torch.Tensor:
        """The indexer's score of every entry, [R, E]; meaningless for entries that a token does not see."""
        indexer = self._attention.indexer
        assert indexer is not None
        _, _, latent, raw = self._projected
        at = torch.tensor(queries.rows, device=latent.device)
        phases = self._phases.view(lambda part: part[at].unsqueeze(0))
        index_queries, weights = indexer.project(latent[at].unsqueeze(0), raw[2][at].unsqueeze(0), phases)
        return index.score(index_queries, self._entries(INDEX, queries).unsqueeze(0), weights)[0]

    def _weight_rows(self, queries: _Queries, changes: Changes) -> Iterator[torch.Tensor]:
        attended = self._attend(queries, changes)
        ratio = self._attention.ratio
        sink = torch.tensor([[SINK, SINK]], device=attended.weights.device)
        for weights, window, chosen in zip(attended.weights, attended.window, attended.chosen):
            tokens = attended.first + window.nonzero()
            blocks = chosen.nonzero() * ratio
            spans = torch.cat(
                (torch.cat((tokens, tokens + 1), 1), torch.cat((blocks, blocks + ratio), 1), sink)
            )
            kept = torch.cat((window, chosen, chosen.new_ones(1)))
            yield torch.cat((spans.float(), weights[:, kept].T), dim=1)

    def _score_rows(self, queries: _Queries, changes: Changes) -> Iterator[torch.Tensor]:
        if int(queries.positions[-1]) + 1 < self._attention.ratio:
            yield from (self._x.new_empty(0, 2, dtype=torch.float32) for _ in queries.rows)
            return
        scores = self._scores(queries)
        for position, own in zip(queries.positions.tolist(), scores):
            count = (position + 1) // self._attention.ratio
            entry = torch.arange(count, device=own.device)
            yield torch.stack((entry.float(), own[:count].float()), dim=1)

    def _block_rows(self, queries: _Queries, changes: Changes) -> Iterator[torch.Tensor]:
        ratio = self._attention.ratio
        for own in self._chosen(queries, changes):
            entry = own.nonzero()[:, 0]
            yield torch.stack((entry, entry * ratio, (entry + 1) * ratio), dim=1).float()

    def _pooling_rows(self, queries: _Queries, changes: Changes) -> Iterator[torch.Tensor]:
        compressor = self._attention.compressor
        assert compressor is not None
        for row, position in zip(queries.rows, queries.positions.tolist()):
            if (position + 1) % compressor.ratio:
                yield self._x.new_empty(0, 2 + compressor.width, dtype=torch.float32)
                continue
            first = max(position + 1 - pooled_tokens(compressor.ratio), 0)
            weights = compressor.pooling_weights(self._raw(queries.chunk, row, first, position + 1))
            tokens = torch.arange(first, position + 1, device=weights.device)
            entry = torch.full_like(tokens, position // compressor.ratio)
            yield torch.cat((torch.stack((entry, tokens), dim=1).float(), weights), dim=1)

    def _raw(self, chunk: SequenceChunk, row: int, first: int, stop: int) -> torch.Tensor:
        """The compressor's raw rows of positions first .. stop - 1 of a chunk, gates with their position bias."""
        compressor = self._attention.compressor
        assert compressor is not None
        if len(chunk.token_ids) == 1 and isinstance(self._state, LayerState):
            return self._state.raw[ENTRY].span(chunk.slot, first, stop)
        _, begin = self._chunk_of(row)
        positions = torch.arange(max(first, chunk.start), stop, device=self._x.device)
        own = self._projected[3][0][begin + positions - chunk.start] + compressor.position_bias(positions)
        if first >= chunk.start:
            return own
        return torch.cat((self._older_raw[begin][first - chunk.start :], own))


def _inside(ranges: Ranges, positions: torch.Tensor) -> torch.Tensor:
    """Which positions lie in the ranges."""
    inside = torch.zeros_like(positions, dtype=torch.bool)
    for start, stop in ranges:
        inside |= (positions >= start) & (positions < stop)
    return inside


def _masked_entries(change: AttentionChange, count: int, ratio: int, device: torch.device) -> torch.Tensor:
    """Which of the first `count` entries a key mask covers, [count] bool."""
    entry = torch.arange(count, device=device)
    masked = torch.zeros_like(entry, dtype=torch.bool)
    if not ratio or change.mask_entries == "none":
        return masked
    stop = (entry + 1) * ratio
    first = (stop - pooled_tokens(ratio)).clamp_min(0)
    if change.mask_entries == "all":
        covered = torch.zeros_like(entry)
        for start, end in change.mask:
            covered += (stop.clamp_max(end) - first.clamp_min(start)).clamp_min(0)
        return covered == stop - first
    for start, end in change.mask:
        masked |= (first < end) & (stop > start)
    return masked


def _in_blocks(blocks: Blocks, entry: torch.Tensor, ratio: int) -> torch.Tensor:
    """Which entries, by index, are among the blocks; an entry stands for the tokens of its own block."""
    inside = torch.zeros_like(entry, dtype=torch.bool)
    for each in blocks.numbers:
        inside |= entry == each
    for start, stop in blocks.tokens:
        inside |= (entry * ratio < stop) & ((entry + 1) * ratio > start)
    return inside


def _zeroed(entries: torch.Tensor, changes: Changes, ratio: int) -> torch.Tensor:
    """The entries [E, c], zeros where they are ablated to zero."""
    entry = torch.arange(len(entries), device=entries.device)
    for change in changes:
        if change.ablate and change.ablation == "zero":
            entries = entries.masked_fill(_in_blocks(change.ablate, entry, ratio).unsqueeze(-1), 0.0)
    return entries
