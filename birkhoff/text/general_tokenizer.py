"""Any `tokenizer.json` of an ordinary model, with the interface of `Tokenizer`.

Text never becomes a special token; other added tokens (runs of blank lines, tags) are text as in the model's own
tokenizer. Byte-level tokens stand for bytes; in tokenizers derived from SentencePiece `▁` is a space and `<0x0A>` a
byte. So an id has fixed bytes here too, and decoding one id at a time is exact after the first token of a text, where
some tokenizers drop a leading space."""

from __future__ import annotations

import json
import re

import tokenizers

from birkhoff.errors import CheckpointError, quoted
from birkhoff.text.byte_tokenizer import byte_alphabet
from birkhoff.text.tokenizer import UNKNOWN_PIECE, Tokenizer, _has_byte_level

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class GeneralTokenizer(Tokenizer):
    def __init__(self, text: str, *, name: str = "tokenizer.json", vocab_size: int | None = None) -> None:
        """`text` is the content of the file; ids that the model lacks are left out."""
        self.name = name
        try:
            raw = json.loads(text)
            encoder = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{name} cannot be read: {quoted(str(error), 200)}. Download it again."
            ) from None
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = True
        self._plain = encoder
        special = {
            entry["content"]: entry["id"] for entry in raw.get("added_tokens", ()) if entry.get("special")
        }
        self._added = special
        self.added_ids = self.special_ids = frozenset(special.values())
        self._marker_of = {token_id: string for string, token_id in special.items()}
        byte_level = _has_byte_level(raw.get("decoder")) or _has_byte_level(raw.get("pre_tokenizer"))
        added = {entry["content"] for entry in raw.get("added_tokens", ())}
        self._pieces = _pieces(encoder.get_vocab(), added, byte_level, vocab_size)
        self._longest_piece = max(map(len, self._pieces))
        self._joins_unknown = not byte_level and not raw.get("model", {}).get("byte_fallback")

    def least_tokens(self, characters: int) -> int:
        """The fewest tokens of a text. One token may stand for any number of unknown characters in some files."""
        return 1 if self._joins_unknown else super().least_tokens(characters)


def _pieces(vocab: dict[str, int], added: set[str], byte_level: bool, vocab_size: int | None) -> list[bytes]:
    size = 1 + max(vocab.values(), default=0) if vocab_size is None else vocab_size
    byte_of = {ord(character): byte for byte, character in enumerate(byte_alphabet())}
    pieces = [UNKNOWN_PIECE] * size
    for token, token_id in vocab.items():
        if token_id >= size:
            continue
        if token in added:
            piece = token.replace("▁", " ").encode() if not byte_level else token.encode()
        elif byte_level and all(ord(character) in byte_of for character in token):
            piece = bytes(byte_of[ord(character)] for character in token)
        elif match := _BYTE.fullmatch(token):
            piece = bytes([int(match[1], 16)])
        else:
            piece = token.replace("▁", " ").encode(errors="replace")
        pieces[token_id] = piece
    return pieces
