"""Mappings returned as `output.acts`: captured rows by (hook, layer), or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from birkhoff import notebook
from birkhoff.capture.spec.request import ResolvedCapture
from birkhoff.errors import BirkhoffError, quoted
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.sites import BY_NAME


class Acts(Mapping[Address, SiteRows]):
    """`acts[hook, layer]`, by layer and then by the order of the forward pass. Keys may be the names used in the
    request: aliases, negative layers, and names of other tools (`acts["blocks.4.hook_in"]`)."""

    def __init__(self, resolved: ResolvedCapture, rows: Mapping[Address, SiteRows], missing: list[int]):
        self._resolved = resolved
        self._rows = dict(rows)
        self.missing = missing

    def __getitem__(self, key: Address | str) -> SiteRows:
        hook, layer = (key, None) if isinstance(key, str) else key
        address = self._resolved.address(hook, layer)
        if address not in self._rows and BY_NAME[address[0]].ragged:  # no token had a row
            shape = self._resolved.rows[address[0]].shape
            return SiteRows(*address, torch.empty(0, *shape), (), ())
        return self._rows[address]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str):
            return any(hook == key for hook, _ in self._resolved.requested)
        return key in self._rows or key in self._resolved.requested

    def __iter__(self) -> Iterator[Address]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _repr_html_(self) -> str:
        rows = [
            (f"{hook}[{layer}]", list(each.tensor.shape), str(each.tensor.dtype), spans(each.positions))
            for (hook, layer), each in self._rows.items()
        ]
        return notebook.table(("rows of", "shape", "dtype", "positions"), rows, "Captured rows")

    def __repr__(self) -> str:
        rows = ", ".join(
            f"{hook}[{layer}]: {tuple(r.tensor.shape)}" for (hook, layer), r in self._rows.items()
        )
        return f"Acts({rows})"


class NoActs(Mapping[Address, SiteRows]):
    """An empty mapping whose lookups raise `reason`. If rows were lost, iteration and `len` raise it too."""

    def __init__(self, reason: BirkhoffError, lost: bool = False):
        self.reason = reason
        self._lost = lost

    def __getitem__(self, key: Address) -> SiteRows:
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


def spans(positions: Sequence[int]) -> str:
    """Ascending positions as ranges: `0..4, 7`."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(f"{first}..{last}" if last > first else str(first) for first, last in runs)
