"""Train nano's tokenizer: byte-level BPE with V4's pre-tokeniser and markers, 4,096 ids in total.

Ids 0, 1, 2 are BOS, EOS and pad as in the release, followed by the 256 bytes and the merges; the other markers take
the last ids in the release's order, with its flags (not "special", so that decoding keeps them). Every byte has an id,
so any text can be encoded and round-trips. Training is deterministic. Hash-routed layers depend on token ids, so the
file is fixed before the model is trained and ships with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from birkhoff.errors import OptionError
from birkhoff.text.markers import BOS, EOS, PAD, PLAIN_MARKERS, SPECIAL_MARKERS
from training.corpus import Corpus, read_corpus

VOCAB_SIZE = 4096
CONTEXT = 4096

# The three splits of V4's file, in its order: runs of up to three digits, CJK runs, then words and punctuation.
SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"""\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["""
    "\r\n"
    r"""]*|\s*["""
    "\r\n"
    r"""]+|\s+(?!\S)|\s+""",
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return a tokenizer with exactly `vocab_size` ids, including markers."""
    smallest = len(SPECIAL_MARKERS) + 256 + len(PLAIN_MARKERS)
    if vocab_size < smallest:
        raise OptionError(
            f"vocab_size is {vocab_size}, expected at least {smallest}: all bytes and all markers."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([])
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(PLAIN_MARKERS),
        special_tokens=list(SPECIAL_MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(marker, normalized=True, special=False) for marker in PLAIN_MARKERS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise OptionError(
            f"the text gave {tokenizer.get_vocab_size()} ids, expected {vocab_size}: it holds too few "
            "different pairs to merge. Train on more text or ask for a smaller vocabulary."
        )
    return tokenizer


def tokenizer_config() -> dict:
    """Return `tokenizer_config.json` as the release spells it, with this model's context length."""

    def token(content: str) -> dict:
        flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
        return {"__type": "AddedToken", "content": content, **flags}

    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": token(BOS),
        "clean_up_tokenization_spaces": False,
        "eos_token": token(EOS),
        "legacy": True,
        "model_max_length": CONTEXT,
        "pad_token": token(PAD),
        "unk_token": None,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    text = json.dumps(tokenizer_config(), indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise OptionError(
            f"{path} is missing. Make it with: python -m training.tokenizer --data DIR --out {folder}"
        )
    return Tokenizer.from_file(str(path))


def training_texts(corpus: Corpus) -> Iterable[str]:
    """Return core text, requests and small talk; `general` would spend merges on rarely needed words."""
    for record in (*corpus.core, *corpus.smalltalk):
        yield record.prompt
        yield record.text


def bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    return sum(len(text.encode()) for text in texts) / max(tokens, 1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="folder of the corpus")
    parser.add_argument("--out", required=True, help="folder for tokenizer.json and tokenizer_config.json")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    options = parser.parse_args(arguments)
    corpus = read_corpus(options.data)
    tokenizer = train_tokenizer(training_texts(corpus), options.vocab_size)
    save_tokenizer(tokenizer, options.out)
    digest = hashlib.sha256((Path(options.out) / "tokenizer.json").read_bytes()).hexdigest()
    report = {
        part: bytes_per_token(tokenizer, [r.text for r in records])
        for part, records in corpus.held_out.items()
    }
    report["both"] = bytes_per_token(
        tokenizer, [r.text for records in corpus.held_out.values() for r in records]
    )
    print(json.dumps({"sha256": digest, "bytes_per_token": {k: round(v, 4) for k, v in report.items()}}))


if __name__ == "__main__":
    main()
