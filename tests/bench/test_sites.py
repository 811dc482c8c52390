"""The comparison of every site itself: two ways through one model agree, and a site that is off is found."""

from __future__ import annotations

import torch

from birkhoff.bench.sites import compare, compare_sites, every_site
from birkhoff.bench.synthetic import random_on_device
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


def test_a_site_that_is_off_or_not_written_is_found():
    torch.manual_seed(0)
    shapes = {"k2": (2, 2), "E": (8,), "m": (4,), "mm": (4, 4), "md": (4, 16), "d": (16,)}
    from birkhoff.hooks.sites import BY_NAME

    true = {key: torch.rand(5, *shapes[BY_NAME[key[0]].shape]) for key in every_site(SHORT)}
    true["logits", -1] = torch.rand(5, 9)
    for name, harm in (("mhc_ffn_res_mix", 1.2), ("post_attn", torch.nan)):
        mine = {key: tensor * harm if key[0] == name else tensor.clone() for key, tensor in true.items()}
        rows = list(compare(mine, true, 0.02, {}))
        assert [row["site"] for row in rows if not row["passed"]] == [name]
