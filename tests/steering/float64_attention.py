"""Attention with reads and edits in plain float64, token by token, written from the specification of the edits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.model.float64 import Attention, Float64, best


@dataclass
class Change:
    """What a layer does differently; `queries` are the positions it applies to, None for all."""

    queries: set[int] | None = None
    heads: list[int] | None = None
    mask: set[int] = field(default_factory=set)
    rule: str = "any"
    force: set[int] = field(default_factory=set)
    forbid: set[int] = field(default_factory=set)
    sink: float = 1.0
    removed: set[int] = field(default_factory=set)
    zeroed: set[int] = field(default_factory=set)
    silent: list[int] = field(default_factory=list)


class EditedAttention(Attention):
    """An attention sublayer that applies a `Change` and records what it attends to, by position."""

    def __init__(self, model, prefix, layer, ratio, change=None):
        super().__init__(model, prefix, layer, ratio)
        self.change = change or Change()
        self.spans, self.shares, self.scores, self.chosen, self.pooling = {}, {}, {}, {}, {}

    def __call__(self, x, position):
        model, change, ratio = self.model, self.change, self.ratio
        active = change.queries is None or position in change.queries
        latent = self.latent(x)
        self.keys.append(self.key(x, position))
        self.keys = self.keys[-model.config["sliding_window"] :]
        first = position + 1 - len(self.keys)
        values = list(self.keys)
        spans = [(first + i, first + i + 1) for i in range(len(values))]
        masked = [active and first + i in change.mask for i in range(len(values))]
        if self.compressor is not None:
            self._pool(x, position)
            self.compressor.push(x, position)
            entries = self.compressor.entries
            seen = [e for e in range(len(entries)) if not active or e not in change.forbid | change.removed]
            if self.index is not None:
                self.index.push(x, position)
                scores = self.index_scores(x, self.index_queries(latent, position), self.index.entries)
                self.scores[position] = scores
                ranked = [np.inf if active and e in change.force else scores[e] for e in seen]
                seen = sorted(seen[i] for i in best(np.array(ranked), model.config["index_topk"]))
                self.chosen[position] = seen
            for e in seen:
                held = range(max((e - 1) * ratio if ratio == 4 else e * ratio, 0), (e + 1) * ratio)
                covered = [token in change.mask for token in held]
                rule = {"any": any, "all": all, "none": lambda each: False}[change.rule]
                masked.append(active and rule(covered))
                spans.append((e * ratio, (e + 1) * ratio))
                values.append(0 * entries[e] if active and e in change.zeroed else entries[e])
        mixed, share = self._softmax(self.queries(latent, position), np.stack(values), masked, active)
        self.spans[position], self.shares[position] = spans, share
        if active:
            mixed[change.silent] = 0.0
        return model.linear(f"{self.prefix}.wo_b", self.gather(mixed, position))

    def _softmax(self, queries, keys, masked, active):
        heads = range(len(queries))
        edited = heads if self.change.heads is None else self.change.heads
        sink = np.exp(self.model.weights[f"{self.prefix}.attn_sink"])
        weight = np.exp(queries @ keys.T / np.sqrt(keys.shape[1]))
        for head in edited if active else ():
            weight[head, masked] = 0.0
            sink[head] = sink[head] * self.change.sink
        share = np.concatenate((weight, sink[:, None]), axis=1)
        share = share / np.maximum(share.sum(axis=1, keepdims=True), 1e-300)
        return share[:, :-1] @ keys, share

    def _pool(self, x, position):
        """Pooling weights of the entry that this token completes, [tokens, channels]."""
        ratio, prefix = self.ratio, f"{self.prefix}.compressor"
        weights = self.model.weights
        self._gates = getattr(self, "_gates", [])
        self._gates.append(weights[f"{prefix}.wgate.weight"] @ x + weights[f"{prefix}.ape"][position % ratio])
        if (position + 1) % ratio:
            return
        newer, older = self._gates[-ratio:], []
        if ratio == 4:
            half = len(newer[0]) // 2
            older = [gate[:half] for gate in self._gates[-2 * ratio : -ratio]]
            newer = [gate[half:] for gate in newer]
        gates = np.exp(np.stack([*older, *newer]))
        self.pooling[position] = gates / gates.sum(axis=0)


def edited_model(config, weights, changes) -> Float64:
    """A float64 model whose attention records, with changes by layer."""
    model = Float64(config.to_dict(), weights)
    model.layers = [
        EditedAttention(model, f"layers.{i}.attn", i, each.ratio, changes.get(i))
        for i, each in enumerate(model.layers)
    ]
    return model


__all__ = ["Change", "EditedAttention", "edited_model"]
