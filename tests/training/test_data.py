"""Rows hold whole conversations in V4's layout; names and requests change consistently; small talk is frequent."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import OptionError, PromptError
from birkhoff.text.chat import encode_chat
from birkhoff.text.prompt_texts import PromptTexts
from birkhoff.text.tokenizer import Tokenizer as OurTokenizer
from tests.training.tiny import write_corpus
from training.corpus import Record, read_corpus, read_records
from training.data import (
    ANSWER,
    IGNORED,
    REQUEST,
    Conversation,
    Markers,
    dress,
    encode_conversations,
    held_out_rows,
    make_unit,
    pack,
    seeded,
)
from training.feed import Feed
from training.names import BOYS, GIRLS, find_names, fresh_names, rename
from training.requests import fresh_request, split_after_sentences, split_late
from training.smalltalk import facts, near_miss
from training.tokenizer import save_tokenizer, train_tokenizer, training_texts

LENGTH = 128


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = write_corpus(tmp_path_factory.mktemp("corpus"))
    corpus = read_corpus(folder)
    tokenizer = train_tokenizer(training_texts(corpus), 400)
    save_tokenizer(tokenizer, folder / "tokenizer")
    return folder, corpus, tokenizer


def conversations_in(ids: np.ndarray, markers: Markers) -> list[list[int]]:
    """Split a row at its BOS tokens and drop padding."""
    out: list[list[int]] = []
    for token in ids.tolist():
        if token == markers.pad:
            break
        if token == markers.bos:
            out.append([])
        out[-1].append(token)
    return out


@pytest.mark.parametrize("part", ["mixed", "core"])
def test_rows_hold_only_whole_conversations(made, part):
    _, corpus, tokenizer = made
    markers = Markers.of(tokenizer)
    unit = make_unit(corpus, tokenizer, LENGTH, part, 0, 0, 0, 3)
    assert unit.ids.shape == unit.roles.shape and unit.ids.shape[1] == LENGTH and len(unit.ids) > 5
    for ids, roles in zip(unit.ids, unit.roles):
        assert ids[0] == markers.bos
        padded = ids == markers.pad
        assert not padded.any() or padded[np.argmax(padded) :].all()  # padding only at the end
        assert (roles[padded] == IGNORED).all() and (roles[ids == markers.bos] == IGNORED).all()
        for talk in conversations_in(ids, markers):
            assert talk[-1] == markers.eos
            marks = (markers.user, markers.assistant, markers.end_think, markers.eos)
            assert len({talk.count(mark) for mark in marks}) == 1 and talk.count(markers.user) >= 1
            text = tokenizer.decode(talk, skip_special_tokens=False)
            assert re.fullmatch(
                r"<｜begin▁of▁sentence｜>[^<]*(<｜User｜>[^<]+<｜Assistant｜></think>[^<]+<｜end▁of▁sentence｜>)+",
                text,
            )


def test_answers_and_only_answers_weigh_fully(made):
    _, _, tokenizer = made
    markers = Markers.of(tokenizer)
    talk = Conversation((Record("a", "Hello!", "Hi there."), Record("a", "Bye!", "Goodbye.")), "Be kind.")
    ids, roles = encode_conversations(tokenizer, markers, [talk])[0]
    answer = tokenizer.decode(ids[roles == ANSWER].tolist(), skip_special_tokens=False)
    assert answer == "Hi there.<｜end▁of▁sentence｜>Goodbye.<｜end▁of▁sentence｜>"
    request = tokenizer.decode(ids[roles == REQUEST].tolist(), skip_special_tokens=False)
    assert request == "Be kind.<｜User｜>Hello!<｜Assistant｜></think><｜User｜>Bye!<｜Assistant｜></think>"


def test_layout_is_the_chat_encoders(made):
    folder, _, tokenizer = made
    markers = Markers.of(tokenizer)
    talk = Conversation((Record("a", "Hello!", "Hi there."), Record("a", "Tell me more.", "No.")), "Be kind.")
    ids, _ = encode_conversations(tokenizer, markers, [talk])[0]
    messages = [{"role": "system", "content": "Be kind."}]
    for turn in talk.turns:
        messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": turn.text}]
    ours = OurTokenizer.from_file(folder / "tokenizer" / "tokenizer.json")
    assert ids.tolist() == encode_chat(messages, ours, PromptTexts(None, None, None))


def test_units_depend_on_their_number_alone(made):
    _, corpus, tokenizer = made
    one = make_unit(corpus, tokenizer, LENGTH, "mixed", 0, 1, 2, 3)
    two = make_unit(corpus, tokenizer, LENGTH, "mixed", 0, 1, 2, 3)
    other = make_unit(corpus, tokenizer, LENGTH, "mixed", 0, 2, 2, 3)
    assert np.array_equal(one.ids, two.ids)
    assert one.ids.shape != other.ids.shape or not np.array_equal(one.ids, other.ids)


def test_a_pass_shows_every_record(made):
    _, corpus, tokenizer = made
    units = [make_unit(corpus, tokenizer, 512, "core", 5, 0, piece, 3) for piece in range(3)]
    assert sum(unit.dropped for unit in units) == 0
    text = " ".join(tokenizer.decode(row.tolist()) for unit in units for row in unit.ids)
    assert text.count("a big ") == sum(record.text.count("a big ") for record in corpus.core)


def test_small_talk_is_repeated_in_every_pass(made):
    _, corpus, tokenizer = made
    markers = Markers.of(tokenizer)
    units = [make_unit(corpus, tokenizer, LENGTH, "core", 0, 0, piece, 3) for piece in range(3)]
    joined = [tokenizer.decode(row.tolist(), skip_special_tokens=False) for unit in units for row in unit.ids]
    assert sum(text.count("I am happy to see you.") for text in joined) >= 5
    assert sum(text.count("Two plus three is five.") for text in joined) >= 5
    assert markers.bos == 0


def test_long_records_become_whole_continuations():
    text = "\n\n".join(f"Part {index} begins here. The cat saw the dog and the ball." for index in range(40))
    record = Record("child", "Tell me a story called The Cat.", text)
    shorter = split_late(record, random.Random(0))
    assert shorter and all(text.endswith(piece.text) for piece in shorter)
    for piece in shorter:
        opening = piece.prompt.split(": ", 1)[-1].removeprefix("What happens next? ")
        assert f"{opening}\n\n{piece.text}" in text
    lengths = [len(piece.text) for piece in shorter]
    assert lengths == sorted(lengths, reverse=True)


@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=80), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_packing_keeps_everything_once(sizes, seed):
    encoded = [(np.full(n, i + 10, np.uint16), np.full(n, ANSWER, np.uint8)) for i, n in enumerate(sizes)]
    rows = pack(encoded, 64, 2, random.Random(seed))
    result = rows.ids[rows.roles == ANSWER]
    for index, size in enumerate(sizes):
        assert (result == index + 10).sum() == size
        holders = {row for row in range(len(rows.ids)) if (rows.ids[row] == index + 10).any()}
        assert len(holders) == 1
    assert len(rows.ids) <= len(sizes)


def test_names_change_everywhere_and_keep_their_gender():
    text = "Lily met Tom. LILY ran. Lily's hat was Tom's. Tomorrow the lily blooms."
    mapping = fresh_names(text, random.Random(1))
    assert set(mapping) == {"Lily", "Tom"} and mapping["Lily"] in GIRLS and mapping["Tom"] in BOYS
    changed = rename(text, mapping)
    girl, boy = mapping["Lily"], mapping["Tom"]
    assert (
        changed
        == f"{girl} met {boy}. {girl.upper()} ran. {girl}'s hat was {boy}'s. Tomorrow the lily blooms."
    )


def test_families_of_a_name_and_words_are_left_alone():
    assert find_names("Tim and Timmy are one boy. Anna is not Ann.") == []
    assert find_names("Ruby and April like Hope.") == []
    assert not set(GIRLS) & set(BOYS)
    assert not {"Will", "May", "Rose", "Mark", "Frank", "Grace", "Christian", "Daisy", "Willow"} & {
        *GIRLS,
        *BOYS,
    }


@given(seed=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_renaming_is_consistent_between_request_and_answer(seed):
    record = Record(
        "child", 'Tell me a story called "Lily and the Cake".', "Lily baked a cake. Max and Lily ate it."
    )
    shown = dress(record, random.Random(seed))
    names = [name for name in (*GIRLS, *BOYS) if re.search(rf"\b{name}\b", shown.text)]
    asked = [name for name in (*GIRLS, *BOYS) if re.search(rf"\b{name}\b", shown.prompt)]
    assert len(names) == 2 and len(asked) == 1 and asked[0] in names
    assert shown.text.startswith(f"{asked[0]} baked")


def test_a_request_in_other_words_keeps_its_subject():
    draw = random.Random(0)
    record = Record("bedtime", 'Tell me a bedtime story called "The Moon".', "Text.")
    asked = {fresh_request(record, draw).prompt for _ in range(200)}
    assert len(asked) > 12 and all("The Moon" in prompt for prompt in asked)
    poem = Record("poem", "Compose a song about rain.", "Text.")
    assert all("song about rain" in fresh_request(poem, draw).prompt for _ in range(50))
    odd = Record("bedtime", "Something else entirely", "Text.")
    assert fresh_request(odd, draw) == odd


def test_tiny_requests_are_true_of_the_story():
    story = (
        "Once upon a time, there was a little girl named Lucy. She was stubborn. One day Lucy found a drum."
    )
    record = Record("tiny", "Tell me a story.", story)
    draw, kinds = random.Random(0), set()
    for _ in range(300):
        shown = fresh_request(record, draw)
        if shown.text != story:
            kinds.add("opening")
            assert story.endswith(shown.text) and shown.prompt.split(": ")[-1].split("? ")[-1] in story
        elif "words" in shown.prompt:
            kinds.add("words")
            listed = re.sub(r"^.*words:? ", "", shown.prompt).removesuffix(" in a story.").rstrip(".?")
            assert all(re.search(rf"\b{word}\b", story) for word in re.split(r", | and ", listed))
        elif "Lucy" in shown.prompt:
            kinds.add("hero")
            assert "a little girl named Lucy" in shown.prompt
    assert kinds == {"opening", "words", "hero"}
    joined = fresh_request(Record("tiny", "Continue this story: A cat sat.", "It slept."), random.Random(4))
    assert joined.text in ("It slept.", "A cat sat. It slept.")


def test_near_misses_keep_the_answer():
    record = Record("smalltalk", "What is 2 plus 3?", "Two plus three is five.")
    draw = random.Random(0)
    shown = [near_miss(record, draw) for _ in range(200)]
    assert {entry.text for entry in shown} == {record.text} and len({entry.prompt for entry in shown}) > 8


def test_facts_are_right():
    result = {record.prompt: record.text for record in facts()}
    assert result["What is 7 plus 8?"] == "Seven plus eight is fifteen."
    assert result["What is 9 minus 4?"] == "Nine minus four is five."
    assert result["What day comes after Sunday?"] == "After Sunday comes Monday."
    assert result["What month comes before January?"] == "Before January comes December."


def test_sentences_split_where_they_end():
    assert split_after_sentences("One. Two! Three?", 2) == ("One. Two!", "Three?")
    assert split_after_sentences("One.", 1) == ("One.", "")


def test_held_out_rows_start_at_zero_and_are_cut_only_at_the_end(made):
    _, corpus, tokenizer = made
    rows = held_out_rows(corpus.held_out["stories"], tokenizer, 48)
    whole = held_out_rows(corpus.held_out["stories"], tokenizer, 512)
    assert (rows.ids[:, 0] == 0).all() and np.array_equal(rows.ids, whole.ids[:, :48])


def test_a_feed_repeats_itself_and_seeks(made):
    folder, _, _ = made
    feed = Feed(folder, folder / "tokenizer", LENGTH, seed=1)
    first = [feed.batch("mixed", 3)[0] for _ in range(4)]
    feed.batch("core", 2)
    index, following = feed.position(), feed.batch("mixed", 3)[0]
    feed.rewind()
    assert all(np.array_equal(batch, feed.batch("mixed", 3)[0]) for batch in first)
    feed.seek(index)
    assert np.array_equal(feed.batch("mixed", 3)[0], following)
    with pytest.raises(OptionError, match="mixed, core"):
        feed.batch("general", 1)


def test_background_workers_make_the_same_rows(made):
    folder, _, _ = made
    alone = Feed(folder, folder / "tokenizer", LENGTH, seed=1)
    workers = Feed(folder, folder / "tokenizer", LENGTH, seed=1, workers=1, ahead=2)
    try:
        assert np.array_equal(alone.batch("mixed", 40)[0], workers.batch("mixed", 40)[0])
    finally:
        workers.close()


def test_seeds_do_not_depend_on_the_process():
    assert (
        seeded(1, "core", 2).random()
        == seeded(1, "core", 2).random()
        == pytest.approx(0.0529303180, abs=1e-9)
    )


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"stories-train\.jsonl\.xz"):
        read_corpus(tmp_path)
    bad = tmp_path / "smalltalk.jsonl"
    bad.write_text('{"source": "a", "prompt": "b"}\n')
    with pytest.raises(PromptError, match="line 1"):
        list(read_records(bad))
    bad.write_text('{"source": "a", "prompt": "b", "text": " "}\n')
    with pytest.raises(PromptError, match="empty"):
        list(read_records(bad))
