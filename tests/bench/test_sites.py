"""The comparison of every site itself: two ways through one model agree, and a site that is off is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

SHORT = variant(compress_ratios=(4,), num_hash_layers=0, num_nextn_predict_layers=0)


def test_prompts_and_steps_are_compared_at_every_site():
    model = random_on_device(SHORT, DEVICE, dtype=torch.float32, kernels="triton")
    rows = list(compare_sites(model, DEVICE, [5], 1, 1e-3, fast=False))
    names = {name for name, _ in every_site(SHORT)} | {"logits"}
    for phase in ("prompt", "decode"):
        found = [row for row in rows if row["phase"] == phase]
        assert {row["site"] for row in found} == names and all(row["passed"] for row in found)
    assert {row["rows"] for row in rows if row["phase"] == "prompt" and row["site"] == "mlp_out"} == {5}


def test_two_precisions_part_at_near_ties_only():
    """Choices that really fall otherwise: the plain path in bfloat16 beside itself in float32."""
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
    seen, here = [], torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float32):
        model = random_on_device(wide, here, dtype=dtype)
        state = State.contiguous(wide, 1, len(tokens), device=here, dtype=dtype)
        seen.append(run_eager(model, Batch.of([SequenceChunk(0, 0, tokens)], here), state, plain=True))
    rows = {row["site"]: row for row in compare(*seen, router_biases(model), 0.05, {"phase": "prompt"})}
    assert all(row["passed"] and row["share_beyond"] == 0.0 for row in rows.values())
    assert rows["mlp_out"]["share_parted"] > 0 and rows["moe_topk"]["margin_most"] > 0


ROWS, EXPERTS = 40, 8
BIASES = (None, 0.1 * torch.arange(EXPERTS), torch.zeros(EXPERTS))  # of a layer by token id, and two by score
DEEP = variant(compress_ratios=(0, 4, 128), num_hash_layers=1, num_nextn_predict_layers=0)
TOLERANCE = 0.02
SHAPES = {"E": (EXPERTS,), "m": (4,), "mm": (4, 4), "md": (4, 16), "d": (16,)}


def passed_through() -> SiteValues:
    """Sites of a pass: random, but experts are chosen by their scores. In layer 1, row 3 has a near tie for the last
    place: expert 6 has it, expert 5 nearly so."""
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


Harm = Callable[[SiteValues], None]


def off(
    name: str, layer: int, rows: int | slice | tuple[Any, ...] = slice(None), factor: float = 1.2
) -> Harm:
    def harm(seen: SiteValues) -> None:
        seen[name, layer][rows] *= factor

    return harm


def chosen(layer: int, row: int, *ids: float) -> Harm:
    """Another choice, with all that comes of it in this row."""

    def harm(seen: SiteValues) -> None:
        seen["moe_topk", layer][row, :, 0] = torch.tensor(ids)
        for name, where in seen.keys() - {("moe_topk", layer) for layer in range(len(BIASES))}:
            if where > layer or where < 0 or (name, where) == ("mlp_out", layer):
                seen[name, where][row] += 1.0

    return harm


def failing(*harms: Harm, phase: str = "decode") -> tuple[list[str], dict[str, Any]]:
    """The sites that do not pass when one path's sites are harmed, and all rows by site."""
    true, mine = passed_through(), passed_through()
    for harm in harms:
        harm(mine)
    rows = {row["site"]: row for row in compare(mine, true, BIASES, TOLERANCE, {"phase": phase})}
    return [site for site, row in rows.items() if not row["passed"]], rows


def test_a_site_that_is_off_or_not_written_is_found():
    for name, factor in (("mhc_ffn_res_mix", 1.2), ("post_attn", torch.nan)):
        for phase in ("prompt", "decode"):
            assert failing(off(name, 1, factor=factor), phase=phase)[0] == [name]


def test_one_row_that_is_off_is_found_where_its_choice_is_the_same():
    for name, layer in (("mlp_out", 1), ("post_attn", 2), ("logits", -1), ("moe_router_logits", 2)):
        found, rows = failing(off(name, layer, 7))
        assert found == [name] and rows[name]["share_parted"] == 0.0
    assert failing(off("moe_topk", 1, (7, slice(None), 1)))[0] == ["moe_topk"]  # the weights of a choice
    assert (
        failing(off("mlp_out", 1, 7), phase="prompt")[0] == []
    )  # one of 120 rows: an index may have had a tie
    assert failing(off("mlp_out", 1, slice(7, 9)), phase="prompt")[0] == ["mlp_out"]


def test_a_near_tie_may_fall_the_other_way():
    found, rows = failing(chosen(1, 3, 0, 5))
    assert found == []
    assert (
        0 < rows["moe_topk"]["margin_most"] < rows["moe_topk"]["margin"]
        and rows["moe_topk"]["wide_choices"] == 0
    )
    assert rows["logits"]["share_parted"] == 1 / ROWS and rows["post_attn"]["share_parted"] < 1 / ROWS


def test_a_parted_row_is_excused_from_its_choice_on_and_not_before():
    flip = chosen(1, 3, 0, 5)
    for name, layer in (("mlp_in", 1), ("moe_router_logits", 1), ("mhc_ffn_pre_mix", 1), ("mlp_out", 0)):
        assert failing(flip, off(name, layer, 3))[0] == [name]
    for name, layer in (("mlp_out", 1), ("pre_attn", 2), ("mhc_streams_final", 2), ("logits", -1)):
        assert failing(flip, off(name, layer, 3))[0] == []
        assert failing(flip, off(name, layer, 3, torch.nan))[0] == [
            name
        ]  # nobody is excused from being written


def test_a_choice_between_unequal_experts_is_found():
    for ids in (
        (0, 1),
        (0, 0),
        (0, 99),
        (0, torch.nan),
        (6, 5),
    ):  # in the row that has its tie between 6 and 5
        found, rows = failing(chosen(1, 3, *ids))
        assert found == ["moe_topk"] and rows["moe_topk"]["wide_choices"] == 1
    found, rows = failing(chosen(1, 3, 0, 5), chosen(2, 3, 0, 1))
    assert found == [] and rows["logits"]["share_parted"] == 1 / ROWS  # it had parted before


def test_a_choice_by_token_id_never_differs():
    ids = passed_through()["moe_topk", 0][5, :, 0].tolist()
    for other in set(range(EXPERTS)) - set(ids):
        found, rows = failing(chosen(0, 5, ids[0], other))
        assert found == ["moe_topk"] and rows["moe_topk"]["wide_choices"] == 1


def test_few_rows_may_part():
    def parting(count: int, phase: str) -> list[str]:
        true, tie = passed_through(), passed_through()
        for name in ("moe_router_logits", "moe_topk"):
            true[name, 1][:count] = tie[name, 1][3]
        mine = {key: tensor.clone() for key, tensor in true.items()}
        for row in range(count):
            chosen(1, row, 0, 5)(mine)
        rows = list(compare(mine, true, BIASES, TOLERANCE, {"phase": phase}))
        assert {row.get("wide_choices", 0) for row in rows} == {0}
        return [row["site"] for row in rows if not row["passed"]]

    for phase in ("prompt", "decode"):
        assert parting(5, phase) == []  # a tenth of 40, and one more
        assert {"moe_topk", "mlp_out", "logits"} <= set(parting(6, phase))


def test_a_row_that_is_alone_may_not_part():
    """Nothing would be left to compare."""
    true = {key: tensor[3:4] for key, tensor in passed_through().items()}
    mine = {key: tensor.clone() for key, tensor in true.items()}
    chosen(1, 0, 0, 5)(mine)
    found = [
        row["site"]
        for row in compare(mine, true, BIASES, TOLERANCE, {"phase": "decode"})
        if not row["passed"]
    ]
    assert "logits" in found and "post_attn" in found and len(found) > 5
