"""Steering in one line, for the command line:

    +2.0 spooky @ mhc_streams_pre_attn[4] stream=1; -0.5 happy @ mlp_out[4,6..8] op=project phase=decode

`STRENGTH NAME @ HOOK[LAYERS] key=value ...`, several joined by `;`. STRENGTH may be omitted and is then 1; the site
after `@` may be omitted if the vector has a hook and layers. LAYERS are numbers, ranges with both ends (`4..8`) or `*`;
negative ones count from the end. Keys: `stream` (numbers, `all` or `post_mix`), `phase`, `path`, `op`, and for mixers
`renormalise` (yes or no) and `permute` (streams). STRENGTH is the scale; for a clamp it is the value of the component.
A name with characters other than letters, digits and `._/~+-` is a JSON string in double quotes. It is left out for
`op=scale`, whose STRENGTH is the factor, for `op=clamp` of all weights of a mixer, and for a patch with `permute`:

    0 @ mhc_pre_mix[6..-1] stream=2 op=scale; identity @ mhc_res_mix[*] op=patch; @ mhc_res_mix[4] op=patch permute=1,0

Routers are edited at `moe_topk` with the key `expert`: `op=force`, `op=ban`, `op=add` (to scores) and `op=weight`:

    @ moe_topk[2..4] op=force expert=3,5; +0.5 @ moe_topk[4] expert=3

A gate limits an edit to some tokens: `when=NAME` with `above` or `below` reads the component along a named vector that
brings its hook and layer; `tokens` are ids, or a class of tokens:

    +2 spooky when=happy above=1.5; 0 @ mlp_out[6] op=scale tokens=digits; @ moe_topk[4] op=ban expert=3 tokens=11,13

`parse_line` parses edits and `print_line` prints them in a canonical form; each is the inverse of the other. Errors
show the line with a caret under the character where parsing failed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from birkhoff.errors import SteeringError, SteeringSyntax, quoted
from birkhoff.hooks.layers import LayerSelector
from birkhoff.hooks.phases import PHASES
from birkhoff.hooks.sites import MOE_TOPK
from birkhoff.steering.expert_edits import ExpertSet
from birkhoff.steering.gated_edits import TOKEN_CLASSES, Gate
from birkhoff.steering.mixer_edits import MixerMatrix
from birkhoff.steering.request_edit import RequestEdit
from birkhoff.steering.vector_edits import PATHS, Add, Clamp, Patch, Project, Scale, VectorEdit

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_NAME = re.compile(r"[\w./~+-]+")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[A-Za-z_]+", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,9}", re.ASCII)
_EXPERT_OPS = ("add", "force", "ban", "weight")
_OPS = ("add", "project", "clamp", "patch", "scale", "force", "ban", "weight")
_EXPERT_FIELDS = {"add": "add", "force": "force", "ban": "ban", "weight": "weights"}
_GATE_KEYS = ("when", "above", "below", "tokens")
_KEYS = ("stream", "phase", "path", "op", "renormalise", "permute", "expert", *_GATE_KEYS)


def parse_line(line: str) -> list[RequestEdit]:
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


def _edit(reader: _EditReader) -> RequestEdit:
    strength = _strength(reader)
    start = reader.index
    name = None if reader.line.startswith("@", start) else _name(reader)
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
        fields[key] = _VALUES.get(key, _choice)(reader, key)
    op = fields.get("op", "add")
    if op in ("force", "ban", "weight") and "expert" not in fields:
        reader.fail(f"op={op} does not say which experts: expert=3", start)
    nameless = op == "scale" or "permute" in fields or "expert" in fields
    if (name is None) != nameless and (op != "clamp" or nameless):
        reader.fail(
            "a name is given beside op=scale, permute or expert, which have none"
            if name is not None
            else "expected the name of a vector: only op=scale, op=clamp of a mixer, permute and expert have none",
            start,
        )
    gate = _gate(fields, reader, start)
    if gate is not None:
        fields["when"] = gate
    if "expert" in fields:
        return _experts(strength, hook, layers, fields, reader, start)
    return _build(strength, name, hook, layers, fields, reader, start)


def _experts(
    strength: float, hook: str | None, layers: Any, fields: dict[str, Any], reader: _EditReader, start: int
) -> ExpertSet:
    op, experts = fields.get("op", "add"), fields["expert"]
    other = next((key for key in fields if key not in ("op", "expert", "phase", "when")), None)
    if op not in _EXPERT_OPS:
        reader.fail(f"expert is for op={', op='.join(_EXPERT_OPS)}", start)
    if hook != MOE_TOPK.name:
        reader.fail(f"experts are chosen at {MOE_TOPK.name}, expected @ {MOE_TOPK.name}[LAYERS]", start)
    if other is not None:
        reader.fail(f"a router has no {other}", start)
    options: dict[str, Any] = {"phase": fields.get("phase", "both"), "when": fields.get("when")}
    if op in ("force", "ban"):
        if strength != 1:
            reader.fail(f"op={op} has no strength", start)
        return ExpertSet(layers, **options, **{op: experts})
    numbers: dict[str, Any] = {_EXPERT_FIELDS[op]: dict.fromkeys(experts, strength)}
    return ExpertSet(layers, **options, **numbers)


def _gate(fields: dict[str, Any], reader: _EditReader, start: int) -> Gate | None:
    """The gate of the keys, which are taken out of `fields`."""
    given = {key: fields.pop(key) for key in _GATE_KEYS if key in fields}
    if not given:
        return None
    if "tokens" in given:
        if len(given) > 1:
            reader.fail("tokens is a gate of its own, without when, above and below", start)
        return Gate(tokens=given["tokens"])
    if "when" not in given or len(given) == 1:
        lacks = "a bound: above=1.0 or below=1.0" if "when" in given else "the vector it reads: when=NAME"
        reader.fail(f"the gate lacks {lacks}", start)
    return Gate(given["when"], above=given.get("above"), below=given.get("below"))


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


def _streams(reader: _EditReader, key: str) -> Any:
    for word in ("all", "post_mix"):
        if reader.take(word):
            return word
    return _numbers(reader, "stream")


def _numbers(reader: _EditReader, key: str) -> list[int]:
    numbers: list[int] = []
    name = {"expert": "expert", "tokens": "token"}.get(key, "stream")

    def read_number() -> None:
        start = reader.index
        words = ", all or post_mix" if key == "stream" else ""
        numbers.append(int(reader.match(_WHOLE, f"{name} numbers{words}")))
        if numbers[-1] < 0:
            reader.fail(f"{name}s are counted from 0", start)

    _listed(reader, read_number)
    return numbers


def _tokens(reader: _EditReader, key: str) -> list[int] | str:
    if _WHOLE.match(reader.line, reader.index):
        return _numbers(reader, key)
    return _choice(reader, key)


def _bound(reader: _EditReader, key: str) -> float:
    start = reader.index
    bound = float(reader.match(_NUMBER, f"a number after {key}="))
    if not math.isfinite(bound):
        reader.fail("this number is beyond every number", start)
    return bound


def _listed(reader: _EditReader, read_item: Callable[[], None]) -> None:
    read_item()
    while reader.take(","):
        read_item()


def _choice(reader: _EditReader, key: str) -> str:
    allowed = {
        "phase": PHASES,
        "path": PATHS,
        "op": _OPS,
        "renormalise": ("yes", "no"),
        "tokens": tuple(TOKEN_CLASSES),
    }[key]
    start = reader.index
    word = reader.match(_WORD, f"one of {', '.join(allowed)}")
    if word not in allowed:
        reader.fail(f"{key} is {quoted(word)}, expected one of {', '.join(allowed)}", start)
    return word


def _build(
    strength: float,
    name: str | None,
    hook: str | None,
    layers: Any,
    fields: dict[str, Any],
    reader: _EditReader,
    start: int,
) -> VectorEdit:
    options: dict[str, Any] = {"hook": hook, "layers": layers, "streams": fields.get("stream")}
    options |= {key: fields[key] for key in ("phase", "path", "when") if key in fields}
    op = fields.get("op", "add")
    if "renormalise" in fields:
        if op not in ("clamp", "patch", "scale"):
            reader.fail("renormalise is for op=patch, op=clamp and op=scale of a mixer", start)
        options["renormalise"] = fields["renormalise"] == "yes"
    if "permute" in fields and op != "patch":
        reader.fail("permute is for op=patch of a mixer", start)
    if op == "scale":
        return Scale(strength, **options)
    if op == "clamp":
        return Clamp(name, min=strength, max=strength, **options)
    vector: Any = name if "permute" not in fields else {"permutation": fields["permute"]}
    kind: type[VectorEdit] = {"add": Add, "project": Project, "patch": Patch}[op]
    return kind(vector, scale=strength, **options)


def _print_experts(edit: ExpertSet) -> str:
    given = [(op, getattr(edit, name)) for op, name in _EXPERT_FIELDS.items() if getattr(edit, name)]
    (op, value), strengths = given[0], {1.0}
    if op in ("add", "weight"):
        value, strengths = [expert for expert, _ in value], {number for _, number in value}
    if len(given) > 1 or len(strengths) > 1 or edit.where is not None:
        raise SteeringError(
            "a line says one thing about experts, with one strength, and not where. Use several, or interventions."
        )
    strength = "" if op in ("force", "ban") else f"{strengths.pop():+} "
    line = f"{strength}@ {MOE_TOPK.name}[{_layers(edit.layers)}] op={op} expert={','.join(map(str, value))}"
    line = line if edit.phase == "both" else f"{line} phase={edit.phase}"
    return " ".join([line, *_gate_keys(edit.when)])


def _gate_keys(gate: Gate | None) -> list[str]:
    if gate is None:
        return []
    if gate.tokens is not None:
        return [f"tokens={gate.tokens if isinstance(gate.tokens, str) else ','.join(map(str, gate.tokens))}"]
    if not isinstance(gate.vector, str) or (gate.hook, gate.layer, gate.stream) != (None, None, None):
        raise SteeringError(
            "a line can say a gate of tokens, or of a named vector at its own site. Use interventions for others."
        )
    name = gate.vector if _NAME.fullmatch(gate.vector) else json.dumps(gate.vector)
    bounds = [f"{key}={getattr(gate, key):+}" for key in ("above", "below") if getattr(gate, key) is not None]
    return [f"when={name}", *bounds]


def _print(edit: Any) -> str:
    if isinstance(edit, ExpertSet):
        return _print_experts(edit)
    keys: list[str] = []
    name = edit.vector if isinstance(edit, VectorEdit) else None
    if isinstance(name, MixerMatrix):
        keys = [f"permute={','.join(map(str, name.permutation))}"] if name.permutation else []
        name = None if name.permutation else name.name
    elif isinstance(edit, Scale) or (isinstance(edit, Clamp) and name is None):
        name = None
    elif not isinstance(name, str):
        raise SteeringError(
            f"{quoted(edit)} has no line: only edits with a named vector do. Register it first."
        )
    strength = edit.scale
    if isinstance(edit, Scale):
        if edit.scale != 1:
            raise SteeringError("a line can say a factor, not a scale beside it. Use interventions.")
        strength = edit.factor
    if isinstance(edit, Clamp):
        if edit.min != edit.max or edit.scale != 1 or edit.min is None:
            raise SteeringError(
                "a line can clamp to one value only. Use interventions for bounds and strengths."
            )
        strength = edit.min
    if edit.where is not None or (isinstance(edit, Add) and edit.norm_match):
        raise SteeringError("a line cannot say where, or norm_match. Use interventions.")
    if isinstance(edit, Patch | Scale) and edit.heads is not None:
        raise SteeringError("a line cannot say heads of a patch or a factor. Use interventions.")
    parts = [f"{strength:+}"]
    if name is not None:
        parts.append(name if _NAME.fullmatch(name) else json.dumps(name))
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
    if getattr(edit, "renormalise", False):
        keys.append("renormalise=yes")
    return " ".join([*parts, *keys, *_gate_keys(edit.when)])


_VALUES: Mapping[str, Callable[[_EditReader, str], Any]] = {
    "stream": _streams,
    "permute": _numbers,
    "expert": _numbers,
    "when": lambda reader, key: _name(reader),
    "above": _bound,
    "below": _bound,
    "tokens": _tokens,
}


def _layers(layers: LayerSelector) -> str:
    if layers.every is not None:
        if (layers.every, layers.start) != (1, 0):
            raise SteeringError("a line cannot say every k-th layer. Name the layers.")
        return "*"
    return ",".join([*map(str, layers.layers), *(f"{first}..{last}" for first, last in layers.ranges)])
