import json

import pytest
import tokenizers

from birkhoff.errors import OptionError
from birkhoff.text.byte_tokenizer import MIN_VOCAB_SIZE, byte_alphabet, byte_tokenizer_json, tokenizer_json
from birkhoff.text.markers import BOS, DSML, EOS, PAD, PLAIN_MARKERS, USER
from birkhoff.text.tokenizer import Tokenizer


@pytest.mark.parametrize("vocab_size", [MIN_VOCAB_SIZE, MIN_VOCAB_SIZE + 1, 512, 4096])
def test_every_id_is_taken_and_none_beyond(vocab_size):
    read = tokenizers.Tokenizer.from_str(byte_tokenizer_json(vocab_size))
    ids = sorted(read.get_vocab(with_added_tokens=True).values())
    assert ids == list(range(vocab_size))


def test_layout_is_the_release_in_small():
    raw = json.loads(byte_tokenizer_json(512))
    added = {entry["content"]: entry for entry in raw["added_tokens"]}
    assert [added[marker]["id"] for marker in (BOS, EOS, PAD)] == [0, 1, 2]
    assert [raw["model"]["vocab"][stand_in] for stand_in in byte_alphabet()] == list(range(3, 259))
    assert [added[marker]["id"] for marker in PLAIN_MARKERS] == list(range(259, 259 + len(PLAIN_MARKERS)))
    assert raw["model"]["merges"] == []


def test_only_what_the_release_flags_special_is_special():
    flags = {
        entry["content"]: entry["special"] for entry in json.loads(byte_tokenizer_json(512))["added_tokens"]
    }
    assert flags[BOS] and flags[EOS] and flags[PAD]
    assert not flags[USER] and not flags[DSML] and not flags["<think>"] and not flags["</think>"]
    unused = [content for content in flags if "place▁holder" in content]
    assert len(unused) == 512 - MIN_VOCAB_SIZE and all(flags[content] for content in unused)


def test_the_alphabet_is_the_librarys():
    theirs = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert sorted(theirs) == sorted(byte_alphabet()) and len(set(byte_alphabet())) == 256
    assert byte_alphabet()[ord(" ")] == "Ġ" and byte_alphabet()[ord("A")] == "A" and byte_alphabet()[0] == "Ā"


@pytest.mark.parametrize("vocab_size", [0, -1, MIN_VOCAB_SIZE - 1, True, 512.0, "512", None])
def test_a_vocabulary_too_small_is_refused_by_number(vocab_size):
    with pytest.raises(OptionError, match=f"expected a whole number of at least {MIN_VOCAB_SIZE}"):
        byte_tokenizer_json(vocab_size)


def test_the_assembler_refuses_holes_doubles_and_markers():
    alphabet = byte_alphabet()
    for tokens in (alphabet[:-1], (*alphabet, "ab", "ab"), (*alphabet, USER)):
        with pytest.raises(OptionError, match="expected all 256 and every token once"):
            tokenizer_json(tokens, ())
    with pytest.raises(OptionError, match="need 304 ids"):
        tokenizer_json(alphabet, (), vocab_size=300)


def test_a_tokenizer_as_large_as_that_of_v4_can_be_opened():
    opened = Tokenizer.from_json(byte_tokenizer_json(129_280))
    assert opened.vocab_size == 129_280 and opened.decode(opened.encode("fox ß")) == "fox ß"
