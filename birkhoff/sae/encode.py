"""Reading a dictionary without ever holding `[n, F]`: features are worked through tile by tile.

Three things are asked of a dictionary: some columns (`columns`), the k largest of each row (`top`), and the rows it
makes of what it reads (`reconstruct`). Under top-k all of them start from what is `kept` of a row, found once. Only
`TILE` features of at most `CHUNK` rows exist at a time, whatever F and n are; sizes are constants, so that a row does
not feel how many others there are through the order of a sum. Decoding gathers the few rows of features that are not
zero, when they are few, and multiplies otherwise. `Sae.encode` and `Sae.decode` are the plain twins of all of it.
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
class DeviceSae:
    """A dictionary's tensors where the model computes. `decoder` may hold chosen features only; see `splice.py`."""

    encoder: torch.Tensor  # [F, d]
    encoder_bias: torch.Tensor  # [F]
    decoder: torch.Tensor  # [F, d]
    decoder_bias: torch.Tensor  # [d]
    activation: Activation

    @classmethod
    def of(cls, sae: Sae, device: torch.device | str) -> DeviceSae:
        bias = sae.decoder_bias.to(device)
        activation = sae.activation.to(device)
        return cls(
            sae.encoder.to(device), sae.encoder_bias.to(device), sae.decoder.to(device), bias, activation
        )

    def tiles(self) -> Iterator[slice]:
        size = self.encoder.shape[0]
        return (slice(first, min(first + TILE, size)) for first in range(0, size, TILE))


def pre_activations(held: DeviceSae, v: torch.Tensor, part: slice) -> torch.Tensor:
    return linear(v, held.encoder[part], held.encoder_bias[part])


def top(
    held: DeviceSae, v: torch.Tensor, k: int, activated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row and their features, `[n, k]` both, ascending by feature; ties to the lowest one.

    Of pre-activations, or of features (`activated`). One tile is joined to the best so far, and the best are kept."""
    best = v.new_empty(len(v), 0)
    names = torch.empty(len(v), 0, dtype=torch.long, device=v.device)
    for part in held.tiles():
        z = pre_activations(held, v, part)
        if activated:
            z = held.activation.part(part)(z)
        joined = torch.cat([best, z], dim=1)
        features = torch.arange(part.start, part.stop, device=v.device).expand(len(v), -1)
        joined_names = torch.cat([names, features], dim=1)
        places = _places(joined, k)
        best = joined.gather(1, places)
        names = joined_names.gather(1, places)
    return best, names


def _places(z: torch.Tensor, k: int) -> torch.Tensor:
    """Where the k largest of each row stand, ascending; all places when there are no more than k."""
    count = z.shape[1]
    if count <= k:
        return torch.arange(count, device=z.device).expand(len(z), -1)
    if z.device.type == "cpu":  # asking whether there is a tie is free on the host alone
        values, places = z.topk(k + 1, dim=1)
        if bool((values[:, k - 1] > values[:, k]).all()):  # the k largest are set apart, and none is NaN
            return places[:, :k].sort(1).values
    return largest(z, k).nonzero()[:, 1].view(len(z), k)


@dataclass(frozen=True, eq=False)
class TopkFeatures:
    """What a top-k dictionary keeps of each row: values and features, `[n, k]`."""

    f: torch.Tensor
    names: torch.Tensor

    @classmethod
    def of(cls, held: DeviceSae, v: torch.Tensor, activation: TopK) -> TopkFeatures:
        parts = [top(held, piece, activation.k) for piece in v.split(CHUNK)]
        values, names = (torch.cat(column) for column in zip(*parts))
        return cls(activation.finish(values), names)

    def rows(self, picked: torch.Tensor) -> TopkFeatures:
        return TopkFeatures(self.f[picked], self.names[picked])

    def columns(self, features: torch.Tensor) -> torch.Tensor:
        """f of chosen features, `[n, C]`: zero where they were not kept."""
        found = self.f.new_empty(len(self.f), len(features))
        for column, feature in enumerate(features.tolist()):
            found[:, column] = torch.where(self.names == feature, self.f, 0.0).sum(1)  # at most one of them
        return found


def kept(held: DeviceSae, v: torch.Tensor) -> TopkFeatures | None:
    """What top-k keeps of rows, found once for all that is asked of them; None for the other families."""
    return TopkFeatures.of(held, v, held.activation) if isinstance(held.activation, TopK) else None


def columns(
    v: torch.Tensor, features: torch.Tensor, chosen: FeatureSubset, found: TopkFeatures | None
) -> torch.Tensor:
    """f of chosen features, `[n, C]`."""
    return (
        chosen.activation(linear(v, chosen.encoder, chosen.bias))
        if found is None
        else found.columns(features)
    )


@dataclass(frozen=True, eq=False)
class FeatureSubset:
    """The encoder rows of some features, next to each other; unused under top-k, which needs every row."""

    encoder: torch.Tensor
    bias: torch.Tensor
    activation: Activation

    @classmethod
    def of(cls, held: DeviceSae, places: torch.Tensor) -> FeatureSubset:
        if held.activation.whole_row:
            return cls(held.encoder[:0], held.encoder_bias[:0], held.activation)
        return cls(held.encoder[places], held.encoder_bias[places], held.activation.part(places))


def reconstruct(held: DeviceSae, v: torch.Tensor, found: TopkFeatures | None) -> torch.Tensor:
    """sum_i f_i w_i + b of rows `[n, d]`; `found` is `kept` of the same rows."""
    if found is not None:
        pieces = zip(found.f.split(CHUNK), found.names.split(CHUNK))
        return torch.cat([_decode_kept(held, f, names) for f, names in pieces])
    return torch.cat([_reconstruct_tiles(held, piece) for piece in v.split(CHUNK)])


def _reconstruct_tiles(held: DeviceSae, v: torch.Tensor) -> torch.Tensor:
    out = held.decoder_bias.expand(len(v), -1).clone()
    for part in held.tiles():
        f = held.activation.part(part)(pre_activations(held, v, part))
        decoder = held.decoder[part]
        # Counting is free on the host; elsewhere the step would have to wait for the answer.
        if v.device.type == "cpu" and int(f.count_nonzero()) * SPARSE_SHARE < f.shape[1]:
            rows, places = f.nonzero(as_tuple=True)
            out.index_add_(0, rows, f[rows, places].unsqueeze(1) * decoder[places])
        else:
            out.addmm_(f, decoder)
    return out


def _decode_kept(held: DeviceSae, f: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
    out = held.decoder_bias.expand(len(f), -1).clone()
    if f.numel() * SPARSE_SHARE < held.encoder.shape[0]:
        return out + torch.einsum("nk,nkd->nd", f, held.decoder[names])
    for part in held.tiles():
        here = (names >= part.start) & (names < part.stop)
        dense = f.new_zeros(
            len(f), part.stop - part.start + 1
        )  # the last column takes what is not of this tile
        dense.scatter_(
            1, torch.where(here, names - part.start, dense.shape[1] - 1), torch.where(here, f, 0.0)
        )
        out.addmm_(dense[:, :-1], held.decoder[part])
    return out
