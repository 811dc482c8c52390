"""Dictionaries at half the size: matrices rounded to bfloat16 and stored as such.

`rounded` returns a dictionary whose matrices are exact in bfloat16; evaluate that one, since it is what ships.
`compact` then rewrites its files with two bytes per number, from which the same dictionary is read bit for bit.
Biases and thresholds stay float32, because they decide which features fire."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from birkhoff.atomic_file import save_tensors
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.saelens_files import WEIGHTS

MATRICES = ("W_enc", "W_dec")


def rounded(sae: Sae) -> Sae:
    """The same dictionary with matrices rounded to bfloat16, stored as float32 tensors."""
    other = sae.at(sae.hook, sae.layer) if sae.hook is not None and sae.layer is not None else sae
    other.encoder, other.decoder = (matrix.bfloat16().float() for matrix in (sae.encoder, sae.decoder))
    return other


def compact(directory: Path) -> int:
    """Store matrices as bfloat16 where that is exact; returns the size of the file in bytes."""
    tensors = load_file(directory / WEIGHTS)
    for name in MATRICES:
        half = tensors[name].bfloat16()
        if torch.equal(half.float(), tensors[name].float()):
            tensors[name] = half
    save_tensors(directory / WEIGHTS, tensors)
    return (directory / WEIGHTS).stat().st_size
