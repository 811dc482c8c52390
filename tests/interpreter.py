"""Triton kernels in tests: on a CUDA device when there is one, else in Triton's interpreter on the CPU (`conftest.py`).

`packed_model` makes models with packed weights, as those kernels read them.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from birkhoff.kernels import quant
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from tests.models import random_model, weights_of

pytest.importorskip("triton", reason="triton is not installed")

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

    def __call__(self, fn):
        modules = {id(value) for value in fn.__globals__.values() if inspect.ismodule(value)}
        language = modules & {id(interpreter.tl), id(interpreter.tl.core)}
        if self._done is not None:
            if not language <= self._done:
                self._done |= language
                self._patch(fn)
            return None  # a device function: Triton ignores what is returned
        scope = self._patch(fn)
        restore, self._done = scope.restore, language

        def restored() -> None:
            self._done = None
            restore()

        scope.restore = restored
        return scope


if DEVICE.type == "cpu":
    interpreter._patch_lang = PatchOnce(interpreter._patch_lang)


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
