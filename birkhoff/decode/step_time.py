"""How long a decode step takes, measured with a model that is loaded."""

from __future__ import annotations

import time
from statistics import median

import torch

from birkhoff.decode.gpu import Decoder
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer


@torch.inference_mode()
def step_seconds(model: Transformer, device: torch.device, count: int = 5) -> float:
    """Return the median seconds of `count` decode steps of one request, after one that is not timed.

    Tokens are random, the same in every call, so that different settings of a model read the same experts. Steps are
    not recorded as graphs, which makes no difference to those that wait for experts in host memory."""
    context = count + 1
    state = State.contiguous(model.config, 1, context, device=device, dtype=model.numerics.dtype)
    decoder = Decoder(model, state)
    buffers = decoder.buffers(1, context)
    buffers.slots.zero_()
    tokens = torch.randint(model.config.vocab_size, (context,), generator=torch.Generator().manual_seed(0))
    seconds = []
    for position, token in enumerate(tokens.tolist()):
        buffers.token_ids.fill_(token)
        buffers.positions.fill_(position)
        _synchronize(device)
        began = time.perf_counter()
        decoder.step(buffers)
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
