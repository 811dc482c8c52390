"""Launches of `prompt_experts.cu`: FP4 experts with FP8 inputs for the rows of a prompt, on GPUs of compute capability
9.0. Everywhere else the Triton twins do the same (`experts/fp8.py`)."""

from __future__ import annotations

from functools import cache

import torch

from birkhoff.kernels.cuda.compile import compiled_module, find_nvrtc
from birkhoff.kernels.quant.rounded_rows import Order

MAX_TOKENS = 128  # of a block of the plan
THREADS = 384
_STAGES = 5
# Of a block: stages of 33 KiB, a ring of scales, results of two groups of warps, facts of six tiles, barriers.
SHARED_BYTES = _STAGES * 33 * 1024 + 3 * 2048 + 2 * 128 * 72 * 2 + 6 * (256 + 128 * 4 + 16) + 2 * _STAGES * 8


def supports(x: torch.Tensor, inner: int) -> bool:
    """Whether these kernels take inputs x [n, d] and experts of `inner` rows."""
    return (
        x.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and x.dtype is torch.bfloat16
        and x.shape[1] % 256 == 0
        and inner % 256 == 0
        and _has_compiler()
    )


def input_order(x: torch.Tensor, inner: int) -> Order:
    """The order of columns (`quant.device.ORDERS`) in which the kernels of FP4 experts read inputs like x."""
    return "fragments" if supports(x, inner) else "halves"


def _grid(tiles: int, device: torch.device) -> tuple[int, int]:
    """One persistent block per multiprocessor, at most one per tile."""
    return min(torch.cuda.get_device_properties(device).multi_processor_count, tiles), 1


@cache
def _has_compiler() -> bool:
    return find_nvrtc() is not None


def gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    addresses: torch.Tensor,
    blocks: torch.Tensor,
    order: torch.Tensor,
    weights: torch.Tensor,
    inner: int,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, d] codes in the order "fragments", x_scale [d / 128, n] -> z codes [pairs in sorted order, inner] in the
    same order and their scales [inner / 128, pairs]: SwiGLU times the routing weight, rounded."""
    pairs = len(order)
    z = torch.empty(pairs, inner, dtype=torch.float8_e4m3fn, device=x.device)
    z_scale = torch.empty(inner // 128, pairs, dtype=torch.float32, device=x.device)
    compiled_module("prompt_experts.cu", x.device).launch(
        "prompt_gate_up",
        _grid(inner // 128 * len(blocks), x.device),
        THREADS,
        x,
        x_scale,
        x_scale.shape[1],
        addresses,
        blocks,
        order,
        weights,
        z,
        z_scale,
        pairs,
        inner,
        x.shape[1],
        weights.shape[1],
        float(limit),
        pdl=False,
        shared=SHARED_BYTES,
    )
    return z, z_scale


def down(
    z: torch.Tensor,
    z_scale: torch.Tensor,
    addresses: torch.Tensor,
    blocks: torch.Tensor,
    order: torch.Tensor,
    y: torch.Tensor,
) -> None:
    """z as `gate_up` returns it -> y [pairs, d] bfloat16 in pair order."""
    compiled_module("prompt_experts.cu", z.device).launch(
        "prompt_down",
        _grid(y.shape[1] // 256 * len(blocks), z.device),
        THREADS,
        z,
        z_scale,
        z_scale.shape[1],
        addresses,
        blocks,
        order,
        y,
        z.shape[1],
        y.shape[1],
        pdl=False,
        shared=SHARED_BYTES,
    )
