"""Steering in one line, for the command line:

    +2.0 spooky @ mhc_streams_pre_attn[4] stream=1; -0.5 happy @ mlp_out[4,6..8] op=project phase=decode

`STRENGTH NAME @ HOOK[LAYERS] key=value ...`, several joined by `;`. STRENGTH may be omitted and is then 1; the site
after `@` may be omitted if the vector has a hook and layers. LAYERS are numbers, ranges with both ends (`4..8`) or `*`;
negative ones count from the end. Keys: `stream` (numbers, `all` or `post_mix`), `phase`, `path`, `op`. STRENGTH is the
scale; for a clamp it is the value of the component. A name with characters other than letters, digits and `._/~+-` is
a JSON string in double quotes.

`parse_line` parses edits and `print_line` prints them in a canonical form; each is the inverse of the other. Errors
show the line with a caret under the character where parsing failed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from birkhoff.errors import SteeringError, SteeringSyntax, quoted
from birkhoff.hooks.layers import LayerSelector
from birkhoff.hooks.phases import PHASES
from birkhoff.steering.vector_edits import PATHS, Add, Clamp, Patch, Project, VectorEdit

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_NAME = re.compile(r"[\w./~+-]+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[A-Za-z_]+", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,9}", re.ASCII)
_OPS = ("add", "project", "clamp", "patch")
_KEYS = ("stream", "phase", "path", "op")


def parse_line(line: str) -> list[VectorEdit]:
    """The edits of a line, in order. Vectors stay names, which are looked up when the edits are used."""
    reader = _EditReader(line)
    edits = [_edit(reader)]
    while reader.take(";"):
        if reader.at_end:
            break  # a trailing semicolon is allowed
        edits.append(_edit(reader))
    if not reader.at_end:
        reader.fail("expected ';' and another edit, a key=value, or the end")
    return edits


def print_line(edits: Sequence[Any]) -> str:
    """The canonical form. Edits that a line cannot express (numbers, `where`, some clamps) are refused."""
    return "; ".join(_print(edit) for edit in edits)


class _EditReader:
    def __init__(self, line: str):
        self.line = line
        self.index = 0
        self._skip()

    @property
    def at_end(self) -> bool:
        return self.index == len(self.line)

    def take(self, text: str) -> bool:
        """Skip `text` if it comes next; whether it did."""
        if not self.line.startswith(text, self.index):
            return False
        self.index += len(text)
        self._skip()
        return True

    def blank(self) -> bool:
        """Skip white space; whether there was any."""
        before = self.index
        self._skip()
        return self.index > before

    def match(self, pattern: re.Pattern[str], expected: str, skip: bool = True) -> str:
        match = pattern.match(self.line, self.index)
        if match is None:
            self.fail(f"expected {expected}")
        self.index = match.end()
        if skip:
            self._skip()
        return match[0]

    def fail(self, message: str, index: int | None = None) -> NoReturn:
        raise SteeringSyntax(message, self.line, self.index if index is None else index)

    def _skip(self) -> None:
        while self.index < len(self.line) and self.line[self.index].isspace():
            self.index += 1


def _edit(reader: _EditReader) -> VectorEdit:
    strength = _strength(reader)
    name = _name(reader)
    hook, layers = (None, None) if not reader.take("@") else _site(reader)
    fields: dict[str, Any] = {}
    while not reader.at_end and reader.line[reader.index] != ";":
        start = reader.index
        key = reader.match(_WORD, f"';' or one of {', '.join(_KEYS)}")
        if key not in _KEYS:
            reader.fail(f"{quoted(key)} is no key, expected one of {', '.join(_KEYS)}", start)
        if key in fields:
            reader.fail(f"{key} is given twice", start)
        if not reader.take("="):
            reader.fail(f"expected '=' after {key}")
        fields[key] = _streams(reader) if key == "stream" else _choice(reader, key)
    return _build(strength, name, hook, layers, fields)


def _strength(reader: _EditReader) -> float:
    start = reader.index
    number = _NUMBER.match(reader.line, start)
    if number is None:
        return 1.0
    strength = float(reader.match(_NUMBER, "a number", skip=False))
    if not math.isfinite(strength):
        reader.fail("this strength is beyond every number", start)
    if not reader.blank():
        reader.fail("expected a blank between the strength and the name")
    return strength


def _name(reader: _EditReader) -> str:
    if not reader.line.startswith('"', reader.index):
        return reader.match(_NAME, "the name of a vector, or a strength and a name such as +2.0 spooky")
    start = reader.index
    text = reader.match(_QUOTED, "a closing quote after this one")
    try:
        name: str = json.loads(text)
    except ValueError:
        reader.fail("this quoted name is not as JSON writes texts", start)
    if not name:
        reader.fail("a name cannot be empty", start)
    return name


def _site(reader: _EditReader) -> tuple[str, Any]:
    hook = reader.match(_WORD, "the name of a hook")
    if not reader.take("["):
        return hook, None
    if reader.take("*"):
        layers: Any = "all"
    else:
        layers = {"layers": [], "ranges": []}
        _listed(reader, lambda: _layer(reader, layers))
    if not reader.take("]"):
        reader.fail("expected ',' and another layer, or ']'")
    return hook, {key: value for key, value in layers.items() if value} if layers != "all" else layers


def _layer(reader: _EditReader, layers: dict[str, list[Any]]) -> None:
    start = reader.index
    first = int(reader.match(_WHOLE, "a layer, a range such as 4..8, or *"))
    if not reader.take(".."):
        layers["layers"].append(first)
        return
    last = int(reader.match(_WHOLE, "the last layer of this range"))
    if (first < 0) == (last < 0) and first > last:
        reader.fail("this range starts after its end", start)
    layers["ranges"].append([first, last])


def _streams(reader: _EditReader) -> Any:
    for word in ("all", "post_mix"):
        if reader.take(word):
            return word
    streams: list[int] = []

    def read_stream() -> None:
        start = reader.index
        streams.append(int(reader.match(_WHOLE, "stream numbers, all or post_mix")))
        if streams[-1] < 0:
            reader.fail("streams are counted from 0", start)

    _listed(reader, read_stream)
    return streams


def _listed(reader: _EditReader, read_item: Callable[[], None]) -> None:
    read_item()
    while reader.take(","):
        read_item()


def _choice(reader: _EditReader, key: str) -> str:
    allowed = {"phase": PHASES, "path": PATHS, "op": _OPS}[key]
    start = reader.index
    word = reader.match(_WORD, f"one of {', '.join(allowed)}")
    if word not in allowed:
        reader.fail(f"{key} is {quoted(word)}, expected one of {', '.join(allowed)}", start)
    return word


def _build(strength: float, name: str, hook: str | None, layers: Any, fields: dict[str, Any]) -> VectorEdit:
    options: dict[str, Any] = {"hook": hook, "layers": layers, "streams": fields.get("stream")}
    options |= {key: fields[key] for key in ("phase", "path") if key in fields}
    op = fields.get("op", "add")
    if op == "clamp":
        return Clamp(name, min=strength, max=strength, **options)
    kind: type[VectorEdit] = {"add": Add, "project": Project, "patch": Patch}[op]
    return kind(name, scale=strength, **options)


def _print(edit: Any) -> str:
    if not isinstance(edit, (Add, Project, Clamp, Patch)) or not isinstance(edit.vector, str):
        raise SteeringError(
            f"{quoted(edit)} has no line: only edits with a named vector do. Register it first."
        )
    strength = edit.scale
    if isinstance(edit, Clamp):
        if edit.min != edit.max or edit.scale != 1 or edit.min is None:
            raise SteeringError(
                "a line can clamp to one value only. Use interventions for bounds and strengths."
            )
        strength = edit.min
    if edit.where is not None or (isinstance(edit, Add) and edit.norm_match):
        raise SteeringError("a line cannot say where, or norm_match. Use interventions.")
    parts = [f"{strength:+}", edit.vector if _NAME.fullmatch(edit.vector) else json.dumps(edit.vector)]
    if edit.hook is not None:
        parts += ["@", edit.hook + ("" if edit.layers is None else f"[{_layers(edit.layers)}]")]
    elif edit.layers is not None:
        raise SteeringError("a line names layers of a hook, and this edit names no hook. Give it one.")
    if edit.streams is not None:
        parts.append(
            "stream=" + (edit.streams if isinstance(edit.streams, str) else ",".join(map(str, edit.streams)))
        )
    for key, value, default in (
        ("phase", edit.phase, "both"),
        ("path", edit.path, "both"),
        ("op", edit.op, "add"),
    ):
        if value != default:
            parts.append(f"{key}={value}")
    return " ".join(parts)


def _layers(layers: LayerSelector) -> str:
    if layers.every is not None:
        if (layers.every, layers.start) != (1, 0):
            raise SteeringError("a line cannot say every k-th layer. Name the layers.")
        return "*"
    return ",".join([*map(str, layers.layers), *(f"{first}..{last}" for first, last in layers.ranges)])
