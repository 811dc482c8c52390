"""Malformed, hostile and oversized bodies are refused quickly, with errors in the documented shape."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import socket
import urllib.parse
from pathlib import Path

import httpx2
import pytest

from tests.server.conftest import user
from tests.sizes import scaled

CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
PACKED = {"dtype": "float32", "shape": [1, 384], "layer_indices": [2], "data": "AAAAAA==", "scales": [1.0]}
VALID = {
    CHAT: {
        "model": "nano",
        "messages": [*user("Hi"), {"role": "assistant", "content": "Hello"}, *user("So?")],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "seed": 4,
        "stop": ["x"],
        "logit_bias": {"5": 1.0},
        "logprobs": True,
        "top_logprobs": 2,
        "stream": False,
        "tools": [TOOL],
        "response_format": {"type": "text"},
        "signals": ["head_mix"],
        "capture_wait": True,
        "capture": {"memory": {"hooks": {"mlp_out": [1]}, "positions": "last_prompt"}},
    },
    "/v1/completions": {
        "prompt": "Once",
        "max_tokens": 2,
        "echo": True,
        "logprobs": 1,
        "stop_token_ids": [3],
        "steering_vectors": {"mlp_out": PACKED},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "model": "nano",
        "max_tokens": 2,
        "system": "Be.",
        "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    "/v1/messages/count_tokens": {"messages": user("Hi")},
    "/tokenize": {"prompt": "Hi", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
    "/apply-template": {"messages": user("Hi")},
    "/v1/interp/estimate": {"prompt": "Hi", "capture": {"memory": {"hooks": {"mlp_out": "all"}}}},
    "/v1/lens": {"prompt": "Hi", "k": 2, "depths": [0], "views": ["head"], "position": -1},
    "/v1/interp/attention": {"prompt": "Hi", "position": 0},
    "/v1/interp/features": {"prompt": "Hi", "sae": "none"},
    "/v1/steering/modules/register": {"name": "a", "vector": [1.0, 2.0], "replace": True},
    "/v1/steering/set": {
        "interventions": [{"op": "add", "at": {"hook": "no", "layers": [1]}, "vector": [1.0]}]
    },
    "/v1/steering/sae/set": {"prefill_specs": [{"module_name": "none", "clamps": {}}]},
    "/v1/requests/none/cancel": {},
}
JUNK = [
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    -0.5,
    "",
    "x",
    "\u0000",
    "../..",
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    "A" * 3000,
    [1] * 500,
]


def is_ours(answer: httpx2.Response, path: str) -> bool:
    """Whether an error has one of the two documented shapes and leaks nothing about the server."""
    body = answer.json()
    error = body["error"]
    if path.startswith("/v1/messages"):
        shaped = body["type"] == "error" and set(error) == {"type", "message"} and body["request_id"]
    else:
        shaped = set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    leaks = re.search(r"Traceback|File \"|0x[0-9a-f]{6}|/(?:usr|tmp|home|var)/", answer.text)
    return bool(shaped) and not leaks and len(error["message"]) <= 1000


def places(node) -> list[tuple]:
    """All (container, key) pairs of a body, recursively."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [entries for key, value in items for entries in ((node, key), *places(value))]


def mutated(body, dice: random.Random):
    """A valid body with one to three mutations: values replaced, keys dropped or renamed, lists grown."""
    body = json.loads(json.dumps(body))
    for _ in range(dice.randint(1, 3)):
        entries = places(body)
        if not entries:
            return copy.deepcopy(dice.choice(JUNK))
        node, key = dice.choice(entries)
        what = dice.random()
        if what < 0.7:
            node[key] = copy.deepcopy(dice.choice(JUNK))  # a copy, because lists are grown in place
        elif what < 0.85:
            del node[key]
        elif isinstance(node, dict):
            node[str(key) + dice.choice(["s", "_", "\u202e"])] = node.pop(key)
        else:
            node.extend(node * 3)
    return body


def test_r1_mutated_bodies_never_break_the_server(served):
    dice, count, statuses = random.Random(8), scaled(1000, 150), {}
    with served.http as client:
        for number in range(count):
            path = dice.choice(list(VALID))
            body = json.dumps(mutated(VALID[path], dice)).encode()
            if number % 10 == 0:  # some are not valid JSON
                cut = dice.randrange(len(body) + 1)
                body = body[:cut] + dice.randbytes(dice.randint(0, 3)) + body[cut + dice.randint(0, 2) :]
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            if answer.status_code != 200:
                assert answer.status_code < 500, (path, body, answer.text)
                assert is_ours(answer, path), (path, body, answer.text)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        client.post("/v1/steering/clear")
    assert statuses[400] > count / 3, statuses
    assert served.get("/health").status_code == 200 and served.idle()


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
    assert answer.status_code == 400 and is_ours(answer, CHAT), answer.text


def test_r3_bodies_beyond_the_limit(served):
    answer = served.post(CHAT, b'{"messages":"' + b"a" * (5 << 20) + b'"}')
    assert answer.status_code == 413 and is_ours(answer, CHAT)
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
        assert answer.status_code == 400 and is_ours(answer, CHAT), answer.text


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
        assert expected == 200 or is_ours(answer, path)


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
            assert answer.status_code == 200 or (answer.status_code == 400 and is_ours(answer, CHAT)), (
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
