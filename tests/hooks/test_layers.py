"""Layer selectors against their definition, and the kind and path of every error."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import SelectorError
from birkhoff.hooks.layers import ALL_LAYERS, LayerSelector, parse_layers
from tests.sizes import scaled

L = 12
layer = st.integers(-L, L - 1)
ordered_pair = st.tuples(layer, layer).map(lambda pair: sorted(pair, key=lambda x: x % L)).map(list)
selectors = st.one_of(
    st.just("all"),
    st.lists(layer, min_size=1, max_size=6),
    st.fixed_dictionaries(
        {"layers": st.lists(layer, min_size=1, max_size=4)},
        optional={"ranges": st.lists(ordered_pair, max_size=3)},
    ),
    st.fixed_dictionaries({"ranges": st.lists(ordered_pair, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"every": st.integers(1, 15)}, optional={"from": layer}),
)


def selects(value, index: int) -> bool:
    """The definition, one layer at a time. `index` is in 0..L-1; `index - L` names the same layer."""
    names = {index, index - L}
    if value == "all":
        return True
    if isinstance(value, list):
        return any(name in value for name in names)
    if "every" in value:
        start = next(i for i in range(L) if value.get("from", 0) in (i, i - L))
        return index >= start and (index - start) % value["every"] == 0
    inside = False
    for first, last in value.get("ranges", []):
        low = next(i for i in range(L) if first in (i, i - L))
        high = next(i for i in range(L) if last in (i, i - L))
        inside |= low <= index <= high
    return inside or any(name in value.get("layers", []) for name in names)


@settings(max_examples=scaled(2000))
@given(selectors)
def test_a_selector_equals_its_definition(value):
    assert parse_layers(value).expand(L) == tuple(index for index in range(L) if selects(value, index))


@given(selectors)
def test_json_round_trip_and_plain_data(value):
    selector = parse_layers(value)
    again = parse_layers(json.loads(json.dumps(selector.to_json())))
    assert again == selector and hash(again) == hash(selector) and again.to_json() == selector.to_json()
    assert pickle.loads(pickle.dumps(selector)) == selector and parse_layers(selector) is selector


def test_equivalent_forms_are_equal_selectors():
    assert parse_layers([3, 1, 3]) == parse_layers({"layers": [1, 3]}) == parse_layers((1, 3))
    assert parse_layers({"every": 1}) == parse_layers("all") == ALL_LAYERS
    assert (
        parse_layers(np.array([1, 3]).tolist())
        == parse_layers([np.int64(1), np.int32(3)])
        == parse_layers([1, 3])
    )
    assert parse_layers(range(4)) == parse_layers([0, 1, 2, 3])
    assert parse_layers(3) == parse_layers(np.int64(3)) == parse_layers([3])
    assert parse_layers(-1).expand(5) == (4,)


def test_the_four_forms_by_example():
    assert parse_layers("all").expand(3) == (0, 1, 2)
    assert parse_layers([-1, 0, 0]).expand(5) == (0, 4)
    assert parse_layers({"layers": [9], "ranges": [[2, 4], [-3, -2]]}).expand(10) == (2, 3, 4, 7, 8, 9)
    assert parse_layers({"ranges": [[8, -1]]}).expand(10) == (8, 9)
    assert parse_layers({"every": 4, "from": 1}).expand(10) == (1, 5, 9)
    assert parse_layers({"every": 2, "from": -3}).expand(10) == (7, 9)


WRONG = [
    ("first", "form", "x"),
    ("", "form", "x"),
    (5.0, "form", "x"),
    (None, "form", "x"),
    (True, "form", "x"),
    (b"all", "form", "x"),
    ({}, "form", "x"),
    ({"layer": [1]}, "form", "x"),
    ({"layers": [1], "step": 2}, "form", "x"),
    ({"from": 2}, "form", "x"),
    ({"every": 2, "layers": [1]}, "form", "x"),
    ({1: 2}, "form", "x"),
    ({3, 4}, "form", "x"),
    ([1, True], "layer", "x[1]"),
    ([1.0], "layer", "x[0]"),
    (["1"], "layer", "x[0]"),
    ([None], "layer", "x[0]"),
    ([[1]], "layer", "x[0]"),
    ({"layers": 3}, "layer", "x.layers"),
    ({"layers": "all"}, "layer", "x.layers"),
    ({"layers": [2, False]}, "layer", "x.layers[1]"),
    ({"ranges": 3}, "layer", "x.ranges"),
    ({"ranges": [3]}, "layer", "x.ranges[0]"),
    ({"ranges": [[1, 2], [1]]}, "layer", "x.ranges[1]"),
    ({"ranges": [[1, 2, 3]]}, "layer", "x.ranges[0]"),
    ({"ranges": ["12"]}, "layer", "x.ranges[0]"),
    ({"ranges": [[1, "2"]]}, "layer", "x.ranges[0][1]"),
    ({"ranges": [[4, 3]]}, "layer", "x.ranges[0]"),
    ({"ranges": [[-1, -2]]}, "layer", "x.ranges[0]"),
    ({"every": 0}, "layer", "x.every"),
    ({"every": -1}, "layer", "x.every"),
    ({"every": 1.5}, "layer", "x.every"),
    ({"every": 2, "from": "0"}, "layer", "x.from"),
    ([L], "layer", "x"),
    (L, "layer", "x"),
    ([-L - 1], "layer", "x"),
    ([10**5000], "layer", "x"),
    ({"ranges": [[0, L]]}, "layer", "x.ranges"),
    ({"ranges": [[0, 10**12]]}, "layer", "x.ranges"),
    ({"ranges": [[5, -10]]}, "layer", "x.ranges"),
    ({"every": 2, "from": L}, "layer", "x.from"),
    ([], "empty", "x"),
    ({"layers": []}, "empty", "x"),
    ({"ranges": []}, "empty", "x"),
    ({"layers": [], "ranges": []}, "empty", "x"),
]


@pytest.mark.parametrize(
    ("value", "kind", "path"), WRONG, ids=lambda v: str(v)[:30] if not isinstance(v, list) else None
)
def test_errors_have_a_kind_and_a_path(value, kind, path):
    with pytest.raises(SelectorError) as refused:
        parse_layers(value, "x").expand(L, "x")
    error = refused.value
    assert (error.kind, error.path) == (kind, path) and str(error) == f"{path}: {error.reason}"
    assert len(str(error)) < 400


def test_errors_survive_pickling():
    error = SelectorError("is wrong.", "x.y", "layer")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.path, again.kind, again.reason) == (
        "x.y: is wrong.",
        "x.y",
        "layer",
        "is wrong.",
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["layers", "ranges", "every", "from", "x"]), inner, max_size=3)
        ),
    )
)
def test_any_json_parses_or_raises_selector_error(value):
    try:
        chosen = parse_layers(value).expand(L)
    except SelectorError:
        return
    assert chosen == tuple(sorted(set(chosen))) and chosen and all(0 <= layer < L for layer in chosen)


def test_a_selector_is_frozen():
    with pytest.raises(AttributeError):
        LayerSelector().every = 3
