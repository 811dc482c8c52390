"""A prompt as segments: markers we place, and text that others wrote.

The one rule that keeps a conversation safe is kept here: a `Marker` becomes its token id by its exact string, and a
`TextSegment` is encoded as plain text, whatever it spells. Nobody's text can turn into a marker, because no text is ever
searched for markers on its way to ids; only *our own* fixed texts are, by `split_markers`, on their way to segments.

Neighbouring texts are joined before they are encoded, so that ids equal those of the released pipeline (one string,
cut at markers, each run tokenised whole) for every conversation whose texts spell no marker.
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
    """Plain text; may spell a marker and is still text."""

    string: str


Segment = Marker | TextSegment


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The same prompt with neighbouring texts made one and empty texts gone."""
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


def render_text(segments: Iterable[Segment]) -> str:
    """The prompt as one string. For people and fixtures: the difference between markers and text is lost."""
    return "".join(segment.string for segment in segments)


def encode_segments(segments: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids: markers by their exact string, text as plain text only."""
    ids: list[int] = []
    for segment in joined(segments):
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
    """Cut a text of *ours* (a prompt literal, a recorded completion) at the chat markers it spells."""
    pieces = _marker_pattern().split(text)  # odd places hold the markers
    return [Marker(piece) if i % 2 else TextSegment(piece) for i, piece in enumerate(pieces) if piece]
