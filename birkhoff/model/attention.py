"""Attention with one shared key/value vector per token (spec 6): a sliding window, compressed entries and a sink."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.tap import NoTap, Tap
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.compress import RingRows
from birkhoff.kernels.gpu import power_of_two
from birkhoff.kernels.quant.rounded_rows import Input, rows_of
from birkhoff.kernels.rope import Phases
from birkhoff.model.attention_rows import AttentionRows
from birkhoff.model.batch import Batch, Group
from birkhoff.model.compiled import CompiledAttention
from birkhoff.model.compressor import Compressor, compress_chunks, visible_entries
from birkhoff.model.indexer import Indexer
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm, SharedInput
from birkhoff.model.rope import Rope, StepPhases
from birkhoff.model.state import ENTRY, INDEX, KEYS, Fresh, LayerState

_NO_TAP = NoTap()


class Attention(nn.Module):
    """The attention sublayer. `ratio` is its compression: 0 (sliding window only), 4 (CSA) or 128 (HCA)."""

    def __init__(self, config: V4Config, ratio: int, rope: Rope, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.ratio, self.numerics, self.kernels = ratio, numerics, numerics.kernels
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.groups = config.o_groups
        self.group_rank = config.o_lora_rank
        self.window = config.sliding_window
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5
        width = self.heads * self.head_dim
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, "fp8", numerics, packed)
        self.q_norm = RMSNorm(config.q_lora_rank, self.eps, numerics)
        self.wq_b = Linear(config.q_lora_rank, width, "fp8", numerics, packed)
        self.wkv = Linear(config.hidden_size, self.head_dim, "fp8", numerics, packed)
        self.kv_norm = RMSNorm(self.head_dim, self.eps, numerics)
        self.attn_sink = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.wo_a = Linear(width // self.groups, self.groups * self.group_rank, "fp8", numerics, packed)
        self.wo_b = Linear(self.groups * self.group_rank, config.hidden_size, "fp8", numerics, packed)
        self.compressor = Compressor(config, ratio, ENTRY, rope, numerics, packed) if ratio else None
        self.indexer = Indexer(config, rope, numerics, packed) if ratio == 4 else None
        readers = [self.wq_a, self.wkv]
        if self.compressor is not None:
            readers.append(self.compressor.project)
        if self.indexer is not None:
            readers += [self.indexer.compressor.project, self.indexer.weights_proj]
        self.in_proj = SharedInput(readers)
        widths = [self.head_dim] if self.indexer is None else [self.head_dim, self.indexer.width]
        self.powers_of_two = all(width == power_of_two(width, 16) for width in widths)
        self.compiled: CompiledAttention | None = None

    def forward(
        self, x: Input, batch: Batch, step_phases: StepPhases, state: LayerState | Fresh, tap: Tap = _NO_TAP
    ) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        phases = step_phases.compressed if self.ratio else step_phases.sliding
        if self.compiled is not None and self.compiled.accepts(batch, state):
            return self.compiled(rows_of(x), batch, phases, state, tap)
        queries, keys, latent, raw = self.project(x, phases)
        rows = None
        if tap.ragged:
            projected = queries, keys, rows_of(latent), raw
            rows = AttentionRows(self, rows_of(x), phases, batch, state, projected)
        # Values are rotated like keys, so the inverse rotation of the query position is applied to their sum.
        if self._takes_all_chunks(batch, state):
            attended = self._attend_chunks(queries, keys, latent, raw, phases, batch, state)
        else:
            parts = [
                self._attend_group(queries, keys, rows_of(latent), raw, phases, group, state)
                for group in batch.groups
            ]
            attended = parts[0] if len(parts) == 1 else torch.cat(parts)
            attended = self.kernels.rotate(attended, phases, inverse=True, own=True)
        if rows is not None:
            attended = rows.run(tap, attended)
        return self._project_out(tap(sites.ATTN_HEAD_OUT, attended))

    def project(
        self, x: Input, phases: Phases
    ) -> tuple[torch.Tensor, torch.Tensor, Input, list[torch.Tensor]]:
        """x [n, d] -> queries [n, h, c] and keys [n, c] as they attend, latent [n, q_lora] for the indexer, and the raw
        rows of the compressor and the indexer."""
        raw_latent, keys, *raw = self.in_proj(x)
        latent = self.q_norm.input(raw_latent, self.numerics.released)
        queries = self.wq_b(latent).unflatten(-1, (self.heads, self.head_dim))
        queries = self.kernels.norm_rotate(queries, None, self.eps, phases)
        return queries, self._cached_keys(keys, phases), latent, raw

    def store_keys(self, x: torch.Tensor, batch: Batch, step_phases: StepPhases, state: LayerState) -> None:
        """Sliding layers: store the keys of these tokens without computing attention."""
        assert self.ratio == 0, "entries are made while attending"
        _, keys = self.in_proj(x)
        keys = self._cached_keys(keys, step_phases.sliding)
        if self._takes_all_chunks(batch, state):
            self._store_chunks(keys, (), batch, state)
            return
        for group in batch.groups:
            grouped = group.view(keys)
            state.decode_keys(group, grouped) if group.length == 1 else state.prefill_keys(group, grouped)

    def _cached_keys(self, keys: torch.Tensor, phases: Phases) -> torch.Tensor:
        """Normalised, rotated and rounded, as they enter the cache."""
        keep = self.rope_dim if self.numerics.released else None
        cached: torch.Tensor = self.kernels.norm_rotate(keys, self.kv_norm.weight, self.eps, phases, keep)
        return cached

    def _takes_all_chunks(self, batch: Batch, state: LayerState | Fresh) -> bool:
        """Whether kernels attend for all chunks of a step at once, from rings and pages.

        A sequence with several chunks, as of draft tokens, would not find the keys of the others in its ring."""
        return (
            isinstance(state, LayerState)
            and batch.one_chunk_per_slot
            and self.kernels.on_gpu
            and not torch.is_grad_enabled()
            and self.powers_of_two
        )

    def _attend_chunks(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        latent: Input,
        raw: Sequence[torch.Tensor],
        phases: Phases,
        batch: Batch,
        state: LayerState | Fresh,
    ) -> torch.Tensor:
        """Attention of all chunks of a step -> [n, h, c], rotated back; rings are written last, since chunks read
        them."""
        assert isinstance(state, LayerState)
        selected = None
        if self.compressor is not None:
            compressors = (
                [self.compressor] if self.indexer is None else [self.compressor, self.indexer.compressor]
            )
            compress_chunks(compressors, raw, batch, state)
            positions = batch.row_index.positions
            most = max(chunk.stop for chunk in batch.chunks) // self.ratio
            selected = batch.cached(
                ("finished", self.ratio),
                lambda: TopkIndices(((positions + 1) // self.ratio).to(torch.int32), most=most),
            )
        if self.indexer is not None:
            assert isinstance(selected, TopkIndices), "an indexer comes with a compressor"
            selected = self.indexer.select_chunks(raw[2], latent, phases, selected, batch, state)
        attended: torch.Tensor = self.kernels.attend_paged(
            queries,
            keys,
            state.keys.rows,
            state.pages.get(ENTRY),
            state.state.page_table,
            batch.row_index,
            selected,
            self.attn_sink,
            self.window,
            self.scale,
            phases,
        )
        self._store_chunks(keys, raw, batch, state)
        return attended

    def _store_chunks(
        self, keys: torch.Tensor, raw: Sequence[torch.Tensor], batch: Batch, state: LayerState
    ) -> None:
        """Fill the requested snapshots, then store keys and raw rows in their rings."""
        rings = {kind: ring.rows for kind, ring in state.rings()}
        stored = {KEYS: RingRows(keys, rings[KEYS])}
        if self.compressor is not None:
            stored[ENTRY] = RingRows(raw[0], rings[ENTRY], self.compressor.ape)
        if self.indexer is not None:
            stored[INDEX] = RingRows(raw[1], rings[INDEX], self.indexer.compressor.ape)
        for kind, (values, ring, ape) in stored.items():
            wanted = state.snapshot_rows(kind, batch)
            if wanted is not None:
                state.fill_snapshots(kind, wanted, self.kernels.gather_rows(values, ring, *wanted.rows, ape))
        self.kernels.store_rows(list(stored.values()), batch.row_index)

    def _attend_group(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        latent: torch.Tensor,
        raw: Sequence[torch.Tensor],
        phases: Phases,
        group: Group,
        state: LayerState | Fresh,
    ) -> torch.Tensor:
        """Attention of one rectangle of the batch -> [B*T, h, c]."""
        grouped_keys = group.view(keys)
        entries = selected = None
        if self.compressor is not None:
            entries = self.compressor(group.view(raw[0]), group, state)
            selected = None if entries is None else self._visible(group, entries.shape[1])
        if self.indexer is not None:
            index_raw, index_weights = group.view(raw[1]), group.view(raw[2])
            selected = self.indexer(
                index_raw, index_weights, group.view(latent), phases.view(group.view), selected, group, state
            )
        attended: torch.Tensor
        if group.length == 1:
            recent, visible = state.decode_keys(group, grouped_keys)
            assert not isinstance(selected, TopkIndices), "one query per sequence takes a mask"
            visible = _join_masks(visible, recent, selected, entries)
            attended = self.kernels.attend_one(
                queries[group.rows], recent, entries, visible, self.attn_sink, self.scale
            )
            return attended
        recent, oldest = state.prefill_keys(group, grouped_keys)
        attended = self.kernels.attend(
            group.view(queries), recent, oldest, entries, selected, self.attn_sink, self.window, self.scale
        )
        return attended.flatten(0, 1)

    def _visible(self, group: Group, count: int) -> torch.Tensor | TopkIndices | None:
        """The entries that each query sees: a mask, or counts for kernels that take indices."""
        if group.length == 1 or not self.kernels.on_gpu or torch.is_grad_enabled():
            return visible_entries(group, count, self.ratio)
        finished = (group.positions() + 1) // self.ratio
        indices: TopkIndices = group.cached(
            ("topk", self.ratio), lambda: TopkIndices(finished.to(torch.int32))
        )
        return indices

    def _project_out(self, attended: torch.Tensor) -> torch.Tensor:
        """[n, h, c] -> [n, d] through one low-rank matrix per group of heads, whose input is never rounded."""
        y: torch.Tensor
        if self.wo_a.reads_codes:
            weight = self.wo_a.packed_weight()
            y = self.wo_b(
                self.kernels.packed_linear(attended.flatten(1), weight, self.group_rank, attended.dtype)
            )
            return y
        grouped = attended.reshape(-1, self.groups, self.heads // self.groups * self.head_dim)
        first = self.wo_a.dense().view(self.groups, self.group_rank, -1)
        latent = torch.bmm(grouped.transpose(0, 1), first.transpose(1, 2))  # [G, n, rank]
        y = self.wo_b(latent.transpose(0, 1).flatten(1))
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b", "compressor", "indexer"):
            module = getattr(self, part)
            if module is not None:
                yield from module.destinations(f"{name}.{part}")
        yield Destination(f"{name}.attn_sink", self.attn_sink)


def _join_masks(
    visible: torch.Tensor | None,
    recent: torch.Tensor,
    selected: torch.Tensor | None,
    entries: torch.Tensor | None,
) -> torch.Tensor | None:
    """Masks of window and entries side by side [B, K+E]; None if everything is visible."""
    if entries is None or (visible is None and selected is None):
        return visible
    if visible is None:
        visible = recent.new_ones(recent.shape[:2], dtype=torch.bool)
    if selected is None:
        return torch.cat((visible, entries.new_ones(entries.shape[:2], dtype=torch.bool)), dim=-1)
    return torch.cat((visible, selected.squeeze(1)), dim=-1)
