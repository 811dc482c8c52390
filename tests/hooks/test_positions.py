"""Position selectors against their definition, with any chunking, and the path of every error."""

from __future__ import annotations

import json
import pickle
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from birkhoff.errors import SelectorError
from birkhoff.hooks.positions import BY_WORD, parse_positions
from birkhoff.hooks.selector import bind
from tests.sizes import scaled

MANY = settings(max_examples=scaled(4000, 400), suppress_health_check=[HealthCheck.filter_too_much])
MAX_LEN = 12  # maximum length of the prompt and of the generated text in the random cases
token = st.integers(0, 4)
ids = st.fixed_dictionaries({"token_ids": st.lists(token, min_size=1, max_size=3)})


def filters(negative: bool):
    end = st.none() | st.integers(-MAX_LEN if negative else 0, MAX_LEN)
    window = st.fixed_dictionaries({"window": st.tuples(end, end).map(list)})
    both = st.tuples(window, ids).map(lambda pair: pair[0] | pair[1])
    listed = st.lists(st.integers(-3 if negative else 0, 4), min_size=1, max_size=4)
    return st.one_of(window, ids, both), listed


def sides(negative: bool):
    filtered, listed = filters(negative)
    exclude = st.fixed_dictionaries({"exclude": filtered | listed})
    return st.one_of(
        st.just("all"), listed, filtered, st.tuples(filtered, exclude).map(lambda p: p[0] | p[1]), exclude
    )


objects = st.fixed_dictionaries(
    {},
    optional={
        "prompt": sides(True) | st.none(),
        "generated": sides(False),
        "exclude": st.one_of(*filters(True)),
    },
)
selectors = st.one_of(
    st.sampled_from([*BY_WORD]), st.lists(st.integers(-3, 14), min_size=1, max_size=5), objects
)
texts = st.tuples(
    st.lists(token, min_size=1, max_size=MAX_LEN), st.lists(token, min_size=1, max_size=MAX_LEN)
)


def holds(side, index: int, token_id: int, count: int) -> bool:
    """Whether token `index` of a side is selected. Negative indices count back from `count`, the side's length."""
    if side == "all":
        return True
    if isinstance(side, list):
        return index in side or (index < count and index - count in side)
    if "window" in side:
        start, stop = ((None if end is None else end + count if end < 0 else end) for end in side["window"])
        if not (start is None or index >= start) or not (stop is None or index < stop):
            return False
    if "token_ids" in side and token_id not in side["token_ids"]:
        return False
    return "exclude" not in side or not holds(side["exclude"], index, token_id, count)


def is_selected(value, position: int, token_id: int, prompt_len: int) -> bool:
    """Whether the selector selects a token, by its definition."""
    if value in ("last_prompt", "all_prompt", "all_generated", "all"):
        in_prompt = position < prompt_len
        return {
            "last_prompt": position == prompt_len - 1,
            "all_prompt": in_prompt,
            "all_generated": not in_prompt,
            "all": True,
        }[value]
    if isinstance(value, list):
        return holds(value, position, token_id, prompt_len)
    side = value.get("prompt" if position < prompt_len else "generated")
    index, count = (position, prompt_len) if position < prompt_len else (position - prompt_len, 10**9)
    if side is None or not holds(side, index, token_id, count):
        return False
    return value.get("exclude") is None or not holds(value["exclude"], position, token_id, prompt_len)


def bound(value, text):
    """The selector bound to the text; the example is rejected if the text does not fit it."""
    try:
        return bind(parse_positions(value), text[0], len(text[1]))
    except SelectorError:
        assume(False)


@MANY
@given(selectors, texts)
@example({"prompt": {"exclude": {"window": [1, -1]}}}, ([0], [0]))  # an empty window
def test_a_selector_equals_its_definition(value, text):
    selector, tokens, prompt_len = bound(value, text), text[0] + text[1], len(text[0])
    expected = [p for p, t in enumerate(tokens) if is_selected(value, p, t, prompt_len)]
    assert selector.rows(0, tokens).tolist() == expected
    assert [p for p, t in enumerate(tokens) if selector.wants(p, t)] == expected
    in_prompt = [p for p in expected if p < prompt_len]
    assert selector.lowest_prompt_position() == (in_prompt[0] if in_prompt else None)
    run = [p for p in expected if p < len(tokens) - 1]  # the last sampled token is never run
    assert sum(selector.max_rows()) == len(run) if selector.exact else sum(selector.max_rows()) >= len(run)


@MANY
@given(selectors, texts, st.data())
def test_rows_of_chunks_concatenate_to_the_rows_of_the_whole_text(value, text, data):
    selector, tokens = bound(value, text), text[0] + text[1]
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=6).map(sorted))
    edges, joined = [0, *cuts, len(tokens)], []
    for start, stop in pairwise(edges):
        offsets = selector.rows(start, np.array(tokens[start:stop]) if start % 2 else tokens[start:stop])
        assert all(0 <= offset < stop - start for offset in offsets)
        joined += (offsets + start).tolist()
    assert joined == selector.rows(0, tokens).tolist()


@MANY
@given(selectors, texts)
def test_binding_to_a_prompt_length_gives_the_same_rows_and_safe_bounds(value, text):
    known, tokens = bound(value, text), text[0] + text[1]
    blind = bind(parse_positions(value), len(text[0]), len(text[1]))
    assert blind.rows(0, tokens).tolist() == known.rows(0, tokens).tolist()
    assert all(a >= b for a, b in zip(blind.max_rows(), known.max_rows()))
    if known.lowest_prompt_position() is not None:
        assert blind.lowest_prompt_position() <= known.lowest_prompt_position()


@MANY
@given(selectors)
def test_json_round_trip_and_plain_data(value):
    try:
        positions = parse_positions(value)
    except SelectorError:
        assume(False)
    again = parse_positions(json.loads(json.dumps(positions.to_json())))
    assert again == positions and hash(again) == hash(positions) and again.to_json() == positions.to_json()
    assert pickle.loads(pickle.dumps(positions)) == positions and parse_positions(positions) is positions


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["prompt", "generated", "exclude", "window", "token_ids"]), inner, max_size=3
            )
        ),
    ),
    st.integers(1, 9),
    st.integers(0, 9),
)
def test_any_json_parses_or_raises_selector_error(value, prompt_len, max_tokens):
    try:
        rows = bind(parse_positions(value), prompt_len, max_tokens).rows(0, [0] * (prompt_len + max_tokens))
    except SelectorError as error:
        assert error.kind == "position" and error.path.startswith("positions") and len(str(error)) < 400
        return
    assert rows.tolist() == sorted(set(rows.tolist()))


def test_forms_by_example():
    prompt, answer = [5, 6, 7, 5], [8, 5, 9]

    def rows(value):
        return bind(parse_positions(value), prompt, len(answer)).rows(0, prompt + answer).tolist()

    assert rows("last_prompt") == [3] == rows([-1]) == rows({"prompt": [-1]})
    assert rows("all_prompt") == [0, 1, 2, 3] and rows("all_generated") == [4, 5, 6]
    assert rows([0, 6, -2, 0]) == [0, 2, 6]
    assert rows({"prompt": {"window": [1, 3]}, "generated": [0]}) == [1, 2, 4]
    assert rows({"prompt": {"window": [-2, None]}}) == [2, 3] == rows({"prompt": {"window": [2, 99]}})
    assert rows({"prompt": {"token_ids": [5]}, "generated": {"token_ids": [5]}}) == [0, 3, 5]
    assert rows({"prompt": "all", "generated": "all", "exclude": {"token_ids": [5]}}) == [1, 2, 4, 6]
    assert rows({"prompt": "all", "exclude": [0, -1]}) == [1, 2]
    assert rows({"prompt": {"window": [0, 3], "exclude": {"token_ids": [6]}}}) == [0, 2]
    assert rows({"generated": {"window": [1, None], "exclude": [2]}}) == [5]
    assert rows({"prompt": [0, 1, 2], "generated": [0, 2], "exclude": {"token_ids": [6, 9]}}) == [0, 2, 4]
    assert rows({"prompt": {"token_ids": [1234]}}) == []  # a filter that matches nothing is allowed


def test_equivalent_forms_are_equal_selectors():
    assert parse_positions({"prompt": [-1]}) == parse_positions("last_prompt")
    assert parse_positions({"prompt": "all", "generated": "all"}) == parse_positions("all")
    assert parse_positions({"prompt": {"window": [None, None]}}).to_json() == "all_prompt"
    assert parse_positions([2, 1, 2]) == parse_positions((1, 2))


WRONG = [
    ("first", ""),
    ("", ""),
    (3, ""),
    (None, ""),
    (True, ""),
    ([], ""),
    ({}, ""),
    ({"exclude": [0]}, ""),
    ({"prompt": None}, ""),
    ({"middle": "all"}, ""),
    ([0, "1"], "[1]"),
    ([True], "[0]"),
    ([1.0], "[0]"),
    ({"prompt": "some"}, ".prompt"),
    ({"prompt": []}, ".prompt"),
    ({"prompt": {}}, ".prompt"),
    ({"prompt": 3}, ".prompt"),
    ({"prompt": {"windows": [0, 1]}}, ".prompt"),
    ({"prompt": {"window": 3}}, ".prompt.window"),
    ({"prompt": {"window": [1]}}, ".prompt.window"),
    ({"prompt": {"window": [3, 3]}}, ".prompt.window"),
    ({"prompt": {"window": [-1, -2]}}, ".prompt.window"),
    ({"prompt": {"window": [0, "1"]}}, ".prompt.window[1]"),
    ({"prompt": {"token_ids": []}}, ".prompt.token_ids"),
    ({"prompt": {"token_ids": 5}}, ".prompt.token_ids"),
    ({"prompt": {"token_ids": [5, -1]}}, ".prompt.token_ids[1]"),
    ({"prompt": {"token_ids": [2**40]}}, ".prompt.token_ids[0]"),
    ({"prompt": {"token_ids": [True]}}, ".prompt.token_ids[0]"),
    ({"generated": [-1]}, ".generated[0]"),
    ({"generated": {"window": [-2, None]}}, ".generated.window[0]"),
    ({"prompt": "all", "exclude": "all"}, ".exclude"),
    ({"prompt": "all", "exclude": {"window": [None, None]}}, ".exclude"),
    ({"prompt": "all", "exclude": {"exclude": [1]}}, ".exclude"),
    ({"prompt": {"exclude": "all"}}, ".prompt.exclude"),
    ({"prompt": {"exclude": {"exclude": [1]}}}, ".prompt.exclude"),
    ({"generated": {"exclude": [-1]}}, ".generated.exclude[0]"),
    # Errors that depend on the prompt (4 tokens) and on max_tokens (3).
    ([7], ""),
    ([-5], ""),
    ([10**5000], ""),
    ({"prompt": [4]}, ".prompt"),
    ({"generated": [3]}, ".generated"),
    ({"prompt": "all", "exclude": [9]}, ".exclude"),
    ({"prompt": {"exclude": [4]}}, ".prompt.exclude"),
    ({"prompt": {"window": [4, 9]}}, ""),
    ({"prompt": {"window": [3, -2]}}, ""),
    ({"generated": {"window": [2, None]}}, ""),
    ({"prompt": [0], "exclude": [0]}, ""),
    ({"prompt": {"window": [2**80, None]}}, ""),
]


@pytest.mark.parametrize(("value", "path"), WRONG)
def test_errors_have_a_path(value, path):
    with pytest.raises(SelectorError) as refused:
        bind(parse_positions(value, "p"), [1, 2, 3, 4], 3, "p")
    error = refused.value
    assert (error.kind, error.path) == ("position", "p" + path) and str(error) == f"p{path}: {error.reason}"
    assert len(str(error)) < 400


def test_with_max_tokens_1_no_generated_token_is_run():
    with pytest.raises(SelectorError, match="the last of these is never run"):
        bind(parse_positions("all_generated"), [1, 2], 1)
    assert bind(parse_positions("all"), [1, 2], 1).max_rows() == (2, 0)
    # Listed, so reported later.
    assert bind(parse_positions({"generated": [0]}), [1, 2], 1).demanded.tolist() == [2]


def test_demanded_positions_are_the_listed_ones():
    prompt = [1, 2, 3, 1]
    assert bind(parse_positions([5, -1, 0]), prompt, 4).demanded.tolist() == [0, 3, 5]
    assert bind(parse_positions({"prompt": "all", "generated": [0, 2]}), prompt, 4).demanded.tolist() == [
        4,
        6,
    ]
    assert bind(
        parse_positions({"prompt": [0, 1], "exclude": {"token_ids": [2]}}), prompt, 4
    ).demanded.tolist() == [0]
    assert bind(parse_positions("last_prompt"), prompt, 4).demanded.tolist() == [3]
    assert bind(parse_positions({"prompt": {"window": [0, 2]}}), prompt, 4).demanded.tolist() == []


def test_lowest_prompt_position():
    def lowest(value, prompt=(1, 2, 3, 1)):
        return bind(parse_positions(value), prompt, 9).lowest_prompt_position()

    assert lowest("all") == lowest("all_prompt") == 0 and lowest("last_prompt") == 3
    assert lowest("all_generated") is None and lowest([5]) is None and lowest([5, 2]) == 2
    assert lowest({"prompt": {"token_ids": [3]}}) == 2 and lowest({"prompt": {"token_ids": [9]}}) is None
    # The ids are unknown: the first position that could be selected.
    assert lowest({"prompt": {"token_ids": [3]}}, prompt=4) == 0
    assert lowest({"prompt": "all", "exclude": {"window": [0, 2]}}) == 2


def test_returned_rows_are_read_only():
    selector = bind(parse_positions([0, 2]), [1, 2, 3], 2)
    rows = selector.rows(0, [1, 2, 3])
    with pytest.raises(ValueError, match="read-only"):
        rows[0] = 7
    assert selector.rows(0, [1, 2, 3]).tolist() == [0, 2]


def test_decode_steps_do_not_scan_a_long_prompt():
    prompt = list(range(scaled(1_000_000)))
    for value in (
        "all_prompt",
        "last_prompt",
        {"prompt": {"token_ids": [3, 4]}},
        [5, 9],
        {"prompt": {"window": [0, 9]}},
    ):
        selector, steps = bind(parse_positions(value), prompt, 10_000), scaled(20_000)
        began = time.process_time()
        for position in range(len(prompt), len(prompt) + steps):
            assert not len(selector.rows(position, (7,)))
        each = (time.process_time() - began) / steps
        # About 1 microsecond is expected; a scan of the prompt takes thousands.
        assert each < 300e-6, f"{value}: {each * 1e6:.1f} microseconds a step"
