"""128 bits that name a loaded model: its config, how it computes, and every bit of its weights.

Weights are summed as whole numbers with a different odd factor at every place, twice, so a digest runs at the speed of
memory on any device and one changed word always changes it. It tells models apart; it is no defence against somebody
who builds two that agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

import torch

from birkhoff.model.transformer import Transformer

_STRIP = 2**22  # words summed at a time
_FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D)


def model_identity(model: Transformer, version: int = 1) -> bytes:
    numerics = model.numerics
    how = [version, str(numerics.dtype), numerics.released, numerics.kernels.name, model.embed.device.type]
    whole = hashlib.blake2b(
        json.dumps([how, dataclasses.asdict(model.config)], default=str).encode(), digest_size=16
    )
    for place in model.destinations():
        tensor = place.tensor.detach()
        whole.update(f"{place.name} {tensor.dtype} {tuple(tensor.shape)} {_sums(tensor)}".encode())
    return whole.digest()


def _sums(tensor: torch.Tensor) -> list[int]:
    data = tensor.contiguous().flatten().view(torch.uint8)
    odd = data.numel() % 8
    words = data[: data.numel() - odd].view(torch.int64)
    sums = [sum(byte * 257**place for place, byte in enumerate(data[data.numel() - odd :].tolist()))]
    for factor in _FACTORS:
        total = 0
        for start in range(0, words.numel(), _STRIP):
            strip = words[start : start + _STRIP]
            places = torch.arange(start, start + strip.numel(), device=strip.device)
            total += int((strip * ((places * factor) | 1)).sum())
        sums.append(total % 2**64)
    return sums
