"""Compare a conversion's output, read back from disk, with its source.

Classes in which rounding changed no value must agree exactly, the others within the rounding error recorded while
writing. All vectors, four rows of each matrix and three experts per layer are compared; the choice is seeded by name,
so it is repeatable.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from birkhoff.convert.write import ClassRounding
from birkhoff.errors import ConvertError
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.inspect import tensor_class
from birkhoff.weights.layout import ModelTensor, model_tensors
from birkhoff.weights.tensor_ref import read_values

ROW_RANGES = 4
EXPERTS_PER_LAYER = 3


def check_output(source: Checkpoint, output: Checkpoint, rounding: Mapping[str, ClassRounding]) -> int:
    """Return the number of tensors compared; raise ConvertError for the first that differs."""
    compared = 0
    for tensor in model_tensors(output.config):
        if not _is_sampled(tensor.name, output.config.n_routed_experts):
            continue
        compared += 1
        kind = tensor_class(tensor.name)
        tolerance = rounding[kind].worst if kind in rounding else 0.0
        for start, stop in _ranges(tensor):
            expected = tensor_values(source, tensor, start, stop)
            actual = tensor_values(output, tensor, start, stop)
            if torch.equal(expected, actual):
                continue
            error = float((actual - expected).abs().max())
            if not error <= tolerance:
                raise ConvertError(
                    f"{tensor.name} rows {start} to {stop - 1} read back differently from the source (by {error:.3g}). "
                    "The disk or the memory of this machine is not to be trusted; remove the output and try again."
                )
    return compared


def tensor_values(checkpoint: Checkpoint, tensor: ModelTensor, start: int, stop: int) -> torch.Tensor:
    """Read rows of a tensor as float32 values (expert tables as integers)."""
    if tensor.storage == "ids":
        return checkpoint[tensor.name].rows(start, stop).long()
    return read_values(checkpoint, tensor.name, start, stop)


def _is_sampled(name: str, experts: int) -> bool:
    if ".ffn.experts." not in name:
        return True
    prefix, _, rest = name.partition(".ffn.experts.")
    seed = zlib.crc32(prefix.encode())
    return int(rest.split(".")[0]) in {
        (seed + i * (experts // EXPERTS_PER_LAYER + 1)) % experts for i in range(EXPERTS_PER_LAYER)
    }


def _ranges(tensor: ModelTensor) -> list[tuple[int, int]]:
    rows = tensor.shape[0]
    if len(tensor.shape) == 1 or rows <= ROW_RANGES:
        return [(0, rows)]
    seed = zlib.crc32(tensor.name.encode())
    starts = {0, rows - 1, seed % rows, (seed // 7) % rows}
    return [(start, start + 1) for start in sorted(starts)]
