"""Check, before a run, that kernels and compiled graphs compute the same as the plain code.

Two checks on the device. The Sinkhorn kernels are compared with their plain twin, forward and backward; a mismatch is
an error. One batch of held-out rows runs through the compiled and the plain forward; if compilation fails or
disagrees, the run continues with the plain functions, which are slower.
"""

from __future__ import annotations

import numpy as np
import torch

from birkhoff.errors import BirkhoffError
from training import sinkhorn
from training.data import Rows
from training.initial import initialise
from training.loop import Bench
from training.measure import Score, measure
from training.optim import Optimiser
from training.parameters import Store
from training.settings import Settings, moment
from training.step import Step

KERNEL_TOLERANCE = 1e-4
LOSS_TOLERANCE = 0.02  # nats on a few thousand tokens in bf16; summation orders differ


def check_kernels(device: torch.device, seed: int = 0) -> float:
    """Return the largest error of the Sinkhorn kernels against float64; raise above the tolerance. 0 if unused."""
    if device.type != "cuda" or sinkhorn.triton is None:
        return 0.0
    draw = torch.Generator(device=device).manual_seed(seed)
    logits = 3 * torch.randn(1000, 4, 4, device=device, generator=draw)
    grad = torch.randn(1000, 4, 4, device=device, generator=draw)
    exact = logits.double().requires_grad_()
    fast = logits.clone().requires_grad_()
    expected = sinkhorn.sinkhorn_plain(exact, 20, 1e-6)
    actual = sinkhorn.sinkhorn(fast, 20, 1e-6)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    (actual_grad,) = torch.autograd.grad(actual, fast, grad)
    worst = max(float((actual - expected).abs().max()), float((actual_grad - expected_grad).abs().max()))
    if not worst < KERNEL_TOLERANCE:
        raise BirkhoffError(
            f"the Sinkhorn kernels are off by {worst:.1e}, expected less than {KERNEL_TOLERANCE:.0e}. "
            "Check the Triton version; without Triton the plain twin is used."
        )
    return worst


def _one_step(bench: Bench, store: Store, settings: Settings) -> None:
    step = Step(bench.forward, store, Optimiser(store, settings), settings, bench.pad)
    rows = bench.held_out[0].rows
    some = np.resize(np.arange(len(rows.ids)), settings.batch)
    step.load(rows.ids[some], rows.roles[some], moment(settings, 0, 0.0))
    step.run()
    step.read()


def check_compiled(bench: Bench, settings: Settings) -> dict:
    """Compare losses of the plain and compiled forward on one batch; select the plain one if they disagree."""
    forward = bench.forward
    store = Store(forward.config, forward.device)
    initialise(store, settings.seed, settings.spread, settings.mhc_scale, settings.stagger)
    dtype = torch.bfloat16 if forward.device.type == "cuda" else torch.float32
    stream_dtype = torch.float32 if settings.stream_float32 else dtype
    weights = store.named(store.leaves(dtype))
    rows = bench.held_out[0].rows
    batch = Rows(rows.ids[: settings.batch], rows.roles[: settings.batch])

    def loss(compiled: bool) -> float:
        forward.choose(compiled)
        total = Score()
        for score in measure(forward, weights, batch, bench.pad, settings.batch, stream_dtype):
            total.add(score)
        return total.loss

    with torch.no_grad():
        plain = loss(False)
    try:
        actual, error = loss(True), None
        _one_step(bench, store, settings)  # the backward graphs are compiled by the first backward pass
    except Exception as problem:  # any compiler failure: fall back to the plain functions
        actual = float("nan")
        error = f"{type(problem).__name__}: {str(problem)[:2000]}"
    agrees = error is None and abs(actual - plain) < LOSS_TOLERANCE
    if not agrees:
        forward.choose(False)
    return {"plain": plain, "compiled": actual, "agrees": agrees, "error": error}
