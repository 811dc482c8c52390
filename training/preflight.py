"""Before device time is spent: do the kernels and the compiled graphs compute what the plain code computes?

Two checks on the device itself. The Sinkhorn kernels against their plain twin, forward and backward: a mismatch is an
error, since nothing trained with them could be trusted. One batch of held-out rows through the compiled and the plain
forward: where compiling fails or disagrees, the run goes on with the plain functions, slower and right.
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
LOSS_TOLERANCE = 0.02  # nats on a few thousand tokens in bf16; the orders of summation differ


def check_kernels(device: torch.device, seed: int = 0) -> float:
    """The largest error of the Sinkhorn kernels against float64; raises above the tolerance. 0 where none are used."""
    if device.type != "cuda" or sinkhorn.triton is None:
        return 0.0
    draw = torch.Generator(device=device).manual_seed(seed)
    logits = 3 * torch.randn(1000, 4, 4, device=device, generator=draw)
    grad = torch.randn(1000, 4, 4, device=device, generator=draw)
    exact = logits.double().requires_grad_()
    fast = logits.clone().requires_grad_()
    wanted = sinkhorn.sinkhorn_plain(exact, 20, 1e-6)
    found = sinkhorn.sinkhorn(fast, 20, 1e-6)
    (wanted_grad,) = torch.autograd.grad(wanted, exact, grad.double())
    (found_grad,) = torch.autograd.grad(found, fast, grad)
    worst = max(float((found - wanted).abs().max()), float((found_grad - wanted_grad).abs().max()))
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
    """Losses of the plain and the compiled forward on one batch; chooses the plain one when they disagree."""
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
        found, error = loss(True), None
        _one_step(bench, store, settings)  # the backward graphs are compiled by the first backward pass
    except Exception as problem:  # whatever the compiler met: the plain functions are there
        found = float("nan")
        error = f"{type(problem).__name__}: {str(problem)[:2000]}"
    agrees = error is None and abs(found - plain) < LOSS_TOLERANCE
    if not agrees:
        forward.choose(False)
    return {"plain": plain, "compiled": found, "agrees": agrees, "error": error}
