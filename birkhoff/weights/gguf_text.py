"""Convert the tokenizer inside a GGUF file to `tokenizer.json` text, and back to metadata.

Files written by Birkhoff carry the original text (`tokenizer.huggingface.json`) next to the lists that other readers
use, so nothing is lost. For other files it is rebuilt from tokens, types and merges. The pre-tokenizer is stored by
name only, so it is rebuilt only for names whose rules are known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from birkhoff.errors import CheckpointError
from birkhoff.json_limits import parse_json
from birkhoff.small_file import TOKENIZER_BYTES
from birkhoff.weights.gguf_keys import STRING, U32, MetadataEntry

TOKENIZER_JSON = "tokenizer.huggingface.json"
PRE = "joyai-llm"
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
_STRINGS, _I32S = (9, 8), (9, 5)
# V4's pre-tokenizer (spec 13.1): digits by threes, runs of CJK, then words, punctuation and white space.
SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def tokenizer_json(keys: Mapping[str, Any], label: str, notices: list[str]) -> str | None:
    """Return the file's tokenizer, or None after adding a notice with the reason."""
    text = keys.get(TOKENIZER_JSON)
    if isinstance(text, str) and text:
        return text
    tokens = keys.get("tokenizer.ggml.tokens")
    merges = keys.get("tokenizer.ggml.merges")
    if keys.get("tokenizer.ggml.model") in (None, "no_vocab") or not tokens:
        notices.append(f"{label} has no tokenizer; it works with token ids.")
        return None
    pre = keys.get("tokenizer.ggml.pre")
    if keys["tokenizer.ggml.model"] != "gpt2" or pre not in (PRE, "deepseek-v3"):
        notices.append(
            f"{label} has the pre-tokenizer {pre!r}, whose rules are not in the file; it works with token ids."
        )
        return None
    types = keys.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens) or not isinstance(merges, list):
        raise CheckpointError(
            f"{label}: tokens, token types and merges do not belong together. Download it again."
        )
    return _rebuild(tokens, types, merges)


def _rebuild(tokens: list[str], types: list[int], merges: list[str]) -> str:
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for i, (token, kind) in enumerate(zip(tokens, types))
        if kind in (CONTROL, USER_DEFINED)
    ]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == NORMAL}
    splits = [
        {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
        for rule in SPLITS
    ]
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _BYTE_LEVEL]},
            "decoder": _BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": vocab, "merges": [merge.split(" ", 1) for merge in merges]},
        },
        ensure_ascii=False,
    )


def tokenizer_metadata(
    text: str | None, vocab_size: int, bos: int | None, eos: int | None, notices: list[str]
) -> list[MetadataEntry]:
    """Return the metadata for other readers, and the whole text for this one."""
    if text is None:
        notices.append("the checkpoint has no tokenizer.json; the file will work with token ids only.")
        return [MetadataEntry("tokenizer.ggml.model", STRING, "no_vocab")]
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [UNUSED] * vocab_size
    try:
        raw = parse_json(text.encode(), TOKENIZER_BYTES)
        model = raw["model"]
        for token, i in model["vocab"].items():
            tokens[i], types[i] = token, NORMAL
        for entry in raw.get("added_tokens", []):
            tokens[entry["id"]] = entry["content"]
            types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
        pre = _pre_name(raw)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"tokenizer.json does not fit a model of {vocab_size} tokens ({error!r}). Take the one of this checkpoint."
        ) from None
    if pre is None:
        notices.append(
            "tokenizer.json splits text by rules that have no name in GGUF; other programs may tokenise differently."
        )
    rows = [
        MetadataEntry("tokenizer.ggml.model", STRING, "gpt2"),
        MetadataEntry("tokenizer.ggml.pre", STRING, pre or "default"),
        MetadataEntry("tokenizer.ggml.tokens", _STRINGS, tokens),
        MetadataEntry("tokenizer.ggml.token_type", _I32S, types),
        MetadataEntry("tokenizer.ggml.merges", _STRINGS, merges),
        MetadataEntry(TOKENIZER_JSON, STRING, text),
    ]
    for which, token in (("bos", bos), ("eos", eos)):
        if token is not None:
            rows.append(MetadataEntry(f"tokenizer.ggml.{which}_token_id", U32, token))
    return [
        *rows,
        MetadataEntry("tokenizer.ggml.add_bos_token", 7, False),
        MetadataEntry("tokenizer.ggml.add_eos_token", 7, False),
    ]


def _pre_name(raw: dict[str, Any]) -> str | None:
    """Return the GGUF name of V4's pre-tokenizer rules, or None for any other rules."""
    parts = (raw.get("pre_tokenizer") or {}).get("pretokenizers") or []
    rules = tuple(
        part["pattern"].get("Regex") for part in parts if part.get("type") == "Split" and "pattern" in part
    )
    return PRE if rules == SPLITS else None
