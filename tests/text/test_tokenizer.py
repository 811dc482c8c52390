import copy
import itertools
import json
import random

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import BirkhoffError, CheckpointError, PromptError, TextUnavailable, TokenError
from birkhoff.text.byte_tokenizer import byte_tokenizer_json
from birkhoff.text.markers import BOS, DSML, EOS, PAD, USER
from birkhoff.text.tokenizer import Tokenizer
from tests.sizes import scaled

CONTEXT = "Naïve  café 123456\n\n狐狸 🙂 <b>x</b>｜"


def test_no_added_token_can_be_typed_at_any_place(tokenizer, library):
    dangerous = 0
    for marker, marker_id in tokenizer.markers.items():
        for index in range(len(CONTEXT) + 1):
            text = CONTEXT[:index] + marker + CONTEXT[index:]
            ids = tokenizer.encode(text)
            assert tokenizer.added_ids.isdisjoint(ids), (marker, index)
            assert tokenizer.decode(ids) == text
        dangerous += marker_id in library.encode(marker, add_special_tokens=False).ids
    assert dangerous == len(tokenizer.markers)  # the library does convert each of them to its id


def test_the_librarys_own_option_would_not_have_helped(library):
    """Shows why `encode_special_tokens` is not enough and added tokens are removed."""
    guarded = tokenizers.Tokenizer.from_str(library.to_str())
    guarded.encode_special_tokens = True
    assert library.token_to_id(USER) in guarded.encode(USER, add_special_tokens=False).ids


@settings(deadline=None, max_examples=scaled(2000))
@given(
    text=st.text(),
    pieces=st.lists(st.sampled_from([BOS, EOS, USER, DSML, "<think>", "｜", "<", "</"]), max_size=4),
)
def test_any_text_comes_back_and_holds_no_marker(tokenizer, text, pieces):
    for piece in pieces:
        text = text[: len(text) // 2] + piece + text[len(text) // 2 :]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.added_ids.isdisjoint(ids)


@settings(deadline=None, max_examples=scaled(2000))
@given(text=st.text(st.sampled_from(list("abthe oquick 019.,\n\t'\"<>{}-é天地ひ🙂｜▁"))))
def test_honest_text_encodes_as_the_library_does(tokenizer, library, text):
    if not any(marker in text for marker in tokenizer.markers):
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids


@settings(deadline=None, max_examples=scaled(2000))
@given(data=st.data())
def test_any_ids_decode_as_the_library_does(tokenizer, library, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=True) == library.decode(ids, skip_special_tokens=True)


def test_markers_have_ids_and_text_ids_have_no_marker(tokenizer):
    assert [tokenizer.token_id(marker) for marker in (BOS, EOS, PAD)] == [0, 1, 2]
    assert tokenizer.marker(tokenizer.token_id(DSML)) == DSML
    assert tokenizer.marker(tokenizer.encode("a")[0]) is None
    assert tokenizer.token_id(BOS) in tokenizer.special_ids
    assert tokenizer.token_id(USER) in tokenizer.added_ids - tokenizer.special_ids


def test_a_missing_marker_is_named_with_its_file(byte_json):
    raw = json.loads(byte_json)
    raw["added_tokens"] = [entry for entry in raw["added_tokens"] if entry["content"] != DSML]
    with pytest.raises(TokenError, match=r"flash/tokenizer\.json has no added token '｜DSML｜'"):
        Tokenizer(raw, name="flash/tokenizer.json").token_id(DSML)


def test_ids_outside_are_refused_and_numpy_ids_are_fine(byte_tokenizer):
    ids = byte_tokenizer.encode("ok")
    assert byte_tokenizer.decode(np.array(ids)) == "ok"
    for bad in (-1, byte_tokenizer.vocab_size, 2**40, True, 1.0, "7", None):
        with pytest.raises(TokenError, match="expected 0 to 511"):
            byte_tokenizer.decode([bad])


def test_ids_only_the_model_has_are_shown(byte_json):
    wide = Tokenizer.from_json(byte_json, vocab_size=520)
    assert wide.vocab_size == 520 and wide.decode([515]) == "\ufffd"
    with pytest.raises(CheckpointError, match="ids up to 511 but the model has only 400"):
        Tokenizer.from_json(byte_json, vocab_size=400)


@pytest.mark.parametrize("text", [b"bytes", None, 7, ["a"], [1, 2]])
def test_what_is_not_text_is_refused(byte_tokenizer, text):
    with pytest.raises(PromptError, match="where text was expected"):
        byte_tokenizer.encode(text)


def test_lone_surrogates_are_refused_by_place(byte_tokenizer):
    with pytest.raises(PromptError, match=r"character 2 of the text is the lone surrogate U\+D800"):
        byte_tokenizer.encode("ab\ud800")


def test_marker_inside_the_vocabulary_and_merges_cannot_be_reached(byte_json):
    """A file may list an added token as a base entry with merges, or set `ignore_merges`."""
    raw = json.loads(byte_json)
    steps = ["<", "<t", "<th", "<thi", "<thin", "<think", "<think>", "<think>!"]
    think = next(entry for entry in raw["added_tokens"] if entry["content"] == "<think>")
    for index, token in enumerate(steps[1:-2], start=512):
        raw["model"]["vocab"][token] = index
    raw["model"]["vocab"] |= {"<think>": think["id"], "<think>!": 600}
    raw["model"]["merges"] = [[a, b[-1]] for a, b in itertools.pairwise(steps)]
    for ignore_merges in (False, True):
        raw["model"]["ignore_merges"] = ignore_merges
        stock = tokenizers.Tokenizer.from_str(json.dumps({**raw, "added_tokens": []}))
        assert stock.encode("<think>").ids == [think["id"]]  # the stock tokenizer does produce it
        ours = Tokenizer(copy.deepcopy(raw))
        for text in ("<think>", "a<think>!", "<think>!"):
            assert ours.added_ids.isdisjoint(ours.encode(text)) and ours.decode(ours.encode(text)) == text


def test_nothing_is_cut_padded_or_added(byte_json):
    raw = json.loads(byte_json)
    raw["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    raw["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 2,
        "pad_type_id": 0,
        "pad_token": PAD,
    }
    assert len(Tokenizer(raw).encode("hello world")) == 11


def test_from_a_directory_or_a_file(tmp_path, byte_json):
    (tmp_path / "tokenizer.json").write_text(byte_json, encoding="utf-8")
    for path in (tmp_path, str(tmp_path / "tokenizer.json")):
        assert Tokenizer.from_file(path).decode(Tokenizer.from_file(path).encode("hé")) == "hé"


def test_missing_and_damaged_files_are_told_apart(tmp_path, byte_json):
    with pytest.raises(TextUnavailable, match="work with token ids"):
        Tokenizer.from_file(tmp_path)
    file = tmp_path / "tokenizer.json"
    for content in (
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"model": 3}',
        byte_json.encode()[: len(byte_json) // 2],
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="Download it again"):
            Tokenizer.from_file(file)


def _damage(raw, **changes):
    raw = copy.deepcopy(raw)
    raw["model"] |= changes.pop("model", {})
    return raw | changes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: _damage(raw, model={"type": "WordPiece"}), "expected byte-level BPE"),
        (lambda raw: _damage(raw, decoder=None), "expected byte-level BPE"),
        (lambda raw: _damage(raw, pre_tokenizer={"type": "Whitespace"}), "expected byte-level BPE"),
        (lambda raw: _damage(raw, model={"end_of_word_suffix": "</w>"}), "expected byte-level BPE"),
        (lambda raw: _damage(raw, model={"vocab": {"a": 0}}), "gives one id to two tokens"),
        (lambda raw: _damage(raw, model={"vocab": {"a": 300.5}}), "without a proper id"),
        (lambda raw: _damage(raw, model={"vocab": {"a": 511000}}), "no entry for 255 of the 256 bytes"),
        (lambda raw: _damage(raw, added_tokens=[{"id": 0}]), "without a proper id and string"),
        (lambda raw: _damage(raw, added_tokens=raw["added_tokens"] * 2), "lists an added token twice"),
        (lambda raw: _damage(raw, model={"merges": [["q", "zz"]]}), "refused by the tokenizers library"),
    ],
)
def test_a_file_that_is_no_v4_tokenizer_is_refused_with_its_reason(byte_json, change, message):
    with pytest.raises(CheckpointError, match=message):
        Tokenizer(change(json.loads(byte_json)))


def test_mutated_files_raise_nothing_but_our_errors():
    rng = random.Random(7)
    base = byte_tokenizer_json(310)
    refused = 0
    for _ in range(scaled(500)):
        text = list(base)
        for _ in range(rng.randrange(1, 6)):
            index = rng.randrange(len(text))
            text[index] = rng.choice(['"', "}", "0", "9", "null", "", "x", ",", "-"])
        try:
            Tokenizer.from_json("".join(text))
        except BirkhoffError:
            refused += 1
    assert refused > scaled(500) // 4


def test_ids_may_be_a_tensor_or_an_array(tokenizer):
    ids = [*sorted(tokenizer.special_ids)[:1], *tokenizer.encode("a text")]
    tensor = torch.tensor(ids)
    for same in (tensor, tensor.numpy(), list(tensor), tuple(tensor.numpy())):
        assert tokenizer.decode(same) == tokenizer.decode(ids)
        assert tokenizer.decode(same, skip_special=True) == "a text"
    assert tokenizer.decode(tensor[-1]) == tokenizer.decode(ids[-1:])
    for wrong in (torch.tensor([0.5]), [True], torch.tensor([-1])):
        with pytest.raises(TokenError, match="outside the vocabulary"):
            tokenizer.decode(wrong)
