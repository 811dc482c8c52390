"""A prompt as segments: markers placed by the encoder, and text from callers.

A `Marker` becomes its token id by exact string; a `TextSegment` is encoded as plain text, whatever it spells. Caller
text is never searched for markers, so it cannot inject one; only the fixed prompt texts are, by `split_markers`.

Adjacent texts are joined before encoding, so that ids equal those of the released pipeline (one string, split at
markers, each run tokenised whole) for every conversation whose texts spell no marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from birkhoff.text.markers import CHAT_MARKERS

if TYPE_CHECKING:
    from birkhoff.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marker:
    """One added token, by its string."""

    string: str


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Plain text, even if it spells a marker."""

    string: str


Segment = Marker | TextSegment


def join_texts(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join adjacent texts and drop empty ones."""
    pending: list[str] = []
    for segment in segments:
        if isinstance(segment, TextSegment):
            pending.append(segment.string)
            continue
        if text := "".join(pending):
            yield TextSegment(text)
        pending.clear()
        yield segment
    if text := "".join(pending):
        yield TextSegment(text)


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Return token ids: markers by exact string, text as plain text."""
    ids: list[int] = []
    for segment in join_texts(segments):
        if isinstance(segment, Marker):
            ids.append(tokenizer.token_id(segment.string))
        else:
            ids.extend(tokenizer.encode(segment.string))
    return ids


@cache
def _marker_pattern() -> re.Pattern[str]:
    longest_first = sorted(CHAT_MARKERS, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


def split_markers(text: str) -> list[Segment]:
    """Split a trusted text (a prompt text, a recorded completion) at the chat markers it spells."""
    pieces = _marker_pattern().split(text)  # odd indices are markers
    return [Marker(piece) if i % 2 else TextSegment(piece) for i, piece in enumerate(pieces) if piece]
