"""After a conversion: what the output says, read back by the reader, against what the source says.

Classes in which rounding changed no number must agree exactly; others within what their rounding reported. All vectors
are compared, four row ranges of every matrix, and three experts of every stack, chosen by name so that a run repeats.
"""

from __future__ import annotations

import zlib

import torch

from birkhoff.errors import ConvertError
from birkhoff.kernels import quant
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.inspect import class_of
from birkhoff.weights.layout import FP8_BLOCK, ModelTensor, model_tensors, scale_name
from birkhoff.weights.tensor_ref import recognise

ROW_RANGES = 4
EXPERTS_PER_LAYER = 3


def check_output(source: Checkpoint, output: Checkpoint, rounding: dict[str, list[float]]) -> int:
    """How many tensors were compared; raises on the first that does not hold."""
    compared = 0
    for tensor in model_tensors(output.config):
        if not _chosen(tensor.name, output.config.n_routed_experts):
            continue
        compared += 1
        kind = class_of(tensor.name)
        worst = rounding.get(kind, [0, 0, 0.0, 0.0])[3]
        for start, stop in _ranges(tensor):
            before = numbers(source, tensor, start, stop)
            after = numbers(output, tensor, start, stop)
            if torch.equal(before, after):
                continue
            gap = float((after - before).abs().max())
            if not gap <= worst:
                raise ConvertError(
                    f"{tensor.name} rows {start} to {stop - 1} read back differently from the source (by {gap:.3g}). "
                    "The disk or the memory of this machine is not to be trusted; remove the output and try again."
                )
    return compared


def numbers(checkpoint: Checkpoint, tensor: ModelTensor, start: int, stop: int) -> torch.Tensor:
    """Rows of a tensor as float32 values (expert tables as they are)."""
    if tensor.storage == "ids":
        return checkpoint[tensor.name].rows(start, stop).long()
    stored = recognise(checkpoint, tensor.name, tensor.shape)
    rows = checkpoint[tensor.name].rows(start, stop)
    if stored == "float":
        return rows.float()
    scale = checkpoint[scale_name(tensor.name)]
    if stored == "fp4":
        return quant.dequant_fp4(rows, scale.rows(start, stop))
    first = start // FP8_BLOCK * FP8_BLOCK
    tiles = scale.rows(start // FP8_BLOCK, -(-stop // FP8_BLOCK))
    whole = quant.dequant_fp8(checkpoint[tensor.name].rows(first, stop), tiles)
    return whole[start - first :]


def _chosen(name: str, experts: int) -> bool:
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
