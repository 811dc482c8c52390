"""Encoding and decoding with a dictionary without ever holding `[n, F]`: features are processed in tiles.

Three operations use a dictionary: f of some features (`feature_columns`), the k largest features of each row
(`top`), and reconstruction (`reconstruct`). For top-k dictionaries all of them start from `encode_topk`, computed
once per step. Only `TILE` features of at most `CHUNK` rows exist at a time, whatever F and n are; both are
constants, so that the result for a row does not depend on the number of rows through the order of a sum. Decoding
gathers the rows of nonzero features if they are few, and multiplies otherwise. `Sae.encode` and `Sae.decode` are
the plain twins.

Nothing here waits for the device, so recorded steps use the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from birkhoff.sae.activations import Activation, TopK, largest
from birkhoff.sae.dictionary import Sae

TILE = 8192  # features at a time
CHUNK = 1024  # rows at a time
SPARSE_SHARE = 8  # decode by gathering when fewer than one in this many features is nonzero


@dataclass(frozen=True, eq=False)
class DeviceSae:
    """A dictionary's tensors on the model's device. `decoder` may hold chosen features only; see `splice.py`."""

    encoder: torch.Tensor  # [F, d]
    encoder_bias: torch.Tensor  # [F]
    decoder: torch.Tensor  # [F, d]
    decoder_bias: torch.Tensor  # [d]
    activation: Activation
    normalize: str = "none"  # done by the callers of the functions below, which take normalised rows

    @classmethod
    def of(cls, sae: Sae, device: torch.device | str) -> DeviceSae:
        return cls(
            sae.encoder.to(device),
            sae.encoder_bias.to(device),
            sae.decoder.to(device),
            sae.decoder_bias.to(device),
            sae.activation.to(device),
            sae.normalize,
        )

    def tiles(self) -> Iterator[slice]:
        size = self.encoder.shape[0]
        return (slice(first, min(first + TILE, size)) for first in range(0, size, TILE))


def pre_activations(weights: DeviceSae, v: torch.Tensor, part: slice) -> torch.Tensor:
    return linear(v, weights.encoder[part], weights.encoder_bias[part])


def top(
    weights: DeviceSae, v: torch.Tensor, k: int, activated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest values of each row and their features, `[n, k]` both, ascending by feature; of equal values those
    of the lowest features.

    Values are pre-activations, or features if `activated`. Each tile is joined to the best so far."""
    best: torch.Tensor | None = None
    best_features: torch.Tensor | None = None
    for part in weights.tiles():
        z = pre_activations(weights, v, part)
        if activated:
            z = weights.activation.part(part)(z)
        features = torch.arange(part.start, part.stop, device=v.device).expand(len(v), -1)
        if best is not None and best_features is not None:
            z = torch.cat([best, z], dim=1)
            features = torch.cat([best_features, features], dim=1)
        columns = _largest_columns(z, k)
        best = z.gather(1, columns)
        best_features = features.gather(1, columns)
    assert best is not None and best_features is not None, "a dictionary has at least one feature"
    return best, best_features


def _largest_columns(z: torch.Tensor, k: int) -> torch.Tensor:
    """Columns of the k largest values of each row, ascending; all columns if there are at most k."""
    count = z.shape[1]
    columns = torch.arange(count, device=z.device).expand(len(z), -1)
    if count <= k:
        return columns
    if z.device.type == "cpu":  # checking for ties would wait for another device
        values, indices = z.topk(k + 1, dim=1)
        if bool((values[:, k - 1] > values[:, k]).all()):  # no tie at the boundary, and no NaN
            return indices[:, :k].sort(1).values
    return torch.where(largest(z, k), columns, count).topk(k, dim=1, largest=False).values


@dataclass(frozen=True, eq=False)
class TopkFeatures:
    """The nonzero features of each row of a top-k dictionary: values and features, `[n, k]`."""

    f: torch.Tensor
    features: torch.Tensor


def encode_topk(weights: DeviceSae, v: torch.Tensor) -> TopkFeatures | None:
    """The features of rows under top-k; None for the other activations."""
    activation = weights.activation
    if not isinstance(activation, TopK):
        return None
    parts = [top(weights, chunk, activation.k) for chunk in torch.split(v, CHUNK)]
    values, features = (torch.cat(column) if len(column) > 1 else column[0] for column in zip(*parts))
    return TopkFeatures(activation.finish(values), features)


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """Encoder and decoder rows of `room` features, contiguous. Top-k needs the whole encoder; it has `column_of`
    instead, the column of every feature of the dictionary, or `room` for features without one."""

    decoder: torch.Tensor  # [room, d]
    encoder: torch.Tensor | None
    bias: torch.Tensor | None
    activation: Activation | None
    column_of: torch.Tensor | None  # [F]

    @classmethod
    def of(cls, weights: DeviceSae, features: Sequence[int], rows: torch.Tensor) -> FeatureRows:
        """`rows` [room] are the indices of the features in `weights`, padded by repeating one."""
        decoder = weights.decoder[rows]
        if weights.activation.whole_row:
            column_of = torch.full((len(weights.encoder),), len(rows))
            column_of[list(features)] = torch.arange(len(features))
            return cls(decoder, None, None, None, column_of.to(rows.device))
        activation = weights.activation.part(rows)
        return cls(decoder, weights.encoder[rows], weights.encoder_bias[rows], activation, None)

    def tensors(self) -> list[torch.Tensor]:
        tensors = [self.decoder, self.encoder, self.bias, self.column_of]
        thresholds = [] if self.activation is None else self.activation.tensors().values()
        return [tensor for tensor in (*tensors, *thresholds) if tensor is not None]

    def clone(self) -> FeatureRows:
        room = torch.arange(len(self.decoder), device=self.decoder.device)
        return FeatureRows(
            self.decoder.clone(),
            None if self.encoder is None else self.encoder.clone(),
            None if self.bias is None else self.bias.clone(),
            None if self.activation is None else self.activation.part(room),
            None if self.column_of is None else self.column_of.clone(),
        )


def feature_columns(v: torch.Tensor, rows: FeatureRows, topk: TopkFeatures | None) -> torch.Tensor:
    """f of chosen features, `[n, room]`; `topk` is `encode_topk` of the same rows."""
    if rows.encoder is not None and rows.activation is not None:
        return rows.activation(linear(v, rows.encoder, rows.bias))
    assert topk is not None and rows.column_of is not None
    room = len(rows.decoder)
    columns = rows.column_of[topk.features]
    return topk.f.new_zeros(len(v), room + 1).scatter_(1, columns, topk.f)[:, :room]


def reconstruct(weights: DeviceSae, v: torch.Tensor, topk: TopkFeatures | None) -> torch.Tensor:
    """sum_i f_i w_i + b of rows `[n, d]`; `topk` is `encode_topk` of the same rows."""
    if topk is not None:
        chunks = zip(torch.split(topk.f, CHUNK), torch.split(topk.features, CHUNK))
        parts = [_decode_topk(weights, f, features) for f, features in chunks]
    else:
        parts = [_reconstruct_tiles(weights, chunk) for chunk in torch.split(v, CHUNK)]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _reconstruct_tiles(weights: DeviceSae, v: torch.Tensor) -> torch.Tensor:
    out = weights.decoder_bias.expand(len(v), -1).clone()
    for part in weights.tiles():
        f = weights.activation.part(part)(pre_activations(weights, v, part))
        decoder = weights.decoder[part]
        # Counting is free on the host; another device would have to be waited for.
        if v.device.type == "cpu" and int(f.count_nonzero()) * SPARSE_SHARE < f.shape[1]:
            rows, columns = f.nonzero(as_tuple=True)
            out.index_add_(0, rows, f[rows, columns].unsqueeze(1) * decoder[columns])
        else:
            out.addmm_(f, decoder)
    return out


def _decode_topk(weights: DeviceSae, f: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    out = weights.decoder_bias.expand(len(f), -1).clone()
    if f.numel() * SPARSE_SHARE < weights.encoder.shape[0]:
        return out + torch.einsum("nk,nkd->nd", f, weights.decoder[features])
    for part in weights.tiles():
        inside = (features >= part.start) & (features < part.stop)
        # The last column takes features of other tiles.
        dense = f.new_zeros(len(f), part.stop - part.start + 1)
        columns = torch.where(inside, features - part.start, dense.shape[1] - 1)
        dense.scatter_(1, columns, torch.where(inside, f, 0.0))
        out.addmm_(dense[:, :-1], weights.decoder[part])
    return out
