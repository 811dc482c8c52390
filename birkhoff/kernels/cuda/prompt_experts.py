"""Launches of `prompt_experts.cu` and `prompt_pipeline.cu`: FP4 experts with FP8 inputs for the rows of a prompt, on
GPUs of compute capability 9.0. Everywhere else the Triton twins do the same (`experts/fp8.py`)."""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

from birkhoff.kernels.cuda.compile import compiled_module, find_nvrtc
from birkhoff.kernels.quant.rounded_rows import Order

MAX_TOKENS = 128  # of a block of the plan
STAGE_BYTES = 33 * 1024  # of one of the five stages, for 128 tokens
Loop = Literal["barrier", "pipeline"]
# Main loops: source and threads of a block. "pipeline" has not been run on a GPU.
LOOPS: dict[Loop, tuple[str, int]] = {
    "barrier": ("prompt_experts.cu", 256),
    "pipeline": ("prompt_pipeline.cu", 384),
}
DEFAULT_LOOP: Loop = "barrier"


def supports(x: torch.Tensor, inner: int) -> bool:
    """Whether these kernels take inputs x [n, d] and experts of `inner` rows."""
    return (
        x.is_cuda
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(x.device) == (9, 0)
        and x.dtype is torch.bfloat16
        and x.shape[1] % 256 == 0
        and inner % 128 == 0
        and _has_compiler()
    )


def input_order(x: torch.Tensor, inner: int) -> Order:
    """The order of columns (`quant.device.ORDERS`) in which the kernels of FP4 experts read inputs like x."""
    return "fragments" if supports(x, inner) else "halves"


def _shared_bytes(width: int) -> int:
    """Shared memory of a block: stages, the scales of its 256 rows of `width` columns, and their largest ones."""
    return 5 * STAGE_BYTES + width // 128 * 1024 + 1024 + 128  # barriers last


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
    loop: Loop | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, d] codes in the order "fragments", x_scale [d / 128, n] -> z codes [pairs in sorted order, inner] in the
    same order and their scales [inner / 128, pairs]: SwiGLU times the routing weight, rounded."""
    pairs = len(order)
    z = torch.empty(pairs, inner, dtype=torch.float8_e4m3fn, device=x.device)
    z_scale = torch.empty(inner // 128, pairs, dtype=torch.float32, device=x.device)
    source, threads = LOOPS[loop or DEFAULT_LOOP]
    compiled_module(source, x.device).launch(
        "prompt_gate_up",
        (inner // 128, len(blocks)),
        threads,
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
        shared=_shared_bytes(x.shape[1]),
    )
    return z, z_scale


def down(
    z: torch.Tensor,
    z_scale: torch.Tensor,
    addresses: torch.Tensor,
    blocks: torch.Tensor,
    order: torch.Tensor,
    y: torch.Tensor,
    loop: Loop | None = None,
) -> None:
    """z as `gate_up` returns it -> y [pairs, d] bfloat16 in pair order."""
    source, threads = LOOPS[loop or DEFAULT_LOOP]
    compiled_module(source, z.device).launch(
        "prompt_down",
        (y.shape[1] // 256, len(blocks)),
        threads,
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
        shared=_shared_bytes(z.shape[1]),
    )
