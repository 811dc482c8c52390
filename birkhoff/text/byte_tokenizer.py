"""Build byte-level tokenizers as HF `tokenizers` JSON.

`byte_tokenizer_json(vocab_size)` is the tokenizer of synthetic checkpoints: no merges, so every UTF-8 byte is one
token and any sequence of ids decodes. Its layout follows the release: ids 0, 1, 2 are BOS, EOS and pad, then the base
entries, the other added tokens with the release's strings and flags, and reserved placeholders up to `vocab_size`.
Strings and flags are the release's, so chat encoding works on it unchanged.

`tokenizer_json(tokens, merges, ...)` builds the same layout from a trained vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from birkhoff.errors import OptionError
from birkhoff.option_checks import as_int
from birkhoff.text.markers import PLAIN_MARKERS, SPECIAL_MARKERS, placeholder

# The pre-tokenizer of the release (spec 13.1): digits in runs of at most three, CJK runs, then words and punctuation.
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
RELEASE_SPLITS: tuple[str, ...] = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    _PUNCTUATION + "[A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)

MIN_VOCAB_SIZE = len(SPECIAL_MARKERS) + 256 + len(PLAIN_MARKERS)


@cache
def byte_alphabet() -> tuple[str, ...]:
    """Return the printable character for each byte, 0..255, used by byte-level BPE files.

    Printable Latin-1 characters represent themselves; the other 68 bytes use the code points from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(substitutes)) for byte in range(256))


def byte_tokenizer_json(vocab_size: int) -> str:
    """Return a `tokenizer.json` with exactly `vocab_size` ids: one per byte, markers and placeholders."""
    if as_int(vocab_size) is None or vocab_size < MIN_VOCAB_SIZE:
        raise OptionError(
            f"vocab_size is {vocab_size!r}, expected a whole number of at least {MIN_VOCAB_SIZE}: 256 bytes and "
            f"{MIN_VOCAB_SIZE - 256} markers. Choose a larger vocabulary, such as 512."
        )
    return tokenizer_json(byte_alphabet(), (), vocab_size=vocab_size)


def tokenizer_json(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    *,
    vocab_size: int | None = None,
    splits: Sequence[str] = (),
) -> str:
    """Build a tokenizer from base `tokens` (byte-alphabet spelling, ids from 3 on) and BPE `merges`.

    `splits` are pre-tokenizer patterns applied in order (`RELEASE_SPLITS` for V4's); without any, BPE runs on whole
    texts.
    """
    vocabulary = {token: token_id for token_id, token in enumerate((*SPECIAL_MARKERS, *tokens))}
    used = len(vocabulary) + len(PLAIN_MARKERS)
    missing = [character for character in byte_alphabet() if character not in vocabulary]
    repeated = len(vocabulary) != len(SPECIAL_MARKERS) + len(tokens) or not vocabulary.keys().isdisjoint(
        PLAIN_MARKERS
    )
    if missing or repeated:
        raise OptionError(
            f"{len(tokens)} base tokens with {len(missing)} of the 256 byte entries missing, or a token that occurs "
            "twice or spells a marker; expected all 256 and every token once. Train again with the whole byte alphabet."
        )
    if vocab_size is not None and vocab_size < used:
        raise OptionError(
            f"vocab_size is {vocab_size}, but tokens and markers need {used} ids. Choose at least that."
        )
    added = [_added(token_id, marker, special=True) for token_id, marker in enumerate(SPECIAL_MARKERS)]
    added += [_added(len(vocabulary) + i, marker, special=False) for i, marker in enumerate(PLAIN_MARKERS)]
    added += [_added(used + i, placeholder(i), special=True) for i in range((vocab_size or used) - used)]
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_split, splits), _byte_level()]},
            "post_processor": None,
            "decoder": _byte_level(),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": [list(pair) for pair in merges],
            },
        }
    )  # ASCII: readers take other text of a quarter of the length only


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {"id": token_id, "content": content, **flags, "normalized": not special, "special": special}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
