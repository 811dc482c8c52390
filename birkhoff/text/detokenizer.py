"""Convert token ids to text one at a time, at constant cost per token.

`IncrementalDetokenizer` output joins to exactly the decoding of the whole sequence: a character is held back until its
last byte arrives, and invalid UTF-8 becomes U+FFFD in the same positions. Byte-level tokenizers make this possible
without looking at earlier ids.

`SegmentDetokenizer` also separates markers from text by id, as the completion parser needs: text that spells a marker
is a `TextSegment`.
"""

from __future__ import annotations

import codecs

from birkhoff.text.segments import Marker, Segment, TextSegment
from birkhoff.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Converts ids to text; `finish` returns what was held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _utf8(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the characters completed by this id, possibly none."""
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.piece(token_id))

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, if any, and reset."""
        return self._decoder.decode(b"", final=True)


class SegmentDetokenizer:
    """Converts ids to markers and text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDetokenizer(tokenizer)

    def feed(self, token_id: int) -> list[Segment]:
        """Return the segments completed by this id."""
        marker = self._tokenizer.marker(token_id)
        if marker is None:
            text = self._decoder.feed(token_id)
            return [TextSegment(text)] if text else []
        return [*self.finish(), Marker(marker)]  # a marker ends an incomplete character

    def finish(self) -> list[Segment]:
        """Return the text held back, if any, and reset."""
        text = self._decoder.finish()
        return [TextSegment(text)] if text else []
