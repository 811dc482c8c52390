"""Selections of running requests: the same rows in any order of steps, and listed positions never computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.capture.spec.selection import Selection, bind
from birkhoff.hooks.positions import parse_positions

PROMPT = [7, 8, 9, 7]


def selection(value, max_tokens=6):
    return Selection(bind(parse_positions(value), PROMPT, max_tokens))


def run(chosen, tokens, cuts):
    """Positions selected when the tokens are run in pieces that end at `cuts`."""
    selected, start = [], 0
    for stop in [*cuts, len(tokens)]:
        selected += (chosen.rows(start, tokens[start:stop]) + start).tolist()
        start = stop
    return selected


def test_a_request_step_by_step():
    chosen, tokens = selection([0, -1, 5, 9]), [*PROMPT, 1, 2, 3]
    assert run(chosen, tokens, [2, 4, 5, 6]) == [0, 3, 5]
    assert chosen.never_computed() == [9]


def test_listed_positions_that_were_not_run_are_reported():
    assert (
        selection("all").never_computed() == selection({"prompt": {"window": [0, 2]}}).never_computed() == []
    )
    assert selection("last_prompt").never_computed() == [3]  # nothing has been run yet
    both = selection({"prompt": "all", "generated": [0, 4]})
    run(both, [*PROMPT, 1, 2], [4, 5])
    assert both.never_computed() == [8]


def test_a_position_excluded_by_its_token_counts_as_run():
    chosen = selection({"generated": [0, 1], "exclude": {"token_ids": [3]}})
    assert run(chosen, [*PROMPT, 3, 2], [4, 5]) == [5] and chosen.never_computed() == []


def test_rejected_draft_tokens_count_as_not_run():
    chosen = selection([4, 5, 6])
    run(chosen, [*PROMPT, 1, 2, 3], [4])  # 5 and 6 were drafts that the text did not keep
    assert chosen.never_computed() == [] and chosen.never_computed(length=5) == [5, 6]


@pytest.mark.parametrize("value", ["all", "all_generated", [0, 5, 9], {"generated": {"token_ids": [2]}}])
def test_running_tokens_again_changes_nothing(value):
    tokens = [*PROMPT, 1, 2, 3]
    once, twice = selection(value), selection(value)
    first = run(once, tokens, [4, 5, 6])
    assert run(twice, tokens[:6], [4, 5]) == [p for p in first if p < 6]
    assert run(twice, tokens, [6]) == first and once.never_computed() == twice.never_computed()


@given(
    st.lists(st.integers(-4, 9), min_size=1, max_size=6),
    st.integers(0, 6),
    st.lists(st.integers(0, 10), max_size=4).map(sorted),
)
def test_selected_and_missing_positions_make_up_the_list(listed, generated, cuts):
    chosen, tokens = selection(listed), np.array(PROMPT + [1] * generated)
    came = run(chosen, tokens, [cut for cut in cuts if cut <= len(tokens)])
    demanded = sorted({position + len(PROMPT) if position < 0 else position for position in listed})
    assert sorted(came + chosen.never_computed()) == demanded and all(
        position < len(tokens) for position in came
    )
