"""Reading a dictionary without ever holding `[n, F]`: features are worked through tile by tile.

Three things are asked of a dictionary: some columns (`columns`), the k largest of each row (`top`), and the rows it
makes of what it reads (`reconstruct`). Only `TILE` features of at most `CHUNK` rows exist at a time, whatever F and n
are; sizes are constants, so that a row does not feel how many others there are through the order of a sum. Decoding
gathers the few rows of features that are not zero, when they are few, and multiplies otherwise. `Sae.encode` and
`Sae.decode` are the plain twins of all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from birkhoff.sae.activations import Activation, TopK, largest
from birkhoff.sae.dictionary import Sae

TILE = 8192  # features at a time
CHUNK = 1024  # rows at a time
SPARSE_SHARE = 8  # decode by gathering when fewer than one in so many features is not zero


@dataclass(frozen=True, eq=False)
class Held:
    """A dictionary's tensors where the model computes. `decoder` may hold chosen features only; see `splice.py`."""

    encoder: torch.Tensor  # [F, d]
    encoder_bias: torch.Tensor  # [F]
    decoder: torch.Tensor  # [F, d]
    decoder_bias: torch.Tensor  # [d]
    activation: Activation

    @classmethod
    def of(cls, sae: Sae, device: torch.device | str) -> Held:
        bias, activation = sae.decoder_bias.to(device), sae.activation.to(device)
        return cls(sae.encoder.to(device), sae.encoder_bias.to(device), sae.decoder.to(device), bias, activation)

    def tiles(self) -> Iterator[slice]:
        size = self.encoder.shape[0]
        return (slice(first, min(first + TILE, size)) for first in range(0, size, TILE))


def pre_activations(held: Held, v: torch.Tensor, part: slice) -> torch.Tensor:
    return linear(v, held.encoder[part], held.encoder_bias[part])


def top(held: Held, v: torch.Tensor, k: int, activated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their features, `[n, k]` both, ascending by feature; ties to the lowest one.

    Of pre-activations, or of features (`activated`). One tile is joined to the best so far, and the best are kept."""
    best, names = v.new_empty(len(v), 0), torch.empty(len(v), 0, dtype=torch.long, device=v.device)
    for part in held.tiles():
        z = pre_activations(held, v, part)
        if activated:
            z = held.activation.part(part)(z)
        joined = torch.cat([best, z], dim=1)
        features = torch.arange(part.start, part.stop, device=v.device).expand(len(v), -1)
        joined_names = torch.cat([names, features], dim=1)
        kept = largest(joined, k)  # k or all of them in every row, so what is kept is a rectangle
        best, names = joined[kept].view(len(v), -1), joined_names[kept].view(len(v), -1)
    return best, names


def columns(held: Held, v: torch.Tensor, features: torch.Tensor, chosen: Chosen) -> torch.Tensor:
    """f of chosen features, `[n, C]`."""
    if not isinstance(held.activation, TopK):
        return chosen.activation(linear(v, chosen.encoder, chosen.bias))
    found = []
    for piece in v.split(CHUNK):
        values, names = top(held, piece, held.activation.k)
        kept = held.activation.finish(values)
        hit = names.unsqueeze(1) == features.view(1, -1, 1)  # [n, C, k], true at most once along k
        found.append(torch.where(hit, kept.unsqueeze(1), 0.0).sum(-1))
    return torch.cat(found) if found else v.new_empty(0, len(features))


@dataclass(frozen=True, eq=False)
class Chosen:
    """The encoder rows of some features, next to each other; unused under top-k, which needs every row."""

    encoder: torch.Tensor
    bias: torch.Tensor
    activation: Activation

    @classmethod
    def of(cls, held: Held, places: torch.Tensor) -> Chosen:
        if held.activation.whole_row:
            return cls(held.encoder[:0], held.encoder_bias[:0], held.activation)
        return cls(held.encoder[places], held.encoder_bias[places], held.activation.part(places))


def reconstruct(held: Held, v: torch.Tensor) -> torch.Tensor:
    """sum_i f_i w_i + b of rows `[n, d]`."""
    whole = [_reconstruct_top(held, piece, held.activation) if isinstance(held.activation, TopK)
             else _reconstruct_tiles(held, piece) for piece in v.split(CHUNK)]  # fmt: skip
    return torch.cat(whole) if whole else v


def _reconstruct_tiles(held: Held, v: torch.Tensor) -> torch.Tensor:
    out = held.decoder_bias.expand(len(v), -1).clone()
    for part in held.tiles():
        f, decoder = held.activation.part(part)(pre_activations(held, v, part)), held.decoder[part]
        # Counting is free on the host; elsewhere the step would have to wait for the answer.
        if v.device.type == "cpu" and int(f.count_nonzero()) * SPARSE_SHARE < f.shape[1]:
            rows, places = f.nonzero(as_tuple=True)
            out.index_add_(0, rows, f[rows, places].unsqueeze(1) * decoder[places])
        else:
            out.addmm_(f, decoder)
    return out


def _reconstruct_top(held: Held, v: torch.Tensor, activation: TopK) -> torch.Tensor:
    values, names = top(held, v, activation.k)
    f, out = activation.finish(values), held.decoder_bias.expand(len(v), -1).clone()
    if f.numel() * SPARSE_SHARE < held.encoder.shape[0]:
        return out + torch.einsum("nk,nkd->nd", f, held.decoder[names])
    for part in held.tiles():
        here = (names >= part.start) & (names < part.stop)
        dense = v.new_zeros(len(v), part.stop - part.start + 1)  # the last column takes what is not of this tile
        dense.scatter_(1, torch.where(here, names - part.start, dense.shape[1] - 1), torch.where(here, f, 0.0))
        out.addmm_(dense[:, :-1], held.decoder[part])
    return out
