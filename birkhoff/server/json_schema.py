"""JSON Schemas of callers: tool parameters and response formats, checked before anything is built from them.

`check_schema` checks the shape: every keyword has the type that JSON Schema gives it, and numbers and sizes are within
limits. `SchemaCompiler` compiles a grammar in a child process first. The grammar library is native code, and there are
schemas that make it overflow its stack, loop or fill memory; in the child, only that process ends.
The child ends with this process, because its standard input is then closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from birkhoff.errors import quoted
from birkhoff.server.api_errors import ApiError, bad_request

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_NODES = 8192
MAX_ENUM = 2048
MAX_INTEGER = 2**63 - 1
COMPILE_CPU_SECONDS = 0.5  # processor time of the child for one grammar
COMPILE_BYTES = 1 << 30  # address space of the child
ANSWER_SECONDS = 30.0  # wall clock, for a child that waits on a loaded machine
CHILD = Path(__file__).with_name("schema_child.py")

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ONE = (
    "items additionalItems additionalProperties unevaluatedProperties unevaluatedItems propertyNames contains not if "
    "then else"
).split()
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TEXTS = ("pattern", "format", "$ref", "title", "description", "$id", "$schema", "$comment")


def check_schema(schema: Any, param: str) -> None:
    """Raise 400 unless `schema` is an object in the shape of a JSON Schema. `param` is the field it came in.

    A keyword that is null counts as absent. Unknown keywords are allowed; their numbers are checked too."""
    if not isinstance(schema, dict):
        raise _refuse(f"is {quoted(schema, 80)}, expected a JSON Schema object.", param)
    pending: list[tuple[Any, str]] = [(schema, param)]
    nodes = 0
    while pending:
        node, path = pending.pop()
        nodes += 1
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            raise _refuse(f"is {quoted(node, 80)}, expected a schema: an object, true or false.", path)
        for keyword, value in node.items():
            if value is not None:
                nodes += _check_keyword(keyword, value, f"{path}.{keyword[:64]}", pending)
        if nodes + len(pending) > MAX_SCHEMA_NODES:
            raise bad_request(
                f"{param}: the schema has more than {MAX_SCHEMA_NODES} parts. Send a smaller one.",
                param,
                "schema-too-large",
            )


def _check_keyword(keyword: str, value: Any, path: str, pending: list[tuple[Any, str]]) -> int:
    """Check one keyword and add its schemas to `pending`; returns how many values it holds beside them."""
    if keyword in _MAPS:
        if not isinstance(value, dict):
            raise _refuse(f"is {quoted(value, 80)}, expected an object of schemas.", path)
        pending += [(each, f"{path}.{name[:64]}") for name, each in value.items()]
    elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
        if not isinstance(value, list) or not value:
            raise _refuse(f"is {quoted(value, 80)}, expected a list of schemas.", path)
        pending += [(each, f"{path}[{index}]") for index, each in enumerate(value)]
    elif keyword in _ONE:
        pending.append((value, path))
    elif keyword == "required":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise _refuse(f"is {quoted(value, 80)}, expected a list of property names.", path)
        return len(value)
    elif keyword == "type":
        words = value if isinstance(value, list) else [value]
        if not words or not all(isinstance(each, str) and each in TYPES for each in words):
            raise _refuse(f"is {quoted(value, 80)}, expected one of {', '.join(TYPES)}.", path)
    elif keyword == "enum":
        if not isinstance(value, list) or not 0 < len(value) <= MAX_ENUM:
            seen = f"has {len(value)} values" if isinstance(value, list) else f"is {quoted(value, 80)}"
            raise _refuse(f"{seen}, expected a list of 1 to {MAX_ENUM} values.", path)
        return _check_numbers(value, path)
    elif keyword in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INTEGER:
            raise _refuse(f"is {quoted(value, 80)}, expected a whole number, 0 or more.", path)
    elif keyword in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _refuse(f"is {quoted(value, 80)}, expected a number.", path)
        return _check_numbers(value, path)
    elif keyword in _TEXTS:
        if not isinstance(value, str):
            raise _refuse(f"is {quoted(value, 80)}, expected text.", path)
    else:
        return _check_numbers(value, path)
    return 1


def _check_numbers(value: Any, path: str) -> int:
    """Refuse integers that 64 bits do not hold, anywhere in `value`; returns how many values it holds."""
    pending, count = [value], 0
    while pending:
        each = pending.pop()
        count += 1
        if isinstance(each, int) and not -MAX_INTEGER <= each <= MAX_INTEGER:
            raise _refuse(f"holds {quoted(each, 40)}, expected numbers within 63 bits.", path)
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict):
            pending += each.values()
    return count


def _refuse(message: str, path: str) -> ApiError:
    return bad_request(f"{path[:200]}: {message}", path[:200], "schema-invalid")


class SchemaCompiler:
    """Compiles grammars in a child process, which is started when it is first needed and replaced when it dies."""

    def __init__(self, seconds: float = COMPILE_CPU_SECONDS, max_bytes: int = COMPILE_BYTES) -> None:
        self._limits = (seconds, max_bytes)
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: str, param: str) -> None:
        """Raise 400 unless `grammar` can be compiled within the limits."""
        with self._lock:
            reason = self._ask(grammar)
        if reason is None:
            raise bad_request(
                f"{param}: the schema takes more than {self._limits[0]:g} s or much memory to compile. Simplify it.",
                param,
                "schema-too-complex",
            )
        if reason:
            raise bad_request(
                f"{param}: no grammar can be made of this: {quoted(reason, 200)}. Simplify it.",
                param,
                "schema-invalid",
            )

    def _ask(self, grammar: str) -> str | None:
        """The reason why a grammar is refused, empty if it is not, or None if the child did not survive it."""
        if self._child is None or self._child.poll() is not None:
            self._stop()
            self._child = subprocess.Popen(
                [sys.executable, str(CHILD), *map(str, self._limits)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if not name.startswith("BIRKHOFF_")},
            )
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(ANSWER_SECONDS, child.kill)
        timer.start()
        try:
            child.stdin.write(json.dumps(grammar).encode() + b"\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except OSError:
            answer = b""
        finally:
            timer.cancel()
        if not answer.endswith(b"\n"):
            self._stop()
            return None
        reason: str = json.loads(answer)
        return reason

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:
                        continue
