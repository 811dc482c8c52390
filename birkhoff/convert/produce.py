"""Convert a stored tensor to the bytes of another format, strip by strip.

Where source and target use the same codes (FP4 and MXFP4, FP8 and FP8), codes are copied. Everything else goes through
exact float32 values and is rounded once, with the changes counted. FP8 and FP4 codes are recovered without loss from
unquantised files: with the original scales where the file kept them, else with the smallest scale that fits, which may
change codes but no value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
import torch

from birkhoff.convert.conversion_plan import OutputChunks, RoundingStats
from birkhoff.kernels import quant
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.gguf_blocks import pack_mxfp4, pack_q8_0, unpack_q8_0
from birkhoff.weights.layout import FP4_GROUP, FP8_BLOCK, ModelTensor, scale_name
from birkhoff.weights.tensor_ref import (
    check_codes,
    check_experts,
    check_finite,
    check_scale,
    strips,
    value_strips,
)

Produce = Callable[[RoundingStats], OutputChunks]
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def producer(source: Checkpoint, tensor: ModelTensor, kind: str) -> Produce:
    """Return the producer of `tensor` as `kind`: a GGUF type, or "fp8" / "fp4" of the release (codes, then scales)."""
    if tensor.storage == "ids":
        return partial(_ids, source, tensor, torch.int32 if kind == "I32" else torch.int64)
    stored = source[tensor.name].format
    if kind in ("MXFP4", "fp4"):
        return partial(_fp4_codes if stored == "fp4" else _fp4_values, source, tensor, kind == "MXFP4")
    if kind == "fp8":
        return partial(_fp8_codes if stored == "fp8" else _fp8_values, source, tensor)
    if kind == "Q8_0":
        return partial(_q8_0, source, tensor)
    if source[tensor.name].dtype == kind and not source[tensor.name].encoding:
        return partial(_copied, source, tensor)
    return partial(_floats, source, tensor, _FLOATS[kind])


def side_by_side(source: Checkpoint, left: ModelTensor, right: ModelTensor, kind: str) -> Produce:
    """Return the producer of two matrices concatenated along columns, for GGUF's eh_proj."""

    def produce(stats: RoundingStats) -> OutputChunks:
        pairs = zip(_values(source, left), _values(source, right), strict=True)
        for (start, first), (_, second) in pairs:
            values = torch.cat((first, second), 1)
            if kind == "Q8_0":
                blocks = pack_q8_0(values)
                stats.compare(values, unpack_q8_0(blocks))
                yield 0, blocks.numpy()
            else:
                yield 0, _rounded(left.name, start, values, _FLOATS[kind], stats)

    return produce


def _values(source: Checkpoint, tensor: ModelTensor) -> Iterator[tuple[int, torch.Tensor]]:
    return value_strips(source, tensor.name)


def _rounded(
    name: str, start: int, values: torch.Tensor, dtype: torch.dtype, stats: RoundingStats
) -> np.ndarray:
    after = values.to(dtype)
    check_finite(name, after, start)
    stats.compare(values, after.float())
    return _raw(after)


def _floats(
    source: Checkpoint, tensor: ModelTensor, dtype: torch.dtype, stats: RoundingStats
) -> OutputChunks:
    for start, values in _values(source, tensor):
        yield 0, _rounded(tensor.name, start, values, dtype, stats)


def _copied(source: Checkpoint, tensor: ModelTensor, stats: RoundingStats) -> OutputChunks:
    for start, stop in strips(tensor.shape):
        rows = source[tensor.name].rows(start, stop)
        if not torch.isfinite(rows.sum(dtype=torch.float32)):  # a cheap test first
            check_finite(tensor.name, rows, start)
        stats.values += rows.numel()
        yield 0, _raw(rows)


def _q8_0(source: Checkpoint, tensor: ModelTensor, stats: RoundingStats) -> OutputChunks:
    for _, values in _values(source, tensor):
        blocks = pack_q8_0(values)
        stats.compare(values, unpack_q8_0(blocks))
        yield 0, blocks.numpy()


def _ids(source: Checkpoint, tensor: ModelTensor, dtype: torch.dtype, stats: RoundingStats) -> OutputChunks:
    for start, stop in strips(tensor.shape, 8):
        ids = source[tensor.name].rows(start, stop)
        check_experts(tensor.name, ids, source.config.n_routed_experts, start)
        stats.values += ids.numel()
        yield 0, _raw(ids.to(dtype))


def _fp4_codes(source: Checkpoint, tensor: ModelTensor, blocks: bool, stats: RoundingStats) -> OutputChunks:
    weight = source[tensor.name]
    scale_ref = source[scale_name(tensor.name)]
    for start, stop in strips((tensor.shape[0], tensor.shape[1] // 2), 1):
        codes = weight.rows(start, stop)
        scale = scale_ref.rows(start, stop)
        check_scale(scale_ref.name, scale, start)
        stats.values += 2 * codes.numel()
        yield from _fp4_pieces(codes, scale, blocks)


def _fp4_values(source: Checkpoint, tensor: ModelTensor, blocks: bool, stats: RoundingStats) -> OutputChunks:
    scales = _stored_scales(source.scales, tensor.name, (tensor.shape[0], tensor.shape[1] // FP4_GROUP))
    for start, values in _values(source, tensor):
        packed = None
        if scales is not None:
            packed = fp4_with(values, scales[start : start + len(values)])
        codes, scale = packed or quant.quant_fp4(values)
        stats.compare(values, quant.dequant_fp4(codes, scale))
        yield from _fp4_pieces(codes, scale, blocks)


def _fp4_pieces(codes: torch.Tensor, scale: torch.Tensor, blocks: bool) -> OutputChunks:
    if blocks:
        yield 0, pack_mxfp4(codes, scale).numpy()
    else:
        yield 0, _raw(codes)
        yield 1, _raw(scale)


def _fp8_codes(source: Checkpoint, tensor: ModelTensor, stats: RoundingStats) -> OutputChunks:
    weight = source[tensor.name]
    scale_ref = source[scale_name(tensor.name)]
    for start, stop in strips(tensor.shape, 1):
        codes = weight.rows(start, stop)
        check_codes(tensor.name, codes, start)
        stats.values += codes.numel()
        yield 0, _raw(codes)
    scale = scale_ref.read()
    check_scale(scale_ref.name, scale)
    yield 1, _raw(scale)


def _fp8_values(source: Checkpoint, tensor: ModelTensor, stats: RoundingStats) -> OutputChunks:
    shape = tensor.shape
    scales = _stored_scales(
        source.scales, tensor.name, (-(-shape[0] // FP8_BLOCK), -(-shape[1] // FP8_BLOCK))
    )
    for start, values in _values(source, tensor):
        packed = None
        if scales is not None:
            packed = fp8_with(values, scales[start // FP8_BLOCK : -(-(start + len(values)) // FP8_BLOCK)])
        codes, scale = packed or quant.quant_fp8(values)
        stats.compare(values, quant.dequant_fp8(codes, scale))
        yield 0, _raw(codes)
        yield 1, _raw(scale)


def fp8_with(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return E4M3 codes of `values` for given tile scales, or None if they do not reproduce the values exactly."""
    rows, columns = values.shape
    factor = quant.decode_e8m0(scale).double().repeat_interleave(FP8_BLOCK, 0)[:rows]
    factor = factor.repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    codes = (values.double() / factor).clamp_(-448, 448).float().to(torch.float8_e4m3fn)
    return (codes, scale) if torch.equal(quant.dequant_fp8(codes, scale), values) else None


def fp4_with(values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return E2M1 codes of `values` for given group scales, or None if they do not reproduce the values exactly."""
    rows, columns = values.shape
    factor = quant.decode_e8m0(scale).double().repeat_interleave(FP4_GROUP, 1)
    units = (values.double() / factor).float()
    order = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nibble = torch.searchsorted(order, units.abs().clamp(max=6.0)).to(torch.uint8)
    nibble |= torch.signbit(units).to(torch.uint8) << 3
    pairs = nibble.view(rows, columns // 2, 2)
    codes = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return (codes, scale) if torch.equal(quant.dequant_fp4(codes, scale), values) else None


def _stored_scales(
    scales: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int]
) -> torch.Tensor | None:
    scale = scales.get(name)
    return scale if scale is not None and tuple(scale.shape) == shape else None


def _raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
