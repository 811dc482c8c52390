"""Small automatic judges of a text, made from other texts: which of two kinds of writing is it more like?

A `WordProbe` is a table of words and their log-odds under two sets of texts (naive Bayes with add-one smoothing); its
score is the mean over the words of a text, so it does not grow with length, and 0 says nothing either way. It knows
nothing of the model that wrote the text, which is what makes it a fair judge of steering.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from birkhoff.errors import OptionError, quoted

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[\"!?]|\n+")
MOST_ODDS = 3.0  # a word seen once in one set and never in the other is no proof


def words_of(text: str) -> list[str]:
    """Words in lower case, quotation, exclamation and question marks, and line breaks."""
    return ["\n" if found.startswith("\n") else found for found in _WORD.findall(text.lower())]


@dataclass(frozen=True)
class WordProbe:
    """`odds[word]` above 0 speaks for the first set."""

    odds: Mapping[str, float]

    @classmethod
    def trained(cls, positive: Iterable[str], negative: Iterable[str], least: int = 3) -> WordProbe:
        """From two sets of texts; words seen fewer than `least` times say nothing."""
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
            if up[word] + down[word] >= least:
                high = (up[word] + 1) / (total_up + len(known))
                low = (down[word] + 1) / (total_down + len(known))
                odds[word] = max(-MOST_ODDS, min(MOST_ODDS, math.log(high / low)))
        return cls(odds)

    @classmethod
    def of_words(cls, positive: Iterable[str], negative: Iterable[str] = ()) -> WordProbe:
        """From two lists of words: +1 and -1."""
        odds = {word.lower(): 1.0 for word in positive} | {word.lower(): -1.0 for word in negative}
        if not odds:
            raise OptionError("a probe needs at least one word.")
        return cls(odds)

    def score(self, text: str) -> float:
        found = words_of(text)
        return sum(self.odds.get(word, 0.0) for word in found) / max(len(found), 1)

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
