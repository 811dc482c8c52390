"""Graph splices equal ordinary splices for every family, view, mode and set of requests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.sae.dictionary import VIEWS
from birkhoff.sae.splice import FEATURE_SIZES
from tests.operations import Issued
from tests.sae.reference import FAMILIES
from tests.sae.test_splice import CLAMPS, F, around_of, host_of, rows_of, sae_for, use_of
from tests.sizes import scaled

COUNT = 7
SOME = CLAMPS | {5: ("absolute", 1.5, True)}  # skipped where the feature is inactive


def both(host, x, uses, around):
    """x after the splice, x after its graph form, and the graph splice."""
    kind = host.graph_kind(uses)
    assert kind is not None
    graph = host.graph_splice(kind)
    graph.fill(uses)
    return host.run(x, uses, around), graph.run(x, around), graph


@settings(max_examples=scaled(300, 60))
@given(
    family=st.sampled_from(FAMILIES),
    view=st.sampled_from(VIEWS),
    mode=st.sampled_from(["delta", "keep", "drop"]),
    rows=st.lists(st.sets(st.integers(0, COUNT - 1), min_size=1), min_size=1, max_size=3),
    chosen=st.sets(st.sampled_from(sorted(SOME))),
    seed=st.integers(0, 99),
)
def test_a_graph_splice_equals_the_splice(family, view, mode, rows, chosen, seed):
    sae = sae_for(family, view, seed)
    host, x, around = host_of(sae), rows_of(COUNT, view, seed), around_of(COUNT)
    taken: set[int] = set()
    uses = []
    for index, wanted in enumerate(rows):  # at most one use per row: two must not clamp the same feature
        free = sorted(wanted - taken)
        taken |= wanted
        clamps = {i + index: SOME[i] for i in chosen if i + index < F}
        if free:
            uses.append((use_of(host, sae, clamps, mode), free))
    expected, actual, _ = both(host, x, uses, around)
    assert torch.equal(actual, expected), (actual - expected).abs().max()
    others = [row for row in range(COUNT) if row not in taken]
    assert torch.equal(actual[others], x[others])


def buffers(graph):
    return list(graph.data.tensors())


def test_other_rows_and_features_reuse_the_buffers():
    sae = sae_for("jumprelu", "flat")
    host, around = host_of(sae), around_of(COUNT)
    first = [(use_of(host, sae, {3: CLAMPS[3]}), [0, 2])]
    kind = host.graph_kind(first)
    graph = host.graph_splice(kind)
    graph.fill(first)
    addresses = [tensor.data_ptr() for tensor in buffers(graph)]
    for seed, uses in enumerate(
        (first, [(use_of(host, sae, {7: CLAMPS[7], 20: CLAMPS[20]}), [5, 6])], first)
    ):
        x = rows_of(COUNT, "flat", seed)
        assert host.graph_kind(uses).room == kind.room
        graph.fill(uses)
        assert torch.equal(graph.run(x, around), host.run(x, uses, around))
    assert addresses == [tensor.data_ptr() for tensor in buffers(graph)]


def test_a_host_with_some_features_only():
    sae = sae_for("relu", "single")
    host, x, around = host_of(sae, features=[3, 8, 20]), rows_of(COUNT, "single"), around_of(COUNT)
    uses = [(use_of(host, sae, {3: CLAMPS[3], 20: CLAMPS[20]}), [1, 4])]
    expected, actual, _ = both(host, x, uses, around)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("count", [0, FEATURE_SIZES[-1] + 1])
def test_graph_kind_is_none_for_unsupported_sizes(count):
    sae = sae_for("relu", "single", features=FEATURE_SIZES[-1] + 1)
    host = host_of(sae)
    uses = [(use_of(host, sae, dict.fromkeys(range(count), CLAMPS[3])), [0] if count else [])]
    assert host.graph_kind(uses) is None


def test_a_step_reads_feature_rows_in_place_with_few_operations():
    """Two matrix products with the clamps between them, for any number of features; only the units are gathered."""
    sae = sae_for("jumprelu", "single", features=40)
    host, x, around = host_of(sae), rows_of(COUNT, "single"), around_of(COUNT)
    for clamps, mode, max_operations in (
        ({3: SOME[3], 7: SOME[7], 20: SOME[20]}, "delta", 14),
        ({}, "drop", 11),
    ):
        uses = [(use_of(host, sae, clamps, mode), [1, 4]), (use_of(host, sae, clamps, mode), [5])]
        graph = host.graph_splice(host.graph_kind(uses))
        graph.fill(uses)
        with Issued() as step:
            graph.run(x, around)
        assert step.names.count("index_select") == 1 and not {"index", "gather", "zeros_like"} & set(
            step.names
        )
        assert (
            sum(name in ("addmm", "addmm_", "mm") for name in step.names) == 2
            and len(step.names) <= max_operations
        ), step.names
