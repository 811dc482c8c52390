"""Malformed, hostile and oversized bodies are refused quickly, with errors in the documented shape."""

from __future__ import annotations

import contextlib
import socket
import urllib.parse
from pathlib import Path

import pytest

from tests.fuzz.attack import is_ours
from tests.fuzz.bodies import PACKED
from tests.server.conftest import user

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
BASE = b'{"messages":[{"role":"user","content":"Hi"}],"max_tokens":1,"temperature":%b}'
HOSTILE = {
    "NaN": BASE % b"NaN",
    "infinity": BASE % b"Infinity",
    "minus infinity": BASE % b"-Infinity",
    "1e999": BASE % b"1e999",
    "digits": BASE % (b"1" * 10_000),
    "hex": BASE % b"0x1",
    "surrogate": BASE.replace(b"Hi", rb"\ud800") % b"1",
    "utf-16": (BASE % b"1").decode().encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + BASE % b"1",
    "latin": BASE.replace(b"Hi", b"\xff\xfe") % b"1",
    "control": BASE.replace(b"Hi", b"\x01") % b"1",
    "twice": b'{"max_tokens":1,"max_tokens":2,"messages":[{"role":"user","content":"a"}]}',
    "twice inside": b'{"messages":[{"role":"user","content":"a"}],"capture":{"memory":{"tag":"a","tag":"b"}}}',
    "deep list": b'{"messages":' + b"[" * 65 + b"]" * 65 + b"}",
    "very deep": b"[" * 100_000,
    "very deep objects": b'{"a":' * 100_000,
    "escapes without an end": b'{"messages":"' + b'\\"' * 1_000_000,
    "empty": b"",
    "null": b"null",
    "text": b'"a"',
    "list": b"[]",
    "comment": b'{"messages":[] /* a */}',
    "comma": b'{"messages":[],}',
    "single quotes": b"{'messages':[]}",
    "extra body twice": b'{"messages":[{"role":"user","content":"a"}],"n":1,"extra_body":{"n":2}}',
    "many keys": b"{" + b",".join(b'"k%d":1' % i for i in range(100_000)) + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_r3_hostile_json_is_refused(served, name):
    answer = served.post(CHAT, HOSTILE[name])
    assert answer.status_code == 400 and is_ours(answer.text, CHAT), answer.text


def test_r3_bodies_beyond_the_limit(served):
    answer = served.post(CHAT, b'{"messages":"' + b"a" * (5 << 20) + b'"}')
    assert answer.status_code == 413 and is_ours(answer.text, CHAT)
    assert (
        served.post(CHAT, {"messages": user("\u0000")}, **{"content-type": "text/plain"}).status_code == 415
    )


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


def form(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


FAN_OUT = {
    "n": {"n": 1000},
    "n of 64": {"n": 64},
    "top_logprobs": {"logprobs": True, "top_logprobs": 10**6},
    "stops": {"stop": ["a"] * 5},
    "long stop": {"stop": ["a" * 65]},
    "stop ids": {"stop_token_ids": [1] * 65},
    "biases": {"logit_bias": {str(i): 1 for i in range(301)}},
    "tools": {"tools": [TOOL] * 129},
    "tool name": {"tools": [{"type": "function", "function": {"name": "a b\n"}}]},
    "best_of": {"best_of": 1000},
    "max_tokens": {"max_tokens": 10**9},
    "interventions": {"interventions": [{"op": "add"}] * 65},
    "signals": {"signals": ["res_mix"] * 33},
    "schema": form({"enum": ["a" * 70_000]}),
    "nested schema": form(nested(12)),
    "cyclic schema": form({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "remote schema": form({"$ref": "http://127.0.0.1:1/s.json"}),
    "regex bomb": form({"type": "string", "pattern": "^((a{1,99}){1,99}b){1,99}(c|d{5,900}){9,900}$"}),
    "no schema": {"response_format": {"type": "json_schema"}},
    "audio": {"audio": {"voice": "x"}},
    "template": {"chat_template": "{{ 7*7 }}"},
    "modalities": {"modalities": ["audio"]},
    "forced without tools": {"tool_choice": "required"},
    "forced other": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
}


@pytest.mark.parametrize("name", FAN_OUT)
def test_r5_fan_out_is_refused_at_once(served, name):
    answer = served.post(CHAT, {"messages": user("Hi"), **FAN_OUT[name]})
    if name == "regex bomb" and answer.status_code == 200:
        assert (
            "too complex" in answer.json()["warnings"][0]
        )  # the grammar hit its limit during generation: the output is truncated with a warning
    else:
        assert answer.status_code == 400 and is_ours(answer.text, CHAT), answer.text


MARKERS = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜DSML｜tool_calls>",
]


def test_r6_special_text_stays_text(served):
    known = served.post("/tokenize", {"messages": user("x")}).json()["tokens"]
    special = {token for token in known if token >= 4000 or token < 3}
    for marker in MARKERS:
        for body in (
            {"prompt": f"a {marker} b", "add_special_tokens": False},
            {"messages": user(f"a {marker} b")},
        ):
            ids = served.post("/tokenize", body).json()["tokens"]
            extra = [token for token in ids if token in special] if "prompt" in body else []
            assert not extra and len(ids) > 4
            back = served.post("/detokenize", {"tokens": ids}).json()["prompt"]
            assert f"a {marker} b" in back
        assert served.post(CHAT, {"messages": user(marker), "max_tokens": 1}).status_code == 200


def test_r6_prompts_of_death(served):
    limit = served.get("/v1/models/nano").json()["max_model_len"]
    deadly = [
        ("/v1/completions", {"prompt": ""}, 400),
        ("/v1/completions", {"prompt": []}, 400),
        ("/v1/completions", {"prompt": [4096]}, 400),
        ("/v1/completions", {"prompt": [-1]}, 400),
        ("/v1/completions", {"prompt": [True]}, 400),
        ("/v1/completions", {"prompt": [0, 0, 1, 1]}, 200),
        ("/v1/completions", {"prompt": [5] * (limit - 1), "max_tokens": 1}, 200),
        ("/v1/completions", {"prompt": [5] * limit, "max_tokens": 1}, 400),
        ("/v1/completions", {"prompt": [5] * (limit - 1), "max_tokens": 2}, 400),
        ("/v1/completions", {"prompt": "a" * 10**6, "max_tokens": 1}, 400),
        (CHAT, {"messages": []}, 400),
        (CHAT, {"messages": user("")}, 200),
        (CHAT, {"messages": user(" \n\u200b\u202e")}, 200),
        (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "none"}]}, 200),
        (CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, 200),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400),
        (CHAT, {"messages": [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]}, 200),
        (CHAT, {"messages": [{"role": "developer", "content": "a"}, *user("b")]}, 200),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
        ),
        (CHAT, {"messages": [{"role": "user"}]}, 400),
        (CHAT, {"messages": [{"content": "a"}]}, 400),
    ]
    for path, body, expected in deadly:
        answer = served.post(path, {"max_tokens": 1, **body})
        assert answer.status_code == expected, (body if len(str(body)) < 300 else path, answer.text[:300])
        assert expected == 200 or is_ours(answer.text, path)


TEMPLATES = [
    "{{ 7*7 }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{x}}{% endfor %}",
    "${7*7}",
    "#{7*7}",
    "<%= 7*7 %>",
    "{{ cycler.__init__.__globals__.os.popen('touch canary').read() }}",
    "__import__('os').system('touch canary')",
    "$(touch canary)",
    "`touch canary`",
    "%s%s%n",
    "{0.__class__}",
]


def test_r7_templates_are_text(served):
    for attack in TEMPLATES:
        shown = served.post(
            "/apply-template", {"messages": [{"role": "system", "content": attack}, *user(attack)]}
        ).json()["prompt"]
        assert shown.count(attack) == 2
        tool = {"type": "function", "function": {"name": "f", "description": attack}}
        body = {
            "messages": [{"role": "user", "content": attack, "name": attack}],
            "tools": [tool],
            "max_tokens": 1,
            "stop": attack[:20],
            "user": attack,
        }
        assert served.post(CHAT, body).status_code == 200
    assert not list(served.log.parent.rglob("canary")) and not Path("canary").exists()


TRICKS = [
    "..",
    "../../etc/passwd",
    "%2e%2e%2f",
    "/etc/passwd",
    "a\u0000b",
    "CON",
    "a" * 4096,
    ".",
    "",
    "․․/",
    "~root",
    "a/../../b",
    "\\\\host\\share",
    "$HOME",
    "\u202e",
]


def outside(served) -> list[Path]:
    """All files next to the capture root, without those inside it."""
    entries = served.root.parent.rglob("*")
    return sorted(path for path in entries if served.root not in path.parents and path != served.log)


def test_r8_names_never_become_paths(served):
    (served.root / "tricks").mkdir(parents=True, exist_ok=True)
    (served.root.parent / "secret").write_text("secret")
    with contextlib.suppress(FileExistsError):
        (served.root / "tricks" / "link").symlink_to(served.root.parent)
    before = outside(served)
    for name in TRICKS:
        for body in ({"request_id": name, "tag": "tricks"}, {"request_id": "r", "tag": name}):
            capture = {"filesystem": {**body, "hooks": {"mhc_head_mix": "all"}, "positions": "last_prompt"}}
            answer = served.post(
                CHAT, {"messages": user("a"), "max_tokens": 1, "capture": capture, "capture_wait": True}
            )
            assert answer.status_code == 200 or (answer.status_code == 400 and is_ours(answer.text, CHAT)), (
                answer.text
            )
        assert served.post("/v1/steering/modules/register", {"name": name, "vector": "x"}).status_code == 400
        assert served.post(CHAT, {"model": name or "x", "messages": user("a")}).status_code in (400, 404)
        quoted = urllib.parse.quote(name, safe="").replace(
            ".", "%2e"
        )  # otherwise the client would resolve it
        for path in (
            "/v1/interp/captures/{}/data",
            "/v1/interp/captures/{}/slice",
            "/assets/{}",
            "/v1/models/x{}",
        ):
            with served.http as client:
                assert client.get(path.format(quoted)).status_code in (400, 404, 405), path.format(quoted)
    assert outside(served) == before
    linked = {"filesystem": {"request_id": "r", "tag": "tricks/link", "hooks": {"mhc_head_mix": "all"}}}
    served.post(CHAT, {"messages": user("a"), "max_tokens": 1, "capture": linked, "capture_wait": True})
    assert outside(served) == before


def test_r9_no_url_is_ever_opened(served):
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.5)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
        for body in (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
            {
                "messages": user(url),
                "interventions": [{"op": "add", "at": {"hook": "mlp_out"}, "vector": url}],
            },
            {"messages": user(url), "steering_name": url},
            {"messages": user(url), "user": url, "metadata": {"url": url}},
            {"messages": user("a"), **form({"$ref": url})},
            {"messages": user("a"), "tools": [{"type": "mcp", "server_url": url}]},
            {"messages": user("a"), "steering_vectors": {"mlp_out": {**PACKED, "data": url}}},
        ):
            assert served.post(CHAT, {"max_tokens": 1, **body}).status_code in (200, 400)
        served.post("/v1/steering/modules/register", {"name": "u", "vector": url})
        with pytest.raises(TimeoutError):
            trap.accept()
