"""Steering as request fields: the fields of compatible servers and our `interventions`, parsed into the same edits.

    steering_vectors, prefill_steering_vectors, decode_steering_vectors    {hook: vectors by layer} (`vector_encoding`)
    steering_clamps, prefill_steering_clamps, decode_steering_clamps       {hook: {layer: [clamps]}} (`tiers`)
    steering_name                                                          a registered module, or {"name", "scale"}
    interventions                                                          [{"op", "at", "vector", ...}], in order

The compatible fields act on the carried streams (`path` "carry"), as on those servers; `interventions` act on both
paths, like the Python edits. A request uses one kind or the other. SAE edits (`op: "sae"` and two compatible
fields) are read by parsers passed in as arguments. `parse_steering` returns the field of every edit, and every
error names the field at fault. `intervention` is the inverse for single edits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from birkhoff.errors import SteeringError, did_you_mean, quoted
from birkhoff.hooks.field_paths import check_keys, field_path
from birkhoff.hooks.layers import is_list
from birkhoff.option_checks import listed
from birkhoff.steering.attention_edits import AttentionEdit
from birkhoff.steering.expert_edits import ExpertSet
from birkhoff.steering.mixer_edits import WORDS, MixerMatrix
from birkhoff.steering.position_rows import PositionRows
from birkhoff.steering.request_edit import RequestEdit
from birkhoff.steering.tiers import SteeringTiers, WireEdit, compatible_path
from birkhoff.steering.vector import Vector, finite_number
from birkhoff.steering.vector_edits import Add, Clamp, Patch, Project, Scale, VectorEdit
from birkhoff.steering.vector_encoding import unpacked_vector
from birkhoff.steering.vector_file import SteeringVector

TIERS = {
    "steering_vectors": "both",
    "prefill_steering_vectors": "prefill",
    "decode_steering_vectors": "decode",
}
CLAMP_TIERS = {
    "steering_clamps": "both",
    "prefill_steering_clamps": "prefill",
    "decode_steering_clamps": "decode",
}
FEATURES = ("sae_clamp_specs", "sae_full_reconstruction_specs")
COMPATIBLE = ("steering_name", *TIERS, *CLAMP_TIERS, *FEATURES)
NATIVE = "interventions"
OPS: Mapping[str, Any] = {"add": Add, "project": Project, "clamp": Clamp, "patch": Patch, "scale": Scale}
# Kinds of edits that take no vector; an entry has their fields, and `layers` in `at`.
OTHERS: Mapping[str, tuple[type[RequestEdit], tuple[str, ...]]] = {
    "attention": (AttentionEdit, ("heads", "mask", "blocks", "sink", "entries", "where", "phase", "when")),
    "experts": (ExpertSet, ("force", "ban", "add", "weights", "where", "phase", "when")),
}
_COMMON = ("op", "at", "scale", "streams", "where", "phase", "path", "when")
_OWN = {
    "add": ("vector", "norm_match"),
    "project": ("vector", "strength"),
    "clamp": ("vector", "strength", "min", "max", "value", "renormalise"),
    "patch": ("vector", "source", "renormalise", "heads"),
    "scale": ("factor", "renormalise", "heads"),
}

Parser = Callable[[Any, str], Sequence[Any]]  # value and path of a field -> edits


def parse_steering(
    body: Mapping[str, Any],
    modules: Mapping[str, Any],
    features: Mapping[str, Parser] | None = None,
    runs: Mapping[str, Mapping[tuple[str, int], Any]] | None = None,
) -> list[WireEdit]:
    """The edits of a request's fields, in order; other fields are ignored.

    `features` parses "sae" interventions and the fields in `FEATURES`; `runs` are captured rows by name, for
    patches."""
    fields = {name: body[name] for name in (*COMPATIBLE, NATIVE) if body.get(name) is not None}
    if NATIVE in fields and len(fields) > 1:
        other = next(name for name in fields if name != NATIVE)
        raise SteeringError(f"is given beside {other}. Use one kind: move everything into {NATIVE}.", NATIVE)
    edits: list[WireEdit] = []
    for name, value in fields.items():
        if name == NATIVE:
            edits += _interventions(value, features or {}, runs or {})
        elif name == "steering_name":
            edits.append(_named(value, modules))
        elif name in TIERS:
            edits += SteeringTiers.parse({name: value}, TIERS, {}).edits(TIERS)
        elif name in CLAMP_TIERS:
            edits += SteeringTiers.parse({name: value}, {}, CLAMP_TIERS).edits(CLAMP_TIERS)
        else:
            edits += [WireEdit(name, edit) for edit in _parser(features or {}, name, name)(value, name)]
    return edits


def intervention(edit: Any) -> dict[str, Any]:
    """One edit as an entry of `interventions`, which `parse_steering` parses into the same edit."""
    if edit.op in OTHERS:
        values: dict[str, Any] = edit.to_json()
        return {"op": edit.op, "at": {"layers": values.pop("layers")}} | values
    if not isinstance(edit, VectorEdit):
        sae_edit: dict[str, Any] = edit.to_json()
        return sae_edit
    out: dict[str, Any] = {"op": edit.op}
    fields = edit.to_json()
    at = {name: fields[name] for name in ("hook", "layers") if name in fields}
    if at:
        out["at"] = at
    name = {"patch": "source", "scale": "factor"}.get(edit.op, "vector")
    if isinstance(edit.vector, str):
        out[name] = f"@{edit.vector}"
    elif edit.op == "scale":
        out[name] = fields["factor"]
    elif edit.vector is not None:
        out[name] = "zeros" if edit.op == "patch" and edit.vector == 0 else fields["vector"]
    return out | {
        key: value for key, value in fields.items() if key not in ("op", "hook", "layers", "vector", "factor")
    }


def _named(value: Any, modules: Mapping[str, Any]) -> WireEdit:
    path = "steering_name"
    scale, name = 1.0, value
    if isinstance(value, Mapping):
        check_keys(value, ("name", "scale"), path, SteeringError)
        scale = finite_number(value.get("scale", 1.0), "scale", f"{path}.scale")
        name = value.get("name")
    if not isinstance(name, str) or not name:
        raise SteeringError(f"is {quoted(name)}, expected the name of a module.", path)
    if name not in modules:
        known = ", ".join(sorted(modules)) or "none"
        hint = did_you_mean(name, modules)
        raise SteeringError(f"there is no module named {quoted(name)}; registered: {known}.{hint}", path)
    op = getattr(modules[name], "op", "add")
    if op == "clamp":
        raise SteeringError(
            f"{quoted(name)} is made to clamp, which needs bounds. Use {NATIVE} with min or max.", path
        )
    hook = getattr(modules[name], "hook", None)
    return WireEdit(path, OPS[op](name, scale=scale, path=compatible_path(hook)))


def _interventions(value: Any, features: Mapping[str, Parser], runs: Mapping[str, Any]) -> Iterator[WireEdit]:
    if not is_list(value):
        raise SteeringError(f"is {quoted(value)}, expected a list of objects with 'op' and 'at'.", NATIVE)
    for index, raw in enumerate(value):
        path = f"{NATIVE}[{index}]"
        if not isinstance(raw, Mapping):
            raise SteeringError(f"is {quoted(raw)}, expected an object with 'op' and 'at'.", path)
        op = raw.get("op")
        if op == "sae":
            for edit in _parser(features, "sae", path)(raw, path):
                yield WireEdit(path, edit)
        elif isinstance(op, str) and op in OTHERS:
            yield WireEdit(path, _other(raw, op, path))
        elif not isinstance(op, str) or op not in OPS:
            known = ", ".join((*OPS, *OTHERS, "sae"))
            raise SteeringError(f"is {quoted(op)}, expected one of {known}.", f"{path}.op")
        else:
            yield WireEdit(path, _native(raw, op, path, runs))


def _other(raw: Mapping[str, Any], op: str, path: str) -> RequestEdit:
    kind, known = OTHERS[op]
    check_keys(raw, ("op", "at", *known), path, SteeringError)
    at = _at(raw, ("layers",), path)
    values = {name: raw[name] for name in known if raw.get(name) is not None}
    with field_path(path, SteeringError):
        return kind.from_json({"op": op, **at, **values})


def _at(raw: Mapping[str, Any], known: Sequence[str], path: str) -> Mapping[str, Any]:
    at = raw.get("at", {})
    if not isinstance(at, Mapping):
        raise SteeringError(
            f"is {quoted(at)}, expected an object with {' and '.join(map(repr, known))}.", f"{path}.at"
        )
    check_keys(at, known, f"{path}.at", SteeringError)
    return at


def _native(raw: Mapping[str, Any], op: str, path: str, runs: Mapping[str, Any]) -> Any:
    check_keys(raw, (*_COMMON, *_OWN[op]), path, SteeringError)
    at = _at(raw, ("hook", "layers"), path)
    options = {
        name: raw[name]
        for name in ("scale", "streams", "where", "phase", "path", "when")
        if raw.get(name) is not None
    }
    options |= {
        name: raw[name]
        for name in ("norm_match", "min", "max", "renormalise", "heads")
        if name in raw and raw[name] is not None
    }
    for name in ("norm_match", "renormalise"):
        if not isinstance(options.get(name, False), bool):
            raise SteeringError(f"is {quoted(options[name])}, expected true or false.", f"{path}.{name}")
    if "strength" in raw:  # an alias of scale for directions
        if "scale" in raw:
            raise SteeringError("is given beside scale, and means the same. Give one.", f"{path}.strength")
        options["scale"] = raw["strength"]
    if "value" in raw:
        if "min" in options or "max" in options:
            raise SteeringError("is given beside min or max. It stands for both.", f"{path}.value")
        options["min"] = options["max"] = raw["value"]
    vector = _source(raw, op, at, path, runs)
    with field_path(path, SteeringError):
        return OPS[op](vector, hook=at.get("hook"), layers=at.get("layers"), **options)


def _source(
    raw: Mapping[str, Any], op: str, at: Mapping[str, Any], path: str, runs: Mapping[str, Any]
) -> Any:
    if op == "scale":
        return finite_number(raw.get("factor"), "factor", f"{path}.factor")
    field = "source" if op == "patch" and "source" in raw else "vector"
    value, where = raw.get(field), f"{path}.{field}"
    if op == "clamp" and value is None:
        return None
    if op == "patch" and "source" in raw and "vector" in raw:
        raise SteeringError("is given beside source, and means the same. Give one.", f"{path}.vector")
    if isinstance(value, str):
        if op == "patch" and value == "zeros":
            return 0
        if op == "patch" and value in WORDS:
            return MixerMatrix(value)
        if value.startswith("@") and len(value) > 1:
            return value[1:]
        raise SteeringError(f"is {quoted(value)}, expected '@' and the name of a module, or numbers.", where)
    with field_path(where, SteeringError):
        if isinstance(value, Mapping):
            if "data" in value or "dtype" in value:
                return unpacked_vector(value, "")
            if op == "patch" and "run" in value:
                return _run(value, at, runs)
            if op == "patch" and "positions" in value:
                return PositionRows.from_json(value)
            if op == "patch" and "permutation" in value:
                return MixerMatrix.parse(value)
            return SteeringVector.from_json(value)
        if not is_list(value):
            raise SteeringError(f"is {quoted(value)}, expected '@name', numbers or a packed vector.")
        if op == "patch" and value and all(is_list(line) for line in value):
            value = [number for line in value for number in line]  # a matrix
        return Vector(value, "the vector")


def _run(value: Mapping[str, Any], at: Mapping[str, Any], runs: Mapping[str, Any]) -> PositionRows:
    check_keys(value, ("run", "layer"), "", SteeringError)
    name, layers = value["run"], listed(at.get("layers"))
    if not isinstance(name, str) or name not in runs:
        known = ", ".join(sorted(runs)) or "none"
        raise SteeringError(f"run is {quoted(name)}, expected a kept run; there is {known}.")
    layer = value.get("layer", layers[0] if is_list(layers) and len(layers) == 1 else None)
    key = (at.get("hook"), layer)
    if key not in runs[name]:
        captured = ", ".join(f"{hook}[{layer}]" for hook, layer in sorted(runs[name]))
        raise SteeringError(
            f"run {quoted(name)} has no rows of {key[0]}[{key[1]}]; it has {captured or 'nothing'}."
        )
    return PositionRows.captured(runs[name][key])


def _parser(features: Mapping[str, Parser], name: str, path: str) -> Parser:
    if name not in features:
        raise SteeringError(
            "dictionaries of features are not served here. Attach one, or leave this out.", path
        )
    return features[name]
