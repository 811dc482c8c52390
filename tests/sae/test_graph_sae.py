"""Dictionaries in fixed shapes do what they do otherwise: every family, view and mode, and whoever uses them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.sae.dictionary import VIEWS
from birkhoff.sae.splice import FEATURE_SIZES
from tests.operations import Issued
from tests.sae.made import FAMILIES
from tests.sae.test_splice import CLAMPS, F, around_of, host_of, rows_of, sae_for, use_of
from tests.sizes import scaled

COUNT = 7
SOME = CLAMPS | {5: ("absolute", 1.5, True)}  # which a feature that is not live is not given


def both(host, x, uses, around):
    """What the splice makes of x, and what its fixed form makes of it."""
    kind = host.graph_kind(uses)
    assert kind is not None
    still = host.graph_splice(kind)
    still.fill(uses)
    return host.run(x, uses, around), still.run(x, around), still


@settings(max_examples=scaled(300, 60))
@given(
    family=st.sampled_from(FAMILIES),
    view=st.sampled_from(VIEWS),
    mode=st.sampled_from(["delta", "keep", "drop"]),
    rows=st.lists(st.sets(st.integers(0, COUNT - 1), min_size=1), min_size=1, max_size=3),
    chosen=st.sets(st.sampled_from(sorted(SOME))),
    seed=st.integers(0, 99),
)
def test_the_fixed_form_is_the_splice(family, view, mode, rows, chosen, seed):
    sae = sae_for(family, view, seed)
    host, x, around = host_of(sae), rows_of(COUNT, view, seed), around_of(COUNT)
    taken: set[int] = set()
    uses = []
    for number, own in enumerate(
        rows
    ):  # one use a row: two of one dictionary must not clamp the same feature
        mine = sorted(own - taken)
        taken |= own
        clamps = {i + number: SOME[i] for i in chosen if i + number < F}
        if mine:
            uses.append((use_of(host, sae, clamps, mode), mine))
    true, new, _ = both(host, x, uses, around)
    assert torch.equal(new, true), (new - true).abs().max()
    others = [row for row in range(COUNT) if row not in taken]
    assert torch.equal(new[others], x[others])


def buffers(still):
    return list(still.data.tensors())


def test_other_rows_and_features_fit_the_same_buffers():
    sae = sae_for("jumprelu", "flat")
    host, around = host_of(sae), around_of(COUNT)
    first = [(use_of(host, sae, {3: CLAMPS[3]}), [0, 2])]
    kind = host.graph_kind(first)
    still = host.graph_splice(kind)
    still.fill(first)
    places = [tensor.data_ptr() for tensor in buffers(still)]
    for seed, uses in enumerate(
        (first, [(use_of(host, sae, {7: CLAMPS[7], 20: CLAMPS[20]}), [5, 6])], first)
    ):
        x = rows_of(COUNT, "flat", seed)
        assert host.graph_kind(uses).room == kind.room
        still.fill(uses)
        assert torch.equal(still.run(x, around), host.run(x, uses, around))
    assert places == [tensor.data_ptr() for tensor in buffers(still)]


def test_features_that_alone_are_held_are_found():
    sae = sae_for("relu", "single")
    host, x, around = host_of(sae, features=[3, 8, 20]), rows_of(COUNT, "single"), around_of(COUNT)
    uses = [(use_of(host, sae, {3: CLAMPS[3], 20: CLAMPS[20]}), [1, 4])]
    true, new, _ = both(host, x, uses, around)
    assert torch.equal(new, true)


@pytest.mark.parametrize("count", [0, FEATURE_SIZES[-1] + 1])
def test_what_does_not_fit_is_said_so(count):
    sae = sae_for("relu", "single", features=FEATURE_SIZES[-1] + 1)
    host = host_of(sae)
    uses = [(use_of(host, sae, dict.fromkeys(range(count), CLAMPS[3])), [0] if count else [])]
    assert host.graph_kind(uses) is None


def test_a_step_reads_the_rows_of_its_features_where_they_lie_and_asks_for_little_else():
    """Two products and the clamps between them, for any number of features; nothing is gathered but the units."""
    sae = sae_for("jumprelu", "single", features=40)
    host, x, around = host_of(sae), rows_of(COUNT, "single"), around_of(COUNT)
    for clamps, mode, most in (({3: SOME[3], 7: SOME[7], 20: SOME[20]}, "delta", 14), ({}, "drop", 11)):
        uses = [(use_of(host, sae, clamps, mode), [1, 4]), (use_of(host, sae, clamps, mode), [5])]
        still = host.graph_splice(host.graph_kind(uses))
        still.fill(uses)
        with Issued() as step:
            still.run(x, around)
        assert step.names.count("index_select") == 1 and not {"index", "gather", "zeros_like"} & set(
            step.names
        )
        assert (
            sum(name in ("addmm", "addmm_", "mm") for name in step.names) == 2 and len(step.names) <= most
        ), step.names
