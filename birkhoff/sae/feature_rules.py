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
from typing import Any

import torch

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
        self.index = {word: number for number, word in enumerate(self.words)}
        self.near_index = {word: number for number, word in enumerate(self.near)}


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

    def add(self, activations: torch.Tensor, tokens: Sequence[str], skip: int = 0) -> None:
        """Add one text: `activations` [T - skip, F] of its tokens from position `skip` on."""
        activations = activations.to(self._device, torch.float32)
        self.rows += len(activations)
        self._total += activations.sum(0, dtype=torch.float64)
        self._square += activations.double().square().sum(0)
        words = [plain_word(token) for token in tokens]
        other = len(self.vocabulary.words)
        ids = torch.tensor([self.vocabulary.index.get(word, other) for word in words])
        shifted = {"at": ids, "before": torch.cat([ids[1:], torch.tensor([other])])}
        shifted["after"] = torch.cat([torch.tensor([other]), ids[:-1]])
        for family, given in shifted.items():
            used = given[skip:].to(self._device)
            self._sums[family].index_add_(0, used, activations)
            self._counts[family] += torch.bincount(used, minlength=other + 1).double()
        for family, clues in (
            ("near", _near(words, self.vocabulary.near_index)),
            ("topic", _topics(words, self.vocabulary.topics)),
            ("kind", _kinds(tokens)),
        ):
            used = clues[skip:].to(self._device)
            self._sums[family] += used.T @ activations
            self._counts[family] += used.sum(0, dtype=torch.float64)

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
        return {name: number for number, name in enumerate(named)}

    def _correlation(self, dot: torch.Tensor, count: torch.Tensor, feature: int) -> float:
        return float(self._correlations(dot[None], count[None], feature)[0])

    def _correlations(self, dots: torch.Tensor, counts: torch.Tensor, feature: int) -> torch.Tensor:
        n, total, square = self.rows, self._total[feature], self._square[feature]
        spread = (n * square - total * total) * (n * counts - counts * counts)
        return torch.where(spread > 0, (n * dots - total * counts) / spread.clamp_min(1e-30).sqrt(), math.nan)


def _near(words: Sequence[str], index: Mapping[str, int]) -> torch.Tensor:
    """[T, near words]: whether the word occurred within the last `NEAR_TOKENS` tokens, this one included."""
    clues = torch.zeros(len(words), len(index))
    for position, word in enumerate(words):
        if word in index:
            clues[position : position + NEAR_TOKENS, index[word]] = 1.0
    return clues


def _topics(words: Sequence[str], topics: Mapping[str, frozenset[str]]) -> torch.Tensor:
    clues = torch.zeros(len(words), len(topics))
    for column, named in enumerate(topics.values()):
        for position, word in enumerate(words):
            if word in named:
                clues[position : position + NEAR_TOKENS, column] = 1.0
    return clues


def _kinds(tokens: Sequence[str]) -> torch.Tensor:
    """[T, kinds]: which kinds of place each token is, in the order of `KINDS`."""
    rows = []
    quoted, sentence = False, True
    for position, token in enumerate(tokens):
        word = token.strip()
        special = bool(_SPECIAL.match(word))
        letters = bool(word) and word[0].isalpha() and not special
        marks = word.count('"') + word.count("“") + word.count("”")
        quoted = quoted != (marks % 2 == 1)
        piece = letters and position > 0 and not token[:1].isspace() and tokens[position - 1][-1:].isalpha()
        here = {
            "break": "\n" in token,
            "mark": bool(word) and not special and not any(c.isalnum() for c in word),
            "quoted": quoted,
            "opening": letters and sentence,
            "capital": letters and word[0].isupper(),
            "piece": piece,
            "number": word.isdecimal(),
            "special": special,
            "early": position < EARLY,
            "late": position >= LATE,
        }
        rows.append([float(here[name]) for name in KINDS])
        if letters:
            sentence = False
        if special or "\n" in token or word.rstrip('"”')[-1:] in (".", "!", "?"):
            sentence = True
            quoted = quoted and "\n" not in token  # an unclosed quotation ends with its line
    return torch.tensor(rows).reshape(len(tokens), len(KINDS))
