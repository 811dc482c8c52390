"""Native CPU kernels for packed matrices and attention, called through ctypes.

Few rows of x go to the kernels of `few_rows.h`, which decode codes in registers, more to those of `many_rows.h`, which
decode a panel of the weight into the cache (`products.h`). `attention.h` is the attention of prefill, `layer.h` a layer
of a decode step (`layer.py`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from birkhoff.kernels.packed.compile import library
from birkhoff.kernels.packed.grids import grid
from birkhoff.kernels.packed.matrix import PackedMatrix
from birkhoff.kernels.packed.types import FLOAT_TYPES, PackedType


class MatrixFields(ctypes.Structure):
    """struct Matrix of native.cpp."""

    _fields_ = (
        ("type", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("row_bytes", c_int64),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("scale_rows", c_int64),
        ("scale_stride", c_int64),
    )


class _JobFields(ctypes.Structure):
    """struct ExpertJob of native.cpp."""

    _fields_ = (
        ("matrices", c_void_p),
        ("experts", c_int64),
        ("x_type", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("threads", c_int64),
        ("x", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("out", c_void_p),
        ("limit", c_double),
    )


@cache
def native_library() -> ctypes.CDLL:
    """The library with its tables filled and its functions declared."""
    native = library()
    assert native is not None, "there are no native kernels here"
    tables = [grid(name).contiguous() for name in ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")]
    native.birkhoff_tables(*(c_void_p(table.data_ptr()) for table in tables))
    strided = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int)  # inputs, outputs, threads
    native.birkhoff_products.argtypes = [c_void_p, c_int, *strided]
    native.birkhoff_grouped.argtypes = [c_void_p, c_int64, *strided]
    native.birkhoff_dequantise.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_int]
    routed = (c_void_p, c_void_p, c_int, c_float, c_void_p, c_int)
    native.birkhoff_experts.argtypes = [c_void_p, c_int, c_void_p, c_int, *routed]
    native.birkhoff_many_experts.argtypes = [c_void_p, c_int, c_void_p, c_int64, *routed]
    native.birkhoff_attend.argtypes = [*[c_void_p] * 6, *[c_int64] * 8, c_float, c_int]
    native.birkhoff_first_bad_row.argtypes = [c_void_p]
    native.birkhoff_first_bad_row.restype = c_int64
    native.birkhoff_read.argtypes = [c_void_p, c_int64, c_int]
    native.birkhoff_expert_job.argtypes = [c_void_p]
    native.birkhoff_norm.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_double, c_void_p]
    for name in (
        "products",
        "grouped",
        "dequantise",
        "experts",
        "many_experts",
        "attend",
        "expert_job",
        "norm",
    ):
        getattr(native, f"birkhoff_{name}").restype = None
    return native


def available() -> bool:
    """Whether there are native kernels on this machine; the first call may compile them."""
    return library() is not None


def fill_matrix(target: MatrixFields, matrix: PackedMatrix) -> None:
    """Describe a matrix to the native kernels. The caller keeps its memory."""
    codes, scales = matrix.codes, matrix.scales
    assert codes.device.type == "cpu" and codes.stride(1) == 1
    target.type, target.rows, target.columns = matrix.type.id, matrix.rows, matrix.columns
    target.row_bytes, target.codes = codes.stride(0), codes.data_ptr()
    if scales is not None:
        assert matrix.type.tile is not None and scales.stride(1) == 1
        target.scales, target.scale_rows = scales.data_ptr(), matrix.type.tile[0]
        target.scale_stride = scales.stride(0)


class Matrices:
    """Matrices as the native kernels take them; keeps their memory alive."""

    def __init__(self, matrices: Sequence[PackedMatrix]):
        self.matrices = list(matrices)
        self.structs = (MatrixFields * len(self.matrices))()
        for target, matrix in zip(self.structs, self.matrices):
            fill_matrix(target, matrix)
        self.address = ctypes.addressof(self.structs)
        self.native = native_library()


class Product(Matrices):
    """`x [..., in] -> [..., sum of rows]` for matrices with a common input, their results side by side."""

    def __init__(self, matrices: Sequence[PackedMatrix]):
        super().__init__(matrices)
        self.columns = self.matrices[0].columns
        assert all(matrix.columns == self.columns for matrix in self.matrices)
        self.rows = sum(matrix.rows for matrix in self.matrices)
        self.count = len(self.matrices)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2:
            return self(x.reshape(-1, self.columns)).view(*x.shape[:-1], self.rows)
        n = x.shape[0]  # len() of a tensor takes microseconds
        out = torch.empty(n, self.rows)
        if x.stride(1) != 1:
            x = x.contiguous()
        self.native.birkhoff_products(
            self.address,
            self.count,
            x.data_ptr(),
            x.stride(0),
            n,
            out.data_ptr(),
            self.rows,
            torch.get_num_threads(),
        )
        return out

    def grouped(self, x: torch.Tensor, group: int) -> torch.Tensor:
        """`x [..., groups * in] -> [..., rows]` for one matrix whose rows form groups: group g reads columns
        `g * in ..`."""
        assert len(self.matrices) == 1, "groups of several matrices"
        groups = self.rows // group
        flat = x.reshape(-1, groups * self.columns)
        n = flat.shape[0]
        out = torch.empty(n, self.rows)
        self.native.birkhoff_grouped(
            self.address,
            group,
            flat.data_ptr(),
            flat.stride(0),
            n,
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )
        return out.view(*x.shape[:-1], self.rows)

    def dequantise(self, index: int, start: int, stop: int, out: torch.Tensor) -> None:
        """Rows [start, stop) of one matrix, float32, into the first rows of `out`."""
        address = self.address + index * ctypes.sizeof(MatrixFields)
        self.native.birkhoff_dequantise(address, start, stop, out.data_ptr(), torch.get_num_threads())


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [n, in] -> [n, out] for a weight [out, in] of numbers; both float32."""
    x, weight = x.contiguous(), weight.detach().contiguous()
    n, (rows, columns) = x.shape[0], weight.shape
    out = torch.empty(n, rows)
    matrix = MatrixFields(FLOAT_TYPES[weight.dtype].id, rows, columns, 4 * columns, weight.data_ptr())
    native_library().birkhoff_products(
        ctypes.addressof(matrix), 1, x.data_ptr(), columns, n, out.data_ptr(), rows, torch.get_num_threads()
    )
    return out


def dequantise(matrix: PackedMatrix) -> torch.Tensor:
    """The values of a matrix, float32 [rows, columns]."""
    out = torch.empty(matrix.rows, matrix.columns)
    Product([matrix]).dequantise(0, 0, matrix.rows, out)
    return out


class ExpertProducts(Matrices):
    """Routed experts. `matrices`: gate, up and down of every expert."""

    def __init__(self, matrices: Sequence[PackedMatrix], limit: float):
        super().__init__(matrices)
        self.limit = limit
        self.count = len(self.matrices) // 3

    def add(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """out [n, d] += the weighted sum over the experts of each row of x [n, d]; ids int64 and weights [n, k]."""
        self._call(self.native.birkhoff_experts, x, ids, weights, out)

    def sum(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[n, d]: the weighted sum over the experts of each of many rows of x [n, d]; ids int64 and weights [n, k]."""
        x = x.contiguous()
        out = torch.empty_like(x)
        self._call(self.native.birkhoff_many_experts, x, ids.contiguous(), weights.contiguous(), out)
        return out

    def _call(
        self,
        function: Callable[..., None],
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        function(
            self.address,
            self.count,
            x.data_ptr(),
            x.shape[0],
            ids.data_ptr(),
            weights.data_ptr(),
            ids.shape[1],
            self.limit,
            out.data_ptr(),
            torch.get_num_threads(),
        )


def attend(
    queries: torch.Tensor,
    recent: torch.Tensor,
    oldest: torch.Tensor,
    entries: torch.Tensor | None,
    selected: torch.Tensor | None,
    sink: torch.Tensor,
    window: int,
    scale: float,
) -> torch.Tensor:
    """Attention of prefill chunks as `kernels.attend`, all float32; `selected` is a mask [B, T, entries]."""
    queries, recent, sink = queries.contiguous(), recent.contiguous(), sink.contiguous()
    batch, length, heads, width = queries.shape
    out = torch.empty_like(queries)
    past = recent.shape[1] - length
    count = 0
    if entries is not None and selected is not None:
        entries, selected = entries.contiguous(), selected.contiguous()
        count = entries.shape[1]
    for sequence in range(batch):
        native_library().birkhoff_attend(
            queries[sequence].data_ptr(),
            recent[sequence].data_ptr(),
            entries[sequence].data_ptr() if entries is not None and count else None,
            selected[sequence].data_ptr() if selected is not None and count else None,
            sink.data_ptr(),
            out[sequence].data_ptr(),
            length,
            past,
            int(oldest[sequence]),
            count,
            count,
            heads,
            width,
            window,
            scale,
            torch.get_num_threads(),
        )
    return out


class HostedExperts:
    """The experts of one layer that are in host memory, for `ExpertJob`s; others have no matrices. `types` are those of
    gate and up, and of down."""

    def __init__(self, count: int, hidden: int, inner: int, types: tuple[PackedType, PackedType]):
        self.count, self.hidden = count, hidden
        self._structs = (MatrixFields * (3 * count))()
        for index, target in enumerate(self._structs):
            is_down = index % 3 == 2
            target.type = types[is_down].id
            target.rows, target.columns = (hidden, inner) if is_down else (inner, hidden)
        self.address = ctypes.addressof(self._structs)

    def set(self, expert: int, matrices: Sequence[PackedMatrix]) -> None:
        """Where gate, up and down of an expert are. The caller keeps the memory."""
        for part, matrix in enumerate(matrices):
            fill_matrix(self._structs[3 * expert + part], matrix)


class ExpertJob:
    """Routed experts of a decode step with fixed inputs and outputs, as a C function of one pointer that needs no
    Python: `function(data)` computes out [n, d] = the weighted sum over the experts of each row of x.

    x [n, d] is float32, float16 or bfloat16, ids [n, k] int32 (negative: left out), weights [n, k] and out float32."""

    def __init__(
        self,
        experts: HostedExperts,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        limit: float,
    ):
        self._kept = experts, x, ids, weights, out
        assert all(tensor.is_contiguous() for tensor in self._kept[1:]) and ids.dtype is torch.int32
        self._struct = _JobFields(
            experts.address,
            experts.count,
            FLOAT_TYPES[x.dtype].id,
            *ids.shape,
            torch.get_num_threads(),
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            limit,
        )
        self.data = ctypes.addressof(self._struct)
        self.function = native_library().birkhoff_expert_job

    def __call__(self) -> None:
        self.function(self.data)


def read_speed(words: torch.Tensor) -> float:
    """Bytes per second at which all threads read a tensor of 64-bit integers once."""
    began = time.perf_counter()
    native_library().birkhoff_read(words.data_ptr(), words.numel(), torch.get_num_threads())
    return words.nbytes / (time.perf_counter() - began)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMSNorm of contiguous float32 rows [n, width]."""
    out = torch.empty_like(x)
    native_library().birkhoff_norm(
        x.data_ptr(), None if weight is None else weight.data_ptr(), *x.shape, eps, out.data_ptr()
    )
    return out


def first_bad_row(matrix: PackedMatrix) -> int | None:
    """The first row with a value that is not finite; None if there is none."""
    held = Matrices([matrix])
    row = held.native.birkhoff_first_bad_row(held.address)
    return None if row < 0 else row
