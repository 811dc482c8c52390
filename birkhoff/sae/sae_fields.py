"""SAE edits as request fields: two fields of compatible servers, and `{"op": "sae"}` interventions.

    sae_clamp_specs                 [{"module_name", "phase", "clamps": {hook: {layer: [{"feature_idx", "kind",
                                    "value", "only_if_active"}]}}}]                        -> SaeSet
    sae_full_reconstruction_specs   the same, clamps may be empty, "error_term" drop|keep  -> SaeReconstruct
    {"op": "sae", "module", "mode": "delta"|"reconstruct", "set": {feature: value}, ...}   -> either

All are parsed into the same objects that Python code uses. Every error names the field at fault. `PARSERS` is the
argument `features` of `steering_fields.parse_steering`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from birkhoff.errors import SaeError, quoted
from birkhoff.hooks.field_paths import check_keys, field_path, join_path
from birkhoff.hooks.layers import is_list
from birkhoff.hooks.phases import PHASES
from birkhoff.hooks.site_names import known_name
from birkhoff.option_checks import as_int
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet

SaeEdit = SaeSet | SaeReconstruct
_SPEC = ("module_name", "phase", "clamps", "where", "streams", "path")
_ENTRY = ("feature_idx", "kind", "value", "only_if_active")
_NATIVE = (
    "op",
    "module",
    "mode",
    "set",
    "set_at",
    "kind",
    "only_if_active",
    "phase",
    "where",
    "streams",
    "path",
    "error_term",
    "when",
)


def parse_clamp_specs(value: Any, path: str = "sae_clamp_specs", phase: str | None = None) -> list[SaeSet]:
    """`phase` is the phase of specs in a list for one phase, as of the global tier."""
    return [_make(SaeSet, spec, at, phase, {}) for spec, at in _specs(value, path, _SPEC)]


def parse_reconstruction_specs(
    value: Any, path: str = "sae_full_reconstruction_specs"
) -> list[SaeReconstruct]:
    return [
        _make(SaeReconstruct, spec, at, None, {"error": spec["error_term"]} if "error_term" in spec else {})
        for spec, at in _specs(value, path, (*_SPEC, "error_term"))
    ]


def parse_global_specs(body: Mapping[str, Any]) -> list[SaeSet]:
    """Edits of all requests: `prefill_specs` and `decode_specs`, each a list of clamp specs."""
    return [
        edit
        for phase in ("prefill", "decode")
        for edit in parse_clamp_specs(body.get(f"{phase}_specs") or [], f"{phase}_specs", phase)
    ]


def parse_intervention(raw: Any, path: str) -> SaeEdit:
    """Parse one `{"op": "sae"}` object; the inverse of an edit's `to_json`."""
    if not isinstance(raw, Mapping):
        raise SaeError(f"is {quoted(raw)}, expected an object with 'op', 'module' and 'mode'.", path)
    check_keys(raw, _NATIVE, path, SaeError)
    if raw.get("op", "sae") != "sae":
        raise SaeError(f"is {quoted(raw['op'])}, expected 'sae'.", join_path(path, "op"))
    mode = raw.get("mode", "delta")
    if mode not in ("delta", "reconstruct"):
        raise SaeError(f"is {quoted(mode)}, expected 'delta' or 'reconstruct'.", join_path(path, "mode"))
    if mode == "delta" and "error_term" in raw:
        raise SaeError(
            "a delta keeps the error by itself. Leave it out, or use mode 'reconstruct'.",
            join_path(path, "error_term"),
        )
    features: dict[Any, Any] = {}
    if raw.get("set") is not None:
        if not isinstance(raw["set"], Mapping):
            raise SaeError(
                f"is {quoted(raw['set'])}, expected an object from features to values.",
                join_path(path, "set"),
            )
        features = dict(raw["set"])
    if raw.get("set_at") is not None:
        if features:
            raise SaeError("is given beside set. Use one of them.", join_path(path, "set_at"))
        features = _by_site(raw["set_at"], join_path(path, "set_at"), _plain_values)
    options = {
        name: raw[name]
        for name in ("kind", "only_if_active", "phase", "where", "streams", "path", "when")
        if name in raw
    }
    if mode == "reconstruct":
        with field_path(path, SaeError):
            error = {"error": raw["error_term"]} if "error_term" in raw else {}
            return SaeReconstruct(raw.get("module"), features, **options, **error)  # type: ignore[arg-type]
    with field_path(path, SaeError):
        return SaeSet(raw.get("module"), features, **options)  # type: ignore[arg-type]


def _specs(value: Any, path: str, known: Sequence[str]) -> list[tuple[Mapping[str, Any], str]]:
    if not is_list(value):
        raise SaeError(
            f"is {quoted(value)}, expected a list of objects with 'module_name' and 'clamps'.", path
        )
    for index, spec in enumerate(value):
        if not isinstance(spec, Mapping):
            raise SaeError(
                f"is {quoted(spec)}, expected an object with 'module_name' and 'clamps'.", f"{path}[{index}]"
            )
        check_keys(spec, known, f"{path}[{index}]", SaeError)
    return [(spec, f"{path}[{index}]") for index, spec in enumerate(value)]


def _make(
    kind: Callable[..., Any], spec: Mapping[str, Any], path: str, phase: str | None, more: dict[str, Any]
) -> Any:
    spec_phase = spec.get("phase", phase or "both")
    if spec_phase not in PHASES:
        raise SaeError(f"is {quoted(spec_phase)}, expected one of {', '.join(PHASES)}.", f"{path}.phase")
    if phase is not None and spec_phase != phase:
        raise SaeError(f"is {quoted(spec_phase)} in a list of {phase} specs. Leave it out.", f"{path}.phase")
    name = spec.get("module_name")
    if not isinstance(name, str) or not name:
        raise SaeError(
            f"is {quoted(name)}, expected the name of an attached dictionary.", f"{path}.module_name"
        )
    features = _by_site(spec.get("clamps") or {}, f"{path}.clamps", _entries)
    options = {name: spec[name] for name in ("where", "streams", "path") if name in spec}
    with field_path(path, SaeError):
        return kind(name, features, phase=spec_phase, **options, **more)


def _by_site(
    raw: Any, path: str, read: Callable[[Any, str], dict[Any, Any]]
) -> dict[tuple[str, int], dict[Any, Any]]:
    if not isinstance(raw, Mapping):
        raise SaeError(f"is {quoted(raw)}, expected an object from hooks to layers.", path)
    by_site: dict[tuple[str, int], dict[Any, Any]] = {}
    for hook, layers in raw.items():
        at = f"{path}.{hook}"
        if not isinstance(hook, str) or not known_name(hook):
            raise SaeError(f"{quoted(hook)} is no hook.", path)
        if not isinstance(layers, Mapping):
            raise SaeError(f"is {quoted(layers)}, expected an object from layers to clamps.", at)
        for layer, entries in layers.items():
            index = int(layer) if isinstance(layer, str) and layer.isdecimal() else layer
            if as_int(index) is None or index < 0:
                raise SaeError(f"layer {quoted(layer)}, expected a whole number from 0.", at)
            if (hook, index) in by_site:
                raise SaeError(f"layer {index} is given twice.", at)
            by_site[hook, index] = read(entries, f"{at}.{layer}")
    return by_site


def _entries(raw: Any, path: str) -> dict[Any, Any]:
    if not is_list(raw):
        raise SaeError(f"is {quoted(raw)}, expected a list of clamps.", path)
    clamps: dict[Any, Any] = {}
    for index, entry in enumerate(raw):
        at = f"{path}[{index}]"
        if not isinstance(entry, Mapping):
            raise SaeError(
                f"is {quoted(entry)}, expected an object with 'feature_idx', 'kind' and 'value'.", at
            )
        check_keys(entry, _ENTRY, at, SaeError)
        if "feature_idx" not in entry or "value" not in entry:
            raise SaeError(f"lacks {'value' if 'feature_idx' in entry else 'feature_idx'}.", at)
        feature = entry["feature_idx"]
        if (
            isinstance(feature, bool)
            or not isinstance(feature, (int, str))
            or feature == ""
            or (type(feature) is int and feature < 0)
        ):
            raise SaeError(f"is {quoted(feature)}, expected a number from 0 or a label.", f"{at}.feature_idx")
        if feature in clamps:
            raise SaeError(f"feature {quoted(feature)} is given twice. Give each feature once.", at)
        clamps[feature] = {
            "kind": entry.get("kind", "absolute"),
            "value": entry["value"],
            "only_if_active": entry.get("only_if_active", False),
        }
    return clamps


def _plain_values(raw: Any, path: str) -> dict[Any, Any]:
    if not isinstance(raw, Mapping):
        raise SaeError(f"is {quoted(raw)}, expected an object from features to values.", path)
    return dict(raw)


def _parse_one(raw: Any, path: str) -> list[SaeEdit]:
    return [parse_intervention(raw, path)]


PARSERS: Mapping[str, Callable[[Any, str], Sequence[Any]]] = {
    "sae": _parse_one,
    "sae_clamp_specs": parse_clamp_specs,
    "sae_full_reconstruction_specs": parse_reconstruction_specs,
}
