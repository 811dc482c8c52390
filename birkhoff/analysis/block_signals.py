"""The signal `blocks`: the compressed blocks each token selects for attention.

Layers with an indexer let a token attend to its highest-scoring compressed blocks. The selection is not a tensor that
a tap can read, so it is recomputed here from the sublayer's input (`pre_attn`, after edits) with the layer's weights
and index keys kept per sequence: a few rows of products per token, without any effect on the output. Rows arrive in
order of position, each once, as plans guarantee to their jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from birkhoff.hooks.plan import Key, SiteRows
from birkhoff.hooks.signals import BLOCKS, SignalJob
from birkhoff.model.batch import Batch, Group, SequenceChunk
from birkhoff.model.block import Block
from birkhoff.model.compressor import visible_entries
from birkhoff.model.state import Fresh
from birkhoff.model.transformer import Transformer

HOOK = "pre_attn"
MAX_UNFINISHED_ROWS = 8  # rows of a block and of the previous one
Spans = list[tuple[int, int]]


def block_keys(model: Transformer) -> tuple[Key, ...]:
    """Return the sites to read: `pre_attn` of every layer with an indexer."""
    indexed = (layer for layer, block in enumerate(model.layers) if block.attn.indexer is not None)  # type: ignore[union-attr]
    return tuple((HOOK, layer) for layer in indexed)


class SignalJobs(NamedTuple):
    """Jobs of one request with signals; its frames are those of `signals`."""

    signals: SignalJob
    blocks: BlockJob | None

    @property
    def jobs(self) -> tuple[SignalJob | BlockJob, ...]:
        return (self.signals,) if self.blocks is None else (self.signals, self.blocks)


def signal_jobs(model: Transformer, names: Sequence[str], modules: Mapping[str, Any]) -> SignalJobs:
    """The jobs that compute the signals `names` for one request."""
    with_blocks = BLOCKS in names
    signals = SignalJob(names, len(model.layers), modules, block_keys(model) if with_blocks else ())
    return SignalJobs(signals, BlockJob(model, signals) if with_blocks else None)


class BlockJob:
    """Computes the selected blocks of one request and adds them to the frames of its signals."""

    after = True

    def __init__(self, model: Transformer, signals: SignalJob):
        self._model = model
        self._signals = signals
        self.keys = block_keys(model)
        self._states = {layer: _BlockRows() for _, layer in self.keys}

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        with torch.no_grad():
            self._signals.put(rows, BLOCKS, rows.layer, [spans(chosen) for chosen in self._chosen(rows)])

    def close(self, finish_reason: str, num_tokens: int) -> None:
        self._states.clear()

    def _chosen(self, rows: SiteRows) -> torch.Tensor:
        """Return [rows, blocks] bool: the blocks each row selects."""
        block = self._model.layers[rows.layer]
        device = self._model.embed.device
        assert isinstance(block, Block)
        attention, indexer = block.attn, block.attn.indexer
        assert indexer is not None
        batch = Batch.of([SequenceChunk(0, rows.positions[0], rows.token_ids)], device)
        group = batch.groups[0]
        turn = self._model.rope.step(batch.positions).compressed
        inputs = rows.tensor.to(device, self._model.numerics.dtype)
        latent, _, _, raw, weights = (group.view(each) for each in attention.in_proj(block.attn_norm(inputs)))
        count = (group.last_position + 1) // attention.ratio
        visible = visible_entries(group, count, attention.ratio)
        latent = attention.q_norm(latent)
        turn = turn.view(group.view)
        state = self._states[rows.layer]
        chosen = indexer(raw, weights, latent, turn, visible, group, state)
        if chosen is None:  # a single token sees all blocks
            return torch.ones(1, count, dtype=torch.bool)
        assert isinstance(chosen, torch.Tensor), "the indexer returns a mask when it is given one"
        return chosen[0].cpu()


class _BlockRows(Fresh):
    """State of one sequence: its entries so far, and the raw rows of the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self._raw: dict[str, torch.Tensor] = {}

    def raw_before(self, kind: str, group: Group, count: int) -> torch.Tensor:
        rows = self._raw[kind][:, -count:]
        missing = count - rows.shape[1]  # positions before the first token, which the caller masks
        return torch.cat((rows.new_zeros(1, missing, rows.shape[2]), rows), dim=1) if missing else rows

    def store_raw(self, kind: str, group: Group, raw: torch.Tensor) -> None:
        previous = self._raw.get(kind)
        self._raw[kind] = (raw if previous is None else torch.cat((previous, raw), dim=1))[
            :, -MAX_UNFINISHED_ROWS:
        ]

    def store_entries(
        self, kind: str, slots: torch.Tensor, first: torch.Tensor, entries: torch.Tensor
    ) -> None:
        previous = self._entries.get(kind)
        self._entries[kind] = entries if previous is None else torch.cat((previous, entries), dim=1)


def spans(chosen: torch.Tensor) -> Spans:
    """Convert a mask [blocks] to the half-open ranges (start, stop) of selected blocks."""
    edges = torch.diff(
        chosen.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int)
    )
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()))
