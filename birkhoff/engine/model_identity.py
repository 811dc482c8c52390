"""128-bit digest of a loaded model: its config, its numerics, and every bit of its weights.

Weights are summed as integers, each multiplied by an odd factor that depends on its index, with two different factors.
A digest is computed at memory bandwidth on any device, and changing one word always changes it. It distinguishes
models; it is not a cryptographic hash.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

import torch

from birkhoff.model.transformer import Transformer

CONTENT_VERSION = 1  # of page files; changes when the same model would store other bytes
_CHUNK_WORDS = 2**22  # summed at a time
_SAMPLE_BYTES = 4096  # of every matrix of a mapped expert
_FACTORS = (0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1D)


def model_identity(model: Transformer) -> bytes:
    """The digest of a model and of how it computes."""
    numerics = model.numerics
    how = [
        CONTENT_VERSION,
        str(numerics.dtype),
        numerics.released,
        numerics.kernels.name,
        model.embed.device.type,
    ]
    digest = hashlib.blake2b(
        json.dumps([how, dataclasses.asdict(model.config)], default=str).encode(), digest_size=16
    )
    for destination in model.destinations():
        tensor = destination.tensor.detach()
        digest.update(f"{destination.name} {tensor.dtype} {tuple(tensor.shape)} {_sums(tensor)}".encode())
    for name, stack in model.named_expert_stacks():
        # A sample: reading all of a mapped file takes too long.
        for expert, matrices in enumerate(stack.mapped or ()):
            sums = [_sums(matrix.codes.view(-1)[:_SAMPLE_BYTES]) for matrix in matrices]
            digest.update(f"{name}.{expert} {sums}".encode())
    return digest.digest()


def _sums(tensor: torch.Tensor) -> list[int]:
    data = tensor.contiguous().flatten().view(torch.uint8)
    if data.storage_offset() % 8:  # rows of packed blocks begin at any byte
        data = data.clone()
    tail = data.numel() % 8
    words = data[: data.numel() - tail].view(torch.int64)
    sums = [sum(byte * 257**index for index, byte in enumerate(data[data.numel() - tail :].tolist()))]
    for factor in _FACTORS:
        total = 0
        for start in range(0, words.numel(), _CHUNK_WORDS):
            chunk = words[start : start + _CHUNK_WORDS]
            index = torch.arange(start, start + chunk.numel(), device=chunk.device)
            total += int((chunk * ((index * factor) | 1)).sum())
        sums.append(total % 2**64)
    return sums
