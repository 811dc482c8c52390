"""Encode and decode text with a checkpoint's `tokenizer.json`.

`encode` treats its input as plain text: text never becomes an added token. The `tokenizers` library has no option for
this (`encode_special_tokens` covers only tokens flagged special, and V4's role markers are not), so the encoder is
built from the file with added tokens removed from the list, the vocabulary and the merges. Markers get their ids from
`token_id`, by exact string.

`decode` is implemented here: V4's tokenizers are byte-level, so each id has fixed bytes, and text is the UTF-8
decoding of their concatenation with U+FFFD for invalid bytes. This makes decoding one id at a time exact (see
`detokenizer.py`). Text is not modified: no BOS, truncation, padding or whitespace clean-up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from birkhoff.errors import CheckpointError, PromptError, TextUnavailable, TokenError, quoted
from birkhoff.json_limits import parse_json
from birkhoff.option_checks import as_int
from birkhoff.small_file import TOKENIZER_BYTES, read_bytes
from birkhoff.text.byte_tokenizer import byte_alphabet

MAX_VOCAB = 1 << 24
UNKNOWN_PIECE = "\ufffd".encode()  # shown for ids that the model has and the tokenizer lacks


def plain_ids(ids: Iterable[Any]) -> list[Any]:
    """Token ids as Python numbers: those of a tensor or an array, or of a list with such numbers in it."""
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    each = values if isinstance(values, Iterable) else [values]  # a tensor of one number
    return [value.item() if hasattr(value, "item") else value for value in each]


class Tokenizer:
    """One checkpoint's tokenizer. Immutable and safe to share between threads."""

    def __init__(self, raw: Any, *, name: str = "tokenizer.json", vocab_size: int | None = None) -> None:
        """`raw` is the parsed file; `vocab_size` is the model's, if it may exceed the file's."""
        self.name = name
        self._check_shape(raw)
        self._added: dict[str, int] = {entry["content"]: entry["id"] for entry in raw["added_tokens"]}
        self.added_ids: frozenset[int] = frozenset(self._added.values())
        self.special_ids: frozenset[int] = frozenset(t["id"] for t in raw["added_tokens"] if t.get("special"))
        self._plain = self._plain_encoder(raw)
        self._pieces = self._piece_table(raw["model"]["vocab"], vocab_size)
        self._longest_piece = max(map(len, self._pieces))
        self._marker_of = {token_id: string for string, token_id in self._added.items()}

    def __repr__(self) -> str:
        return f"Tokenizer({self.name}, {self.vocab_size} tokens)"

    @classmethod
    def from_file(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Open `tokenizer.json`, or the one in a checkpoint directory."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            raw = read_bytes(file, TOKENIZER_BYTES)
        except FileNotFoundError:
            raise TextUnavailable(
                f"{file} is missing, so text cannot be encoded. Put the checkpoint's tokenizer.json "
                "there, or work with token ids."
            ) from None
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read ({error.strerror}). Download it again.") from None
        return cls.from_json(raw, name=f"{file.absolute().parent.name}/{file.name}", vocab_size=vocab_size)

    @classmethod
    def from_json(
        cls, text: str | bytes, *, name: str = "tokenizer.json", vocab_size: int | None = None
    ) -> Tokenizer:
        """Parse the text of a `tokenizer.json`."""
        try:
            raw = parse_json(text if isinstance(text, bytes) else text.encode(), TOKENIZER_BYTES)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{name} is not JSON ({error}). Download it again.") from None
        return cls(raw, name=name, vocab_size=vocab_size)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, or the model's size if that was given."""
        return len(self._pieces)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain text. Markers spelled in it stay text."""
        check_text(text)
        return self._plain.encode(text, add_special_tokens=False).ids

    def least_tokens(self, characters: int) -> int:
        """The fewest tokens that a text of this many characters can have. Known without encoding it."""
        return -(-characters // self._longest_piece)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of `ids` (also a tensor or an array) with markers spelled out; `skip_special` drops special
        ones (BOS, EOS)."""
        hidden = self.special_ids if skip_special else frozenset()
        numbers = plain_ids(ids)
        return b"".join(self.piece(i) for i in numbers if i not in hidden).decode("utf-8", errors="replace")

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one id, possibly part of a character."""
        if as_int(token_id) is None or not 0 <= token_id < len(self._pieces):
            raise TokenError(
                f"token id {quoted(token_id)} is outside the vocabulary, expected 0 to "
                f"{len(self._pieces) - 1}. Were these ids made with another tokenizer?"
            )
        return self._pieces[token_id]

    def token_id(self, marker: str) -> int:
        """Return the id of an added token by its exact string."""
        try:
            return self._added[marker]
        except (KeyError, TypeError):
            raise TokenError(
                f"{self.name} has no added token {quoted(marker)}, which the V4 chat format needs. Use "
                "the tokenizer.json that came with the checkpoint, or plain prompts."
            ) from None

    def marker(self, token_id: int) -> str | None:
        """The string of an added token, or None for an id that is text."""
        return self._marker_of.get(token_id)

    @property
    def markers(self) -> dict[str, int]:
        """Every added token and its id."""
        return dict(self._added)

    def _check_shape(self, raw: Any) -> None:
        """Refuse a tokenizer that is not byte-level BPE: its ids would not stand for fixed bytes."""
        if not isinstance(raw, dict) or not isinstance(raw.get("model"), dict):
            raise CheckpointError(
                f"{self.name} holds no tokenizer, expected an object with 'model' and "
                "'added_tokens'. Download it again."
            )
        model = raw["model"]
        added = raw.setdefault("added_tokens", [])
        byte_level = _has_byte_level(raw.get("pre_tokenizer")) and _has_byte_level(raw.get("decoder"))
        affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
        if model.get("type") != "BPE" or not byte_level or affixes:
            raise CheckpointError(
                f"{self.name} is a {quoted(model.get('type'))} tokenizer, expected byte-level BPE as "
                "every DeepSeek-V4 checkpoint has. Use the checkpoint's own file."
            )
        vocab = model.get("vocab")
        entries = list(vocab.values()) if isinstance(vocab, dict) else [None]
        well_formed = isinstance(added, list) and all(
            isinstance(t, dict) and isinstance(t.get("content"), str) and t["content"] for t in added
        )
        ids = entries + [t.get("id") for t in added] if well_formed else [None]
        if not all(type(i) is int and 0 <= i < 2**21 for i in ids):
            raise CheckpointError(
                f"{self.name} has a vocabulary or added token without a proper id and string. Download it again."
            )
        strings = {t["content"]: t["id"] for t in added}
        if len(strings) != len(added) or len(set(strings.values())) != len(added):
            raise CheckpointError(
                f"{self.name} lists an added token twice, so a marker has no single id. Download it again."
            )
        tokens = {**vocab, **strings}
        disagreeing = [token for token in strings if vocab.get(token, strings[token]) != strings[token]]
        if disagreeing or len(set(tokens.values())) != len(tokens):
            raise CheckpointError(
                f"{self.name} gives one id to two tokens or two ids to one "
                f"({quoted(disagreeing[:1])}). Download it again."
            )

    def _plain_encoder(self, raw: dict[str, Any]) -> tokenizers.Tokenizer:
        model = raw["model"]
        vocab = {token: i for token, i in model["vocab"].items() if token not in self._added}
        missing = [character for character in byte_alphabet() if character not in vocab]
        if missing:  # the library would drop such bytes silently
            raise CheckpointError(
                f"{self.name} has no entry for {len(missing)} of the 256 bytes, so some text could "
                "not be encoded. Download it again."
            )
        merges = [m for m in model.get("merges") or () if self._added.keys().isdisjoint(_merge_tokens(m))]
        plain = {
            **raw,
            "added_tokens": [],
            "truncation": None,
            "padding": None,
            "post_processor": None,
            "model": {**model, "vocab": vocab, "merges": merges, "dropout": None, "unk_token": None},
        }
        try:
            return tokenizers.Tokenizer.from_str(json.dumps(plain))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{self.name} is refused by the tokenizers library: {quoted(str(error), 200)}. Download it again."
            ) from None

    def _piece_table(self, vocab: dict[str, int], vocab_size: int | None) -> list[bytes]:
        size = 1 + max(max(vocab.values()), max(self._added.values(), default=0))
        if size > MAX_VOCAB:
            raise CheckpointError(
                f"{self.name} has ids up to {size - 1}, more than the {MAX_VOCAB} allowed. Download it again."
            )
        if vocab_size is not None:
            if size > vocab_size:
                raise CheckpointError(
                    f"{self.name} has ids up to {size - 1} but the model has only {vocab_size}. "
                    "Tokenizer and model belong to different checkpoints."
                )
            size = vocab_size
        pieces = [UNKNOWN_PIECE] * size
        byte_of = {ord(character): byte for byte, character in enumerate(byte_alphabet())}
        for token, i in vocab.items():
            try:
                pieces[i] = bytes(byte_of[ord(c)] for c in token)
            except KeyError:
                pieces[i] = token.encode("utf-8", errors="replace")
        for string, i in self._added.items():
            pieces[i] = string.encode("utf-8", errors="replace")
        return pieces


def check_text(text: object) -> None:
    """Raise PromptError for a value that is not text or cannot be encoded as UTF-8."""
    if not isinstance(text, str):
        raise PromptError(
            f"a {type(text).__name__} was given where text was expected. Decode bytes to str first; "
            "token ids go in as a list of integers."
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, "
            "which is not Unicode text. Repair the source's decoding (errors='replace')."
        ) from None


def _merge_tokens(merge: Any) -> tuple[str, ...]:
    """Return the two tokens of a merge and their result. Files write a merge as a pair or as two words."""
    pair = merge.split(" ", 1) if isinstance(merge, str) else merge
    if (
        not isinstance(pair, (list, tuple))
        or len(pair) != 2
        or not all(isinstance(part, str) for part in pair)
    ):
        return ()  # malformed; kept, so that the library reports it
    return pair[0], pair[1], pair[0] + pair[1]


def _has_byte_level(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    if part.get("type") == "ByteLevel":
        return True
    inner = part.get("pretokenizers") or part.get("decoders") or []
    return isinstance(inner, list) and any(_has_byte_level(p) for p in inner)
