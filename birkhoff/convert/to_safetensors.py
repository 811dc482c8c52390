"""Plan a conversion to the released layout: names, formats, shards, index and config.json.

The source can be any dialect of safetensors or GGUF. `experts` and `dense` select the storage of matrices; codes that
already have that format are copied. config.json is written last, so a directory that has one is complete.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from birkhoff.convert.conversion_plan import ConversionPlan, ConversionUnit, FileRegion, OutputFile
from birkhoff.convert.produce import producer
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.inspect import tensor_class
from birkhoff.weights.layout import check_formats, stored_tensors
from birkhoff.weights.released import index_json, json_text, pack_shards, released_config, shard_path
from birkhoff.weights.safetensors import build_header

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
    """Plan the output directory `path`: files, units and texts."""
    check_formats(dense, experts)
    config = source.config if mtp else replace(source.config, num_nextn_predict_layers=0)
    shards = pack_shards(config, dense, experts, shard_bytes)
    file_order = {name: index for index, name in enumerate(source)}
    files: list[OutputFile] = []
    units: list[ConversionUnit] = []
    weight_map: dict[str, str] = {}
    for index, tensors in enumerate(shards):
        file = shard_path(path, index, len(shards))
        stored = {tensor.name: stored_tensors(tensor, dense, experts) for tensor in tensors}
        rows = {name: (dtype, shape) for pair in stored.values() for name, (shape, dtype, _) in pair}
        header, entries = build_header(file, rows, _METADATA)
        for tensor in tensors:
            regions = tuple(
                FileRegion(name, entries[name].offset, entries[name].nbytes)
                for name, _ in stored[tensor.name]
            )
            kind = _KIND[entries[tensor.name].dtype]
            produce = producer(source, tensor, kind)
            units.append(
                ConversionUnit(
                    len(files), tensor_class(tensor.name), file_order[tensor.name], regions, produce
                )
            )
        weight_map.update(dict.fromkeys(rows, file.name))
        files.append(
            OutputFile(file, header, len(header) + sum(e.nbytes for e in entries.values()), len(entries))
        )
    texts = {
        **texts,
        "model.safetensors.index.json": json_text(index_json(weight_map, sum(unit.nbytes for unit in units))),
        "config.json": json_text(released_config(config, dense, experts)),
    }
    return ConversionPlan(str(source.path), path, options, files, units, source.files, texts)
