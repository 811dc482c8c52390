"""One layer of a decode step for the native kernels (`layer.h`): its structures, and the calls that take them.

A call computes a part of a layer for a few rows, `run_layers` several whole layers. Parts called one by one give the
bits of whole layers. All tensors are contiguous; numbers are float32, ids, slots and positions int64. Tolerance against
the modules of `birkhoff.model`: 2e-5 of the scale of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from birkhoff.kernels.packed.matrix import PackedMatrix
from birkhoff.kernels.packed.native import Matrices, MatrixFields, fill_matrix, native_library


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class LinearsFields(ctypes.Structure):
    """struct Linears of layer.h, as are the following of their names."""

    _fields_ = (("matrices", c_void_p), *_fields(c_int64, "count", "rows", "columns"))


class MixerFields(ctypes.Structure):
    _fields_ = (
        ("fn", MatrixFields),
        *_fields(c_void_p, "base", "scale", "norm"),
        ("iters", c_int64),
        *_fields(c_double, "eps", "rms_eps", "norm_eps"),
    )


class PoolingFields(ctypes.Structure):
    _fields_ = (*_fields(c_void_p, "ape", "norm", "omega"), *_fields(c_int64, "ratio", "overlap", "width"))


class LayerFields(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "hidden", "streams", "heads", "head_dim", "rank", "pairs", "window", "ratio"),
        *_fields(c_int64, "group_rank", "index_heads", "index_width", "index_topk"),
        *_fields(c_int64, "experts", "inner", "topk"),
        *_fields(c_double, "eps", "scale", "factor", "limit"),
        *_fields(MixerFields, "attention_mixer", "expert_mixer"),
        *_fields(LinearsFields, "in_proj", "wq_b", "wo_a", "wo_b", "index_wq_b"),
        *_fields(c_void_p, "q_norm", "kv_norm", "sink"),
        *_fields(PoolingFields, "entry", "index"),
        *_fields(LinearsFields, "router", "shared_down"),
        *_fields(c_void_p, "expert_matrices", "transposed_down", "bias", "hash_table"),
    )


class CacheFields(ctypes.Structure):
    _fields_ = (
        *_fields(c_void_p, "keys", "entry_raw", "entry_pages", "index_raw", "index_pages"),
        *_fields(c_int64, "key_size", "raw_size", "per_page"),
        ("table", c_void_p),
        ("table_stride", c_int64),
    )


class StepFields(ctypes.Structure):
    _fields_ = (
        *_fields(c_int64, "n", "threads"),
        *_fields(c_void_p, "tokens", "slots", "positions", "cos_sliding", "cos_compressed"),
        *_fields(c_void_p, "sin_sliding", "sin_compressed"),
    )


class Weights:
    """Describes weights to the kernels and keeps their memory alive."""

    def __init__(self) -> None:
        self._kept: list[object] = []

    def address(self, tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        """Of a contiguous tensor; None without one."""
        if tensor is None:
            return None
        assert tensor.dtype is dtype and tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def matrix(self, tensor: torch.Tensor) -> MatrixFields:
        """A matrix of numbers."""
        packed = PackedMatrix.floats(tensor.detach())
        self._kept.append(packed)
        fields = MatrixFields()
        fill_matrix(fields, packed)
        return fields

    def linears(self, matrices: Sequence[PackedMatrix]) -> LinearsFields:
        """Matrices with a common input; none of them is no layer."""
        held = Matrices(matrices)
        self._kept.append(held)
        columns = held.matrices[0].columns if held.matrices else 0
        assert all(matrix.columns == columns for matrix in held.matrices)
        rows = sum(matrix.rows for matrix in held.matrices)
        return LinearsFields(held.address, len(held.matrices), rows, columns)

    def matrices(self, matrices: Sequence[PackedMatrix]) -> int:
        """The address of an array of matrices."""
        held = Matrices(matrices)
        self._kept.append(held)
        return held.address


@cache
def _library() -> ctypes.CDLL:
    native = native_library()
    pointer, count = c_void_p, c_int64
    signatures: dict[str, list[Any]] = {
        "read_streams": [pointer, pointer, count, count, count, c_int, *[pointer] * 4],
        "write_streams": [*[pointer] * 4, count, count, count, pointer],
        "merge_streams": [pointer, pointer, count, count, count, c_int, pointer, pointer],
        "attend_rows": [pointer] * 5,
        "project_out": [pointer, pointer, count, c_int, pointer],
        "route": [pointer] * 7,
        "run_experts": [pointer] * 7,
        "layers": [pointer, pointer, pointer, count, count, pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(native, f"birkhoff_{name}")
        function.argtypes, function.restype = arguments, None
    return native


def read_streams(
    mixer: MixerFields, streams: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Streams [n, m, d] -> u [n, d] and the coefficients pre [n, m], post [n, m], mix [n, from, to]."""
    n, m, d = streams.shape
    out = torch.empty(n, d), torch.empty(n, m), torch.empty(n, m), torch.empty(n, m, m)
    _library().birkhoff_read_streams(
        ctypes.addressof(mixer),
        streams.data_ptr(),
        n,
        m,
        d,
        torch.get_num_threads(),
        *(tensor.data_ptr() for tensor in out),
    )
    return out


def write_streams(
    streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
) -> torch.Tensor:
    """Streams [n, m, d] mixed, plus the output y [n, d] of a sublayer."""
    out = torch.empty_like(streams)
    pointers = (tensor.data_ptr() for tensor in (streams, y, post, mix))
    _library().birkhoff_write_streams(*pointers, *streams.shape, out.data_ptr())
    return out


def merge_streams(mixer: MixerFields, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams [n, m, d] -> merged [n, d] with read-out weights [n, m]."""
    n, m, d = streams.shape
    merged, weights = torch.empty(n, d), torch.empty(n, m)
    _library().birkhoff_merge_streams(
        ctypes.addressof(mixer),
        streams.data_ptr(),
        n,
        m,
        d,
        torch.get_num_threads(),
        merged.data_ptr(),
        weights.data_ptr(),
    )
    return merged, weights


def attend_rows(layer: LayerFields, cache: CacheFields, step: StepFields, x: torch.Tensor) -> torch.Tensor:
    """x [n, d], normalised -> heads [n, h, c], rotated back; stores keys and entries."""
    attended = torch.empty(x.shape[0], layer.heads, layer.head_dim)
    fields = (ctypes.addressof(each) for each in (layer, cache, step))
    _library().birkhoff_attend_rows(*fields, x.data_ptr(), attended.data_ptr())
    return attended


def project_out(layer: LayerFields, attended: torch.Tensor) -> torch.Tensor:
    """Heads [n, h, c] -> the output of attention [n, d]."""
    n = attended.shape[0]
    y = torch.empty(n, layer.hidden)
    _library().birkhoff_project_out(
        ctypes.addressof(layer), attended.data_ptr(), n, torch.get_num_threads(), y.data_ptr()
    )
    return y


def route(
    layer: LayerFields, step: StepFields, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [n, d], normalised -> router logits [n, E], ids and weights [n, k], input of the shared expert's
    down [n, i]."""
    n = x.shape[0]
    logits, ids = torch.empty(n, layer.experts), torch.empty(n, layer.topk, dtype=torch.long)
    weights, shared = torch.empty(n, layer.topk), torch.empty(n, layer.inner)
    _library().birkhoff_route(
        ctypes.addressof(layer),
        ctypes.addressof(step),
        x.data_ptr(),
        logits.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        shared.data_ptr(),
    )
    return logits, ids, weights, shared


def run_experts(
    layer: LayerFields,
    step: StepFields,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor,
) -> torch.Tensor:
    """The output [n, d] of shared and routed experts."""
    y = torch.empty_like(x)
    pointers = (tensor.data_ptr() for tensor in (x, ids, weights, shared, y))
    _library().birkhoff_run_experts(ctypes.addressof(layer), ctypes.addressof(step), *pointers)
    return y


def run_layers(
    layers: ctypes.Array[LayerFields],
    caches: ctypes.Array[CacheFields],
    step: StepFields,
    first: int,
    stop: int,
    streams: torch.Tensor,
) -> torch.Tensor:
    """Streams [n, m, d] before layer `first` -> after layer `stop - 1`."""
    out = torch.empty(streams.shape)
    addresses = (ctypes.addressof(each) for each in (layers, caches, step))
    _library().birkhoff_layers(*addresses, first, stop, streams.data_ptr(), out.data_ptr())
    return out
