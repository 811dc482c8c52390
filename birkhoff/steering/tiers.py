"""Vectors and clamps by tier, hook and layer: the form of global steering and of modules on vLLM steering servers.

    {"vectors": {hook: layers}, "prefill_vectors": ..., "decode_vectors": ...,          `vector_encoding.py`
     "clamps": {hook: {layer: [{"vector", "min", "max"}]}}, "prefill_clamps": ..., "decode_clamps": ...}

A tier is one of these fields: both phases, the prompt, or generated tokens. `SteeringTiers` holds what each tier has at
each layer of each hook, so that a later setting can replace one layer and keep the others, as those servers do.
`SteeringModule` is such a set under a name: any hooks, layers, tiers and scales together. A clamp is also accepted in
its packed form: one blob of directions with `bounds` and `strengths` by row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from birkhoff.errors import SteeringError, VectorFileError, quoted
from birkhoff.hooks.field_paths import check_keys, field_path
from birkhoff.hooks.layers import is_list
from birkhoff.hooks.site_names import STREAMS_POST_MLP
from birkhoff.hooks.sites import BY_NAME
from birkhoff.small_file import VECTOR_BYTES, read_json
from birkhoff.steering.vector_edits import Add, Clamp, VectorEdit
from birkhoff.steering.vector_encoding import LayerVector, layer_number, layer_vectors, packed_rows
from birkhoff.steering.vector_file import SteeringVector

VECTORS = {"vectors": "both", "prefill_vectors": "prefill", "decode_vectors": "decode"}
CLAMPS = {"clamps": "both", "prefill_clamps": "prefill", "decode_clamps": "decode"}
_CLAMP = ("vector", "min", "max", "value", "strength", "streams")

Key = tuple[str, str, int]  # tier, hook, layer


@dataclass(frozen=True)
class WireEdit:
    """An edit and the path of its request field."""

    path: str
    edit: Any


@dataclass(frozen=True)
class SteeringTiers:
    """What every tier has at every layer of every hook: a vector, or a list of clamps."""

    cells: Mapping[Key, LayerVector | tuple[WireEdit, ...]] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, body: Mapping[str, Any], vectors: Mapping[str, str] = VECTORS, clamps: Mapping[str, str] = CLAMPS
    ) -> SteeringTiers:
        """The tiers in `body`; other keys are left to the caller. `vectors` and `clamps` give the phase of each
        field, whose order is the order of the edits."""
        cells: dict[Key, Any] = {}
        readers: tuple[tuple[str, Mapping[str, str], Callable[..., Iterator[Any]]], ...] = (
            ("vectors", vectors, _vector_cells),
            ("clamps", clamps, _clamp_cells),
        )
        for kind, fields, read in readers:
            for name, phase in fields.items():
                value = body.get(name)
                if value is None:
                    continue
                if not isinstance(value, Mapping):
                    raise SteeringError(f"is {quoted(value)}, expected an object from hooks to {kind}.", name)
                for hook, raw in value.items():
                    for layer, cell in read(hook, raw, phase, f"{name}.{hook}"):
                        cells[name, hook, layer] = cell
        return cls(cells)

    def updated(self, other: SteeringTiers, num_layers: int) -> SteeringTiers:
        """These tiers with those layers replaced that `other` has; -1 and the last layer are the same."""
        merged: dict[Key, Any] = {}
        for tiers in (self, other):
            for (tier, hook, layer), cell in tiers.cells.items():
                once = hook in BY_NAME and BY_NAME[hook].once
                at = num_layers - 1 if once else layer + num_layers if layer < 0 else layer
                merged[tier, hook, at] = replace(cell, layer=at) if isinstance(cell, LayerVector) else cell
        return SteeringTiers(merged)

    @property
    def hooks(self) -> list[str]:
        return sorted({hook for _, hook, _ in self.cells})

    @property
    def layers(self) -> list[int]:
        return sorted({layer for _, _, layer in self.cells})

    def edits(self, phases: Mapping[str, str] = {**VECTORS, **CLAMPS}) -> list[WireEdit]:
        """The edits of all tiers; layers of one hook with the same scale and streams share an edit."""
        edits: list[WireEdit] = []
        by_hook: dict[tuple[str, str], list[LayerVector]] = {}
        for (tier, hook, _), cell in self.cells.items():
            if isinstance(cell, LayerVector):
                by_hook.setdefault((tier, hook), []).append(cell)
        for (tier, hook), entries in by_hook.items():
            path = f"{tier}.{hook}"
            for group in _group_layers(sorted(entries, key=lambda entry: entry.layer)):
                edit = _add(group, hook, phases[tier], path)
                edits.append(WireEdit(group[0].path if len(group) == 1 else path, edit))
        for cell in self.cells.values():
            if not isinstance(cell, LayerVector):
                edits += cell
        return edits


def compatible_path(hook: str | None) -> str:
    """The stream path of an edit in a compatible field: those servers change the carried streams."""
    # "after the layer" changes everything that follows
    return "both" if hook == STREAMS_POST_MLP else "carry"


@dataclass(frozen=True, eq=False)
class SteeringModule:
    """A named set of edits at any hooks and layers, each with its phase and scale."""

    parts: tuple[VectorEdit, ...]

    @classmethod
    def from_json(cls, raw: Any) -> SteeringModule:
        """From `{"vectors", "prefill_vectors", "decode_vectors", "clamps", ...}`; a null tier is an absent one."""
        if not isinstance(raw, Mapping):
            raise SteeringError(
                f"is {quoted(raw)}, expected an object with {', '.join((*VECTORS, *CLAMPS))}."
            )
        check_keys(raw, (*VECTORS, *CLAMPS), "", SteeringError)
        parts = tuple(wired.edit for wired in SteeringTiers.parse(raw).edits())
        if not parts:
            raise SteeringError(
                f"has no vectors in any tier, expected some in {', '.join((*VECTORS, *CLAMPS))}."
            )
        return cls(parts)

    @classmethod
    def load(cls, path: str | Path) -> SteeringModule:
        """Read a JSON file of tiers."""
        path = Path(path)
        if not path.is_file():
            raise VectorFileError(f"{path} is {'not a file' if path.exists() else 'missing'}, expected JSON.")
        try:
            raw = read_json(path, VECTOR_BYTES)
        except OSError as error:
            raise VectorFileError(f"{path} cannot be read ({error.strerror}). Use packed rows.") from None
        except (ValueError, RecursionError) as error:
            raise VectorFileError(f"{path} is not JSON ({error}).") from None
        try:
            return cls.from_json(raw)
        except SteeringError as error:
            raise VectorFileError(f"{path}: {error}") from None

    def sites(self, num_layers: int) -> list[tuple[str, int]]:
        """Hook and layer of every part, each once; a hook that fires once per model is at the last layer."""
        found = set()
        for part in self.parts:
            hook = str(part.hook)
            once = hook in BY_NAME and BY_NAME[hook].once
            found |= {
                (hook, layer) for layer in ([num_layers - 1] if once else part.layers.expand(num_layers))
            }
        return sorted(found)

    @cached_property
    def digest(self) -> str:
        """128-bit digest of what determines its effect."""
        content = json.dumps([part.to_json() for part in self.parts], sort_keys=True)
        return hashlib.sha256(b"birkhoff module 1" + content.encode()).hexdigest()[:32]

    def as_vector(self, num_layers: int) -> SteeringVector | None:
        """The same as a steering vector, which edits can also project or place elsewhere; None if it is more than one
        hook at full strength in both phases."""
        part = self.parts[0]
        if len(self.parts) > 1 or not isinstance(part, Add) or (part.scale, part.phase) != (1.0, "both"):
            return None
        rows = {layer: part.vector.at(layer) for layer in part.layers.expand(num_layers)}
        if part.streams == "post_mix" or not all(float(row.tensor().norm()) for row in rows.values()):
            return None
        return SteeringVector(rows, "add", str(part.hook), "flat" if part.streams is None else part.streams)

    def edits(self, edit: VectorEdit) -> list[VectorEdit]:
        """The edits that `edit`, which names this module, stands for: its scale multiplies every part, its phase and
        positions limit them."""
        if not isinstance(edit, Add) or edit.norm_match:
            raise SteeringError(
                f"{quoted(edit.vector)} has its own operation at every hook and layer. Use Add (op 'add'), "
                "without norm_match."
            )
        own = next((name for name in ("hook", "layers", "streams") if getattr(edit, name) is not None), None)
        if own is not None:
            raise SteeringError(f"{quoted(edit.vector)} has its own {own}. Leave {own} out.")
        edits: list[VectorEdit] = []
        for part in self.parts:
            phase = edit.phase if part.phase == "both" else part.phase
            if edit.phase not in ("both", phase):
                continue
            scale = part.scale * edit.scale
            if isinstance(part, Clamp) and not 0 <= scale <= 1:
                raise SteeringError(
                    f"scale {edit.scale:g} makes a clamp of {quoted(edit.vector)} {scale:g} strong, expected 0 to 1."
                )
            path = "both" if part.hook == STREAMS_POST_MLP else edit.path
            edits.append(replace(part, scale=scale, phase=phase, path=path, where=edit.where))
        if not edits:
            raise SteeringError(f"{quoted(edit.vector)} has nothing for the phase {edit.phase}.")
        return edits


def _vector_cells(hook: str, raw: Any, phase: str, path: str) -> Iterator[tuple[int, LayerVector]]:
    entries = layer_vectors(raw, path)
    if hook in BY_NAME and BY_NAME[hook].once and len(entries) > 1:
        layers = [entry.layer for entry in entries]
        raise SteeringError(
            f"{hook} fires once per model, and layers {layers} are given. Give one vector.", path
        )
    for entry in entries:
        yield entry.layer, entry


def _clamp_cells(hook: str, raw: Any, phase: str, path: str) -> Iterator[tuple[int, tuple[WireEdit, ...]]]:
    if not isinstance(raw, Mapping):
        raise SteeringError(f"is {quoted(raw)}, expected {{layer: [clamps]}} or a packed blob.", path)
    if "data" in raw or "dtype" in raw:
        listed = _packed_clamps(raw, path)
    else:
        listed = {}
        for key, entries in raw.items():
            if not is_list(entries):
                raise SteeringError(f"is {quoted(entries)}, expected a list of clamps.", f"{path}.{key}")
            layer = layer_number(key, path)
            if layer in listed:
                raise SteeringError(f"layer {layer} is there twice. Give it once.", path)
            listed[layer] = [(f"{path}.{key}[{i}]", entry) for i, entry in enumerate(entries)]
    for layer, entries in listed.items():
        yield (
            layer,
            tuple(WireEdit(where, _clamp(entry, hook, layer, phase, where)) for where, entry in entries),
        )


def _packed_clamps(raw: Mapping[str, Any], path: str) -> dict[int, list[tuple[str, dict[str, Any]]]]:
    """Rows of a blob as clamp entries by layer; a layer may have several, in the order of rows."""
    rows = packed_rows(raw, ("bounds", "strengths"), path)
    bounds, strengths = raw.get("bounds"), raw.get("strengths")
    for name, values in (("bounds", bounds), ("strengths", strengths)):
        if (values is not None or name == "bounds") and (not is_list(values) or len(values) != len(rows)):  # type: ignore[arg-type]
            raise SteeringError(
                f"is {quoted(values)}, expected one for each of {len(rows)} rows.", f"{path}.{name}"
            )
    listed: dict[int, list[tuple[str, dict[str, Any]]]] = {}
    for index, (layer, row) in enumerate(rows):
        pair = bounds[index]  # type: ignore[index]
        if not is_list(pair) or len(pair) != 2:
            raise SteeringError(f"is {quoted(pair)}, expected [low, high].", f"{path}.bounds[{index}]")
        entry = {"vector": row, "min": pair[0], "max": pair[1]}
        if strengths is not None:
            entry["strength"] = strengths[index]
        listed.setdefault(layer, []).append((f"{path}.data[{index}]", entry))
    return listed


def _clamp(entry: Any, hook: str, layer: int, phase: str, path: str) -> Clamp:
    if not isinstance(entry, Mapping) or "vector" not in entry:
        raise SteeringError(f"is {quoted(entry)}, expected an object with {', '.join(_CLAMP)}.", path)
    check_keys(entry, _CLAMP, path, SteeringError)
    low, high = entry.get("min"), entry.get("max")
    if "value" in entry:
        if low is not None or high is not None:
            raise SteeringError("is given beside min or max. It stands for both.", f"{path}.value")
        low = high = entry["value"]
    with field_path(path, SteeringError):
        return Clamp(
            entry["vector"],
            hook,
            [layer],
            entry.get("strength", 1.0),
            entry.get("streams"),
            phase=phase,
            path=compatible_path(hook),
            min=low,
            max=high,
        )


def _group_layers(entries: list[LayerVector]) -> Iterator[list[LayerVector]]:
    """Groups of layers that fit one edit: the same scale and streams, and no row that `SteeringVector` refuses."""
    groups: dict[Any, list[LayerVector]] = {}
    for entry in entries:
        alone = entry.layer if entry.layer < 0 or not float(entry.vector.tensor().norm()) else None
        groups.setdefault((entry.scale, str(entry.streams), len(entry.vector), alone), []).append(entry)
    return iter(groups.values())


def _add(entries: list[LayerVector], hook: str, phase: str, path: str) -> Add:
    first = entries[0]
    layers = [entry.layer for entry in entries]
    vector: Any = first.vector
    with field_path(path, SteeringError):
        if len(entries) > 1:
            vector = SteeringVector({entry.layer: entry.vector for entry in entries}, "add", hook)
        return Add(vector, hook, layers, first.scale, first.streams, phase=phase, path=compatible_path(hook))
