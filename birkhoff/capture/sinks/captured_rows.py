"""Mappings returned as `output.acts`: captured rows by (hook, layer), or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from birkhoff import notebook
from birkhoff.capture.spec.requested import Requested
from birkhoff.errors import BirkhoffError, SiteError, quoted
from birkhoff.hooks.plan import RowLabels, SiteRows
from birkhoff.hooks.site_names import Address
from birkhoff.hooks.sites import BY_NAME
from birkhoff.option_checks import as_int
from birkhoff.result_file import FileParts, SavedResult, site_name


class Acts(Mapping[Address, SiteRows], SavedResult):
    """`acts[hook, layer]`, by layer and then by the order of the forward pass. Keys may be the names used in the
    request: aliases, negative layers, and names of other tools (`acts["blocks.4.hook_in"]`). `in` takes the same keys,
    and the name of a hook that was captured at several layers."""

    kind = "acts"

    def __init__(
        self,
        requested: Requested,
        rows: Mapping[Address, SiteRows],
        missing: list[int],
        ragged: Mapping[str, Sequence[int]],
    ):
        """`ragged`: the shape of a row of each captured ragged hook, of which there may be no rows."""
        self._requested = requested
        order = sorted(rows, key=lambda address: (address[1], BY_NAME[address[0]].id))
        self._rows = {address: _with_labels(rows[address]) for address in order}
        self._ragged = {hook: tuple(shape) for hook, shape in ragged.items()}
        self.missing = missing

    def __getitem__(self, key: Address | str) -> SiteRows:
        hook, layer = (key, None) if isinstance(key, str) else key
        address = self._requested.address(hook, layer)
        if address not in self._rows and address[0] in self._ragged:  # no token had a row
            return SiteRows(*address, torch.empty(0, *self._ragged[address[0]]), RowLabels(), RowLabels())
        return self._rows[address]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, str) and any(hook == key for hook, _ in self._requested.names):
            return True
        hook: Any
        layer: Any
        hook, layer = key if isinstance(key, tuple) and len(key) == 2 else (key, None)
        if not isinstance(hook, str) or (as_int(layer) is None) != isinstance(key, str):
            return False
        try:
            address = self._requested.address(hook, as_int(layer))
        except SiteError:
            return False
        return address in self._rows or address[0] in self._ragged

    def file_parts(self) -> FileParts:
        """Tensors named `hook.layer`, and `hook.layer/positions`, `/token_ids` and, for fp8, `/scale` of their rows.
        Facts: the names of the request, and the selected positions that have no row."""
        tensors: dict[str, torch.Tensor] = {}
        for site, rows in self._rows.items():
            name = site_name(*site)
            tensors[name] = rows.tensor
            tensors[f"{name}/positions"] = torch.tensor(list(rows.positions), dtype=torch.long)
            tensors[f"{name}/token_ids"] = torch.tensor(list(rows.token_ids), dtype=torch.long)
            if rows.scale is not None:
                tensors[f"{name}/scale"] = rows.scale
        requested = [[list(name), list(address)] for name, address in self._requested.names.items()]
        facts = {
            "num_layers": self._requested.num_layers,
            "requested": requested,
            "missing": list(self.missing),
            "ragged": {hook: list(shape) for hook, shape in self._ragged.items()},
        }
        return FileParts(tensors, facts)

    @classmethod
    def from_file_parts(cls, parts: FileParts) -> Acts:
        tensors, facts = parts
        names = {(name[0], name[1]): (address[0], address[1]) for name, address in facts["requested"]}
        rows = {}
        for address in dict.fromkeys(names.values()):
            name = site_name(*address)
            if name in tensors:
                positions, token_ids = (
                    tuple(tensors[f"{name}/{label}"].tolist()) for label in ("positions", "token_ids")
                )
                scale = tensors.get(f"{name}/scale")
                rows[address] = SiteRows(*address, tensors[name], positions, token_ids, scale)
        requested = Requested(names, facts["num_layers"])
        return cls(requested, rows, facts["missing"], facts["ragged"])

    def __iter__(self) -> Iterator[Address]:
        return iter(self._rows)

    def _ipython_key_completions_(self) -> list[Address]:
        return list(self._rows)

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


def _with_labels(rows: SiteRows) -> SiteRows:
    """The same rows, with labels that are safe as an index."""
    return replace(rows, positions=RowLabels(rows.positions), token_ids=RowLabels(rows.token_ids))


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
