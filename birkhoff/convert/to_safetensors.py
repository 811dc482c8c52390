"""The plan of a conversion to the released layout: names, formats, shards, index and config.json.

Any source goes: safetensors of any dialect, GGUF of either. `experts` and `dense` choose how matrices are stored; codes
that already have that form are copied. config.json comes last, so a directory that has one is complete.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from birkhoff.convert.conversion_plan import ConversionPlan, OutputFile, Region, Unit
from birkhoff.convert.produce import producer
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.inspect import class_of
from birkhoff.weights.layout import ModelTensor, check_formats, model_tensors, stored_as
from birkhoff.weights.released import released_config
from birkhoff.weights.safetensors import item_bytes, layout

_KIND = {"F32": "F32", "BF16": "BF16", "I64": "I64", "F8_E4M3": "fp8", "I8": "fp4"}
_METADATA = {"format": "pt"}


def plan_safetensors(
    source: Checkpoint,
    path: Path,
    experts: str,
    dense: str,
    mtp: bool,
    shard_bytes: int,
    options: dict[str, Any],
    texts: dict[str, str],
) -> ConversionPlan:
    """Files, units and texts of the output directory `path`."""
    from dataclasses import replace

    check_formats(dense, experts)
    config = source.config if mtp else replace(source.config, num_nextn_predict_layers=0)
    shards = _packed(config, dense, experts, shard_bytes)
    place = {name: index for index, name in enumerate(source)}
    files: list[OutputFile] = []
    units: list[Unit] = []
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = path / f"model-{number:05}-of-{len(shards):05}.safetensors"
        stored = {tensor.name: stored_as(tensor, dense, experts) for tensor in tensors}
        rows = {name: (dtype, shape) for pair in stored.values() for name, (shape, dtype, _) in pair}
        header, entries = layout(file, rows, _METADATA)
        for tensor in tensors:
            regions = tuple(
                Region(name, entries[name].offset, entries[name].nbytes) for name, _ in stored[tensor.name]
            )
            kind = _KIND[entries[tensor.name].dtype]
            produce = producer(source, tensor, kind)
            units.append(Unit(len(files), class_of(tensor.name), place[tensor.name], regions, produce))
        weight_map.update(dict.fromkeys(rows, file.name))
        files.append(
            OutputFile(file, header, len(header) + sum(e.nbytes for e in entries.values()), len(entries))
        )
    total = sum(unit.nbytes for unit in units)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    beside = {
        **texts,
        "model.safetensors.index.json": _json(index),
        "config.json": _json(released_config(config, dense, experts)),
    }
    return ConversionPlan(str(source.path), path, options, files, units, source.files, beside)


def _packed(config: Any, dense: str, experts: str, shard_bytes: int) -> list[list[ModelTensor]]:
    """Tensors in reading order, cut into shards; a matrix and its scale stay together."""
    shards: list[list[ModelTensor]] = [[]]
    filled = 0
    for tensor in model_tensors(config):
        size = sum(
            math.prod(shape) * item_bytes(dtype) for _, (shape, dtype, _) in stored_as(tensor, dense, experts)
        )
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    return shards


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
