"""The implementation of each operation that a model uses.

Every operation has a plain twin (`reference.py`); some have a fast one with the same signature in the same folder
(`cpu.py`; `prefill.py` or `decode.py` for a GPU). `select` returns the `KernelSet` that a model is built with; the
choice does not change later. Fast twins are for inference: while gradients are recorded, the plain twin is called
instead. On a GPU the set handles prefill, and everything else that the decoder of `decode/gpu.py` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from birkhoff.kernels import jit, quant
from birkhoff.kernels.attend import cpu as attend_cpu
from birkhoff.kernels.attend import reference as attend_plain
from birkhoff.kernels.compress import reference as compress_plain
from birkhoff.kernels.experts import cpu as experts_cpu
from birkhoff.kernels.experts import reference as experts_plain
from birkhoff.kernels.index import reference as index_plain
from birkhoff.kernels.linear import cpu as linear_cpu
from birkhoff.kernels.linear import reference as linear_plain
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import cpu as mhc_cpu
from birkhoff.kernels.mhc import reference as mhc_plain
from birkhoff.kernels.mhc.read_input import read_input
from birkhoff.kernels.norm import cpu as norm_cpu
from birkhoff.kernels.norm import reference as norm_plain
from birkhoff.kernels.packed import native
from birkhoff.kernels.rope import cpu as rope_cpu
from birkhoff.kernels.rope import reference as rope_plain

Choice = Literal["reference", "cpu", "triton"]
Op = Callable[..., Any]


@dataclass(frozen=True)
class KernelSet:
    """One implementation per operation; the contract of each is in the `__init__.py` of its folder."""

    name: str
    linear: Op
    arrange: Op  # packed matrices with a common input -> the weight that `packed_linear` takes
    packed_linear: Op
    rounded_linear: Op
    dequantise: Op
    fp8_round: Op
    hadamard_fp4: Op
    rms_norm: Op
    norm_input: Op
    norm_rotate: Op
    rotate: Op
    mhc_prepare: Op
    mhc_read: Op
    mhc_read_input: Op
    mhc_write: Op
    attend: Op
    attend_one: Op
    attend_paged: Op
    compress_blocks: Op
    store_rows: Op
    gather_rows: Op
    index_topk: Op
    index_chunks: Op
    route: Op
    glu: Op
    experts: Op

    @property
    def reads_codes(self) -> bool:
        """Whether `packed_linear` reads weights as they are stored."""
        return self.on_gpu or (self.name == "cpu" and native.available())

    @property
    def on_gpu(self) -> bool:
        """Whether `experts` reads packed weights by address, attention takes all chunks of a step, and `packed_linear`
        also takes weights that are held as numbers."""
        return self.name == "triton"


TWINS: dict[str, tuple[Op, Op]] = {
    "linear": (linear_plain.linear, linear_cpu.linear),
    "arrange": (PackedWeight.of, linear_cpu.arrange),
    "packed_linear": (linear_plain.packed_linear, linear_cpu.packed_linear),
    "rounded_linear": (linear_plain.rounded_linear, linear_cpu.rounded_linear),
    "dequantise": (linear_plain.dequantise, linear_cpu.dequantise),
    "fp8_round": (quant.fp8_round, quant.fp8_round),
    "hadamard_fp4": (quant.hadamard_fp4, quant.hadamard_fp4),
    "rms_norm": (norm_plain.rms_norm, norm_cpu.rms_norm),
    "norm_input": (norm_plain.norm_input, norm_cpu.norm_input),
    "norm_rotate": (norm_plain.norm_rotate, norm_cpu.norm_rotate),
    "rotate": (rope_plain.rotate, rope_cpu.rotate),
    "mhc_prepare": (mhc_plain.prepare, mhc_plain.prepare),
    "mhc_read": (mhc_plain.read, mhc_cpu.read),
    "mhc_read_input": (read_input, read_input),
    "mhc_write": (mhc_plain.write, mhc_cpu.write),
    "attend": (attend_plain.attend, attend_cpu.attend),
    "attend_one": (attend_plain.attend_one, attend_plain.attend_one),
    "attend_paged": (attend_plain.attend_paged, attend_plain.attend_paged),
    "compress_blocks": (compress_plain.compress_blocks, compress_plain.compress_blocks),
    "store_rows": (compress_plain.store_rows, compress_plain.store_rows),
    "gather_rows": (compress_plain.gather_rows, compress_plain.gather_rows),
    "index_topk": (index_plain.index_topk, index_plain.index_topk),
    "index_chunks": (index_plain.index_chunks, index_plain.index_chunks),
    "route": (experts_plain.route, experts_plain.route),
    "glu": (experts_plain.glu, experts_plain.glu),
    "experts": (experts_plain.experts, experts_cpu.experts),
}


def select(choice: Choice) -> KernelSet:
    if choice == "triton":
        return _triton()
    if choice == "reference" or not jit.AVAILABLE:
        return KernelSet("reference", **{name: plain for name, (plain, _) in TWINS.items()})
    twins = {name: _while_inferring(plain, fast) for name, (plain, fast) in TWINS.items()}
    # These two are for weights as stored, which are read only while no gradient is recorded.
    twins |= {name: TWINS[name][1] for name in ("arrange", "packed_linear", "rounded_linear", "dequantise")}
    return KernelSet("cpu", **twins)


def _triton() -> KernelSet:
    from birkhoff.kernels.attend import prefill as attend_prefill
    from birkhoff.kernels.compress import prefill as compress_prefill
    from birkhoff.kernels.experts import prefill as experts_prefill
    from birkhoff.kernels.experts import routing as experts_routing
    from birkhoff.kernels.index import prefill as index_prefill
    from birkhoff.kernels.linear import fp8 as linear_fp8
    from birkhoff.kernels.linear import prefill as linear_prefill
    from birkhoff.kernels.mhc import decode as mhc_decode
    from birkhoff.kernels.mhc import prefill as mhc_prefill
    from birkhoff.kernels.norm import prefill as norm_prefill
    from birkhoff.kernels.quant import device as quant_device
    from birkhoff.kernels.rope import prefill as rope_prefill

    plain = {name: twin for name, (twin, _) in TWINS.items()}
    fast: dict[str, Op] = {
        "mhc_prepare": mhc_prefill.prepare,
        "mhc_read": _for_four_streams(plain["mhc_read"], mhc_prefill.read),
        "mhc_read_input": _for_four_streams(plain["mhc_read_input"], mhc_prefill.read_input),
        "mhc_write": _for_four_streams(plain["mhc_write"], mhc_decode.write),
        "packed_linear": linear_prefill.packed_linear,
        "rounded_linear": linear_fp8.rounded_linear,
        "fp8_round": quant_device.fp8_round,
        "hadamard_fp4": quant_device.hadamard_fp4,
        "rms_norm": norm_prefill.rms_norm,
        "norm_input": norm_prefill.norm_input,
        "norm_rotate": norm_prefill.norm_rotate,
        "rotate": rope_prefill.rotate,
        "attend": attend_prefill.attend,
        "attend_paged": attend_prefill.attend_paged,
        "compress_blocks": compress_prefill.compress_blocks,
        "store_rows": compress_prefill.store_rows,
        "gather_rows": compress_prefill.gather_rows,
        "index_topk": index_prefill.index_topk,
        "index_chunks": index_prefill.index_chunks,
        "route": experts_routing.route,
        "glu": experts_prefill.glu,
        "experts": experts_prefill.experts,
    }
    twins = {name: _while_inferring(plain[name], twin) for name, twin in fast.items()}
    return KernelSet("triton", **plain | twins)


def _for_four_streams(plain: Op, fast: Op) -> Op:
    def dispatch(streams, *arguments):
        return (fast if streams.shape[-2] == 4 and streams.dim() == 3 else plain)(streams, *arguments)

    return dispatch


def _while_inferring(plain: Op, fast: Op) -> Op:
    if plain is fast:
        return plain

    def dispatch(*arguments, **options):
        return (plain if torch.is_grad_enabled() else fast)(*arguments, **options)

    return dispatch
