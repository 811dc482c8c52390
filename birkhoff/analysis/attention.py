"""Attention weights of a text per layer: sliding window, compressed entries and sink, in token positions.

A V4 query attends to a sliding window of single tokens, to compressed entries that each cover a block of 4 or 128
tokens (for blocks of 4 only those selected by the indexer), and to a sink. The weights are rows of the ragged site
`attn_weights`, after the edits of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from birkhoff import notebook
from birkhoff.analysis.forward import passes, resolve_edits, run_texts
from birkhoff.errors import SiteError, quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.tap import RowReader
from birkhoff.option_checks import as_int
from birkhoff.records import Tabular

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.steering.resolver import Steering

QUERY_BLOCK = 128  # tokens read at a time; bounds the memory of the weights
KINDS = {0: "window", 4: "csa", 128: "hca"}  # layer kind by compression ratio

SMALLEST_WEIGHT = 1e-4  # of a span in JSON


@dataclass(frozen=True, repr=False)
class AttentionReadout(Tabular):
    """Attention of one token in one layer, averaged over heads; `window`, `entries` and `sink` sum to 1."""

    ratio: int  # tokens per compressed entry; 0: the layer has none
    first: int  # position of the window's first token
    window: torch.Tensor  # [tokens]
    entries: torch.Tensor  # [entries]: entry e covers tokens e * ratio .. (e + 1) * ratio - 1
    chosen: torch.Tensor  # [entries] bool: selected by the indexer; all visible entries without one
    sink: float
    layer: int | None = None
    tokens: Sequence[str] | None = field(default=None, repr=False)  # up to the one that attends

    @classmethod
    def of(
        cls,
        rows: torch.Tensor,
        ratio: int,
        position: int,
        layer: int | None = None,
        tokens: Sequence[str] | None = None,
    ) -> AttentionReadout:
        """From the rows [k, 2 + heads] of `attn_weights` of the token at `position`."""
        mean = rows[:, 2:].mean(1)
        first = rows[:, 0].long()
        in_window = rows[:, 1] - rows[:, 0] == 1
        chosen = torch.zeros((position + 1) // ratio if ratio else 0, dtype=torch.bool, device=rows.device)
        entries = torch.zeros(chosen.shape, device=rows.device)
        if ratio:
            compressed = rows[:, 1] - rows[:, 0] == ratio
            chosen[first[compressed] // ratio] = True
            entries[first[compressed] // ratio] = mean[compressed]
        return cls(ratio, int(first[0]), mean[in_window], entries, chosen, float(mean[-1]), layer, tokens)

    def records(self) -> list[dict[str, Any]]:
        """A row for each key: the first token it covers, the end, the text of these tokens, and its weight; the sink is
        last, at -1."""
        spans = [(self.first + offset, self.first + offset + 1) for offset in range(len(self.window))]
        blocks = [(entry * self.ratio, (entry + 1) * self.ratio) for entry in range(len(self.entries))]
        weights = [*self.window.tolist(), *self.entries.tolist(), self.sink]
        return [
            {
                "from": start,
                "to": stop,
                **(
                    {}
                    if self.tokens is None
                    else {"text": "".join(self.tokens[max(start, 0) : max(stop, 0)])}
                ),
                "weight": weight,
            }
            for (start, stop), weight in zip([*spans, *blocks, (-1, -1)], weights, strict=True)
        ]

    def _repr_html_(self) -> str:
        rows = sorted(self.records(), key=lambda row: -row["weight"])[:24]
        terms = [
            (f"{row['from']} {row.get('text', '')!r}" if row["to"] >= 0 else "sink", row["weight"])
            for row in rows
        ]
        return notebook.bars(terms, repr(self))

    def __repr__(self) -> str:
        kind = KINDS.get(self.ratio, f"blocks of {self.ratio}")
        window, blocks = float(self.window.sum()), float(self.entries.sum())
        return (
            f"AttentionReadout(layer {self.layer}, {kind}: {window:.2f} on {len(self.window)} tokens, {blocks:.2f} on "
            f"{len(self.entries)} blocks, {self.sink:.2f} on the sink)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPattern:
    """Attention of every head and token of a text in one layer. For each head and query, the weights of `window`,
    `entries` and `sink` sum to 1; what is not attended to is 0."""

    layer: int
    ratio: int  # tokens per compressed entry; 0: the layer has none
    window: torch.Tensor  # [heads, T, T]: single tokens, from query to key
    entries: torch.Tensor  # [heads, T, E]: entry e covers tokens e * ratio .. (e + 1) * ratio - 1
    sink: torch.Tensor  # [heads, T]
    tokens: Sequence[str] | None = field(default=None, repr=False)

    def by_token(self) -> torch.Tensor:
        """[heads, T, T]: `window`, and the weight of every entry in equal parts on the tokens it covers."""
        spread = self.window.clone()
        covered = self.entries.shape[-1] * self.ratio
        if covered:
            spread[:, :, :covered] += (self.entries / self.ratio).repeat_interleave(self.ratio, dim=-1)
        return spread

    def _repr_html_(self) -> str:
        """For every head, where its weight goes on average over the queries after the first."""
        weights = self.by_token()[:, 1:]
        if not weights.shape[1]:
            return notebook.facts(repr(self), {})
        itself = self.by_token().diagonal(dim1=1, dim2=2)[:, 1:]
        before = self.by_token().diagonal(offset=-1, dim1=1, dim2=2)
        shares = {
            "itself": itself,
            "token before": before,
            "first token": weights[:, :, 0],
            "single tokens": self.window[:, 1:].sum(-1),
            "blocks": self.entries[:, 1:].sum(-1),
            "sink": self.sink[:, 1:],
        }
        values = torch.stack([share.mean(-1) for share in shares.values()], -1)
        heads = [f"head {head}" for head in range(len(values))]
        return f"<b>{notebook.escape(repr(self))}</b>" + notebook.heat(values.tolist(), heads, list(shares))

    def __repr__(self) -> str:
        heads, tokens, entries = self.entries.shape
        return f"AttentionPattern(layer {self.layer}, {heads} heads, {tokens} tokens, {entries} compressed entries)"


def attention_patterns(
    engine: Engine, texts: Sequence[Sequence[int]], layers: Any = "all", steer: Steering = None
) -> list[dict[int, AttentionPattern]]:
    """Return for each text the patterns of the selected layers, by layer, on the host."""
    config = engine.v4_model.config
    chosen = set(parse_layers(layers).expand(config.num_hidden_layers))
    patterns: list[dict[int, AttentionPattern]] = [{} for _ in texts]
    tokens = [engine.token_texts(ids) for ids in texts]

    def read(index: int, layer: int, rows: RowReader) -> None:
        if layer not in chosen:
            return
        length, ratio, heads = len(texts[index]), config.compress_ratios[layer], config.num_attention_heads
        window = torch.zeros(heads, length, length)
        entries = torch.zeros(heads, length, length // ratio if ratio else 0)
        sink = torch.zeros(heads, length)
        for start in range(0, length, QUERY_BLOCK):
            queries = range(start, min(start + QUERY_BLOCK, length))
            for query, own in zip(queries, rows(queries)):
                own = own.cpu()
                first, count, weights = own[:, 0].long(), own[:, 1] - own[:, 0], own[:, 2:].T
                single, compressed = count == 1, count > 1
                window[:, query, first[single]] = weights[:, single]
                if ratio:
                    entries[:, query, first[compressed] // ratio] = weights[:, compressed]
                sink[:, query] = weights[:, -1]
        patterns[index][layer] = AttentionPattern(layer, ratio, window, entries, sink, tokens[index])

    _run(engine, texts, steer, read)
    return patterns


def attention(
    engine: Engine, texts: Sequence[Sequence[int]], position: int = -1, steer: Steering = None
) -> list[list[AttentionReadout]]:
    """Return for each text one `AttentionReadout` per layer, of the token at `position`; negative positions count from
    the end."""
    ratios = engine.v4_model.config.compress_ratios
    cut = []
    for ids in texts:
        if as_int(position) is None or not -len(ids) <= position < len(ids):
            raise SiteError(f"position is {quoted(position)}, the text has {len(ids)} tokens.")
        cut.append(list(ids)[: position % len(ids) + 1])  # attention is causal: later tokens have no effect
    readouts: list[list[AttentionReadout]] = [[] for _ in cut]
    tokens = [engine.token_texts(ids) for ids in cut]

    def read(index: int, layer: int, rows: RowReader) -> None:
        last = len(cut[index]) - 1
        readout = AttentionReadout.of(rows([last])[0], ratios[layer], last, layer, tokens[index])
        readouts[index].append(readout)

    _run(engine, cut, steer, read)
    return readouts


def attention_masses(engine: Engine, token_ids: Sequence[int], steer: Steering = None) -> torch.Tensor:
    """Return [layers, T, 3]: attention mass on the window, on compressed entries and on the sink, for every token."""
    assert engine.v4_model is not None
    masses = []

    def read(index: int, layer: int, rows: RowReader) -> None:
        parts = []
        for start in range(0, len(token_ids), QUERY_BLOCK):
            for own in rows(range(start, min(start + QUERY_BLOCK, len(token_ids)))):
                mean, count = own[:, 2:].mean(1), own[:, 1] - own[:, 0]
                parts.append(torch.stack((mean[count == 1].sum(), mean[count > 1].sum(), mean[-1])))
        masses.append(torch.stack(parts))

    _run(engine, [list(token_ids)], steer, read)
    return torch.stack(masses)


def _run(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    steer: Steering,
    read: Callable[[int, int, RowReader], None],
) -> None:
    """Run texts and call `read` with the index of a text, a layer and a reader of its weights."""
    edits = resolve_edits(engine, texts, steer)
    with torch.no_grad():
        for together in passes(texts):

            def weights(index: int, layer: int, rows: RowReader, together: Sequence[int] = together) -> None:
                read(together[index], layer, rows)

            run_texts(engine, [texts[i] for i in together], [edits[i] for i in together], weights=weights)


def attention_json(readouts: Sequence[AttentionReadout]) -> list[dict[str, Any]]:
    """Convert readouts to JSON: spans `[from, to)` of the text with their weight.

    Weights below `SMALLEST_WEIGHT` are summed in `rest`, so that all weights still sum to 1.
    """
    layers = []
    for readout in readouts:
        spans, rest = [], 0.0
        for offset, weight in enumerate(readout.window.tolist()):
            if weight >= SMALLEST_WEIGHT:
                start = readout.first + offset
                spans.append({"from": start, "to": start + 1, "weight": weight})
            else:
                rest += weight
        blocks = []
        for entry, (weight, chosen) in enumerate(zip(readout.entries.tolist(), readout.chosen.tolist())):
            if weight >= SMALLEST_WEIGHT:
                start = entry * readout.ratio
                blocks.append(
                    {"from": start, "to": start + readout.ratio, "weight": weight, "chosen": chosen}
                )
            else:
                rest += weight
        layers.append(
            {
                "kind": KINDS.get(readout.ratio, f"blocks of {readout.ratio}"),
                "window": spans,
                "blocks": blocks,
                "chosen": int(readout.chosen.sum()),
                "entries": len(readout.entries),
                "sink": readout.sink,
                "rest": rest,
            }
        )
    return layers
