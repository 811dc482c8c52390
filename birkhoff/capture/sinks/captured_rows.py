"""Captured rows in memory: what `output.acts` holds; and what it is when it holds none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from birkhoff.capture.spec.request import ResolvedCapture
from birkhoff.errors import BirkhoffError, quoted
from birkhoff.hooks.site_names import Address


@dataclass(frozen=True, eq=False)
class CapturedRows:
    """Rows of one site in order of position: `tensor` (rows, *row_shape). A reduced row has no position of its own
    unless it was picked. `scale` is one float32 per row of fp8."""

    tensor: torch.Tensor
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    scale: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.tensor.shape[0])


class Acts(Mapping[Address, CapturedRows]):
    """`acts[hook, layer]`, by the names of the request: aliases and negative layers included."""

    def __init__(self, resolved: ResolvedCapture, rows: Mapping[Address, CapturedRows], missing: list[int]):
        self._resolved = resolved
        self._rows = dict(rows)
        self.missing = missing

    def __getitem__(self, key: Address) -> CapturedRows:
        return self._rows[self._resolved.address(*key)]

    def __contains__(self, key: object) -> bool:
        return key in self._rows or key in self._resolved.asked

    def __iter__(self) -> Iterator[Address]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{hook}[{layer}]: {tuple(r.tensor.shape)}" for (hook, layer), r in self._rows.items()
        )
        return f"Acts({rows})"


class NoActs(Mapping[Address, CapturedRows]):
    """No rows in memory. Whoever asks for some is told why; when some were lost, looking at all is refused too."""

    def __init__(self, reason: BirkhoffError, lost: bool = False):
        self.reason = reason
        self._lost = lost

    def __getitem__(self, key: Address) -> CapturedRows:
        raise type(self.reason)(f"there are no rows of {quoted(key)}: {self.reason}")

    def __contains__(self, key: object) -> bool:
        return key in tuple(self)

    def __iter__(self) -> Iterator[Address]:
        if self._lost:
            raise self.reason
        return iter(())

    def __len__(self) -> int:
        if self._lost:
            raise self.reason
        return 0

    def __repr__(self) -> str:
        return f"NoActs({self.reason})"
