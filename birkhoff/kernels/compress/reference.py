"""Gated pooling and the cache writes of a prefill step in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from birkhoff.kernels import quant
from birkhoff.kernels.norm.reference import KEY_GROUP, rms_norm
from birkhoff.kernels.rope.reference import Phases, rotate
from birkhoff.kernels.row_index import RowIndex

Rounding = Literal["none", "key", "index"]


class RawRows(NamedTuple):
    """Rows of one compressor in a step [n, values and gates], and where its rows and entries are kept."""

    raw: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    ring: torch.Tensor
    pages: torch.Tensor
    rounding: Rounding = "none"


class RingRows(NamedTuple):
    """Rows [n, w] to be stored in a ring; gates get their position bias `ape`."""

    values: torch.Tensor
    ring: torch.Tensor
    ape: torch.Tensor | None = None


def pool(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return (gates.softmax(dim=-2) * values).sum(dim=-2)


def compress_blocks(
    parts: Sequence[RawRows],
    table: torch.Tensor,
    rows: RowIndex,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> None:
    for part in parts:
        _compress(part, table, rows, cos, sin, eps)


def _compress(
    part: RawRows, table: torch.Tensor, rows: RowIndex, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> None:
    raw, ape, norm, ring, pages, rounding = part
    ratio, width, per_page = len(ape), pages.shape[2], pages.shape[1]
    overlap = 2 if ratio == 4 else 1
    for row, position in enumerate(rows.positions.tolist()):
        if (position + 1) % ratio:
            continue
        slot, start = int(rows.slots[row]), int(rows.starts[row])
        block = range(max(position + 1 - overlap * ratio, 0), position + 1)
        sources = [row - (position - at) if at >= start else -1 for at in block]
        at = torch.tensor(block, device=raw.device)
        kept = gather_rows(
            raw, ring, torch.full_like(at, slot), at, torch.tensor(sources, device=raw.device), ape
        )
        values, gates = kept.chunk(2, dim=-1)
        if overlap == 2:  # the first half of the channels of the older block, the second half of the newer
            old = slice(0, len(block) - ratio)
            new = slice(len(block) - ratio, None)
            values, gates = (torch.cat((part[old, :width], part[new, width:])) for part in (values, gates))
        entry = rms_norm(pool(values, gates).to(pages.dtype).unsqueeze(0), norm, eps)
        entry = rotate(entry, Phases(cos[row : row + 1], sin[row : row + 1]))[0]
        if rounding == "key":
            entry = quant.fp8_round(entry, KEY_GROUP, 2 * cos.shape[-1])
        elif rounding == "index":
            entry = quant.hadamard_fp4(entry)
        index = position // ratio
        pages[table[slot, index // per_page], index % per_page] = entry.to(pages.dtype)


def store_rows(parts: Sequence[RingRows], rows: RowIndex) -> None:
    for values, ring, ape in parts:
        kept = (rows.positions >= rows.stops - ring.shape[1]).nonzero()[:, 0]
        slots, positions = rows.slots[kept], rows.positions[kept]
        ring[slots, positions % ring.shape[1]] = gather_rows(values, ring, slots, positions, kept, ape)


def gather_rows(
    values: torch.Tensor,
    ring: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    sources: torch.Tensor,
    ape: torch.Tensor | None = None,
) -> torch.Tensor:
    own = values[sources.clamp_min(0)].float()
    if ape is not None:
        bias = ape[positions % len(ape)]
        own = own + torch.cat((torch.zeros_like(bias), bias), dim=-1)
    old = ring[slots, positions % ring.shape[1]]
    return torch.where((sources >= 0).unsqueeze(-1), own.to(ring.dtype), old)
