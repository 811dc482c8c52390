import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import OptionError
from birkhoff.text.stop import StopMatcher
from tests.sizes import scaled

FEW = st.text("ab\n", max_size=14)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def by_definition(text, stops):
    """Reference implementation: the stop that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces, stops):
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.feed, pieces))
    return shown + matcher.finish(), matcher.matched


@settings(max_examples=scaled(3000))
@given(text=FEW, stops=STOPS, data=st.data())
def test_any_cut_gives_what_the_definition_says(text, stops, data):
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert run(pieces, stops) == by_definition(text, stops)


def test_found_across_every_border():
    text, stops = "We say: stop here, please", ["stop here", "never"]
    for cut in range(len(text) + 1):
        assert run([text[:cut], text[cut:]], stops) == ("We say: ", "stop here")


@settings(max_examples=scaled(2000))
@given(text=FEW, stops=STOPS, data=st.data())
def test_nothing_is_held_but_the_longest_possible_beginning(text, stops, data):
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=4))})
    matcher, shown = StopMatcher(stops), ""
    for start, end in itertools.pairwise(cuts):
        shown += matcher.feed(text[start:end])
        if matcher.matched is not None:
            break
        seen = text[:end]
        beginnings = [
            seen[-size:] for size in range(1, end + 1) if any(s.startswith(seen[-size:]) for s in stops)
        ]
        assert seen == shown + max(beginnings, key=len, default="")


def test_after_a_stop_nothing_more_comes():
    matcher = StopMatcher(["X"])
    assert (
        matcher.feed("aXb") == "a"
        and matcher.feed("c") == ""
        and matcher.finish() == ""
        and matcher.matched == "X"
    )


def test_without_stops_text_passes():
    matcher = StopMatcher([])
    assert matcher.feed("any\n") == "any\n" and matcher.finish() == "" and matcher.matched is None


@pytest.mark.parametrize("stops", ["text", [""], [1], [None, "a"]])
def test_bad_stops_are_refused(stops):
    with pytest.raises(OptionError, match="expected a list of non-empty strings"):
        StopMatcher(stops)
