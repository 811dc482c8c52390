"""Changes of attention as a table of fixed shape, which the kernels of decode steps read.

What a change hides, forces or sets to zero does not depend on the query, so a row of a step has a list of rules: a
kind, a range of positions or of entries, and the heads it holds for. The kernels look every key up in the rules of its
row. Rules are data: a recorded step keeps its operations when they change. A row with more than `MAX_RULES` rules is
left to the plain operations of the model (`model/attention_rows.py`).

    KEY      keys at these positions get no weight
    ENTRY    compressed entries with these numbers get no weight
    FORBID   the same, and the indexer never chooses them
    FORCE    the indexer always chooses them
    ZERO     they are found as zeros
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from birkhoff.hooks.attention_change import AttentionChange, Blocks, Ranges, RowChanges, ranges_of
from birkhoff.hooks.schema import pooled_tokens

KEY, ENTRY, FORBID, FORCE, ZERO = range(5)
MAX_RULES = 32  # of one row
WORD = 32  # heads in a number of the table
HEAD_WORDS = 4
Rule = tuple[int, int, int]  # kind, first, stop


@dataclass(frozen=True, eq=False)
class KeyRules:
    """The rules of n rows: `counts` [n] int32, `table` [n, MAX_RULES, 3 + HEAD_WORDS] int32 (kind, first, stop, heads
    as bits), and `sink` [n, h] float32: what is added to the logit of the sink."""

    counts: torch.Tensor
    table: torch.Tensor
    sink: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, device: torch.device | str = "cpu") -> KeyRules:
        return cls(
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, MAX_RULES, 3 + HEAD_WORDS, dtype=torch.int32, device=device),
            torch.zeros(rows, heads, device=device),
        )

    def copy_(self, other: KeyRules) -> None:
        """Take the rules of as many or fewer rows; the others have none."""
        for own, new in ((self.counts, other.counts), (self.table, other.table), (self.sink, other.sink)):
            own[len(new) :].zero_()
            own[: len(new)].copy_(new)


def key_rules(changes: RowChanges, rows: int, heads: int, ratio: int) -> KeyRules | None:
    """The rules of the changes in a layer with this compression ratio, on the host; None if they do not fit."""
    if heads > WORD * HEAD_WORDS:
        return None
    counts = [0] * rows
    made = KeyRules.empty(rows, heads)
    table, sink = made.table, made.sink
    for change, changed in changes:
        rules = torch.tensor(
            [[*rule, *words] for rule, words in _rules(change, heads, ratio)], dtype=torch.int32
        )
        for row in changed:
            stop = counts[row] + len(rules)
            if stop > MAX_RULES:
                return None
            if len(rules):
                table[row, counts[row] : stop] = rules
            counts[row] = stop
            if change.sink is not None:
                own = slice(None) if change.heads is None else list(change.heads)
                sink[row, own] += math.log(change.sink) if change.sink else -torch.inf
    made.counts.copy_(torch.tensor(counts))
    return made


def _rules(change: AttentionChange, heads: int, ratio: int) -> Iterator[tuple[Rule, tuple[int, ...]]]:
    """The rules of a change, each with its heads as bits."""
    some = _head_words(range(heads) if change.heads is None else change.heads)
    every = _head_words(range(heads))
    for first, stop in change.mask:
        yield (KEY, first, stop), some
    if not ratio:
        return
    for first, stop in _masked_entries(change, ratio):
        yield (ENTRY, first, stop), some
    ablated = FORBID if change.ablation == "remove" else ZERO
    for kind, blocks in ((FORBID, change.forbid), (FORCE, change.force), (ablated, change.ablate)):
        for first, stop in _entries_of(blocks, ratio):
            yield (kind, first, stop), every


def _head_words(heads: range | tuple[int, ...]) -> tuple[int, ...]:
    words = [0] * HEAD_WORDS
    for head in heads:
        words[head // WORD] |= 1 << head % WORD
    return tuple(word - (1 << WORD) if word >> (WORD - 1) else word for word in words)  # as int32


def _masked_entries(change: AttentionChange, ratio: int) -> Ranges:
    """Entries that a key mask covers, as ranges of their numbers. Entry e pools the tokens up to (e + 1) * ratio."""
    pooled, found = pooled_tokens(ratio), []
    for start, stop in () if change.mask_entries == "none" else change.mask:
        if change.mask_entries == "any":
            first, end = start // ratio, (stop + pooled - 1) // ratio
        else:  # the first entries pool fewer tokens, from 0 on
            first, end = -(-(start + pooled) // ratio) - 1 if start else 0, stop // ratio
        if first < end:
            found.append((first, end))
    return tuple(found)


def _entries_of(blocks: Blocks, ratio: int) -> Ranges:
    """Blocks as ranges of the numbers of entries."""
    return ranges_of(sorted(set(blocks.numbers))) + tuple(
        (start // ratio, -(-stop // ratio)) for start, stop in blocks.tokens
    )
