"""Feature edits as request fields: the fields of other servers, the native form, and serialisation."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import SaeError, SteeringError
from birkhoff.sae.clamps import XMax
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.sae_fields import (
    PARSERS,
    parse_clamp_specs,
    parse_global_specs,
    parse_intervention,
    parse_reconstruction_specs,
)
from birkhoff.steering.steering_fields import parse_steering
from tests.sizes import scaled

SPEC = {
    "module_name": "golden_gate",
    "phase": "decode",
    "clamps": {
        "mlp_out": {
            "20": [{"feature_idx": 34, "kind": "absolute", "value": 5.0, "only_if_active": False}],
            "21": [
                {"feature_idx": 3, "kind": "additive", "value": -1},
                {"feature_idx": "fog", "value": {"x_max": 2.0}},
            ],
        }
    },
}


def test_clamp_specs_equal_python_edits():
    (edit,) = parse_clamp_specs([SPEC])
    assert edit == SaeSet(
        "golden_gate",
        {
            ("mlp_out", 20): {34: 5.0},
            ("mlp_out", 21): {3: {"kind": "additive", "value": -1.0}, "fog": {"x_max": 2}},
        },
        phase="decode",
    )
    assert edit.clamps[1][1][1].low == XMax(2.0)


def test_reconstruction_specs_may_have_no_clamps():
    specs = [
        {"module_name": "gg_full", "phase": "both", "clamps": {}},
        {"module_name": "g", "error_term": "keep"},
    ]
    assert parse_reconstruction_specs(specs) == [SaeReconstruct("gg_full"), SaeReconstruct("g", error="keep")]


def test_interventions_equal_python_edits():
    body = {
        "interventions": [
            {"op": "sae", "module": "gg", "mode": "delta", "set": {"34": 5.0}, "where": {"generated": "all"}},
            {"op": "sae", "module": "gg_full", "mode": "reconstruct", "error_term": "keep"},
            {
                "op": "sae",
                "module": "gg",
                "set": {"7": 0.5},
                "kind": "multiply",
                "only_if_active": True,
                "phase": "prefill",
            },
        ]
    }
    assert [wired.edit for wired in parse_steering(body, {}, PARSERS)] == [
        SaeSet("gg", {34: 5.0}, where={"generated": "all"}),
        SaeReconstruct("gg_full", error="keep"),
        SaeSet("gg", {7: 0.5}, kind="multiply", only_if_active=True, phase="prefill"),
    ]
    fields = {"sae_clamp_specs": [SPEC], "sae_full_reconstruction_specs": [{"module_name": "f"}]}
    parsed = parse_steering(fields, {}, PARSERS)
    assert [type(wired.edit) for wired in parsed] == [SaeSet, SaeReconstruct]


def test_global_specs_are_grouped_by_phase():
    spec = {name: value for name, value in SPEC.items() if name != "phase"}
    edits = parse_global_specs({"prefill_specs": [spec], "decode_specs": [SPEC]})
    assert [edit.phase for edit in edits] == ["prefill", "decode"]
    with pytest.raises(SaeError, match=r"prefill_specs\[0\]\.phase: is 'decode' in a list of prefill specs"):
        parse_global_specs({"prefill_specs": [SPEC]})


amounts = st.floats(-1e6, 1e6, allow_nan=False) | st.builds(XMax, st.floats(-9, 9, allow_nan=False))
above = amounts.map(lambda amount: amount if isinstance(amount, XMax) else abs(amount) + 1)
clamps = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["absolute", "additive"]), "value": amounts, "only_if_active": st.booleans()}
    ),
    st.fixed_dictionaries({"kind": st.just("multiply"), "value": st.floats(-9, 9)}),
    st.fixed_dictionaries({"kind": st.sampled_from(["min", "max"]), "value": amounts}),
    st.fixed_dictionaries(
        {"kind": st.just("bound"), "value": st.fixed_dictionaries({"min": st.just(0.5), "max": above})}
    ),
)
names = st.integers(0, 2**31) | st.text(min_size=1).filter(lambda text: not text.isdecimal())
values = st.dictionaries(names, clamps, min_size=1, max_size=4)
sites = st.tuples(st.sampled_from(["mlp_out", "mhc_streams_final"]), st.integers(0, 60))
common = {
    "phase": st.sampled_from(["both", "prefill", "decode"]),
    "path": st.sampled_from(["both", "read", "carry"]),
    "where": st.sampled_from([None, "all_prompt", {"generated": {"window": [1, 4]}}, [0, 3]]),
    "streams": st.none() | st.lists(st.integers(0, 3), min_size=1),
}
edits = st.builds(
    SaeSet, st.just("gg"), values | st.dictionaries(sites, values, min_size=1, max_size=2), **common
) | (
    st.builds(
        SaeReconstruct,
        st.text(min_size=1),
        st.just({}) | values,
        error=st.sampled_from(["drop", "keep"]),
        **common,
    )
)


@given(edits)
@settings(max_examples=scaled(400, 80), deadline=None)
def test_json_round_trip(edit):
    back = type(edit).from_json(json.loads(json.dumps(edit.to_json())))
    assert back == edit and hash(back) == hash(edit) and back.to_json() == edit.to_json()


def test_from_json_refuses_another_mode():
    with pytest.raises(SaeError, match="mode is 'reconstruct'"):
        SaeSet.from_json(SaeReconstruct("x").to_json())


def changed(change):
    spec = copy.deepcopy(SPEC)
    change(spec, spec["clamps"]["mlp_out"]["20"][0])
    return [spec]


BAD_SPECS = [
    (lambda: {"module_name": "x"}, "sae_clamp_specs: is .* expected a list"),
    (lambda: ["x"], r"sae_clamp_specs\[0\]: is 'x', expected an object"),
    (lambda: changed(lambda s, e: s.update(module_name="")), r"sae_clamp_specs\[0\]\.module_name: is ''"),
    (lambda: changed(lambda s, e: s.pop("module_name")), r"module_name: is None"),
    (lambda: changed(lambda s, e: s.update(phase="later")), r"phase: is 'later', expected one of both"),
    (lambda: changed(lambda s, e: s.update(colour=1)), "unknown key 'colour'"),
    (lambda: changed(lambda s, e: s.update(clamps=[1])), r"clamps: is \[1\]"),
    (lambda: changed(lambda s, e: s.update(clamps={})), "names no feature"),
    (lambda: changed(lambda s, e: s.update(clamps={"mlp_up": {}})), "'mlp_up' is no hook"),
    (lambda: changed(lambda s, e: s.update(clamps={"mlp_out": []})), r"clamps\.mlp_out: is \[\]"),
    (lambda: changed(lambda s, e: s["clamps"]["mlp_out"].update({"-1": []})), "layer '-1'"),
    (lambda: changed(lambda s, e: s["clamps"]["mlp_out"].update({20: []})), "layer 20 is given twice"),
    (lambda: changed(lambda s, e: s["clamps"]["mlp_out"].update({"9": {}})), "expected a list of clamps"),
    (lambda: changed(lambda s, e: s["clamps"]["mlp_out"]["20"].append(7)), r"20\[1\]: is 7"),
    (lambda: changed(lambda s, e: s["clamps"]["mlp_out"]["20"].append(dict(e))), "feature 34 is given twice"),
    (lambda: changed(lambda s, e: e.pop("value")), "lacks value"),
    (lambda: changed(lambda s, e: e.pop("feature_idx")), "lacks feature_idx"),
    (lambda: changed(lambda s, e: e.update(feature_idx=True)), "feature_idx: is True"),
    (lambda: changed(lambda s, e: e.update(feature_idx=-2)), "feature_idx: is -2"),
    (lambda: changed(lambda s, e: e.update(value=float("inf"))), "value is inf, expected a finite number"),
    (lambda: changed(lambda s, e: e.update(value="5")), "value is '5'"),
    (lambda: changed(lambda s, e: e.update(value={"y_max": 2})), "value is {'y_max': 2}"),
    (lambda: changed(lambda s, e: e.update(kind="none")), "kind is 'none', expected one of absolute"),
    (lambda: changed(lambda s, e: e.update(only_if_active="yes")), "only_if_active is 'yes'"),
    (lambda: changed(lambda s, e: e.update(mode=1)), "unknown key 'mode'"),
    (lambda: changed(lambda s, e: s.update(where={"prompt": "some"})), r"sae_clamp_specs\[0\]\.where"),
]


@pytest.mark.parametrize(("make", "message"), BAD_SPECS, ids=[message[:40] for _, message in BAD_SPECS])
def test_bad_specs_are_refused_by_field(make, message):
    with pytest.raises(SaeError, match=message) as refused:
        parse_clamp_specs(make())
    assert refused.value.path.startswith("sae_clamp_specs")


BAD_INTERVENTIONS = [
    ({"op": "sae", "module": "x", "mode": "full"}, "mode: is 'full'"),
    ({"op": "sae", "module": "x", "set": [1]}, r"set: is \[1\]"),
    (
        {"op": "sae", "module": "x", "set": {"1": 2}, "set_at": {}, "mode": "delta", "error_term": "keep"},
        "keeps the error",
    ),
    ({"op": "sae", "module": "x", "set": {"1": 2}, "set_at": {"mlp_out": {"1": {"2": 3}}}}, "beside set"),
    ({"op": "sae", "module": "x", "mode": "reconstruct", "error_term": "lose"}, "error is 'lose'"),
    ({"op": "sae", "set": {"1": 2}}, "module is None"),
    ({"op": "sae", "module": "x", "vector": [1]}, "unknown key 'vector'"),
]


@pytest.mark.parametrize(
    ("raw", "message"), BAD_INTERVENTIONS, ids=[message[:40] for _, message in BAD_INTERVENTIONS]
)
def test_bad_interventions_are_refused_by_field(raw, message):
    with pytest.raises(SaeError, match=message):
        parse_intervention(raw, "interventions[0]")
    with pytest.raises(SteeringError, match=r"interventions\[0\]"):
        parse_steering({"interventions": [raw]}, {}, PARSERS)
