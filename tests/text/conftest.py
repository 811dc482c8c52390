"""Two tokenizers with V4's added tokens (bytes only, and a small trained BPE), and the official texts if available."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from birkhoff.text.byte_tokenizer import RELEASE_SPLITS, byte_alphabet, byte_tokenizer_json, tokenizer_json
from birkhoff.text.prompt_texts import PromptTexts
from birkhoff.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then it thinks about the weather in Beijing.",
    "A tool call has a name and parameters; the answer is written between the tags.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. Ça va? Déjà vu.",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。 ひらがなとカタカナ。",
    'def parse(text: str) -> dict:\n    """Read."""\n    return {"name": "invoke", "value": [1, 2, 345, null]}\n',
    '<tool_result>{"ok": true}</tool_result>\n\nparameter name="x" string="true">',
] * 8


def trained_json() -> str:
    """A BPE of about 700 entries with the release's pre-tokenizer and layout."""
    trainee = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in RELEASE_SPLITS]
    trainee.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainee.decoder = decoders.ByteLevel()
    alphabet = sorted(byte_alphabet())
    trainee.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet))
    model = json.loads(trainee.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokenizer_json(tokens, [tuple(pair) for pair in model["merges"]], splits=RELEASE_SPLITS)


@pytest.fixture(scope="session")
def byte_json() -> str:
    return byte_tokenizer_json(512)


@pytest.fixture(scope="session")
def bpe_json() -> str:
    return trained_json()


@pytest.fixture(scope="session", params=["byte", "bpe"])
def source(request: pytest.FixtureRequest) -> str:
    """The text of a tokenizer.json, parametrised over both kinds."""
    return request.getfixturevalue(f"{request.param}_json")


@pytest.fixture(scope="session")
def tokenizer(source: str) -> Tokenizer:
    return Tokenizer.from_json(source)


@pytest.fixture(scope="session")
def byte_tokenizer(byte_json: str) -> Tokenizer:
    return Tokenizer.from_json(byte_json)


@pytest.fixture(scope="session")
def library(source: str) -> tokenizers.Tokenizer:
    """The same file loaded by the tokenizers library, with added tokens."""
    return tokenizers.Tokenizer.from_str(source)


@pytest.fixture(scope="session")
def official() -> Path:
    """The directory of official chat fixtures."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures"
    folder = Path(os.environ.get("BIRKHOFF_FIXTURES", default)) / "chat"
    if not folder.is_dir():
        pytest.skip(
            "the official chat fixtures are not here; set BIRKHOFF_FIXTURES to the folder that holds chat/"
        )
    return folder


@pytest.fixture(scope="session")
def official_texts(official: Path) -> dict[str, str]:
    return json.loads((official / "literals.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def official_literals(official_texts: dict[str, str]) -> PromptTexts:
    return PromptTexts(
        tools_head=official_texts["tools_head"],
        tools_tail=official_texts["tools_tail"],
        response_format_head=official_texts["response_format_head"],
        effort={"max": official_texts["effort_v4_max"]},
        source="encoding_dsv4.py",
    )
