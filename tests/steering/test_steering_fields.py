"""Steering as request fields: every form gives the same edits, and every error names its field."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.errors import SteeringError
from birkhoff.hooks.plan import Plan
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.steering.position_rows import PositionRows
from birkhoff.steering.steering_fields import COMPATIBLE, NATIVE, intervention, parse_steering
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_edits import Add, Clamp, Patch, Project
from birkhoff.steering.vector_file import SteeringVector

D, M, L = 4, 2, 6
SCHEMA = build_hook_schema(D, "float32", M)
NUMBERS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


def packed(rows, layers, dtype="float32", **more):
    array = np.asarray(rows, NUMBERS[dtype])
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": dtype, "shape": list(array.shape), "layer_indices": layers, "data": data, **more}


def edits_of(body, modules=None, **more):
    return [wired.edit for wired in parse_steering(body, modules or {}, **more)]


def digests(edits, modules=None):
    """The prefill and decode digests of the edits for a prompt of 8 tokens."""
    plan = Plan(edits=tuple(edit.resolve(SCHEMA, L, modules or {}, 8, 4) for edit in edits))
    return plan.prefill_digest, plan.decode_digest


halves = st.integers(-64, 64).map(lambda n: n / 8)  # exactly representable in float16
layer_rows = st.dictionaries(st.integers(0, L - 1), st.lists(halves, min_size=D, max_size=D), min_size=1)


@given(
    vectors=st.dictionaries(st.sampled_from(["mlp_out", "pre_attn", "post_attn"]), layer_rows, min_size=1),
    dtype=st.sampled_from(sorted(NUMBERS)),
    scale=st.sampled_from([1.0, 2.0, -0.25]),
    seed=st.randoms(),
)
def test_t_cache_2_hashes_do_not_depend_on_order_or_form(vectors, dtype, scale, seed):
    """Lists, objects, packed blobs and Python edits, in any order of hooks and layers, have the same hashes."""

    def shuffled(items):
        items = list(items)
        seed.shuffle(items)
        return items

    listed = {
        hook: {str(k): {"vector": v, "scale": scale} for k, v in rows.items()}
        for hook, rows in vectors.items()
    }
    mixed = {
        hook: {k: {"scale": scale, "vector": v} for k, v in shuffled(rows.items())}
        for hook, rows in shuffled(vectors.items())
    }
    blobs = {}
    for hook, rows in shuffled(vectors.items()):
        order = shuffled(rows)
        blobs[hook] = packed([rows[k] for k in order], order, dtype, scales=[scale] * len(order))
    python = [
        Add(v, hook, [k], scale)
        for hook, rows in shuffled(vectors.items())
        for k, v in shuffled(rows.items())
    ]
    forms = [digests(edits_of({"steering_vectors": form})) for form in (listed, mixed, blobs)]
    assert forms[0] == forms[1] == forms[2] == digests(python)
    prompt_only = digests(edits_of({"prefill_steering_vectors": blobs}))
    assert prompt_only == (forms[0][0], None)  # the prefill hash is that of both phases
    assert digests(edits_of({"decode_steering_vectors": listed})) == (None, forms[0][1])


def test_tiers_names_and_paths_of_the_compatible_fields():
    calm = SteeringVector({3: [1.0] * (M * D)}, "add", "mhc_streams_pre_attn")
    body = {
        "steering_name": {"name": "calm", "scale": 2.0},
        "steering_vectors": {"mhc_streams_pre_attn": {"1": [1.0] * (M * D), "-1": [2.0] * (M * D)}},
        "prefill_steering_vectors": {
            "mlp_out": packed([[1.0] * D, [2.0] * D], [0, 4], "float16", scales=[1.0, 3.0])
        },
        "decode_steering_vectors": {"mhc_streams_post_mlp": {"2": {"vector": [1.0] * D, "streams": [1]}}},
        "max_tokens": 5,
    }
    assert edits_of(body, {"calm": calm}) == [
        Add("calm", scale=2.0, path="carry"),
        Add([2.0] * (M * D), "mhc_streams_pre_attn", [-1], path="carry"),
        Add([1.0] * (M * D), "mhc_streams_pre_attn", [1], path="carry"),
        Add([1.0] * D, "mlp_out", [0], phase="prefill", path="carry"),
        Add([2.0] * D, "mlp_out", [4], 3.0, phase="prefill", path="carry"),
        Add([1.0] * D, "mhc_streams_post_mlp", [2], streams=[1], phase="decode", path="both"),
    ]
    many = edits_of({"steering_vectors": {"mlp_out": {str(k): [k + 1.0] * D for k in range(L)}}})
    # one edit for all layers of equal scale
    assert len(many) == 1 and many[0].vector.at(4) == Vector([5.0] * D)
    zero = edits_of({"steering_vectors": {"mlp_out": {"0": [0.0] * D, "1": [1.0] * D}}})
    assert [edit.layers.expand(L) for edit in zero] == [(0,), (1,)]
    project = SteeringVector({3: [1.0] * D}, "project", "mlp_out")
    assert edits_of({"steering_name": "no"}, {"no": project}) == [Project("no", path="carry")]


def test_carry_at_the_final_site_means_both():
    (edit,) = edits_of({"steering_vectors": {"mhc_streams_final": {"0": [1.0] * (M * D)}}})
    assert edit.resolve(SCHEMA, L, {}, 4, 4).sites["mhc_streams_final", L - 1].path == "both"


def test_the_native_form():
    body = {
        NATIVE: [
            {
                "op": "add",
                "at": {"hook": "mhc_streams_pre_attn", "layers": [2]},
                "vector": "@calm",
                "streams": [1],
                "scale": 2.0,
                "where": {"generated": "all"},
                "path": "both",
            },
            {"op": "clamp", "at": {"hook": "mlp_out", "layers": [3]}, "vector": "@refusal", "max": 0.0},
            {
                "op": "clamp",
                "at": {"hook": "mlp_out", "layers": "all"},
                "vector": [1.0] * D,
                "value": 0.5,
                "strength": 0.5,
            },
            {"op": "project", "vector": packed([1.0] * D, None), "strength": -2.0, "phase": "decode"},
            {"op": "patch", "at": {"hook": "mlp_out", "layers": [1]}, "source": "zeros", "where": [0, -1]},
            {
                "op": "patch",
                "at": {"hook": "mlp_out", "layers": [1]},
                "source": {"positions": [3, 1], "rows": [[1.0] * D, [2.0] * D]},
                "scale": 0.5,
            },
            {"op": "sae", "module": "gg"},
            {"op": "add", "vector": [1.0] * D, "norm_match": True},
        ]
    }
    body[NATIVE][3]["vector"].pop("layer_indices")
    parsed = edits_of(body, features={"sae": lambda raw, path: [(raw["module"], path)]})
    assert parsed == [
        Add("calm", "mhc_streams_pre_attn", [2], 2.0, [1], {"generated": "all"}),
        Clamp("refusal", "mlp_out", [3], max=0.0),
        Clamp([1.0] * D, "mlp_out", "all", 0.5, min=0.5, max=0.5),
        Project([1.0] * D, scale=-2.0, phase="decode"),
        Patch(0, "mlp_out", [1], where=[0, -1]),
        Patch(PositionRows({1: [2.0] * D, 3: [1.0] * D}), "mlp_out", [1], 0.5),
        ("gg", "interventions[6]"),
        Add([1.0] * D, norm_match=True),
    ]


numbers = st.floats(-8, 8, width=32)
rows = st.lists(numbers, min_size=1, max_size=3)
by_layer = st.dictionaries(st.integers(0, 9), st.just([1.0, 2.0]), min_size=1)
sources = st.one_of(
    st.text(st.characters(categories=("L", "N")), min_size=1),
    rows,
    by_layer.map(lambda rows_by_layer: SteeringVector(rows_by_layer, "add", "mlp_in")),
)
by_position = st.dictionaries(st.integers(0, 9), st.just([1.0, 0.5]), min_size=1).map(PositionRows)
patched = st.one_of(sources, st.just(0), by_position)
common = {
    "hook": st.none() | st.sampled_from(["mlp_out", "mhc_streams_pre_attn"]),
    "layers": st.none()
    | st.just("all")
    | st.lists(st.integers(-9, 9), min_size=1)
    | st.just({"every": 2, "from": 1}),
    "streams": st.none() | st.just("all") | st.lists(st.integers(0, 5), min_size=1),
    "where": st.none()
    | st.just("all_prompt")
    | st.lists(st.integers(-4, 9), min_size=1)
    | st.just({"generated": {"window": [1, None]}, "exclude": {"token_ids": [3]}}),
    "phase": st.sampled_from(["both", "prefill", "decode"]),
    "path": st.sampled_from(["both", "read", "carry"]),
}
any_edit = st.one_of(
    st.builds(Add, sources, scale=numbers, norm_match=st.booleans(), **common),
    st.builds(Project, sources, scale=numbers, **common),
    st.builds(
        Clamp, sources, scale=st.floats(0, 1), min=st.just(-1.0) | st.none(), max=numbers.map(abs), **common
    ),
    st.builds(Patch, patched, scale=numbers, **common),
)


@given(edit=any_edit)
def test_edits_round_trip_through_both_forms(edit):
    """`to_json` and the entry of `interventions` are both inverted by their parsers, hashes included."""
    again = type(edit).from_json(edit.to_json())
    assert again == edit and hash(again) == hash(edit)
    (wired,) = edits_of({NATIVE: [intervention(edit)]})
    assert wired == edit and hash(wired) == hash(edit) and intervention(wired) == intervention(edit)


V = [1.0] * D
AT = {"hook": "mlp_out", "layers": [0]}
BAD = {  # error -> (body, path of the field, part of the message)
    "both kinds": ({NATIVE: [], "steering_vectors": {}}, NATIVE, "beside steering_vectors"),
    "a number for vectors": ({"steering_vectors": 3}, "steering_vectors", "from hooks to vectors"),
    "a number for a hook": ({"steering_vectors": {"mlp_out": 3}}, "steering_vectors.mlp_out", "packed blob"),
    "no layer": ({"steering_vectors": {"mlp_out": {}}}, "steering_vectors.mlp_out", "no layer"),
    "a word for a layer": (
        {"steering_vectors": {"mlp_out": {"four": V}}},
        "steering_vectors.mlp_out",
        "'four'",
    ),
    "a layer twice": ({"steering_vectors": {"mlp_out": {"4": V, 4: V}}}, "steering_vectors.mlp_out", "twice"),
    "a text for numbers": (
        {"steering_vectors": {"mlp_out": {"4": "1 2"}}},
        "steering_vectors.mlp_out.4",
        "list",
    ),
    "words for numbers": (
        {"steering_vectors": {"mlp_out": {"4": ["a"]}}},
        "steering_vectors.mlp_out.4",
        "numbers",
    ),
    "texts of numbers": (
        {"steering_vectors": {"mlp_out": {"4": ["1"] * D}}},
        "steering_vectors.mlp_out.4",
        "'1'",
    ),
    "truth values": (
        {"steering_vectors": {"mlp_out": {"4": [True] * D}}},
        "steering_vectors.mlp_out.4",
        "True",
    ),
    "uneven": (
        {"steering_vectors": {"mlp_out": {"4": [V, [1.0]]}}},
        "steering_vectors.mlp_out.4",
        r"\[1.0\]",
    ),
    "not finite": (
        {"steering_vectors": {"mlp_out": {"4": [1e300, *V]}}},
        "steering_vectors.mlp_out.4",
        "finite",
    ),
    "a table": ({"steering_vectors": {"mlp_out": {"4": [V, V]}}}, "steering_vectors.mlp_out.4", "shape"),
    "unknown key": (
        {"steering_vectors": {"mlp_out": {"4": {"vector": V, "weight": 1}}}},
        "steering_vectors.mlp_out.4",
        "'weight'",
    ),
    "no vector": (
        {"steering_vectors": {"mlp_out": {"4": {"scale": 1}}}},
        "steering_vectors.mlp_out.4",
        "no vector",
    ),
    "scale": (
        {"steering_vectors": {"mlp_out": {"4": {"vector": V, "scale": "x"}}}},
        "steering_vectors.mlp_out.4.scale",
        "finite number",
    ),
    "a scale beyond floats": (
        {"steering_vectors": {"mlp_out": {"4": {"vector": V, "scale": 10**400}}}},
        "steering_vectors.mlp_out.4.scale",
        "finite number",
    ),
    "streams": (
        {"steering_vectors": {"mlp_out": {"4": {"vector": V, "streams": [-1]}}}},
        "steering_vectors.mlp_out",
        "streams",
    ),
    "once": (
        {"steering_vectors": {"mhc_streams_final": {"4": V, "5": V}}},
        "steering_vectors.mhc_streams_final",
        "once per model",
    ),
    "base64": (
        {"decode_steering_vectors": {"mlp_out": {**packed([V], [4]), "data": "%%%"}}},
        "decode_steering_vectors.mlp_out.data",
        "not base64",
    ),
    "size": (
        {"decode_steering_vectors": {"mlp_out": {**packed([V], [4]), "shape": [1, 5]}}},
        "decode_steering_vectors.mlp_out.data",
        "16 bytes.*20",
    ),
    "dtype": (
        {"decode_steering_vectors": {"mlp_out": {**packed([V], [4]), "dtype": "int8"}}},
        "decode_steering_vectors.mlp_out.dtype",
        "float16",
    ),
    "shape": (
        {"decode_steering_vectors": {"mlp_out": {**packed([V], [4]), "shape": [4]}}},
        "decode_steering_vectors.mlp_out.shape",
        "layers, width",
    ),
    "empty shape": (
        {"decode_steering_vectors": {"mlp_out": {**packed([V], [4]), "shape": [1, 0]}}},
        "decode_steering_vectors.mlp_out.shape[1]",
        "positive",
    ),
    "layer count": (
        {"decode_steering_vectors": {"mlp_out": packed([V], [4, 5])}},
        "decode_steering_vectors.mlp_out.layer_indices",
        "2 entries",
    ),
    "layer index": (
        {"decode_steering_vectors": {"mlp_out": packed([V], ["4"])}},
        "decode_steering_vectors.mlp_out.layer_indices[0]",
        "expected a layer",
    ),
    "packed twice": (
        {"decode_steering_vectors": {"mlp_out": packed([V, V], [4, 4])}},
        "decode_steering_vectors.mlp_out",
        "twice",
    ),
    "scale count": (
        {"decode_steering_vectors": {"mlp_out": packed([V], [4], scales=[1, 2])}},
        "decode_steering_vectors.mlp_out.scales",
        "2 entries",
    ),
    "packed key": (
        {"decode_steering_vectors": {"mlp_out": packed([V], [4], order="F")}},
        "decode_steering_vectors.mlp_out",
        "'order'",
    ),
    "packed without data": (
        {"decode_steering_vectors": {"mlp_out": {"dtype": "float32"}}},
        "decode_steering_vectors.mlp_out",
        "no shape",
    ),
    "packed infinity": (
        {"decode_steering_vectors": {"mlp_out": packed([[np.inf] * D], [4], "float16")}},
        "decode_steering_vectors.mlp_out.data[0]",
        "finite",
    ),
    "unknown module": (
        {"steering_name": "nobody"},
        "steering_name",
        "no module named 'nobody'; registered: held",
    ),
    "no name": ({"steering_name": 3}, "steering_name", "name of a module"),
    "clamp by name": ({"steering_name": "held"}, "steering_name", "bounds"),
    "name key": ({"steering_name": {"name": "held", "phase": "both"}}, "steering_name", "'phase'"),
    "features": ({"sae_clamp_specs": []}, "sae_clamp_specs", "not served"),
    "feature op": ({NATIVE: [{"op": "sae"}]}, "interventions[0]", "not served"),
    "not a list": ({NATIVE: {"op": "add"}}, NATIVE, "list of objects"),
    "not an object": ({NATIVE: ["add"]}, "interventions[0]", "object with 'op'"),
    "op": (
        {NATIVE: [{"op": "boost"}]},
        "interventions[0].op",
        "add, project, clamp, patch, scale, attention, experts, sae",
    ),
    "key": ({NATIVE: [{"op": "add", "vector": V, "value": 1}]}, "interventions[0]", "'value'"),
    "at": ({NATIVE: [{"op": "add", "vector": V, "at": "mlp_out"}]}, "interventions[0].at", "hook"),
    "at key": ({NATIVE: [{"op": "add", "vector": V, "at": {"layer": 3}}]}, "interventions[0].at", "'layer'"),
    "layers": (
        {NATIVE: [{"op": "add", "vector": V, "at": {"hook": "mlp_out", "layers": "some"}}]},
        "interventions[0].at.layers",
        "'some'",
    ),
    "where": ({NATIVE: [{"op": "add", "vector": V, "where": "there"}]}, "interventions[0].where", "'there'"),
    "no numbers": ({NATIVE: [{"op": "add"}]}, "interventions[0].vector", "None"),
    "bare name": ({NATIVE: [{"op": "add", "vector": "calm"}]}, "interventions[0].vector", "'@'"),
    "no number": ({NATIVE: [{"op": "add", "vector": [None]}]}, "interventions[0].vector", "numbers"),
    "phase": ({NATIVE: [{"op": "add", "vector": V, "phase": "late"}]}, "interventions[0]", "phase"),
    "path": ({NATIVE: [{"op": "add", "vector": V, "path": "around"}]}, "interventions[0]", "path"),
    "norm_match": (
        {NATIVE: [{"op": "add", "vector": V, "norm_match": 1}]},
        "interventions[0].norm_match",
        "true",
    ),
    "bounds": ({NATIVE: [{"op": "clamp", "vector": V, "min": 2, "max": 1}]}, "interventions[0]", "Swap"),
    "no bounds": ({NATIVE: [{"op": "clamp", "vector": V}]}, "interventions[0]", "neither"),
    "value and max": (
        {NATIVE: [{"op": "clamp", "vector": V, "value": 2, "max": 1}]},
        "interventions[0].value",
        "both",
    ),
    "strength and scale": (
        {NATIVE: [{"op": "project", "vector": V, "strength": 2, "scale": 1}]},
        "interventions[0].strength",
        "the same",
    ),
    "two sources": (
        {NATIVE: [{"op": "patch", "at": AT, "vector": V, "source": V}]},
        "interventions[0].vector",
        "beside source",
    ),
    "positions": (
        {NATIVE: [{"op": "patch", "at": AT, "source": {"positions": [1], "rows": []}}]},
        "interventions[0].source",
        "as many",
    ),
    "a position twice": (
        {NATIVE: [{"op": "patch", "at": AT, "source": {"positions": [1, 1], "rows": [V, V]}}]},
        "interventions[0].source",
        "once",
    ),
    "run": (
        {NATIVE: [{"op": "patch", "at": AT, "source": {"run": "clean"}}]},
        "interventions[0].source",
        "there is kept",
    ),
    "run without rows": (
        {NATIVE: [{"op": "patch", "at": {**AT, "hook": "mlp_in"}, "source": {"run": "kept"}}]},
        "interventions[0].source",
        r"mlp_in\[0\]; it has mlp_out\[0\]",
    ),
}


class CapturedRows:
    tensor, positions = torch.ones(2, D), (3, 5)


RUNS = {"kept": {("mlp_out", 0): CapturedRows}}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_their_field(name):
    body, path, words = BAD[name]
    module = SteeringVector({0: V}, "clamp", "mlp_out")
    with pytest.raises(SteeringError, match=words) as refused:
        parse_steering(body, {"held": module}, runs=RUNS)
    assert refused.value.path == path and str(refused.value).startswith(f"{path}: ")


def test_every_error_has_a_distinct_message():
    messages = {}
    for name, (body, _, _) in BAD.items():
        try:
            parse_steering(body, {"held": SteeringVector({0: V}, "clamp", "mlp_out")}, runs=RUNS)
        except SteeringError as error:
            messages[name] = str(error)
    assert len(messages) == len(BAD) and len(set(messages.values())) == len(BAD)


def test_captured_runs_are_sources():
    (edit,) = edits_of({NATIVE: [{"op": "patch", "at": AT, "source": {"run": "kept"}}]}, runs=RUNS)
    assert edit == Patch(PositionRows({3: V, 5: V}), "mlp_out", [0]) == Patch(CapturedRows, "mlp_out", [0])
    assert edit.resolve(SCHEMA, L, {}, 8, 4).offsets(2, [9] * 6, 8) == [1, 3]


def test_other_fields_are_ignored():
    assert edits_of({"messages": [], "steering_vectors": None, NATIVE: None}) == []
    assert set(COMPATIBLE) >= {"steering_name", "sae_clamp_specs"}
