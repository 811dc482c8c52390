"""Which blocks of the past each token chose: the signal `blocks`, read beside the running model.

Layers with an indexer let a token attend to the best few of its compressed blocks. The choice is no tensor of the
forward pass that a tap could hand out, so it is made again here from what the sublayer read (`pre_attn`, as edited),
with the layer's own weights and index keys kept for this one sequence: a few rows of products per token, and no bit
of the answer changes. Rows come in order of position, each once, which is what a plan promises its jobs.
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
MOST_UNFINISHED = 8  # rows of a block and of the one before it
Spans = list[tuple[int, int]]


def block_keys(model: Transformer) -> tuple[Key, ...]:
    """The rows that are needed: of every layer with an indexer."""
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
    wanted = BLOCKS in names
    signals = SignalJob(names, len(model.layers), modules, block_keys(model) if wanted else ())
    return SignalJobs(signals, BlockJob(model, signals) if wanted else None)


class BlockJob:
    """One request's choices; they go into the frames of its signals."""

    after = True

    def __init__(self, model: Transformer, signals: SignalJob):
        self._model = model
        self._signals = signals
        self.keys = block_keys(model)
        self._kept = {layer: _BlockRows() for _, layer in self.keys}

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        with torch.no_grad():
            self._signals.put(rows, BLOCKS, rows.layer, [spans(chosen) for chosen in self._chosen(rows)])

    def close(self, finish_reason: str, num_tokens: int) -> None:
        self._kept.clear()

    def _chosen(self, rows: SiteRows) -> torch.Tensor:
        """[rows, blocks] bool."""
        block = self._model.layers[rows.layer]
        device = self._model.embed.device
        assert isinstance(block, Block)
        attention, indexer = block.attn, block.attn.indexer
        assert indexer is not None
        batch = Batch.of([SequenceChunk(0, rows.positions[0], rows.token_ids)], device)
        group = batch.groups[0]
        turn = self._model.rope.step(batch.positions).compressed
        given = rows.tensor.to(device, self._model.numerics.dtype)
        latent, _, _, raw, weights = (group.view(each) for each in attention.in_proj(block.attn_norm(given)))
        count = (group.last_position + 1) // attention.ratio
        visible = visible_entries(group, count, attention.ratio)
        latent = attention.q_norm(latent)
        turn = turn.view(group.view)
        kept = self._kept[rows.layer]
        chosen = indexer(raw, weights, latent, turn, visible, group, kept)
        if chosen is None:  # the one token sees all there are
            return torch.ones(1, count, dtype=torch.bool)
        assert isinstance(chosen, torch.Tensor), "a mask was given and a mask comes back"
        return chosen[0].cpu()


class _BlockRows(Fresh):
    """The entries of one sequence so far, and the raw rows that the next ones are made of."""

    def __init__(self) -> None:
        super().__init__()
        self._raw: dict[str, torch.Tensor] = {}

    def raw_before(self, kind: str, group: Group, count: int) -> torch.Tensor:
        found = self._raw[kind][:, -count:]
        missing = count - found.shape[1]  # before the first token: whatever stands there is made absent
        return torch.cat((found.new_zeros(1, missing, found.shape[2]), found), dim=1) if missing else found

    def store_raw(self, kind: str, group: Group, raw: torch.Tensor) -> None:
        before = self._raw.get(kind)
        self._raw[kind] = (raw if before is None else torch.cat((before, raw), dim=1))[:, -MOST_UNFINISHED:]

    def store_entries(
        self, kind: str, slots: torch.Tensor, first: torch.Tensor, entries: torch.Tensor
    ) -> None:
        before = self._entries.get(kind)
        self._entries[kind] = entries if before is None else torch.cat((before, entries), dim=1)


def spans(chosen: torch.Tensor) -> Spans:
    """[blocks] bool -> where runs of chosen ones begin, and where they have ended."""
    edges = torch.diff(
        chosen.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int)
    )
    return list(zip((edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()))
