"""Sinkhorn for training: 4x4 mixing matrices of every token at once, forward and backward, in float32.

`sinkhorn` dispatches to Triton kernels on CUDA and to the plain twin elsewhere. The order of `birkhoff.kernels.mhc` is
kept step by step (softmax over rows, then columns, then rows and columns alternately, ending on columns). Plain
autograd would launch about two hundred small kernels per call. Here the forward stores the sums it divides by, and the
backward reverses the divisions one by one: with B = A / (s + eps) and s a sum of A, A = B (s + eps) and dA = (dB -
sum(dB * B)) / (s + eps), so no intermediate matrix is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton only the plain twin is available
    triton = None

STREAMS = 4
BLOCK_TOKENS = 64


def sinkhorn_plain(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Map [..., j, k] float32 logits to nearly doubly stochastic matrices; column sums (over j) are exact."""
    mix = logits.softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return mix


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    if logits.is_cuda and triton is not None and logits.shape[-1] == STREAMS:
        mix, _ = torch.ops.birkhoff_training.sinkhorn(logits.contiguous(), iterations, eps)
        return mix
    return sinkhorn_plain(logits, iterations, eps)


if triton is not None:

    @triton.jit
    def _forward_kernel(
        logits, mix, sums, count, iterations: tl.constexpr, eps: tl.constexpr, block: tl.constexpr
    ):
        token = tl.program_id(0) * block + tl.arange(0, block)
        row = tl.arange(0, 4)
        inside = token < count
        # cells[token, j, k]; sums[token, step, 4] with steps column, row, column, row, ..., column.
        cells = token[:, None, None] * 16 + row[None, :, None] * 4 + row[None, None, :]
        edge = token[:, None] * (4 * (2 * iterations - 1)) + row[None, :]
        z = tl.load(logits + cells, mask=inside[:, None, None], other=0.0)
        z = tl.exp(z - tl.max(z, axis=2)[:, :, None])
        m = z / tl.sum(z, axis=2)[:, :, None] + eps
        for step in tl.static_range(2 * iterations - 1):
            if step % 2 == 0:
                total = tl.sum(m, axis=1) + eps
                m = m / total[:, None, :]
            else:
                total = tl.sum(m, axis=2) + eps
                m = m / total[:, :, None]
            tl.store(sums + edge + 4 * step, total, mask=inside[:, None])
        tl.store(mix + cells, m, mask=inside[:, None, None])

    @triton.jit
    def _backward_kernel(
        grad, mix, sums, out, count, iterations: tl.constexpr, eps: tl.constexpr, block: tl.constexpr
    ):
        token = tl.program_id(0) * block + tl.arange(0, block)
        row = tl.arange(0, 4)
        inside = token < count
        cells = token[:, None, None] * 16 + row[None, :, None] * 4 + row[None, None, :]
        edge = token[:, None] * (4 * (2 * iterations - 1)) + row[None, :]
        m = tl.load(mix + cells, mask=inside[:, None, None], other=0.25)
        g = tl.load(grad + cells, mask=inside[:, None, None], other=0.0)
        for back in tl.static_range(2 * iterations - 1):
            total = tl.load(sums + edge + 4 * (2 * iterations - 2 - back), mask=inside[:, None], other=1.0)
            if back % 2 == 0:  # the forward ends on columns, so the backward starts with them
                g = (g - tl.sum(g * m, axis=1)[:, None, :]) / total[:, None, :]
                m = m * total[:, None, :]
            else:
                g = (g - tl.sum(g * m, axis=2)[:, :, None]) / total[:, :, None]
                m = m * total[:, :, None]
        m = m - eps  # back at the softmax
        g = m * (g - tl.sum(g * m, axis=2)[:, :, None])
        tl.store(out + cells, g, mask=inside[:, None, None])


def launch_forward(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """Run the Triton kernel on contiguous float32 [..., 4, 4]; return mix and sums [tokens, 2 iterations - 1, 4]."""
    count = logits.numel() // (STREAMS * STREAMS)
    mix = torch.empty_like(logits)
    sums = torch.empty((count, 2 * iterations - 1, STREAMS), dtype=torch.float32, device=logits.device)
    grid = (triton.cdiv(count, BLOCK_TOKENS),)
    _forward_kernel[grid](logits, mix, sums, count, iterations, eps, BLOCK_TOKENS, num_warps=4)
    return mix, sums


def launch_backward(grad: Tensor, mix: Tensor, sums: Tensor, iterations: int, eps: float) -> Tensor:
    count = mix.numel() // (STREAMS * STREAMS)
    out = torch.empty_like(mix)
    grid = (triton.cdiv(count, BLOCK_TOKENS),)
    _backward_kernel[grid](grad, mix, sums, out, count, iterations, eps, BLOCK_TOKENS, num_warps=4)
    return out


@torch.library.custom_op("birkhoff_training::sinkhorn", mutates_args=())
def _sinkhorn_op(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    return launch_forward(logits, iterations, eps)


@_sinkhorn_op.register_fake
def _(logits: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    count = logits.numel() // (STREAMS * STREAMS)
    return torch.empty_like(logits), logits.new_empty((count, 2 * iterations - 1, STREAMS))


@torch.library.custom_op("birkhoff_training::sinkhorn_backward", mutates_args=())
def _sinkhorn_backward_op(grad: Tensor, mix: Tensor, sums: Tensor, iterations: int, eps: float) -> Tensor:
    return launch_backward(grad.contiguous(), mix, sums, iterations, eps)


@_sinkhorn_backward_op.register_fake
def _(grad: Tensor, mix: Tensor, sums: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(mix)


def _remember(ctx, inputs, output) -> None:
    ctx.save_for_backward(*output)
    _, ctx.iterations, ctx.eps = inputs


def _differentiate(ctx, grad_mix: Tensor, _grad_sums: Tensor | None):
    mix, sums = ctx.saved_tensors
    return (
        torch.ops.birkhoff_training.sinkhorn_backward(grad_mix, mix, sums, ctx.iterations, ctx.eps),
        None,
        None,
    )


_sinkhorn_op.register_autograd(_differentiate, setup_context=_remember)
