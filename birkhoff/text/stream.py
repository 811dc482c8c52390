"""Token ids one at a time to text pieces, at constant cost per token.

`IncrementalDecoder` joins to exactly what decoding the whole gives: a character is held back until its last byte is
there, and bytes that are not UTF-8 come out as U+FFFD in the same places. It never looks back at earlier ids, which
byte-level tokenizers make possible.

`SegmentDecoder` does the same but tells markers from text by id, which is what the completion parser needs: text that
merely spells a marker comes out as `TextSegment`.
"""

from __future__ import annotations

import codecs

from birkhoff.text.segments import Marker, Segment, TextSegment
from birkhoff.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Feed ids, get text; `finish` gives what was held back."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _utf8(errors="replace")

    def feed(self, token_id: int) -> str:
        """The characters completed by this id; often one word, sometimes none."""
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.piece(token_id))

    def finish(self) -> str:
        """What an unfinished character comes to; the decoder is fresh afterwards."""
        return self._decoder.decode(b"", final=True)


class SegmentDecoder:
    """Feed ids, get markers and text pieces."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)

    def feed(self, token_id: int) -> list[Segment]:
        marker = self._tokenizer.marker(token_id)
        if marker is None:
            text = self._decoder.feed(token_id)
            return [TextSegment(text)] if text else []
        return [*self.finish(), Marker(marker)]  # a character cannot go on behind a marker

    def finish(self) -> list[Segment]:
        text = self._decoder.finish()
        return [TextSegment(text)] if text else []
