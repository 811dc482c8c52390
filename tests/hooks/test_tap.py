"""`NoTap` and `EagerTap`: callbacks, their arguments and order, and return values."""

from __future__ import annotations

import torch

from birkhoff.hooks import sites
from birkhoff.hooks.tap import EagerTap, NoTap

X = torch.arange(6.0).view(2, 3)


def test_no_tap_returns_the_same_tensor():
    tap = NoTap()
    read, carried = tap.part(sites.MHC_STREAMS_FINAL, X)
    assert tap(sites.PRE_ATTN, X) is X and read is X and carried is X
    assert tap.see(sites.MOE_TOPK, X, X) is None and tap.at(3) is tap


def test_an_eager_tap_without_callbacks_returns_the_same_tensor():
    tap = EagerTap().at(1)
    read, carried = tap.part(sites.MHC_STREAMS_FINAL, X)
    assert tap(sites.PRE_ATTN, X) is X and read is X and carried is X


def test_callbacks_get_site_layer_and_tensor_and_seen_runs_before_edit():
    calls = []

    def edit(site, layer, x):
        calls.append(("edit", site, layer, x))
        return x + 1

    tap = EagerTap(lambda site, layer, x: calls.append(("seen", site, layer, x)), edit).at(4)
    assert torch.equal(tap(sites.PRE_ATTN, X), X + 1)
    assert [call[0] for call in calls] == ["seen", "edit"]
    assert all(site is sites.PRE_ATTN and layer == 4 and x is X for _, site, layer, x in calls)


def test_an_edit_that_returns_none_leaves_the_tensor():
    assert EagerTap(edit=lambda *_: None)(sites.PRE_ATTN, X) is X


def test_see_stacks_several_tensors_as_float32():
    seen = []
    tap = EagerTap(lambda site, layer, x: seen.append(x), edit=lambda *_: X)
    assert tap.see(sites.MOE_TOPK, torch.tensor([[3, 1]]), torch.tensor([[0.25, 0.75]])) is None
    assert seen[0].dtype == torch.float32 and seen[0].tolist() == [[[3.0, 0.25], [1.0, 0.75]]]


def test_edit_changes_both_paths_and_part_runs_after_it():
    read, carried = EagerTap(edit=lambda s, layer, x: x * 2).part(sites.MHC_STREAMS_FINAL, X)
    assert torch.equal(read, 2 * X) and read is carried
    tap = EagerTap(edit=lambda s, layer, x: x * 2, part=lambda s, layer, x: (x + 1, x))
    read, carried = tap.part(sites.MHC_STREAMS_FINAL, X)
    assert torch.equal(read, 2 * X + 1) and torch.equal(carried, 2 * X)


def test_part_is_called_at_stream_sites_only():
    called_at = []
    tap = EagerTap(part=lambda s, layer, x: called_at.append(s))
    tap(sites.PRE_ATTN, X), tap.see(sites.MHC_HEAD_MIX, X), tap.part(sites.MHC_STREAMS_FINAL, X)
    assert called_at == [sites.MHC_STREAMS_FINAL]


def test_at_returns_an_independent_tap():
    layers = []
    tap = EagerTap(lambda s, layer, x: layers.append(layer))
    third, fifth = tap.at(3), tap.at(5)
    fifth.see(sites.PRE_ATTN, X), third.see(sites.PRE_ATTN, X)
    assert layers == [5, 3]
