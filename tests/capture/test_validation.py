"""T-CAP-2 and T-CAP-3: every refusal with its rule and field path, in order; hooks that fire once take any selector."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.capture.spec.request import Capture, resolve_capture_request
from birkhoff.errors import CaptureValidationError
from tests.capture.requests import DISK, FACTS, FILED, MAX_TOKENS, MEMORY, PROMPT, V4, L, part, refused

CASES = {
    "V1": [
        ({"disc": part()}, "capture.disc"),
        ({"shm": part()}, "capture.shm"),
        ({}, "capture"),
        (None, "capture"),
        ([], "capture"),
        ("memory", "capture"),
        ({1: part()}, "capture"),
        ({"a b": part()}, "capture.'a b'"),
    ],
    "V2": [
        ({"disk": part()}, f"{DISK}.request_id"),
        ({"disk": part(request_id="a")}, f"{DISK}.tag"),
        *(
            ({"disk": part(request_id="a", tag=bad)}, f"{DISK}.tag")
            for bad in (None, "", 3, True, ["a"], "x" * 257, "a/../b", "..", "/etc")
        ),
        *(
            ({"memory": part(request_id=bad)}, f"{MEMORY}.request_id")
            for bad in ("", 3, "x" * 257, "a..b", "/a")
        ),
    ],
    "V3": [
        *(
            ({"memory": part(hooks=bad)}, f"{MEMORY}.hooks")
            for bad in (..., None, {}, [], ["mlp_out"], "mlp_out", 3)
        ),
        *(({"memory": part(hooks={bad: "all"})}, f"{MEMORY}.hooks") for bad in (3, None, True)),
    ],
    "V4": [
        *(
            ({"memory": part(hooks={hook: [1]})}, f"{MEMORY}.hooks.{hook}")
            for hook in ("mlp_uot", "post_mlp", "post_block", "hidden")
        ),
        ({"memory": part(hooks={"mlp_out": [1], "": [1]})}, f"{MEMORY}.hooks.''"),
        ({"memory": part(hooks={"x y": [1]})}, f"{MEMORY}.hooks.'x y'"),
    ],
    "V5": [
        *(
            ({"memory": part(hooks={"mlp_in": "all", "mlp_out": bad})}, f"{MEMORY}.hooks.mlp_out")
            for bad in (
                "first",
                "ALL",
                {},
                {"layer": [1]},
                {"layers": [1], "step": 2},
                {"from": 1},
                3,
                None,
                True,
                1.5,
            )
        ),
        *(
            ({"memory": part(hooks={hook: bad})}, f"{MEMORY}.hooks.{hook}")
            for bad in (3, None, True, 1.5)
            for hook in ("mhc_streams_final", "mhc_head_mix", "final_hidden")
        ),
    ],
    "V6": [
        *(
            ({"memory": part(hooks={"mlp_out": bad})}, f"{MEMORY}.hooks.mlp_out{tail}")
            for bad, tail in (
                ([1, True], "[1]"),
                (["1"], "[0]"),
                ([1.0], "[0]"),
                ([L], ""),
                ([-L - 1], ""),
                ({"layers": 3}, ".layers"),
                ({"ranges": [[1]]}, ".ranges[0]"),
                ({"ranges": [3]}, ".ranges[0]"),
                ({"ranges": [[3, 2]]}, ".ranges[0]"),
                ({"ranges": [[0, L]]}, ".ranges"),
                ({"ranges": [[5, -6]]}, ".ranges"),
                ({"every": 0}, ".every"),
                ({"every": 2, "from": L}, ".from"),
            )
        ),
        ({"memory": part(hooks={"mhc_streams_post_mlp": [L]})}, f"{MEMORY}.hooks.mhc_streams_post_mlp"),
    ],
    "V7": [
        *(
            ({"memory": part(hooks={"mlp_in": [0], "mlp_out": bad})}, f"{MEMORY}.hooks.mlp_out")
            for bad in ([], {"layers": []}, {"ranges": []}, {"layers": [], "ranges": []})
        )
    ],
    "V8": [
        *(
            ({"memory": part(positions=bad)}, f"{MEMORY}.positions{tail}")
            for bad, tail in (
                ("first", ""),
                (3, ""),
                (None, ""),
                ([], ""),
                ([0, "1"], "[1]"),
                ([True], "[0]"),
                ([9], ""),
                ([-5], ""),
                ({"prompt": [4]}, ".prompt"),
                ({"generated": [-1]}, ".generated[0]"),
                ({"generated": [5]}, ".generated"),
                ({"prompt": {"window": [2, 2]}}, ".prompt.window"),
                ({"middle": "all"}, ""),
                ({}, ""),
            )
        )
    ],
    "V10": [
        *(
            ({"disk": part(**FILED, layout=bad)}, f"{DISK}.layout")
            for bad in ("zip", 3, "", ["packed"], "per_file")
        )
    ],
    "V11": [
        (
            {
                "memory": part(
                    hooks={"mhc_streams_pre_attn": "all", "mhc_streams_pre_mlp": "all"},
                    positions="all",
                    dtype="fp32",
                    **{"return": "file"},
                )
            },
            MEMORY,
        ),
        ({"memory": part(hooks=dict.fromkeys(V4, "all"), positions="all", dtype="fp32")}, MEMORY),
        (
            {
                "memory": part(
                    hooks={"mhc_streams_pre_attn": "all", "mhc_streams_pre_mlp": [0, 1]},
                    positions="all",
                    dtype="fp32",
                )
            },
            MEMORY,
        ),  # the cap on what is returned inline
    ],
    "V12": [
        ({"memory": part(project="nothing")}, f"{MEMORY}.project"),
        ({"memory": part(project=3)}, f"{MEMORY}.project"),
        ({"memory": part(project="")}, f"{MEMORY}.project"),
        ({"memory": part(project="wide")}, f"{MEMORY}.project"),
        (
            {"memory": part(hooks={"mlp_out": [1], "mhc_streams_final": "all"}, project="probe")},
            f"{MEMORY}.project",
        ),
        (
            {"memory": part(hooks={"mhc_streams_final": "all"}, project="wide", streams=[0, 1])},
            f"{MEMORY}.project",
        ),
    ],
}


@pytest.mark.parametrize(
    ("rule", "raw", "path"), [(rule, raw, path) for rule, rows in CASES.items() for raw, path in rows]
)
def test_t_cap_2_each_rejection_names_its_rule_and_its_path(rule, raw, path):
    error = refused(raw)
    assert (error.rule, error.path) == (rule, path), str(error)


def test_t_cap_2_v9_a_position_that_the_prefix_cache_serves():
    cached = dataclasses.replace(FACTS, cached_tokens=3)
    for positions in ("all_prompt", "all", [2], [-2], {"prompt": {"window": [1, 3]}}):
        error = refused({"memory": part(positions=positions)}, cached)
        assert (error.rule, error.path) == ("V9", f"{MEMORY}.positions") and "first 3 tokens" in str(error)
    for positions in ("last_prompt", "all_generated", [3], {"prompt": {"window": [3, None]}}):
        assert resolve_capture_request({"memory": part(positions=positions)}, cached)


def test_t_cap_2_the_first_broken_rule_is_the_one_that_is_named():
    """One field after the other is put right, from a request in which every rule is broken."""
    cached = dataclasses.replace(FACTS, cached_tokens=2, max_request_bytes=10)
    bad = {"request_id": "", "tag": "t", "hooks": {}, "positions": [], "layout": "zip", "project": "nothing"}
    repairs = [
        ("V1", "none", {}),
        ("V2", "disk", {}),
        ("V3", "disk", {"request_id": "a"}),
        ("V4", "disk", {"hooks": {"nope": "x", "mlp_out": "x"}}),
        ("V5", "disk", {"hooks": {"mlp_in": [99], "mlp_out": "x"}}),
        ("V6", "disk", {"hooks": {"mlp_in": [], "mlp_out": [99]}}),
        ("V7", "disk", {"hooks": {"mlp_in": [1], "mlp_out": []}}),
        ("V8", "disk", {"hooks": {"mlp_in": [1], "mlp_out": [0]}}),
        ("V9", "disk", {"positions": "all_prompt"}),
        ("V10", "disk", {"positions": "last_prompt"}),
        ("V12", "disk", {"layout": "packed"}),
        ("V11", "disk", {"project": "wide"}),
        ("V12", "disk", {"reduce": "last", "dtype": "fp8_e4m3", "hooks": {"mlp_out": [0]}}),
    ]
    for rule, consumer, change in repairs:
        bad |= change
        assert refused({consumer: bad}, cached).rule == rule, (rule, bad)
    assert resolve_capture_request({"disk": bad | {"project": "probe"}}, cached)


def test_t_cap_2_messages_name_valid_values():
    message = str(refused({"memory": part(hooks={"mlp_uot": [1]})}))
    assert "Did you mean 'mlp_out'?" in message and ", ".join(sorted(V4)) in message
    message = str(refused({"memory": part(hooks={"post_block": "all"})}))
    assert all(
        hook in message
        for hook in ("mhc_streams_pre_mlp", "mhc_streams_pre_attn of the next layer", "mhc_streams_final")
    )
    assert "0..5" in str(refused({"memory": part(hooks={"mlp_out": [6]})}))
    assert "Enabled here: disk, memory" in str(refused({"shm": part()}))
    for name, value in part().items():  # the fields of a capture without a consumer, and hooks as consumers
        assert '{"memory": {"hooks": {hook: layers}}}' in str(refused({name: value})), name
    assert '{"memory": {"hooks": {hook: layers}}}' in str(refused({"mlp_out": [3]}))
    with pytest.raises(CaptureValidationError, match=r"Did you mean 'mlp_out'\?"):
        Capture({"mlp_uot": [1]})
    with pytest.raises(
        CaptureValidationError, match=r"'mhc_streams_post_mlp' instead.* An ordinary model has 'post_mlp'"
    ):
        Capture({"resid_post": [1]})
    assert "packed" in str(refused({"disk": part(**FILED, layout="sharded")}))
    fixed = [name for name, hook in V4.items() if hook.ragged is None]
    everything = {"memory": part(hooks=dict.fromkeys(fixed, "all"))}
    message = str(refused(everything, dataclasses.replace(FACTS, max_request_bytes=1)))
    once = sum(hook.once for hook in V4.values())
    sites = once + L * (len(fixed) - once)
    assert (
        "a request may store 1 (capture_max_request_bytes)." in message
        and f"{len(PROMPT) * sites} rows at {sites} sites" in message
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capture_point", "during"),
        ("capture_point", None),
        ("capture_point", 3),
        ("reduce", "max"),
        ("reduce", ["mean"]),
        ("dtype", "bfloat16"),
        ("dtype", 16),
        ("return", "email"),
        ("return", {}),
        ("accepted_only", "yes"),
        ("accepted_only", 1),
        ("accepted_only", False),
        ("streams", []),
        ("streams", 1),
        ("streams", "all"),
        ("streams", [0, 0]),
        ("streams", [-1]),
        ("streams", [True]),
        ("streams", [4]),
        ("streams", [0.0]),
    ],
)
def test_other_fields_are_refused_by_path(field, value):
    error = refused({"memory": part(hooks={"mhc_streams_pre_attn": [1]}, **{field: value})})
    assert (error.path, error.rule) == (f"{MEMORY}.{field}", "")


def test_unknown_fields_and_parts_that_are_no_object():
    assert refused({"memory": part(position="all")}).path == MEMORY
    assert "unknown field 'position'" in str(refused({"memory": part(position="all")}))
    for bad in (None, 3, [], "all"):
        assert refused({"memory": bad}).path == MEMORY
    assert "none of the hooks has a row of streams" in str(refused({"memory": part(streams=[0])}))
    with pytest.raises(CaptureValidationError, match=r"^capture: has the unknown field 'layer'"):
        Capture({"mlp_out": [1]}, layer=3)
    with pytest.raises(CaptureValidationError, match="given twice"):
        Capture({"mlp_out": [1]}, returns="file", **{"return": "file"})


@pytest.mark.parametrize(
    "selector",
    [
        "all",
        [0],
        [],
        {},
        {"layers": []},
        {"odd": 1},
        "first",
        ["x", None],
        [99],
        {"every": -3},
        {"ranges": [[5, 2]]},
    ],
)
@pytest.mark.parametrize("hook", ["mhc_streams_final", "mhc_head_mix", "final_hidden"])
def test_t_cap_3_model_level_hooks_take_any_selector_and_give_one_entry_at_the_last_layer(hook, selector):
    capture = Capture({hook: selector})
    assert capture == Capture({hook: "all"}) == Capture.from_json({"hooks": {hook: selector}})
    resolved = capture.resolve(V4, L, PROMPT, MAX_TOKENS)
    assert resolved.addresses == ((hook, L - 1),) and resolved.requested == {(hook, L - 1): (hook, L - 1)}
    assert all(resolved.address(hook, layer) == (hook, L - 1) for layer in (0, 3, -1, 99))


words = st.sampled_from("memory hooks positions mlp_out layers streams tag reduce project return".split())
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)


@given(
    st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4))
)
def test_any_json_is_a_request_or_a_typed_refusal(raw):
    try:
        captures = resolve_capture_request(raw, FACTS)
    except CaptureValidationError as error:
        assert error.path.startswith("capture") and len(str(error)) < 1000
    else:
        assert all(isinstance(each.capture, Capture) for each in captures.values())
