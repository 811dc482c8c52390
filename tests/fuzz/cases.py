"""Named bodies that once broke the server: memory, crashes and defects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fuzz.bodies import CHAT, USER, zeros

FOLDER = Path(__file__).parent / "cases"


def forced(parameters: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": USER, "max_tokens": 2, "tools": [tool], "tool_choice": "required"}


def patched(**changes: Any) -> dict[str, Any]:
    edit = {"op": "patch", "at": {"hook": "mlp_out", "layers": [1]}, "source": "zeros"}
    return {"messages": USER, "max_tokens": 2, "interventions": [{**edit, **changes}]}


def clamped(value: Any) -> dict[str, Any]:
    return {
        "messages": USER,
        "max_tokens": 2,
        "interventions": [{"op": "sae", "module": "delta", "set": {"3": value}}],
    }


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "properties is a number": (CHAT, forced({"properties": 5})),
    "properties is a text": (CHAT, forced({"properties": "abc"})),
    "properties is a list": (CHAT, forced({"properties": ["a"]})),
    "required is a number": (CHAT, forced({"properties": {"a": {}}, "required": 5})),
    "required holds a list": (CHAT, forced({"properties": {"a": {}}, "required": [[]]})),
    "a property is a number": (CHAT, forced({"properties": {"a": 5}})),
    "a property is null": (CHAT, forced({"properties": {"a": None}})),
    "enum is a number": (CHAT, forced({"properties": {"a": {"enum": 5}}})),
    "parameters is a list": (CHAT, forced([])),
    "the smallest integer overflows the grammar's stack": (
        CHAT,
        forced({"properties": {"a": {"enum": ["a", -(2**63)]}}}),
    ),
    "the smallest integer in a format": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": -(2**63)}}},
        },
    ),
    "forced function is a text": (CHAT, {**forced({}), "tool_choice": {"type": "function", "function": "f"}}),
    "feature of 1e308": (CHAT, clamped(1e308)),
    "feature of 1e39": (CHAT, clamped(1e39)),
    "feature with a large integer": (CHAT, clamped(10**40)),
    "feature with a long name": (
        CHAT,
        {**clamped(1.0), "interventions": [{"op": "sae", "module": "delta", "set": {"1" * 5000: 1.0}}]},
    ),
    "scale of 1e308": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2,
            "interventions": [
                {"op": "add", "at": {"hook": "mlp_out", "layers": [1]}, "vector": zeros(1.0), "scale": 1e308}
            ],
        },
    ),
    "max_tokens with a patch of all generated": (
        CHAT,
        {**patched(where={"generated": "all"}), "max_tokens": 2**28},
    ),
    "max_tokens with a window": (
        CHAT,
        {**patched(where={"generated": {"window": [0, 2**30]}}), "max_tokens": 2**31 - 1},
    ),
    "max_tokens with a capture of everything": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2**31 - 1,
            "capture": {"memory": {"hooks": {"mlp_out": "all"}, "positions": "all"}},
        },
    ),
    "estimate of everything": (
        "/v1/interp/estimate",
        {
            "prompt": "Hi",
            "max_tokens": 2**31 - 1,
            "capture": {"memory": {"hooks": {"mlp_out": "all"}, "positions": "all"}},
        },
    ),
    "max_tokens with a clamp of all generated": (
        CHAT,
        {
            "messages": USER,
            "max_tokens": 2**31 - 1,
            "n": 8,
            "interventions": [
                {"op": "sae", "module": "delta", "set": {"3": 1.0}, "where": {"generated": "all"}}
            ],
        },
    ),
}


def stored(pattern: str) -> dict[str, dict[str, Any]]:
    """The findings that `python -m tests.fuzz` wrote, by file name: bodies by route, files and connections."""
    return {path.stem: json.loads(path.read_bytes()) for path in sorted(FOLDER.glob(f"{pattern}.json"))}
