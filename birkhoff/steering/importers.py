"""Import vectors from the formats of other tools.

    module JSON        {"vectors": {hook: {layer: numbers}}, "prefill_vectors": …}, see `vector_encoding.py`
    control vectors    tensors `direction.N`: added to the output streams of layer N, the same in every stream
    raw float32        layers x width numbers without a header
    plain tensors      one tensor per layer, named by a number

Metadata in the file is used; what is missing must be given by the caller, in particular the operation: adding a
vector and projecting it out are different experiments, and nothing here guesses which is meant. Rows of zeros steer
nothing and are dropped. The functions take tensors and plain data and return `SteeringVector`s; files are opened
elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.site_names import STREAMS_POST_MLP
from birkhoff.steering.tiers import VECTORS
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_encoding import layer_vectors
from birkhoff.steering.vector_file import OPS, SteeringVector

_DIRECTION = re.compile(r"direction\.(0|[1-9][0-9]{0,5})")
_LAYER = re.compile(r"(?:.*?[._])?(\d{1,6})(?:\.[a-z_]+)?")


def check_op(op: Any) -> str:
    """The operation, which the caller must give."""
    if op not in OPS:
        raise SteeringError(
            f"op is {quoted(op)}. The file does not say whether its vector is to be added or projected away, and the "
            f"two are different experiments: state op, one of {', '.join(OPS)}."
        )
    return str(op)


def from_module_json(raw: Any, op: Any, **metadata: Any) -> dict[str, SteeringVector]:
    """Vectors by tier and hook, e.g. "both.mlp_out": a file may have several hooks, a vector has one.

    A scale in the file is multiplied into the vector."""
    op = check_op(op)
    if not isinstance(raw, Mapping) or not any(isinstance(raw.get(tier), Mapping) for tier in VECTORS):
        raise SteeringError(f"the file holds {quoted(raw)}, expected an object with {', '.join(VECTORS)}.")
    vectors = {}
    for tier, phase in VECTORS.items():
        for hook, by_layer in (raw.get(tier) or {}).items():
            entries = layer_vectors(by_layer, f"{tier}.{hook}")
            streams = {quoted(entry.streams): entry.streams for entry in entries}
            if len(streams) > 1:
                raise SteeringError(
                    f"{tier}.{hook} names other streams for other layers: {', '.join(streams)}."
                )
            chosen = next(iter(streams.values()))
            rows = {entry.layer: Vector(entry.vector.tensor() * entry.scale) for entry in entries}
            fields = {
                "method": "imported module JSON",
                **metadata,
                "streams": "flat" if chosen is None else chosen,
            }
            vectors[f"{phase}.{hook}"] = SteeringVector(_nonzero(rows), op, hook, **fields)
    if not vectors:
        raise SteeringError("the file names no hook. It has nothing to import.")
    return vectors


def from_control_vector(
    tensors: Mapping[str, torch.Tensor],
    keys: Mapping[str, Any],
    op: Any,
    hook: str | None = None,
    **metadata: Any,
) -> SteeringVector:
    """From tensors `direction.N` of a control-vector file: applied at the output streams of layer N."""
    op = check_op(op)
    architecture = keys.get("general.architecture", "controlvector")
    if architecture != "controlvector":
        raise SteeringError(
            f"the file is of architecture {quoted(architecture)}, expected controlvector. Is it a model? Then load it."
        )
    rows = {}
    for name, tensor in tensors.items():
        match = _DIRECTION.fullmatch(name)
        if match is None:
            raise SteeringError(f"the file holds a tensor {quoted(name)}, expected direction.N only.")
        rows[int(match[1])] = Vector(tensor, name)
    hint = keys.get("controlvector.model_hint")
    note = f"model hint {hint}" if hint else ""
    fields = {"method": "imported control vector", "note": note, **metadata}
    where = hook or STREAMS_POST_MLP
    fields.setdefault("streams", "all" if where.startswith("mhc_streams") else "flat")
    return SteeringVector(_nonzero(rows), op, where, **fields)


def from_raw(data: bytes, width: int, op: Any, hook: Any, **metadata: Any) -> SteeringVector:
    """From little-endian float32 numbers, `width` per layer, starting at layer 0."""
    op = check_op(op)
    if not isinstance(hook, str):
        raise SteeringError("the file does not say where its vector belongs. State hook.")
    if not data or len(data) % (4 * width):
        raise SteeringError(
            f"the file has {len(data)} bytes, expected a multiple of {4 * width}: rows of {width} float32 numbers. "
            "State the width it was made with."
        )
    table = torch.frombuffer(bytearray(data), dtype=torch.float32).view(-1, width)
    fields = {"method": "imported raw float32", **metadata}
    if hook.startswith("mhc_streams"):
        fields.setdefault("streams", "all")
    rows = {layer: Vector(row, f"row {layer}") for layer, row in enumerate(table)}
    return SteeringVector(_nonzero(rows), op, hook, **fields)


def from_tensors(
    tensors: Mapping[Any, Any], op: Any, hook: Any, layer: int | None = None, **metadata: Any
) -> SteeringVector:
    """From a dictionary of tensors: keys are layer numbers or names with one number (`layers.12`, `12.weight`); a
    single tensor takes `layer`. A tensor [layers, width] without a number has the layers from 0 on."""
    op = check_op(op)
    if not isinstance(hook, str):
        raise SteeringError("the file does not say where its vector belongs. State hook.")
    rows: dict[int, Vector] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            raise SteeringError(
                f"{quoted(name)} is {quoted(type(tensor).__name__)}, expected a tensor of numbers."
            )
        index = name if isinstance(name, int) else _layer_in(str(name))
        if len(tensors) == 1 and layer is not None:
            index = layer
        elif len(tensors) == 1 and tensor.ndim == 2 and index is None:
            rows |= {i: Vector(row, f"{name}[{i}]") for i, row in enumerate(tensor)}
            continue
        if index is None:
            raise SteeringError(
                f"{quoted(name)} names no layer. Rename it to a layer's number, or state layer."
            )
        if index in rows:
            raise SteeringError(f"layer {index} is there twice, the second time as {quoted(name)}.")
        rows[index] = Vector(tensor.squeeze(), str(name))
    fields = {"method": "imported tensors", **metadata}
    return SteeringVector(_nonzero(rows), op, hook, **fields)


def _layer_in(name: str) -> int | None:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def _nonzero(rows: Mapping[int, Vector]) -> dict[int, Vector]:
    kept = {layer: row for layer, row in rows.items() if bool(row.tensor().any())}
    if not kept:
        raise SteeringError("every row of the file is zero, so it steers nothing.")
    return kept
