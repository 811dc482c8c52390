"""The comparison of all sites: two implementations of one model agree, and a wrong site fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from birkhoff.bench.sites import (
    MARGIN,
    SiteValues,
    compare,
    compare_sites,
    every_site,
    router_biases,
    run_eager,
)
from birkhoff.bench.synthetic import random_on_device
from birkhoff.hooks.sites import BY_NAME
from birkhoff.kernels.experts.reference import route
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.state import State
from tests.interpreter import DEVICE
from tests.models import variant
from tests.sizes import FULL

from birkhoff.kernels.quant import device as device_rounding  # isort: skip

SHORT = variant(compress_ratios=(4,), num_hash_layers=0, num_nextn_predict_layers=0)


def test_prompts_and_steps_are_compared_at_every_site():
    model = random_on_device(SHORT, DEVICE, dtype=torch.float32, kernels="triton")
    rows = list(compare_sites(model, DEVICE, [5], 1, 1e-3, fast=False))
    names = {name for name, _ in every_site(SHORT)} | {"logits"}
    for phase in ("prompt", "decode"):
        phase_rows = [row for row in rows if row["phase"] == phase]
        assert {row["site"] for row in phase_rows} == names and all(row["passed"] for row in phase_rows)
    assert {row["rows"] for row in rows if row["phase"] == "prompt" and row["site"] == "mlp_out"} == {5}


@pytest.mark.parametrize("wrong", [False, True] if FULL else [False])
def test_released_numerics_are_compared_stage_by_stage(wrong, monkeypatch):
    """All sites agree although rounding drifts; decode steps that do not round their inputs are seen."""
    flat = variant(compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0)
    model = random_on_device(flat, DEVICE, dtype=torch.float32, kernels="triton", released=True)
    if wrong:
        monkeypatch.setattr(device_rounding, "round_input", lambda x, out, dtype: out.copy_(x))
    rows = list(compare_sites(model, DEVICE, [3], 1, 0.01, fast=False))
    failed = {row["phase"] for row in rows if not row["passed"]}
    assert failed == ({"decode"} if wrong else set())


def test_two_precisions_diverge_at_near_ties_only():
    """Real differences in routing: the reference path in bfloat16 compared with itself in float32."""
    wide = variant(
        compress_ratios=(4, 128),
        num_hash_layers=1,
        num_nextn_predict_layers=0,
        n_routed_experts=64,
        num_experts_per_tok=6,
        hidden_size=256,
        index_topk=512,
    )
    tokens = torch.randint(wide.vocab_size, (300,), generator=torch.Generator().manual_seed(5))
    seen, device = [], torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float32):
        model = random_on_device(wide, device, dtype=dtype)
        state = State.contiguous(wide, 1, len(tokens), device=device, dtype=dtype)
        seen.append(run_eager(model, Batch.of([SequenceChunk(0, 0, tokens)], device), state, plain=True))
    rows = {row["site"]: row for row in compare(*seen, router_biases(model), 0.05, {"phase": "prompt"}, 512)}
    assert all(row["passed"] and row["share_beyond"] == 0.0 for row in rows.values())
    assert rows["mlp_out"]["share_parted"] > 0 and rows["moe_topk"]["margin_most"] > 0


ROWS, EXPERTS = 40, 8
# Router biases: one layer routes by token id, two by score.
BIASES = (None, 0.1 * torch.arange(EXPERTS), torch.zeros(EXPERTS))
DEEP = variant(compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=0)
TOLERANCE = 0.02
SHAPES = {"E": (EXPERTS,), "m": (4,), "mm": (4, 4), "md": (4, 16), "d": (16,), "hc": (2, 8)}


def random_pass() -> SiteValues:
    """Random values of all sites, with experts selected by their scores.

    In layer 1, row 3 has a near tie for the last selected expert: expert 6 is selected, expert 5 is next.
    """
    torch.manual_seed(0)
    seen = {key: torch.rand(ROWS, *SHAPES.get(BY_NAME[key[0]].shape, ())) for key in every_site(DEEP)}
    for layer, bias in enumerate(BIASES):
        logits = torch.stack([torch.randperm(EXPERTS).float() for _ in range(ROWS)])
        if layer == 1:
            logits[3] = torch.tensor([6.0, 0.0, 0.0, 0.0, 0.0, 1.3, 1.001, 0.0])
        ids, weights = route(logits, bias, None, 2, 1.0)
        seen["moe_router_logits", layer], seen["moe_topk", layer] = (
            logits,
            torch.stack([ids.float(), weights], -1),
        )
    scores = F.softplus(seen["moe_router_logits", 1][3]).sqrt() + BIASES[1]
    assert scores.topk(3).indices.tolist() == [0, 6, 5]
    assert 0 < scores.topk(3).values[1] - scores.topk(3).values[2] < MARGIN * TOLERANCE
    return seen | {("logits", -1): torch.rand(ROWS, 9)}


Change = Callable[[SiteValues], None]


def scaled_site(
    name: str, layer: int, rows: int | slice | tuple[Any, ...] = slice(None), factor: float = 1.2
) -> Change:
    def change(seen: SiteValues) -> None:
        seen[name, layer][rows] *= factor

    return change


def other_choice(layer: int, row: int, *ids: float) -> Change:
    """Select other experts in a row, and change all later sites of that row."""

    def change(seen: SiteValues) -> None:
        seen["moe_topk", layer][row, :, 0] = torch.tensor(ids)
        for name, other_layer in seen.keys() - {("moe_topk", layer) for layer in range(len(BIASES))}:
            if other_layer > layer or other_layer < 0 or (name, other_layer) == ("mlp_out", layer):
                seen[name, other_layer][row] += 1.0

    return change


def compare_changed(*changes: Change, phase: str = "decode") -> tuple[list[str], dict[str, Any]]:
    """Compare changed values with unchanged ones. Returns the failed sites, and all result rows by site."""
    expected, actual = random_pass(), random_pass()
    for change in changes:
        change(actual)
    rows = {row["site"]: row for row in compare(actual, expected, BIASES, TOLERANCE, {"phase": phase}, 512)}
    return [site for site, row in rows.items() if not row["passed"]], rows


def test_a_wrong_or_unwritten_site_fails():
    for name, factor in (("mhc_ffn_res_mix", 1.2), ("post_attn", torch.nan)):
        for phase in ("prompt", "decode"):
            assert compare_changed(scaled_site(name, 1, factor=factor), phase=phase)[0] == [name]


def test_one_wrong_row_fails_if_its_experts_are_the_same():
    for name, layer in (("mlp_out", 1), ("post_attn", 2), ("logits", -1), ("moe_router_logits", 2)):
        failed, rows = compare_changed(scaled_site(name, layer, 7))
        assert failed == [name] and rows[name]["share_parted"] == 0.0
    # The weights of the selected experts.
    assert compare_changed(scaled_site("moe_topk", 1, (7, slice(None), 1)))[0] == ["moe_topk"]
    # One of 120 rows may differ in a prompt: the indexer may have had a tie.
    assert compare_changed(scaled_site("mlp_out", 1, 7), phase="prompt")[0] == []
    assert compare_changed(scaled_site("mlp_out", 1, slice(7, 9)), phase="prompt")[0] == ["mlp_out"]


def test_a_near_tie_may_select_another_expert():
    failed, rows = compare_changed(other_choice(1, 3, 0, 5))
    assert failed == []
    assert (
        0 < rows["moe_topk"]["margin_most"] < rows["moe_topk"]["margin"]
        and rows["moe_topk"]["wide_choices"] == 0
    )
    assert rows["logits"]["share_parted"] == 1 / ROWS and rows["post_attn"]["share_parted"] < 1 / ROWS


def test_a_diverged_row_is_ignored_after_its_divergence_only():
    flip = other_choice(1, 3, 0, 5)
    for name, layer in (("mlp_in", 1), ("moe_router_logits", 1), ("mhc_ffn_pre_mix", 1), ("mlp_out", 0)):
        assert compare_changed(flip, scaled_site(name, layer, 3))[0] == [name]
    for name, layer in (("mlp_out", 1), ("pre_attn", 2), ("mhc_streams_final", 2), ("logits", -1)):
        assert compare_changed(flip, scaled_site(name, layer, 3))[0] == []
        # Values must be finite even after a divergence.
        assert compare_changed(flip, scaled_site(name, layer, 3, torch.nan))[0] == [name]


def test_a_wrong_expert_without_a_near_tie_fails():
    # In the row with the near tie between 6 and 5.
    for ids in ((0, 1), (0, 0), (0, 99), (0, torch.nan), (6, 5)):
        failed, rows = compare_changed(other_choice(1, 3, *ids))
        assert failed == ["moe_topk"] and rows["moe_topk"]["wide_choices"] == 1
    failed, rows = compare_changed(other_choice(1, 3, 0, 5), other_choice(2, 3, 0, 1))
    assert failed == [] and rows["logits"]["share_parted"] == 1 / ROWS  # the row had diverged before


def test_experts_by_token_id_must_be_equal():
    ids = random_pass()["moe_topk", 0][5, :, 0].tolist()
    for other in set(range(EXPERTS)) - set(ids):
        failed, rows = compare_changed(other_choice(0, 5, ids[0], other))
        assert failed == ["moe_topk"] and rows["moe_topk"]["wide_choices"] == 1


def test_a_tenth_of_the_rows_may_diverge():
    def failed_sites(count: int, phase: str) -> list[str]:
        expected, tie = random_pass(), random_pass()
        for name in ("moe_router_logits", "moe_topk"):
            expected[name, 1][:count] = tie[name, 1][3]
        actual = {key: tensor.clone() for key, tensor in expected.items()}
        for row in range(count):
            other_choice(1, row, 0, 5)(actual)
        rows = list(compare(actual, expected, BIASES, TOLERANCE, {"phase": phase}, 512))
        assert {row.get("wide_choices", 0) for row in rows} == {0}
        return [row["site"] for row in rows if not row["passed"]]

    for phase in ("prompt", "decode"):
        assert failed_sites(5, phase) == []  # a tenth of 40, plus one
        assert {"moe_topk", "mlp_out", "logits"} <= set(failed_sites(6, phase))


def test_a_single_row_may_not_diverge():
    """Otherwise no row would be left to compare."""
    expected = {key: tensor[3:4] for key, tensor in random_pass().items()}
    actual = {key: tensor.clone() for key, tensor in expected.items()}
    other_choice(1, 0, 0, 5)(actual)
    failed = [
        row["site"]
        for row in compare(actual, expected, BIASES, TOLERANCE, {"phase": "decode"}, 512)
        if not row["passed"]
    ]
    assert "logits" in failed and "post_attn" in failed and len(failed) > 5


def test_attention_over_other_entries_may_differ_more_but_not_much():
    """Stage by stage, where the indexer's scores select another entry at a near tie; its scores must agree."""

    def failed_sites(score: float, *changes: Change) -> list[str]:
        expected, actual = random_pass(), random_pass()
        for seen in (expected, actual):
            seen["index_scores", 1] = torch.zeros(ROWS, ROWS // 4)
            seen["index_scores", 1][31, :8] = torch.tensor([5.0, 1.0, 4.0, 0.0, 3.0, 0.0, 2.99, 0.0])
        actual["index_scores", 1][31, 6] = score
        for change in changes:
            change(actual)
        rows = compare(actual, expected, BIASES, TOLERANCE, {"phase": "decode"}, 3, by_stage=True)
        return [row["site"] for row in rows if not row["passed"]]

    assert failed_sites(3.01) == failed_sites(2.98) == []
    assert failed_sites(4.5) == ["index_scores"]
    slightly, widely = (scaled_site("attn_head_out", 1, 31, 1 + part * TOLERANCE) for part in (3, 5))
    assert failed_sites(3.01, slightly) == []
    assert failed_sites(2.98, slightly) == ["attn_head_out"]  # the same entries
    assert failed_sites(3.01, widely) == ["attn_head_out"]
    assert failed_sites(3.01, scaled_site("attn_head_out", 2, 31, 1 + 3 * TOLERANCE)) == ["attn_head_out"]


def test_scores_of_the_indexer_are_recorded_where_it_selects():
    config = variant(compress_ratios=(4,), num_hash_layers=0, num_nextn_predict_layers=0, index_topk=4)
    model = random_on_device(config, torch.device("cpu"), dtype=torch.float32, released=True)
    state = State.contiguous(config, 1, 40, device=torch.device("cpu"), dtype=torch.float32)
    tokens = torch.randint(config.vocab_size, (40,), generator=torch.Generator().manual_seed(5))
    batch = Batch.of([SequenceChunk(0, 0, tokens)], torch.device("cpu"))
    scores = run_eager(model, batch, state, plain=True)["index_scores", 0]
    seen = (scores != 0).sum(-1)
    assert scores.shape == (40, 10)
    assert torch.equal(seen > 4, torch.arange(40) >= 19)  # five blocks are finished, of which four are kept
    assert all(seen[row] <= (row + 1) // 4 for row in range(40))
