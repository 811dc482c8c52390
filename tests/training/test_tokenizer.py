"""The tokenizer covers every byte, keeps V4's markers whole, and is deterministic."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import OptionError
from birkhoff.text.markers import BOS, EOS, PAD, PLAIN_MARKERS, SPECIAL_MARKERS
from tests.training.tiny import write_corpus
from training.corpus import read_corpus
from training.tokenizer import (
    bytes_per_token,
    load_tokenizer,
    main,
    save_tokenizer,
    train_tokenizer,
    training_texts,
)

VOCAB = 400


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    texts = list(training_texts(read_corpus(folder)))
    return folder, texts, train_tokenizer(texts, VOCAB)


def test_size_counts_markers_and_the_first_three_ids_are_the_release_ones(made):
    tokenizer = made[2]
    assert tokenizer.get_vocab_size() == VOCAB
    assert [tokenizer.token_to_id(marker) for marker in (BOS, EOS, PAD)] == [0, 1, 2]
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB))


@pytest.mark.parametrize("marker", [*SPECIAL_MARKERS, *PLAIN_MARKERS])
def test_a_marker_is_one_id_even_inside_text(made, marker):
    tokenizer = made[2]
    expected = tokenizer.token_to_id(marker)
    assert tokenizer.encode(marker, add_special_tokens=False).ids == [expected]
    assert tokenizer.encode(f"a cat{marker}a dog", add_special_tokens=False).ids.count(expected) == 1


def test_only_the_three_special_markers_vanish_when_decoding(made):
    tokenizer = made[2]
    for marker in (*SPECIAL_MARKERS, *PLAIN_MARKERS):
        shown = tokenizer.decode([tokenizer.token_to_id(marker)], skip_special_tokens=True)
        assert shown == ("" if marker in SPECIAL_MARKERS else marker)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(made, text):
    tokenizer = made[2]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if not any(marker in text for marker in (*SPECIAL_MARKERS, *PLAIN_MARKERS)):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_byte_has_an_id(made):
    tokenizer = made[2]
    every = bytes(range(256)).decode(
        "latin-1"
    )  # as text: two bytes for the upper half, all covered by pieces
    assert (
        tokenizer.decode(tokenizer.encode(every, add_special_tokens=False).ids, skip_special_tokens=False)
        == every
    )


def test_nothing_is_added_to_plain_text(made):
    tokenizer = made[2]
    ids = tokenizer.encode("Once upon a time").ids
    assert not {0, 1, 2} & set(ids)


def test_numbers_split_by_three_digits(made):
    pieces = [piece for piece, _ in made[2].pre_tokenizer.pre_tokenize_str("12345 cats")]
    assert pieces == ["123", "45", "Ġcats"]


def test_training_is_repeatable_and_survives_the_disk(made, tmp_path):
    _, texts, tokenizer = made
    assert train_tokenizer(texts, VOCAB).to_str() == tokenizer.to_str()
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.to_str() == tokenizer.to_str()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["bos_token"]["content"] == BOS and config["eos_token"]["content"] == EOS
    assert bytes_per_token(again, texts) > 2


def test_a_vocabulary_too_small_or_too_large_is_refused(made):
    with pytest.raises(OptionError, match="at least"):
        train_tokenizer(made[1], 200)
    with pytest.raises(OptionError, match="too few"):
        train_tokenizer(["a b c"], 4096)
    with pytest.raises(OptionError, match=r"training\.tokenizer"):
        load_tokenizer("/nowhere")


def test_the_command_reports_compression(made, tmp_path, capsys):
    main(["--data", str(made[0]), "--out", str(tmp_path), "--vocab-size", str(VOCAB)])
    result = json.loads(capsys.readouterr().out)
    assert result["bytes_per_token"]["both"] > 2 and len(result["sha256"]) == 64
