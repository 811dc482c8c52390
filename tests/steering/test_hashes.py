"""Steering hashes: equal for edits with equal effect, different otherwise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.hooks.digest import BLOCKS, IN_ORDER, DigestPart, combine, framed, number, short
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.steering.hashes import digest_steering_config, hash_steering_config
from birkhoff.steering.position_rows import PositionRows
from birkhoff.steering.vector_edits import Add, Clamp, Patch, Project

D, M, L = 4, 2, 6
SCHEMA = build_hook_schema(D, "float32", M)
V, W = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
WIDE = [*V, *W]


def digests(*edits, prompt=8, max_tokens=4, modules=None):
    plan = Plan(edits=tuple(edit.resolve(SCHEMA, L, modules or {}, prompt, max_tokens) for edit in edits))
    return plan.prefill_digest, plan.decode_digest


BASE = Add(V, "mlp_out", [1])
OTHERS = {
    "another vector": Add(W, "mlp_out", [1]),
    "another layer": Add(V, "mlp_out", [2]),
    "another hook": Add(V, "mlp_in", [1]),
    "another scale": Add(V, "mlp_out", [1], 2.0),
    "one more layer": Add(V, "mlp_out", [1, 2]),
    "norm_match": Add(V, "mlp_out", [1], norm_match=True),
    "some tokens": Add(V, "mlp_out", [1], where=[0, 8]),
    "others": Add(V, "mlp_out", [1], where=[1, 9]),
    "by id": Add(V, "mlp_out", [1], where={"prompt": {"token_ids": [7]}, "generated": {"token_ids": [3]}}),
    "by another id": Add(
        V, "mlp_out", [1], where={"prompt": {"token_ids": [8]}, "generated": {"token_ids": [4]}}
    ),
    "all but some": Add(V, "mlp_out", [1], where={"prompt": "all", "generated": "all", "exclude": [2, 9]}),
    "project": Project(V, "mlp_out", [1]),
    "clamp": Clamp(V, "mlp_out", [1], max=0.0),
    "clamp below": Clamp(V, "mlp_out", [1], min=0.0),
    "patch": Patch(V, "mlp_out", [1]),
    "zeros": Patch(0, "mlp_out", [1]),
    "patch rows": Patch(PositionRows({1: V, 9: W}), "mlp_out", [1]),
    "patch elsewhere": Patch(PositionRows({2: V, 10: W}), "mlp_out", [1]),
    "streams": Add(WIDE, "mhc_streams_pre_attn", [1]),
    "read": Add(WIDE, "mhc_streams_pre_attn", [1], path="read"),
    "carry": Add(WIDE, "mhc_streams_pre_attn", [1], path="carry"),
    "one stream": Add(V, "mhc_streams_pre_attn", [1], streams=[0]),
    "the other": Add(V, "mhc_streams_pre_attn", [1], streams=[1]),
    "by weight": Add(V, "mhc_streams_pre_attn", [1], streams="post_mix"),
}


def test_different_edits_have_different_hashes():
    prompt = [5, 6, 7, 8, 9, 8, 7, 6]
    by_name = {name: digests(edit, prompt=prompt) for name, edit in {"base": BASE, **OTHERS}.items()}
    for phase in (0, 1):
        seen = [pair[phase] for pair in by_name.values()]
        assert None not in seen and len(set(seen)) == len(seen) and {len(digest) for digest in seen} == {16}


def test_equal_edits_have_equal_hashes():
    same = digests(BASE)
    assert same == digests(Add(np.asarray(V), "mlp_out", {"ranges": [[1, 1]]}))
    assert same == digests(Add(torch.tensor(V, dtype=torch.float64), "mlp_out", [-5], where="all"))
    by_name = Add("calm", "mlp_out", [1])
    assert same == digests(by_name, modules={"calm": BASE.vector})  # by content, not by name
    assert same == digests(Add(V, "mlp_out", [1], path="carry"))  # a hook with one stream has one path
    assert digests(Add(V, "mlp_out", [1, 2])) == digests(Add(V, "mlp_out", [2]), Add(V, "mlp_out", [1]))
    both = Add([*V, *V], "mhc_streams_final", [5])
    assert digests(both) == digests(Add([*V, *V], "mhc_streams_final", [0], path="carry"))
    assert digests(Project(V, "mlp_out", [1])) == digests(
        Clamp([2 * v for v in V], "mlp_out", [1], min=0, max=0)
    )
    assert digests(Add([0.0] * D, "mlp_out", [1])) == digests(Add([-0.0] * D, "mlp_out", [1], -0.0 + 1))


def test_each_phase_has_its_hash():
    prefill_only, decode_only = (
        digests(Add(V, "mlp_out", [1], phase="prefill")),
        digests(Add(V, "mlp_out", [1], phase="decode")),
    )
    assert prefill_only == (digests(BASE)[0], None) and decode_only == (None, digests(BASE)[1])
    # An edit of both phases has one hash, so pages of generated tokens can be reused for a prompt.
    assert digests(BASE)[0] == digests(BASE)[1]
    assert digests(Add(V, "mlp_out", [1], where=[3])) != digests(BASE)
    assert digests(Add(V, "mlp_out", [1], where=[3]))[1] is None
    assert digests(Add(V, "mlp_out", [1], where={"generated": "all"}))[0] is None
    rows = Patch(PositionRows({3: V}), "mlp_out", [1]), Patch(PositionRows({9: V}), "mlp_out", [1])
    assert [[digest is None for digest in digests(edit)] for edit in rows] == [[False, True], [True, False]]
    assert digests() == (None, None)


def test_where_is_hashed_by_the_selected_positions():
    """So a cached prefix is shared exactly by requests that steer it in the same way."""

    def prefill(where, prompt):
        return digests(Add(V, "mlp_out", [1], where=where), prompt=prompt)[0]

    assert prefill([-1], 8) == prefill([7], 8) != prefill([-1], 9)
    assert (
        prefill("all_prompt", 8) == prefill("all_prompt", 20) == prefill({"prompt": {"window": [0, None]}}, 9)
    )
    assert prefill({"prompt": {"window": [2, None]}}, 8) == prefill({"prompt": {"window": [2, None]}}, 20)
    assert prefill({"prompt": {"window": [0, -2]}}, 8) != prefill({"prompt": {"window": [0, -2]}}, 20)
    by_id = {"prompt": {"token_ids": [7]}}
    assert prefill(by_id, [1, 7, 3]) == prefill([1], [1, 7, 3]) != prefill(by_id, [7, 7, 3])


def test_order_is_hashed_where_it_has_an_effect():
    one, other = Clamp(V, "mlp_out", [1], max=0.0), Clamp(W, "mlp_out", [1], min=1.0)
    assert digests(one, other) != digests(other, one)
    assert digests(BASE, one) == digests(one, BASE)  # additions run first, wherever they are listed
    patches = Patch(V, "mlp_out", [1], 0.5), Patch(W, "mlp_out", [1], 0.5)
    assert digests(*patches) != digests(*reversed(patches))


parts = st.lists(st.builds(DigestPart, st.sampled_from(BLOCKS), st.binary(max_size=6)), max_size=6)


@given(one=parts, other=parts)
def test_parts_do_not_collide_across_blocks_or_boundaries(one, other):
    def canonical(listed):
        blocks = {block: [part.content for part in listed if part.block == block] for block in BLOCKS}
        return {
            block: contents if block in IN_ORDER else sorted(contents) for block, contents in blocks.items()
        }

    assert (combine(one) == combine(other)) == (canonical(one) == canonical(other))


@given(one=st.lists(st.binary(max_size=4), max_size=4), other=st.lists(st.binary(max_size=4), max_size=4))
def test_framing_is_injective(one, other):
    assert (framed(*one) == framed(*other)) == (one == other)


def test_the_hash_of_wire_fields():
    assert (
        hash_steering_config() == 0 == hash_steering_config({}, None, [], [])
        and digest_steering_config() is None
    )
    vectors = {"mlp_out": {4: (V, 1.0), 6: (W, 2.0)}, "pre_attn": {0: (V, 1.0)}}
    reordered = {
        "pre_attn": {0: (np.asarray(V, np.float16), 1)},
        "mlp_out": {6: (W, 2.0), 4: (torch.tensor(V), 1.0)},
    }
    assert hash_steering_config(vectors) == hash_steering_config(reordered)
    hashes = [
        hash_steering_config(vectors),
        hash_steering_config({"mlp_out": {4: (V, 1.0)}}),
        hash_steering_config({"mlp_out": {4: (V, 2.0)}}),
        hash_steering_config({"mlp_out": {5: (V, 1.0)}}),
        hash_steering_config(module_ref=b"x"),
        hash_steering_config(sae_clamp_specs=[b"x"]),
        hash_steering_config(sae_full_reconstruction_specs=[b"x"]),
        hash_steering_config(vectors, b"x"),
        hash_steering_config(sae_clamp_specs=[b"x"], sae_full_reconstruction_specs=[b"x"]),
        hash_steering_config(sae_clamp_specs=[b"x", b"y"]),
        hash_steering_config(sae_clamp_specs=[b"xy"]),
    ]
    assert len(set(hashes)) == len(hashes) and all(0 < value < 2**63 for value in hashes)
    assert hash_steering_config(sae_clamp_specs=[b"x", b"y"]) == hash_steering_config(
        sae_clamp_specs=[b"y", b"x"]
    )


@pytest.mark.parametrize(("digest", "value"), [(None, 0), (b"\0" * 16, 1), (b"\xff" * 16, 2**63 - 1)])
def test_the_short_form_is_positive_and_zero_means_none(digest, value):
    assert short(digest) == value and number(-0.0) == number(0.0) != number(1.0) and number(None) == b""
