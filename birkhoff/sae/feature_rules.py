"""Labels of features as simple rules, and how well a rule predicts the feature on other texts.

A rule says where a feature should be active: at certain words, before or after them, shortly after a word of a topic,
or at a kind of place (a line break, inside quotation marks, the first words of a text). For every feature the rule is
taken whose 0/1 prediction correlates best with the feature's activation on some texts; its score is the correlation on
texts that had no part in the choice. That is the measure of automated interpretability (a simulated activation against
the real one) with the simplest possible simulator: it is cheap, deterministic and needs no other model, and it says
nothing about meanings that words do not show.

`RuleSums` adds up what the correlations need, text by text: memory does not grow with the number of texts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

NEAR_TOKENS = 24  # how far back a topic word counts
MOST_WORDS = 800  # words of each family
LEAST_COUNT = 3  # occurrences of a word that a rule may name
MOST_IN_RULE = 5  # words of one rule
GAIN = 0.01  # correlation that a further word must add
SUM_BYTES = 256 << 20  # limit for all sums
WORD_FAMILIES = ("at", "before", "after", "near")
FORMS = {"at": "{}", "before": "before {}", "after": "after {}", "near": "soon after {}"}
KINDS = {
    "break": "line breaks",
    "mark": "punctuation",
    "quoted": "inside quotation marks",
    "opening": "the first word of a sentence",
    "capital": "capitalised words",
    "piece": "pieces inside a word",
    "number": "numbers",
    "special": "chat markers",
    "early": "the first twelve tokens",
    "late": "after the first hundred tokens",
}
EARLY, LATE = 12, 100
_CONTENT = re.compile(r"[^\W\d_]{3,}")
_SPECIAL = re.compile(r"^(<\|.*\|>|<｜.*｜>|</?\w+>)$")


@dataclass(frozen=True)
class LabelRule:
    """Where a feature is predicted to be active: `family` is one of `WORD_FAMILIES`, "topic" or "kind"."""

    family: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.family in FORMS:
            return FORMS[self.family].format(" / ".join(f'"{word}"' for word in self.words))
        return f"about {self.words[0]}" if self.family == "topic" else KINDS[self.words[0]]

    def to_json(self) -> dict[str, Any]:
        return {self.family: list(self.words)}


def plain_word(token: str) -> str:
    """A token as rules name it: without spaces around it and in lower case; white space gets a name."""
    word = token.strip().lower()
    return word or ("line break" if "\n" in token else "space")


class Vocabulary:
    """The words rules may name, from the tokens of texts, and the topics: word lists under a name."""

    def __init__(
        self, texts: Iterable[Sequence[str]], features: int, topics: Mapping[str, Iterable[str]] | None = None
    ):
        words: Counter[str] = Counter()
        content: Counter[str] = Counter()
        count = 0
        for tokens in texts:
            count += 1
            plain = [plain_word(token) for token in tokens]
            words.update(plain)
            content.update({word for word in plain if _CONTENT.fullmatch(word)})
        room = max(16, SUM_BYTES // (4 * len(WORD_FAMILIES) * max(features, 1)))
        limit = min(MOST_WORDS, room)
        self.words = [word for word, n in words.most_common(limit) if n >= LEAST_COUNT]
        # a word of most texts says nothing about the topic of one
        topical = {word: n for word, n in content.items() if LEAST_COUNT <= n <= max(LEAST_COUNT, count / 2)}
        self.near = sorted(topical, key=lambda word: (-topical[word], word))[:limit]
        self.topics = {name: frozenset(given) for name, given in (topics or {}).items()}
        self.index = {word: index for index, word in enumerate(self.words)}
        self.near_index = {word: index for index, word in enumerate(self.near)}
        self._rows: dict[str, int] = {}  # of the table below, by token
        self._facts: list[_TokenFacts] = []
        self._table = np.zeros((len(_TokenFacts._fields), 0), dtype=np.int64)

    def clues(self, tokens: Sequence[str]) -> TextClues:
        """What rules see of a text."""
        rows = [self._row(token) for token in tokens]
        if self._table.shape[1] < len(self._facts):
            self._table = np.array(self._facts, dtype=np.int64).reshape(-1, len(_TokenFacts._fields)).T
        word, near, kinds, *facts = self._table[:, rows]
        ids, beyond = torch.from_numpy(word), torch.tensor([len(self.words)])
        places = np.flatnonzero(near >= 0)
        topics = [
            (index, position)
            for index, given in enumerate(self.topics.values())
            for position, token in enumerate(tokens)
            if plain_word(token) in given
        ]
        topic, at = np.array(topics, dtype=np.int64).reshape(-1, 2).T
        return TextClues(
            {"at": ids, "before": torch.cat([ids[1:], beyond]), "after": torch.cat([beyond, ids[:-1]])},
            {"near": _spans(near[places], places, len(rows)), "topic": _spans(topic, at, len(rows))},
            _kinds(kinds, np.array(facts)),
        )

    def _row(self, token: str) -> int:
        row = self._rows.get(token)
        if row is None:
            row = self._rows[token] = len(self._facts)
            word = plain_word(token)
            numbers = self.index.get(word, len(self.words)), self.near_index.get(word, -1)
            self._facts.append(_token_facts(token, *numbers))
        return row


class TextClues(NamedTuple):
    """What rules see of a text: the number of the word at, before and after each token, by family; spans of near
    words and topics, by family; and the kinds of each token."""

    words: dict[str, torch.Tensor]  # [T]
    spans: dict[str, torch.Tensor]  # [n, 3]: column, start, stop
    kinds: torch.Tensor  # [T, kinds]


class RuleSums:
    """Sums over rows of activations and of activations times predictions, for all features and rules."""

    def __init__(self, vocabulary: Vocabulary, features: int, device: torch.device | str = "cpu"):
        self.vocabulary = vocabulary
        self._device = torch.device(device)
        self.rows = 0
        words = len(vocabulary.words) + 1  # the last one stands for all other words
        sizes = dict.fromkeys(("at", "before", "after"), words)
        sizes |= {"near": len(vocabulary.near), "topic": len(vocabulary.topics), "kind": len(KINDS)}
        self._total = torch.zeros(features, dtype=torch.float64, device=device)
        self._square = torch.zeros(features, dtype=torch.float64, device=device)
        self._sums = {family: torch.zeros(size, features, device=device) for family, size in sizes.items()}
        self._counts = {
            family: torch.zeros(size, dtype=torch.float64, device=device) for family, size in sizes.items()
        }

    def add(self, clues: TextClues, first: int, activations: torch.Tensor) -> None:
        """Add `activations` [n, F] of the tokens of a text from position `first` on.

        Sums of single words are made for the part and then added: adding every token to a sum over 10^8 rows would
        lose small activations in float32."""
        activations = activations.to(self._device, torch.float32)
        stop = first + len(activations)
        self.rows += len(activations)
        before = activations.new_zeros(len(activations) + 1, activations.shape[1], dtype=torch.float64)
        torch.cumsum(activations, 0, dtype=torch.float64, out=before[1:])
        self._total += before[-1]
        self._square += activations.square().sum(0, dtype=torch.float64)
        for family, words in clues.words.items():
            used, inverse = words[first:stop].to(self._device).unique(return_inverse=True)
            part = activations.new_zeros(len(used), activations.shape[1])
            self._sums[family][used] += part.index_add_(0, inverse, activations)
            self._counts[family].index_add_(0, used, torch.bincount(inverse, minlength=len(used)).double())
        for family, spans in clues.spans.items():
            column, start, end = spans.to(self._device).unbind(1)
            start, end = (side.clamp(first, stop) - first for side in (start, end))
            self._sums[family].index_add_(0, column, (before[end] - before[start]).float())
            self._counts[family].index_add_(0, column, (end - start).double())
        kinds = clues.kinds[first:stop].to(self._device)
        self._sums["kind"] += kinds.T @ activations
        self._counts["kind"] += kinds.sum(0, dtype=torch.float64)

    def score(self, feature: int, rule: LabelRule) -> float | None:
        """Correlation of the rule with the feature's activations; None if either is constant."""
        names = self._names(rule.family)
        picked = [names[word] for word in rule.words]
        sums, counts = self._sums[rule.family][picked, feature].double(), self._counts[rule.family][picked]
        value = self._correlation(sums.sum(), counts.sum(), feature)
        return None if math.isnan(value) else value

    def best_rule(self, feature: int) -> tuple[LabelRule, float] | None:
        """The rule with the largest correlation, and that correlation; None for a feature that never varies."""
        found: list[tuple[float, int, LabelRule]] = []
        for order, family in enumerate(self._sums):
            names = list(self._names(family))
            if not names:
                continue
            sums, counts = (
                self._sums[family][: len(names), feature].double(),
                self._counts[family][: len(names)],
            )
            each = self._correlations(sums, counts, feature).nan_to_num(-1.0)
            # only words of a family whose places are disjoint can be joined by adding their sums
            most = MOST_IN_RULE if family in ("at", "before", "after") else 1
            chosen, value = self._join(each, sums, counts, feature, most)
            if chosen:
                rule = LabelRule(family, tuple(names[index] for index in chosen))
                # of nearly equal rules the one that speaks of the token itself comes first
                found.append((value - 0.01 * (order > 0), -order, rule))
        if not found:
            return None
        _, _, rule = max(found, key=lambda one: one[:2])
        fitted = self.score(feature, rule)
        return None if fitted is None else (rule, fitted)

    def _join(
        self, each: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor, feature: int, most: int
    ) -> tuple[list[int], float]:
        chosen: list[int] = []
        value = 0.0
        total, count = torch.zeros(2, dtype=torch.float64, device=sums.device)
        for index in each.topk(min(4 * most, len(each))).indices.tolist():
            joined = self._correlation(total + sums[index], count + counts[index], feature)
            if joined > value + (GAIN if chosen else 0.0):
                chosen.append(index)
                value, total, count = joined, total + sums[index], count + counts[index]
            if len(chosen) == most:
                break
        return chosen, value

    def _names(self, family: str) -> dict[str, int]:
        if family in ("at", "before", "after"):
            return self.vocabulary.index
        if family == "near":
            return self.vocabulary.near_index
        named: Iterable[str] = self.vocabulary.topics if family == "topic" else KINDS
        return {name: index for index, name in enumerate(named)}

    def _correlation(self, dot: torch.Tensor, count: torch.Tensor, feature: int) -> float:
        return float(self._correlations(dot[None], count[None], feature)[0])

    def _correlations(self, dots: torch.Tensor, counts: torch.Tensor, feature: int) -> torch.Tensor:
        n, total, square = self.rows, self._total[feature], self._square[feature]
        spread = (n * square - total * total) * (n * counts - counts * counts)
        return torch.where(spread > 0, (n * dots - total * counts) / spread.clamp_min(1e-30).sqrt(), math.nan)


def _spans(columns: NDArray[np.int64], positions: NDArray[np.int64], length: int) -> torch.Tensor:
    """[n, 3]: column, first position and the one after the last, where a column occurred within the last
    `NEAR_TOKENS` tokens of a text of `length`. It occurs at `positions`, in ascending order."""
    if not len(columns):
        return torch.zeros(0, 3, dtype=torch.long)
    order = np.argsort(columns, kind="stable")
    column, start = columns[order], positions[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (np.diff(column) != 0) | (np.diff(start) > NEAR_TOKENS)
    ends = np.append(begins[1:], True)
    stop = np.minimum(start[ends] + NEAR_TOKENS, length)
    return torch.from_numpy(np.stack([column[begins], start[begins], stop], 1))


class _TokenFacts(NamedTuple):
    """What a token says by itself: its words, a bit per kind of its place, and how it changes what follows."""

    word: int
    near: int  # -1 for a word that is not among them
    kinds: int
    letters: bool
    inner: bool  # begins with a letter that may continue a word
    ends_in_letter: bool
    turns: bool  # opens or closes a quotation
    ends_sentence: bool
    breaks: bool


_BIT = {name: 1 << index for index, name in enumerate(KINDS)}


def _token_facts(token: str, word: int, near: int) -> _TokenFacts:
    plain = token.strip()
    special = bool(_SPECIAL.match(plain))
    letters = bool(plain) and plain[0].isalpha() and not special
    kinds = {
        "break": "\n" in token,
        "mark": bool(plain) and not special and not any(c.isalnum() for c in plain),
        "capital": letters and plain[0].isupper(),
        "number": plain.isdecimal(),
        "special": special,
    }
    return _TokenFacts(
        word,
        near,
        sum(_BIT[name] for name, here in kinds.items() if here),
        letters,
        letters and not token[:1].isspace(),
        token[-1:].isalpha(),
        sum(map(plain.count, ('"', "“", "”"))) % 2 == 1,
        special or "\n" in token or plain.rstrip('"”')[-1:] in (".", "!", "?"),
        "\n" in token,
    )


def _kinds(kinds: NDArray[np.int64], facts: NDArray[np.int64]) -> torch.Tensor:
    """[T, kinds]: which kinds of place the tokens of a text are, in the order of `KINDS`, from what each says by itself
    (`kinds` [T] and `facts` [5 or more, T], in the order of `_TokenFacts`)."""
    letters, inner, ends_in_letter, turns, ends_sentence, breaks = facts
    quotes = np.cumsum(turns)
    quoted = (quotes - _before(quotes, breaks)) % 2  # an unclosed quotation ends with its line
    words = np.cumsum(letters)
    opening = letters * (words - _before(words, ends_sentence) == 1)
    piece = inner * np.append(0, ends_in_letter)[: len(inner)]
    codes = kinds | quoted * _BIT["quoted"] | opening * _BIT["opening"] | piece * _BIT["piece"]
    codes[:EARLY] |= _BIT["early"]
    codes[LATE:] |= _BIT["late"]
    return (torch.from_numpy(codes)[:, None] >> torch.arange(len(KINDS)) & 1).float()


def _before(counts: NDArray[np.int64], marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """For every position the (rising) count at the last marked position before it; 0 if there is none."""
    return np.maximum.accumulate(np.append(0, counts * marks))[: len(counts)]
