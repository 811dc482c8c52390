"""Bodies that are refused and would like to take long: each makes some check do much work."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.bodies import CHAT, USER, zeros
from tests.fuzz.cases import forced

MIB = 1 << 20


def form(schema: Any) -> dict[str, Any]:
    schema = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {"messages": USER, "max_tokens": 2, "response_format": schema}


def nested(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        schema = {"anyOf": [schema] * width if level < 2 else [schema], "properties": {"a": schema}}
    return schema


def chain(length: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


def edits(count: int, **fields: Any) -> dict[str, Any]:
    edit = {"op": "add", "at": {"hook": "mlp_out", "layers": "all"}, "vector": zeros(0.1), **fields}
    return {"messages": USER, "max_tokens": 2, "interventions": [edit] * count}


def large(path: str, body: dict[str, Any]) -> tuple[str, bytes]:
    return path, json.dumps(body).encode()


REFUSED: dict[str, tuple[str, bytes]] = {
    "chain of references": large(CHAT, form(chain(60))),
    "cycle of references": large(
        CHAT, form({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}})
    ),
    "nested schema": large(CHAT, form(nested(10, 8))),
    "huge enum": large(CHAT, form({"enum": [f"value {i}" for i in range(20_000)]})),
    "enum of a tool": large(CHAT, forced({"properties": {"a": {"enum": [f"v{i}" for i in range(5000)]}}})),
    "many properties": large(
        CHAT, forced({"properties": {f"p{i}": {"type": "string"} for i in range(9000)}})
    ),
    "many required": large(CHAT, forced({"properties": {}, "required": ["a"] * 200_000})),
    "pattern": large(
        CHAT, form({"type": "string", "pattern": "((a{1,99}){1,99}b){1,99}(c|d{5,900}){9,900}"})
    ),
    "pattern of alternatives": large(
        CHAT, form({"pattern": "(" + "|".join(f"a{i}.*" for i in range(4000)) + ")*"})
    ),
    "large lengths": large(
        CHAT, forced({"properties": {"a": {"minLength": 2**40, "type": "array", "minItems": 10**9}}})
    ),
    "stop list": large(CHAT, {"messages": USER, "stop": ["a" * 60] * 50_000}),
    "stop ids": large(CHAT, {"messages": USER, "stop_token_ids": list(range(200_000))}),
    "logit bias": large(CHAT, {"messages": USER, "logit_bias": {str(i): 1.0 for i in range(100_000)}}),
    "unknown fields": large(CHAT, {"messages": USER, **{f"k{i}": 1 for i in range(100_000)}}),
    "messages": large(CHAT, {"messages": USER * 40_000}),
    "message parts": large(CHAT, {"messages": [{"role": "user", "content": [{"type": "image"}] * 60_000}]}),
    "positions": large(CHAT, edits(1, where=list(range(400_000)))),
    "positions in small bodies": large(CHAT, edits(8, where=list(range(2000)))),
    "excluded positions": large(CHAT, edits(4, where={"prompt": "all", "exclude": list(range(9000))})),
    "token ids": large(
        CHAT, edits(1, where={"generated": {"token_ids": list(range(2**31 - 300_000, 2**31))}})
    ),
    "layers": large(
        CHAT,
        {
            **edits(1),
            "interventions": [
                {"op": "add", "at": {"hook": "mlp_out", "layers": list(range(300_000))}, "vector": zeros()}
            ],
        },
    ),
    "edits that fail at the last": large(
        CHAT, {**edits(1), "interventions": [*edits(60)["interventions"], {"op": "none"}]}
    ),
    "wide edits": large(CHAT, edits(12, vector=[0.5] * 20_000)),
    "rows": large(
        CHAT,
        edits(1, op="patch", vector=None, source={"positions": list(range(500)), "rows": [zeros()] * 500}),
    ),
    "features": large(
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "interventions": [{"op": "sae", "module": "delta", "set": {str(i): 1.0 for i in range(60_000)}}],
        },
    ),
    "clamp specs": large(
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "sae_clamp_specs": [
                {
                    "module_name": "delta",
                    "clamps": {"mlp_out": {"2": [{"feature_idx": i, "value": 1.0} for i in range(20_000)]}},
                }
            ],
        },
    ),
    "capture hooks": large(
        CHAT, {"messages": USER, "capture": {"memory": {"hooks": {f"h{i}": "all" for i in range(50_000)}}}}
    ),
    "capture consumers": large(
        CHAT, {"messages": USER, "capture": {f"c{i}": {"hooks": {"mlp_out": "all"}} for i in range(30_000)}}
    ),
    "prompt": large("/v1/completions", {"prompt": "word " * 700_000, "max_tokens": 1}),
    "prompt of one character": large("/v1/completions", {"prompt": "a" * 3 * MIB, "max_tokens": 1}),
    "prompts": large("/v1/completions", {"prompt": ["word " * 2000] * 60, "max_tokens": 1}),
    "prompt ids": large("/v1/completions", {"prompt": [5] * 900_000, "max_tokens": 1}),
    "small text of many tokens": large("/v1/completions", {"prompt": "! " * 15_000, "max_tokens": 1}),
    "estimate": large(
        "/v1/interp/estimate",
        {
            "prompt": "Hi",
            "capture": {"memory": {"hooks": {"mlp_out": "all"}, "positions": list(range(200_000))}},
        },
    ),
    "estimate of a long text": large("/v1/interp/estimate", {"prompt": "word " * 600_000, "capture": {}}),
    "global edits": large(
        "/v1/steering/set", {"interventions": [*edits(63)["interventions"], {"op": "none"}]}
    ),
    "text with features": large("/v1/interp/features", {"prompt": "word " * 100_000, "sae": "delta"}),
    "count": large(
        "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "word " * 500_000}]}
    ),
    "chat": large(CHAT, {"messages": [{"role": "user", "content": "a" * 3 * MIB}]}),
    "detokenize": large("/detokenize", {"tokens": [2**31 - 1] * 300_000}),
    "lens": large("/v1/lens", {"token_ids": [5] * 300_000}),
    "depth": (CHAT, b"[" * 4 * MIB),
    "open braces": (CHAT, b'{"a":' * 700_000),
    "keys twice": (CHAT, b"{" + b'"a":1,' * 600_000 + b'"a":1}'),
    "keys": (CHAT, b"{" + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}"),
    "escapes": (CHAT, b'{"messages":"' + b'\\"' * MIB + b'"}'),
    "digits": (CHAT, b'{"max_tokens":' + b"1" * 3 * MIB + b"}"),
    "module": large(
        "/v1/steering/modules/register", {"name": "m", "vector": [0.5] * 900_000, "replace": True}
    ),
    "contrast": large(
        "/v1/interp/contrast", {"positive": ["a " * 9000] * 100, "negative": [""], "hook": "mlp_out"}
    ),
}
