"""Captures as plain data, and captures resolved against a model: sites, rows, storage, cost."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.capture.spec.request import Capture, capture_hash, resolve_capture_request
from birkhoff.capture.spec.validation import FIELDS
from birkhoff.errors import CaptureValidationError, SiteError
from tests.capture.requests import DISK, FACTS, FILED, MAX_TOKENS, PLAIN, PROMPT, V4, D, L, M, part, refused
from tests.sizes import scaled
from tests.test_floors import PACKAGE


def test_aliases_resolve_and_shared_tensors_are_kept_once():
    capture = Capture(
        {"mhc_streams_post_mlp": [0, -1], "mhc_streams_pre_attn": [1], "mhc_streams_final": "all"}
    )
    resolved = capture.resolve(V4, L, PROMPT, MAX_TOKENS)
    assert resolved.addresses == (("mhc_streams_pre_attn", 1), ("mhc_streams_final", L - 1))
    assert resolved.address("mhc_streams_post_mlp", 0) == ("mhc_streams_pre_attn", 1)
    assert resolved.address("mhc_streams_post_mlp", -1) == ("mhc_streams_final", L - 1)
    assert resolved.address("mhc_streams_pre_attn", 1) == ("mhc_streams_pre_attn", 1)
    only = Capture({"mhc_streams_post_mlp": [2]}).resolve(V4, L, PROMPT, MAX_TOKENS)
    assert only.address("mhc_streams_pre_attn", 3) == only.address("mhc_streams_post_mlp", 2 - L)
    with pytest.raises(
        SiteError, match=r"'mlp_out'\[2\] was not captured. This capture holds .*mhc_streams_post_mlp"
    ):
        only.address("mlp_out", 2)
    plain = Capture({"post_block": [0, 1]}).resolve(PLAIN, 2, PROMPT, MAX_TOKENS)
    assert plain.addresses == (("post_mlp", 0), ("post_mlp", 1))
    with pytest.raises(
        CaptureValidationError, match=r"^capture\.memory\.hooks\.mlp_in: .*post_attn, post_mlp, pre_attn"
    ):
        Capture({"mlp_in": [0]}).resolve(PLAIN, 2, PROMPT, MAX_TOKENS)


def test_addresses_are_in_order_of_layer_and_hook_id():
    resolved = Capture({"mlp_out": [1, 0], "pre_attn": [0, 1]}).resolve(V4, L, PROMPT, MAX_TOKENS)
    assert resolved.addresses == (("pre_attn", 0), ("mlp_out", 0), ("pre_attn", 1), ("mlp_out", 1))


def test_how_rows_are_stored_and_what_they_cost():
    def resolved(hooks, positions="all", **fields):
        return Capture(hooks, positions, **fields).resolve(
            V4, L, PROMPT, MAX_TOKENS, projections=FACTS.projections
        )

    rows = len(PROMPT) + MAX_TOKENS - 1  # the last token is never run
    one = resolved({"mhc_streams_pre_attn": [0, 1], "mhc_ffn_res_mix": [2]})
    assert (one.rows["mhc_streams_pre_attn"].shape, one.rows["mhc_streams_pre_attn"].dtype) == (
        (M, D),
        "bfloat16",
    )
    assert (one.rows["mhc_ffn_res_mix"].shape, one.rows["mhc_ffn_res_mix"].dtype) == ((M, M), "float32")
    assert one.estimate.bytes == rows * (2 * M * D * 2 + M * M * 4)
    assert (one.estimate.rows, one.estimate.sites, one.estimate.exact) == (3 * rows, 3, True)
    assert (one.estimate.prompt_rows, one.estimate.generated_rows) == (len(PROMPT), MAX_TOKENS - 1)
    assert json.loads(json.dumps(one.estimate.to_json()))["bytes_by_hook"] == {
        "mhc_streams_pre_attn": rows * 2 * M * D * 2,
        "mhc_ffn_res_mix": rows * M * M * 4,
    }

    expected = {
        "mhc_streams_pre_attn": (2, D),
        "mhc_attn_post_mix": (2,),
        "mlp_out": (D,),
        "mhc_attn_res_mix": (M, M),
    }
    cut = resolved({hook: [0] for hook in expected}, streams=[3, 1])
    assert {hook: row.shape for hook, row in cut.rows.items()} == expected

    fp8 = resolved({"mlp_out": [0]}, dtype="fp8_e4m3")
    assert fp8.rows["mlp_out"].dtype == "fp8_e4m3" and fp8.estimate.bytes == rows * (D + 4)
    scores = resolved({"mhc_streams_pre_attn": [0]}, project="wide")
    assert (
        scores.rows["mhc_streams_pre_attn"]
        == resolved({"mhc_streams_final": []}, project="wide").rows["mhc_streams_final"]
    )
    assert scores.estimate.bytes == rows * 3 * 4 and scores.rows["mhc_streams_pre_attn"].dtype == "float32"
    pair = resolved({"mhc_streams_pre_attn": [0]}, project="pair", streams=[0, 2], dtype="bf16")
    assert pair.estimate.bytes == rows * 1 * 2

    for reduce, dtype in (
        ("mean", "float32"),
        ("sum", "float32"),
        ("last", "bfloat16"),
        ("max_norm", "bfloat16"),
    ):
        single = resolved({"mlp_out": [0, 5]}, reduce=reduce)
        assert single.rows["mlp_out"].dtype == dtype and single.estimate.rows == 2
        assert single.estimate.bytes == 2 * D * (4 if dtype == "float32" else 2)


def test_estimates_by_position():
    def cost(positions, prompt=tuple(PROMPT)):
        return Capture({"mlp_out": [0]}, positions).resolve(V4, L, prompt, MAX_TOKENS).estimate

    assert (cost("last_prompt").rows, cost("last_prompt").lowest_prompt_position) == (1, 3)
    assert (cost("all_generated").rows, cost("all_generated").lowest_prompt_position) == (4, None)
    assert (cost([0, 8]).rows, cost([0, 8]).exact) == (1, True)  # position 8 is sampled, never run
    by_id = cost({"prompt": {"token_ids": [7]}, "generated": {"token_ids": [7]}})
    assert (by_id.prompt_rows, by_id.generated_rows, by_id.exact) == (2, 4, False)
    assert (cost({"prompt": {"token_ids": [7]}}).rows, cost({"prompt": {"token_ids": [7]}}).exact) == (
        2,
        True,
    )
    assert (cost({"prompt": {"token_ids": [7]}}, 4).rows, cost({"prompt": {"token_ids": [7]}}, 4).exact) == (
        4,
        False,
    )


def test_the_cap_is_one_for_all_consumers_and_exact_to_the_byte():
    each = Capture({"mlp_out": [1]}).resolve(V4, L, PROMPT, MAX_TOKENS).estimate.bytes
    two = {"memory": part(), "disk": part(**FILED)}
    enough = dataclasses.replace(FACTS, max_request_bytes=2 * each)
    assert list(resolve_capture_request(two, enough)) == ["memory", "disk"]
    error = refused(two, dataclasses.replace(FACTS, max_request_bytes=2 * each - 1))
    assert (error.rule, error.path) == ("V11", DISK) and f"{each} of them for other consumers" in str(error)
    inline = dataclasses.replace(FACTS, max_inline_bytes=each - 1)
    assert refused({"memory": part()}, inline).rule == "V11"
    assert resolve_capture_request({"memory": part(**{"return": "handle"})}, inline)
    assert resolve_capture_request({"disk": part(**FILED)}, inline)  # that consumer returns files by default


def test_the_return_field_defaults_to_what_the_consumer_offers():
    resolved = resolve_capture_request({"memory": part(), "disk": part(**FILED)}, FACTS)
    assert (resolved["memory"].returns, resolved["disk"].returns) == ("inline", "file")
    resolved = resolve_capture_request({"disk": part(**FILED, **{"return": "handle"})}, FACTS)
    assert resolved["disk"].returns == "handle"


def test_a_typed_capture_is_resolved_unchanged():
    capture = Capture({"mlp_out": [0]}, positions="last_prompt", request_id="a", tag="b")
    typed = resolve_capture_request({"disk": capture}, FACTS)["disk"]
    wire = resolve_capture_request({"disk": capture.to_json()}, FACTS)["disk"]
    assert typed.capture is capture and wire.capture == capture
    assert (typed.addresses, typed.estimate, typed.rows) == (wire.addresses, wire.estimate, wire.rows)


def test_python_and_json_forms_are_equal():
    """The same fields, as JSON with and without a model, and as Python arguments."""
    raw = {
        "hooks": {"mhc_streams_pre_attn": [0, -1]},
        "positions": [0, -1],
        "capture_point": "after",
        "reduce": "mean",
        "dtype": "fp32",
        "streams": [1, 0],
        "return": "handle",
        "layout": "packed",
        "request_id": "a",
        "tag": "b",
        "accepted_only": True,
        "project": "pair",
    }
    wire = resolve_capture_request({"disk": raw}, FACTS)["disk"].capture
    keywords = {name: value for name, value in raw.items() if name not in ("hooks", "positions", "return")}
    python = Capture(raw["hooks"], raw["positions"], returns="handle", **keywords)
    assert wire == python == Capture.from_json(raw) == Capture(**raw)
    assert (
        python.streams == (0, 1)
        and python.returns == "handle"
        and python.hooks == {"mhc_streams_pre_attn": wire.hooks["mhc_streams_pre_attn"]}
    )
    assert python.to_json() == raw | {
        "hooks": {"mhc_streams_pre_attn": [-1, 0]},
        "positions": [-1, 0],
        "streams": [0, 1],
    }


def test_errors_that_need_no_model_are_raised_at_construction():
    for arguments, rule in (
        (({},), "V3"),
        (({"nope": [1]},), "V4"),
        (({"mlp_out": "some"},), "V5"),
        (({"mlp_out": [True]},), "V6"),
        (({"mlp_out": []},), "V7"),
        (({"mlp_out": [1]}, "first"), "V8"),
        ((["mlp_out"],), "V3"),
    ):
        with pytest.raises(CaptureValidationError) as caught:
            Capture(*arguments)
        assert caught.value.rule == rule and caught.value.path.startswith("capture")
    for fields, rule in (({"layout": "zip"}, "V10"), ({"tag": ""}, "V2"), ({"project": 3}, "V12")):
        with pytest.raises(CaptureValidationError) as caught:
            Capture({"mlp_out": [1]}, **fields)
        assert caught.value.rule == rule
    assert Capture({"mlp_out": [10**6]}).hooks["mlp_out"].layers == (10**6,)  # some model may have it


layer = st.integers(-L, L - 1)
layers = st.one_of(
    st.just("all"),
    st.lists(layer, min_size=1, max_size=4),
    st.fixed_dictionaries({"every": st.integers(1, 9)}, optional={"from": layer}),
    st.fixed_dictionaries({"ranges": st.just([[0, 2], [-2, -1]])}, optional={"layers": st.just([3])}),
)
position = st.one_of(
    st.sampled_from(["last_prompt", "all_prompt", "all_generated", "all"]),
    st.lists(st.integers(-4, 8), min_size=1),
    st.fixed_dictionaries(
        {"prompt": st.sampled_from(["all", [-1], {"window": [0, None]}, {"token_ids": [7]}])},
        optional={
            "generated": st.sampled_from(["all", [0], {"window": [0, 3], "exclude": [1]}]),
            "exclude": st.sampled_from([[1], {"token_ids": [8]}]),
        },
    ),
)
names = st.text(st.characters(codec="utf-8"), min_size=1).filter(
    lambda text: ".." not in text and text[0] != "/"
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "capture_point": st.sampled_from(["before", "after"]),
        "reduce": st.sampled_from([None, "mean", "sum", "last", "max_norm"]),
        "dtype": st.sampled_from([None, "bf16", "fp16", "fp32", "fp8_e4m3"]),
        "return": st.sampled_from(["inline", "file", "handle"]),
        "layout": st.sampled_from(["per_file", "packed", "sharded"]),
        "request_id": names,
        "tag": names,
        "accepted_only": st.just(True),
    },
)
ONE_ROW = [hook for hook, row in V4.items() if row.ragged is None]  # ragged hooks take none of these fields
captures = st.builds(
    lambda hooks, positions, optional: Capture(hooks, positions, **optional),
    st.dictionaries(st.sampled_from([*ONE_ROW, "mhc_streams_post_mlp"]), layers, min_size=1, max_size=4),
    position,
    fields,
)


@settings(max_examples=scaled(2000))
@given(captures)
def test_json_round_trip_and_plain_data(capture):
    raw = json.loads(json.dumps(capture.to_json()))
    again = Capture.from_json(raw)
    assert again == capture and hash(again) == hash(capture) and again.to_json() == raw
    assert resolve_capture_request(
        {"memory": raw}, dataclasses.replace(FACTS, max_request_bytes=None, max_inline_bytes=None)
    )
    assert (
        pickle.loads(pickle.dumps(capture))
        == capture
        == copy.deepcopy(capture)
        == dataclasses.replace(capture)
    )
    assert eval(repr(capture), {"Capture": Capture}) == capture
    assert {capture: 1}[again] == 1 and again.digest() == capture.digest()


@settings(max_examples=scaled(1000))
@given(captures)
def test_a_resolved_capture_matches_its_request(capture):
    resolved = capture.resolve(V4, L, PROMPT, MAX_TOKENS)
    assert len(set(resolved.addresses)) == len(resolved.addresses) == resolved.estimate.sites
    for hook, selector in capture.hooks.items():
        for index in (L - 1,) if hook in V4 and V4[hook].once else selector.expand(L):
            assert resolved.address(hook, index) in resolved.addresses
    assert {hook for hook, _ in resolved.addresses} == set(resolved.rows)
    early, late = resolved.estimate.prompt_rows, resolved.estimate.generated_rows
    each = early + late if capture.reduce is None else min(early + late, 1)
    assert resolved.estimate.bytes == sum(each * resolved.rows[hook].nbytes for hook, _ in resolved.addresses)


def test_captures_are_frozen_and_compare_by_value():
    capture = Capture({"mlp_out": [2, 1], "mlp_in": "all"})
    assert capture == Capture(
        {"mlp_in": "all", "mlp_out": [1, 2, 2]}, "all_prompt", reduce=None, capture_point="before"
    )
    assert capture != Capture({"mlp_in": "all", "mlp_out": [1]}) and capture != Capture(
        {"mlp_out": [1, 2]}, "all"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        capture.reduce = "mean"
    with pytest.raises(TypeError):
        capture.hooks["mlp_in"] = "all"


def test_digests_depend_on_rows_and_not_on_destinations():
    base = Capture({"mlp_out": [1, 2]}, request_id="a")
    assert base.digest() == Capture({"mlp_out": [2, 1]}, tag="x", layout="packed", returns="file").digest()
    others = [
        Capture({"mlp_out": [1]}),
        Capture({"mlp_in": [1, 2]}),
        Capture({"mlp_out": [1, 2]}, "all"),
        *(
            Capture({"mlp_out": [1, 2]}, **{name: value})
            for name, value in (
                ("capture_point", "after"),
                ("reduce", "mean"),
                ("dtype", "bf16"),
                ("project", "p"),
                ("accepted_only", True),
            )
        ),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    both = {"memory": base, "disk": others[0]}
    assert capture_hash(both) == capture_hash(dict(reversed(both.items()))) and len(capture_hash(both)) == 32
    glued = {
        "disk" + others[0].digest() + "memory": base
    }  # the same concatenated letters, split at another point
    assert capture_hash(glued) != capture_hash(both)
    assert (
        capture_hash(both)
        != capture_hash({"memory": others[0], "disk": base})
        != capture_hash({"memory": base})
    )


def test_errors_survive_pickling():
    error = refused({"memory": part(hooks={"mlp_out": [99]})})
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.path, again.rule) == (str(error), error.path, "V6")


def test_requests_can_be_checked_where_there_is_no_torch_and_no_engine():
    code = (
        "import sys, birkhoff.capture.spec.request, birkhoff.capture.spec.selection, birkhoff.hooks.site_docs; "
        "print([m for m in sys.modules if m == 'torch' or m.startswith(('birkhoff.engine', 'birkhoff.model'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_keywords_of_a_capture_are_in_its_signature():
    keywords = inspect.signature(Capture).parameters
    wire = {"return" if name == "returns" else name for name in keywords}
    assert set(FIELDS) <= wire
    assert Capture({"mlp_out": [3]}, **{"return": "file"}) == Capture({"mlp_out": [3]}, returns="file")
    with pytest.raises(CaptureValidationError, match="unknown field 'stream'"):
        Capture({"mlp_out": [3]}, stream=[1])
