"""Valid bodies of every POST route, and mutations of them.

Every body is answered with 200, or 404 if it names what does not exist, by a server with the SAEs `delta` and `full`. A
mutation
replaces, drops, renames, moves or repeats parts of a body, or damages its bytes.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from typing import Any

CHAT = "/v1/chat/completions"
WIDTH = 384  # hidden size of the embedded model
USER = [{"role": "user", "content": "Hi"}]
PACKED = {
    "dtype": "float16",
    "shape": [1, WIDTH],
    "layer_indices": [2],
    "data": base64.b64encode(bytes(2 * WIDTH)).decode(),
    "scales": [1.0],
}
SCHEMA: dict[str, Any] = {
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 8, "pattern": "^[a-z]+$"},
        "b": {"enum": ["a", "b"]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/i"}, "maxItems": 2},
        "d": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0}]},
    },
    "required": ["a"],
    "$defs": {"i": {"type": "boolean"}},
}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
POSITIONS: dict[str, Any] = {
    "prompt": {"window": [0, 4], "exclude": [1]},
    "generated": {"token_ids": [5, 6]},
    "exclude": [0],
}


def zeros(value: float = 0.0) -> list[float]:
    return [value] * WIDTH


BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "model": "nano",
            "messages": [
                *USER,
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "So?"},
            ],
            "max_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "n": 1,
            "seed": 4,
            "stop": ["x"],
            "stop_token_ids": [3],
            "min_tokens": 1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "repetition_penalty": 1.1,
            "logit_bias": {"5": 1.0},
            "logprobs": True,
            "top_logprobs": 2,
            "stream": False,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "response_format": {"type": "text"},
            "signals": ["head_mix"],
            "capture_wait": True,
            "capture": {"memory": {"hooks": {"mlp_out": [1]}, "positions": "last_prompt"}},
        },
    ),
    (CHAT, {"messages": USER, "max_tokens": 2, "tools": [TOOL], "tool_choice": "required"}),
    (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "tools": [TOOL, {"type": "function", "function": {"name": "g", "parameters": {}}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
            "parallel_tool_calls": False,
        },
    ),
    (
        CHAT,
        {
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"city":"a"}'},
                        }
                    ],
                },
                {"role": "tool", "content": "x", "tool_call_id": "c"},
            ],
            "max_tokens": 2,
            "tools": [TOOL],
            "reasoning_effort": "low",
            "stream_options": {"include_usage": True},
            "stream": True,
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
            "thinking": {"type": "disabled"},
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 3,
            "temperature": 0,
            "baseline": True,
            "interventions": [
                {
                    "op": "add",
                    "at": {"hook": "mlp_out", "layers": [1, 2]},
                    "vector": zeros(0.01),
                    "scale": 2.0,
                    "where": POSITIONS,
                    "phase": "both",
                },
                {
                    "op": "clamp",
                    "at": {"hook": "mlp_out", "layers": {"from": 1, "every": 2}},
                    "vector": zeros(1.0),
                    "min": -1.0,
                    "max": 1.0,
                    "strength": 0.5,
                },
                {
                    "op": "patch",
                    "at": {"hook": "mlp_out", "layers": [3]},
                    "source": {"positions": [0, 1], "rows": [zeros(), zeros()]},
                },
                {"op": "patch", "at": {"hook": "mlp_out", "layers": [4]}, "source": "zeros", "where": "all"},
                {
                    "op": "sae",
                    "module": "delta",
                    "set": {"3": 1.0, "4": {"kind": "bound", "value": {"min": 0.0, "max": 1.0}}},
                    "where": {"generated": "all"},
                },
            ],
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "sae_clamp_specs": [
                {
                    "module_name": "delta",
                    "phase": "both",
                    "clamps": {
                        "mlp_out": {
                            "2": [
                                {"feature_idx": 3, "kind": "additive", "value": 2.0, "only_if_active": True}
                            ]
                        }
                    },
                }
            ],
        },
    ),
    (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "sae_full_reconstruction_specs": [{"module_name": "full", "clamps": {}, "error_term": "keep"}],
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": ["Once", "Twice"],
            "max_tokens": 2,
            "echo": True,
            "logprobs": 1,
            "stop_token_ids": [3],
            "n": 2,
            "steering_vectors": {"mlp_out": PACKED},
            "decode_steering_vectors": {"mlp_out": {"1": {"vector": zeros(0.1), "scale": 2.0}}},
        },
    ),
    (
        "/v1/completions",
        {
            "prompt": [5, 6, 7],
            "max_tokens": 2,
            "capture_wait": True,
            "capture": {
                "memory": {
                    "hooks": {"mlp_out": "all", "mhc_streams_pre_attn": [1, -1]},
                    "positions": POSITIONS,
                    "dtype": "fp16",
                    "reduce": "mean",
                    "streams": [0, 1],
                    "capture_point": "after",
                }
            },
        },
    ),
    (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "instructions": "Be.",
            "max_output_tokens": 2,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": "required",
            "text": {"format": {"type": "text"}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": "Hi",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "nano",
            "max_tokens": 2,
            "system": "Be.",
            "thinking": {"type": "disabled"},
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]},
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["x"],
        },
    ),
    ("/v1/messages/count_tokens", {"messages": USER, "tools": [{"name": "f", "input_schema": SCHEMA}]}),
    ("/v1/chat/completions/input_tokens", {"messages": USER, "tools": [TOOL]}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", {"messages": USER, "tools": [TOOL]}),
    ("/detokenize", {"tokens": [5, 6], "return_token_strs": True}),
    ("/apply-template", {"messages": USER, "tools": [TOOL]}),
    (
        "/v1/interp/estimate",
        {
            "prompt": "Hi",
            "max_tokens": 8,
            "capture": {"memory": {"hooks": {"mlp_out": [1]}, "positions": POSITIONS}},
        },
    ),
    ("/v1/logit_attribution", {"prompt": "Hi", "token": [5, " a"], "position": -1}),
    ("/v1/lens", {"prompt": "Hi", "k": 2, "depths": [0], "views": ["head", 1], "position": -1}),
    (
        "/v1/lens",
        {
            "token_ids": [5, 6],
            "surprise": True,
            "interventions": [
                {"op": "add", "at": {"hook": "mlp_out", "layers": [1]}, "vector": zeros(0.1), "scale": 2.0}
            ],
        },
    ),
    ("/v1/interp/attention", {"messages": USER, "position": 0, "masses": False}),
    ("/v1/interp/features", {"prompt": "Hi", "sae": "delta", "k": 2, "hook": "mlp_out", "layer": 2}),
    (
        "/v1/interp/contrast",
        {
            "positive": ["a b", "b c", "d"],
            "negative": ["c d", "d e", "f"],
            "hook": "mlp_out",
            "how": "mean_diff",
        },
    ),
    (
        "/v1/steering/modules/register",
        {"name": "a", "vectors": {"mlp_out": {"2": zeros(1.0)}}, "replace": True},
    ),
    ("/v1/steering/modules/unregister", {"name": "never"}),
    (
        "/v1/steering/set",
        {
            "interventions": [
                {"op": "add", "at": {"hook": "mlp_out", "layers": [1]}, "vector": zeros(0.1), "scale": 0.1}
            ],
            "replace": True,
        },
    ),
    ("/v1/steering/clear", {}),
    (
        "/v1/steering/sae/set",
        {
            "prefill_specs": [
                {"module_name": "delta", "clamps": {"mlp_out": {"2": [{"feature_idx": 1, "value": 1.0}]}}}
            ],
            "replace": True,
        },
    ),
    ("/v1/steering/sae/clear", {}),
    (
        "/v1/patch_sweep",
        {
            "source": {"prompt": "a b"},
            "target": {"prompt": "a c"},
            "hook": "mlp_out",
            "layers": [1],
            "positions": [0],
            "metric": {"token": 5, "other": 6},
        },
    ),
    (
        "/v1/attribute",
        {
            "prompt": "a b",
            "metric": {"token": 5, "other": 6, "position": -1, "logprob": False},
            "over": ["streams"],
            "layers": [1],
            "baseline": "mean",
            "method": "exact",
            "steps": 2,
            "top": 3,
        },
    ),
    (
        "/v1/circuit",
        {"prompt": "a b", "metric": {"token": 5}, "baseline": {"prompt": "a c"}, "faithfulness": 0.5},
    ),
    ("/v1/requests/none/cancel", {}),
    ("/v1/interp/captures/none/link", {}),
]
HUGE: list[Any] = [
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    -(2**63),
    2**64,
    10**30,
    1e18,
    1e38,
    1e39,
    1e308,
    -1e308,
]
JUNK: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    0.5,
    -0.5,
    "",
    "x",
    "all",
    "\u0000",
    "../..",
    "1" * 5000,
    "\u0663",
    [],
    {},
    [[]],
    [None],
    [0],
    ["a", 1],
    {"a": {}},
    {"": None},
    {"window": [0, None]},
    {"$ref": "#"},
    "A" * 3000,
    [1] * 500,
    *HUGE,
]


def places(node: Any) -> list[tuple[Any, Any]]:
    """All (container, key) pairs of a body, recursively; of a long list only the first entries."""
    if isinstance(node, dict):
        items = list(node.items())
    elif isinstance(node, list):
        items = list(enumerate(node[:8]))
    else:
        return []
    return [entry for key, value in items for entry in ((node, key), *places(value))]


def mutated(body: Any, dice: random.Random) -> Any:
    """A copy of `body` with one to three mutations."""
    body = copy.deepcopy(body)
    for _ in range(dice.randint(1, 3)):
        entries = places(body)
        if not entries:
            return copy.deepcopy(dice.choice(JUNK))
        node, key = dice.choice(entries)
        what = dice.random()
        if what < 0.6:
            node[key] = copy.deepcopy(dice.choice(JUNK))
        elif what < 0.7:  # a part of the body in another place
            other, name = dice.choice(entries)
            node[key] = copy.deepcopy(other[name])
        elif what < 0.8:
            node[key] = [copy.deepcopy(node[key])] if dice.random() < 0.5 else {"a": node[key]}
        elif what < 0.9:
            del node[key]
        elif isinstance(node, dict):
            node[str(key) + dice.choice(["s", "_", "\u202e"])] = node.pop(key)
        else:
            node.extend(copy.deepcopy(node[:50]))
    return body


def damaged(raw: bytes, dice: random.Random) -> bytes:
    """Bytes with one cut, and up to three bytes inserted and two removed there."""
    cut = dice.randrange(len(raw) + 1)
    return raw[:cut] + dice.randbytes(dice.randint(0, 3)) + raw[cut + dice.randint(0, 2) :]


def random_body(dice: random.Random) -> tuple[str, bytes]:
    """The route and the bytes of one hostile body."""
    path, body = dice.choice(BODIES)
    changed = mutated(body, dice)
    limit = next((name for name in ("max_tokens", "max_output_tokens") if name in body), None)
    if limit is not None and isinstance(changed, dict) and dice.random() < 0.9:
        changed.setdefault(limit, 2)  # else an accepted body runs to the end of the context
    raw = json.dumps(changed).encode()
    return path, damaged(raw, dice) if dice.random() < 0.1 else raw


def with_huge_numbers() -> list[tuple[str, bytes]]:
    """Every number, and every word for positions, of every body replaced by each number of `HUGE`."""
    result = []
    for path, body in BODIES:
        for index, (node, key) in enumerate(places(body)):
            if type(node[key]) in (int, float):
                for number in HUGE:
                    changed = copy.deepcopy(body)
                    at, name = places(changed)[index]
                    at[name] = number
                    result.append((path, json.dumps(changed).encode()))
    return result
