"""The site table. Files and clients depend on its ids, names and flags, so the expected values are repeated here."""

from __future__ import annotations

import dataclasses

import pytest

from birkhoff.hooks import sites

# id, name, row shape, stored in float32, may be edited (spec: interpretability 1.1)
EXPECTED = [
    (0, "pre_attn", "d", False, True),
    (1, "post_attn", "d", False, True),
    (2, "post_mlp", "d", False, True),
    (3, "mlp_in", "d", False, True),
    (4, "mlp_out", "d", False, True),
    (5, "mhc_streams_pre_attn", "md", False, True),
    (6, "mhc_streams_pre_mlp", "md", False, True),
    (7, "mhc_streams_final", "md", False, True),
    (8, "mhc_attn_post_mix", "m", True, False),
    (9, "mhc_ffn_post_mix", "m", True, False),
    (10, "mhc_attn_res_mix", "mm", True, False),
    (11, "mhc_ffn_res_mix", "mm", True, False),
    (12, "mhc_attn_pre_mix", "m", True, False),
    (13, "mhc_ffn_pre_mix", "m", True, False),
    (14, "mhc_head_mix", "m", True, False),
    (15, "final_hidden", "d", False, True),
    (16, "moe_router_logits", "E", True, False),
    (17, "moe_topk", "k2", True, False),
]


def test_ids_names_and_flags_are_stable():
    table = [(s.id, s.name, s.shape, s.dtype == "float32", s.edit) for s in sites.SITES]
    assert table[: len(EXPECTED)] == EXPECTED  # later sites may only append
    assert [s.id for s in sites.SITES] == list(range(len(sites.SITES)))


def test_by_name_and_constants_cover_the_table():
    assert all(sites.BY_NAME[s.name] is s for s in sites.SITES) and len(sites.BY_NAME) == len(sites.SITES)
    constants = {value.name for value in vars(sites).values() if isinstance(value, sites.Site)}
    assert constants == set(sites.BY_NAME)


def test_once_plain_and_absent_sites():
    assert [s.name for s in sites.SITES if s.once] == ["mhc_streams_final", "mhc_head_mix", "final_hidden"]
    assert [s.name for s in sites.SITES if s.plain] == ["pre_attn", "post_attn", "post_mlp"]
    assert [s.name for s in sites.SITES if s.absent] == ["post_mlp", "attn_out", "attn_z"]


def test_mixers_take_their_own_edits():
    assert {s.name: s.ops for s in sites.SITES if s.name.endswith("_mix")} == dict.fromkeys(
        [s.name for s in sites.SITES if s.shape in ("m", "mm")], ("clamp", "patch", "scale")
    )
    assert all(not (s.edit and s.ops) and s.editable == (s.edit or bool(s.ops)) for s in sites.SITES)


def test_sites_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sites.PRE_ATTN.name = "other"
