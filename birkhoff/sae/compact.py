"""Dictionaries at half the size: matrices rounded to bfloat16, and stored so without losing anything more.

`rounded` gives the dictionary whose matrices are exactly bfloat16 numbers; measure that one, since it is what ships.
`compact` then rewrites its files with two bytes for each such number: whoever reads them back gets the same dictionary,
bit for bit. Biases and thresholds stay float32, as they decide which features fire.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from birkhoff.sae.dictionary import Sae
from birkhoff.sae.load_saelens import WEIGHTS

MATRICES = ("W_enc", "W_dec")


def rounded(sae: Sae) -> Sae:
    """The same dictionary with matrices of bfloat16 numbers, held as float32 like any other."""
    other = sae.at(sae.hook, sae.layer) if sae.hook is not None and sae.layer is not None else sae
    other.encoder, other.decoder = (matrix.bfloat16().float() for matrix in (sae.encoder, sae.decoder))
    return other


def compact(directory: Path) -> int:
    """Store matrices in two bytes a number where that loses nothing; the size of the file in bytes."""
    tensors = load_file(directory / WEIGHTS)
    for name in MATRICES:
        half = tensors[name].bfloat16()
        if torch.equal(half.float(), tensors[name].float()):
            tensors[name] = half
    save_file(tensors, directory / WEIGHTS)
    return (directory / WEIGHTS).stat().st_size
