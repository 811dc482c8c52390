"""Rounding in training is bit-identical to the released layout; the Sinkhorn kernel equals its plain twin."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import TensorShape
from birkhoff.kernels import mhc, quant
from training import sinkhorn as pair
from training.rounding import round_fp4, round_fp8, round_stored


@given(seed=st.integers(0, 10_000), exponent=st.integers(-30, 30))
@settings(max_examples=40, deadline=None)
def test_fp4_rounds_as_the_writer_does(seed, exponent):
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[0, :32] = 0
    weight[1] = (weight[1] * 4 / 2.0**exponent).round() / 4 * 2.0**exponent  # many ties
    assert torch.equal(round_fp4(weight), quant.dequant_fp4(*quant.quant_fp4(weight)))


@given(seed=st.integers(0, 10_000), exponent=st.integers(-30, 30))
@settings(max_examples=15, deadline=None)
def test_fp8_rounds_as_the_writer_does(seed, exponent):
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[:128, 128:256] = 0
    weight[200, 300] = 448 * 2.0**exponent
    assert torch.equal(round_fp8(weight), quant.dequant_fp8(*quant.quant_fp8(weight)))


def test_stacks_round_like_their_matrices():
    stack = torch.randn(3, 128, 256)
    assert torch.equal(round_fp8(stack)[1], round_fp8(stack[1]))
    assert torch.equal(round_fp4(stack)[2], round_fp4(stack[2]))
    assert torch.equal(round_stored(stack, "f32"), stack)
    assert torch.equal(round_stored(stack, "bf16"), stack.bfloat16().float())


def test_rounding_twice_changes_nothing():
    stack = torch.randn(2, 128, 128)
    for storage in ("expert", "dense", "bf16"):
        once = round_stored(stack, storage)
        assert torch.equal(round_stored(once, storage), once) and not torch.equal(once, stack)


def test_shapes_that_do_not_divide_are_refused():
    with pytest.raises(TensorShape, match="128x128"):
        round_fp8(torch.zeros(64, 128))
    with pytest.raises(TensorShape, match="groups of 32"):
        round_fp4(torch.zeros(4, 48))


def test_plain_sinkhorn_is_the_models():
    logits = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0)) * 3
    torch.testing.assert_close(
        pair.sinkhorn(logits, 20, 1e-6), mhc.sinkhorn(logits, 20, 1e-6), atol=1e-6, rtol=0
    )


@pytest.mark.skipif(
    not torch.cuda.is_available() and (pair.triton is None or os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs CUDA, or Triton with TRITON_INTERPRET=1",
)
def test_the_kernel_equals_its_plain_twin_forward_and_backward():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    for scale in (0.5, 3.0, 8.0):
        logits = (torch.randn(3, 50, 4, 4, generator=draw) * scale).to(device)
        grad = torch.randn(3, 50, 4, 4, generator=draw).to(device)
        exact = logits.double().requires_grad_()
        wanted = pair.sinkhorn_plain(exact, 20, 1e-6)
        (wanted_grad,) = torch.autograd.grad(wanted, exact, grad.double())
        mix, sums = pair.launch_forward(logits, 20, 1e-6)
        torch.testing.assert_close(mix.double(), wanted.detach(), atol=1e-6, rtol=0)
        found_grad = pair.launch_backward(grad, mix, sums, 20, 1e-6)
        torch.testing.assert_close(found_grad.double(), wanted_grad, atol=2e-6, rtol=0)
