"""Naive Bayes text classifiers: which of two sets of texts is a text more similar to?

A `WordProbe` is a table of words and their log-odds under two sets of texts (naive Bayes with add-one smoothing).
Its score is the mean over the words of a text, so it does not depend on length; 0 is neutral. It is independent of
the model that generated the text, so it can measure the effect of steering."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from birkhoff.errors import OptionError, quoted

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[\"!?]|\n+")
MAX_ODDS = 3.0  # limits the weight of words that occur in one set only


def words_of(text: str) -> list[str]:
    """Lower-case words, quotation, exclamation and question marks, and line breaks."""
    return ["\n" if word.startswith("\n") else word for word in _WORD.findall(text.lower())]


@dataclass(frozen=True)
class WordProbe:
    """`odds[word]` above 0 indicates the first set."""

    odds: Mapping[str, float]

    @classmethod
    def trained(cls, positive: Iterable[str], negative: Iterable[str], min_count: int = 3) -> WordProbe:
        """From two sets of texts; words seen fewer than `min_count` times are ignored."""
        up, down = (
            Counter(word for text in texts for word in words_of(text)) for texts in (positive, negative)
        )
        if not up or not down:
            raise OptionError("a probe needs words on both sides. Give texts that have some.")
        total_up = sum(up.values())
        total_down = sum(down.values())
        known = {*up, *down}
        odds = {}
        for word in sorted(known):
            if up[word] + down[word] >= min_count:
                high = (up[word] + 1) / (total_up + len(known))
                low = (down[word] + 1) / (total_down + len(known))
                odds[word] = max(-MAX_ODDS, min(MAX_ODDS, math.log(high / low)))
        return cls(odds)

    @classmethod
    def of_words(cls, positive: Iterable[str], negative: Iterable[str] = ()) -> WordProbe:
        """From two lists of words: +1 and -1."""
        odds = {word.lower(): 1.0 for word in positive} | {word.lower(): -1.0 for word in negative}
        if not odds:
            raise OptionError("a probe needs at least one word.")
        return cls(odds)

    def score(self, text: str) -> float:
        words = words_of(text)
        return sum(self.odds.get(word, 0.0) for word in words) / max(len(words), 1)

    def to_json(self) -> dict[str, Any]:
        return {"odds": dict(self.odds)}

    @classmethod
    def from_json(cls, raw: Any) -> WordProbe:
        odds = raw.get("odds") if isinstance(raw, Mapping) else None
        if not isinstance(odds, Mapping) or not all(
            isinstance(value, (int, float)) for value in odds.values()
        ):
            raise OptionError(f"a probe is {quoted(raw)}, expected an object with odds of words.")
        return cls({str(word): float(value) for word, value in odds.items()})
