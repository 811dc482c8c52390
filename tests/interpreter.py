"""Triton kernels in tests: on a CUDA device when there is one, else in Triton's interpreter on the CPU (`conftest.py`).

`packed_model` makes models with packed weights, as those kernels read them.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from birkhoff.kernels import quant
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from tests.models import random_model, weights_of
from tests.sizes import FULL

pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl
from triton.runtime import interpreter

from birkhoff.kernels.attend import decode as attend
from birkhoff.kernels.compress import decode as compress
from birkhoff.kernels.experts import decode as experts
from birkhoff.kernels.index import decode as index
from birkhoff.kernels.linear import decode as linear
from birkhoff.kernels.mhc import decode as mhc

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

__all__ = ["DEVICE", "attend", "compress", "experts", "index", "linear", "mhc", "packed_model"]


class PatchOnce:
    """Triton's `_patch_lang`, done once per launch.

    The interpreter exchanges the functions of `triton.language` when a kernel is launched, and again, with the same
    result, at every call of a device function inside it: two fifths of the time of our kernels."""

    def __init__(self, patch):
        self._patch = patch
        self._done: set[int] | None = None  # the modules exchanged by the launch that runs

    @staticmethod
    @cache
    def _language(fn) -> set[int]:
        """The modules of `triton.language` that a kernel's file names."""
        modules = {id(value) for value in fn.__globals__.values() if inspect.ismodule(value)}
        return modules & {id(tl), id(tl.core)}

    def __call__(self, fn):
        language = self._language(fn)
        if self._done is not None:
            if not language <= self._done:
                self._done |= language
                self._patch(fn)
            return None  # a device function: Triton ignores what is returned
        scope = self._patch(fn)
        restore, self._done = scope.restore, set(language)

        def restored() -> None:
            self._done = None
            restore()

        scope.restore = restored
        return scope


class ShorterTypes:
    """What the interpreter computes about types, each computed once: half the time of our kernels without this.

    Shapes, element counts and names of block types are kept by element type and shape, NumPy's type by Triton's name,
    the functions to exchange by module, and operands of one type or shape are not converted. Checks for integer
    overflow are left out, since without `debug` the interpreter computes them and ignores the result."""

    def __init__(self) -> None:
        self._make_block = tl.block_type.__init__
        self._broadcast = interpreter.interpreter_semantic.broadcast_impl_value
        self._operands = interpreter.interpreter_semantic.binary_op_type_checking_impl
        self._numpy_type = interpreter._get_np_dtype
        self._blocks: dict[tuple, tuple] = {}  # (element type, shape): shape, numel and name of a block type
        self._tensors: dict[tuple, tuple] = {}  # shape: shape and numel of a tensor
        self._numpy_types: dict[str, np.dtype] = {}

    def install(self) -> None:
        tl.block_type.__init__ = lambda block, element_ty, shape: self.make_block(block, element_ty, shape)
        tl.tensor.__init__ = lambda tensor, handle, type: self.make_tensor(tensor, handle, type)
        builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
        assert not builder.options.debug
        builder.options = replace(builder.options, sanitize_overflow=False)
        semantic.broadcast_impl_value = self.broadcast
        semantic.binary_op_type_checking_impl = self.operands
        interpreter._get_np_dtype = self.numpy_type
        interpreter._patch_builtin = self.patch_builtin

    @staticmethod
    @cache
    def _builtins(package) -> list:
        return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def patch_builtin(self, package, builder, scope) -> None:
        for name, member in self._builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    def make_block(self, block, element_ty, shape) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        known = self._blocks.get((element_ty.name, sizes))
        if known is not None:
            block.element_ty = element_ty
            block.shape, block.numel, block.name = known
            return
        self._make_block(block, element_ty, shape)
        if all(type(size) is int for size in sizes):
            self._blocks[element_ty.name, sizes] = block.shape, block.numel, block.name

    def make_tensor(self, tensor, handle, type) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = self._tensors.get(sizes)
        if known is None:
            shape = tl.tuple([tl.constexpr(size) for size in sizes])
            known = self._tensors[sizes] = shape, tl.constexpr(math.prod(sizes))
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known

    def broadcast(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return self._broadcast(lhs, rhs)

    def operands(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, div_or_mod=False):
        """Two tensors of one type that is no pointer need no check and no conversion, except for quotients."""
        tensors = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and not div_or_mod
        if tensors and lhs.type.name == rhs.type.name and not lhs.dtype.is_ptr():
            return lhs, rhs
        return self._operands(lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, div_or_mod)

    def numpy_type(self, triton_type):
        name = triton_type.scalar.name
        found = self._numpy_types.get(name)
        if found is None:
            found = self._numpy_types[name] = self._numpy_type(triton_type)
        return found


if DEVICE.type == "cpu":
    interpreter._patch_lang = PatchOnce(interpreter._patch_lang)
    if not FULL:
        ShorterTypes().install()


def packed_model(config, seed: int = 0, dtype: torch.dtype = torch.float32, mtp: bool = False) -> Transformer:
    """Random weights rounded to the released formats, kept as codes; on `DEVICE`."""
    source = weights_of(random_model(config, seed))
    model = Transformer(config, Numerics(dtype), packed=True, mtp=mtp).to(DEVICE)
    scales: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for d in model.destinations():
            if d.kind == "codes":
                how = quant.quant_fp8 if d.tensor.dtype is torch.float8_e4m3fn else quant.quant_fp4
                codes, scales[d.name.removesuffix("weight") + "scale"] = how(source[d.name])
                d.tensor.copy_(codes.view(d.tensor.dtype))
            elif d.kind == "scale":
                d.tensor.copy_(scales[d.name])
            else:
                matrix = d.kind == "value" and d.tensor.dim() == 2 and not d.name.endswith(("_fn", "ape"))
                d.tensor.copy_(source[d.name].bfloat16() if matrix else source[d.name])
    return model.eval()
