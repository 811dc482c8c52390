"""Gates: an edit applies to a token only where a probe fires.

A probe reads the row of its site before the edits there: score = row . direction + bias, and it fires where
low < score < high. It reads the same token as the edit, at the site of the edit or earlier in the forward pass
(`sites.in_order`). Which tokens have which probe is data: eager steps score the rows that an edit names, recorded steps
all rows with buffers of fixed shape. Both use `fires`, whose sums do not depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from birkhoff.errors import SteeringError
from birkhoff.hooks.digest import float32_bytes, framed, number
from birkhoff.hooks.edit import MAX_STACKED, row_sum
from birkhoff.hooks.sites import in_order

Address = tuple[str, int]  # hook, layer


@dataclass(frozen=True, eq=False)
class SiteGate:
    """A probe at one site: `direction` [width] float32."""

    key: Address
    direction: torch.Tensor
    bias: float = 0.0
    low: float = -torch.inf
    high: float = torch.inf

    @property
    def content(self) -> bytes:
        """Canonical bytes, for the hashes of edits."""
        site = framed(self.key[0].encode(), str(self.key[1]).encode(), float32_bytes(self.direction))
        return framed(site, *map(number, (self.bias, self.low, self.high)))

    def check_before(self, key: Address) -> None:
        """Refuse to gate an edit of a site that is computed before the one it reads."""
        if in_order(self.key) > in_order(key):
            raise SteeringError(
                f"the gate reads {self.key[0]}[{self.key[1]}], which is computed after {key[0]}[{key[1]}]. Read an "
                "earlier site, or edit a later one."
            )


def fires(
    x: torch.Tensor,
    direction: torch.Tensor,
    bias: float | torch.Tensor,
    low: float | torch.Tensor,
    high: float | torch.Tensor,
) -> torch.Tensor:
    """Rows x [n, width] -> [n, 1] bool; the other arguments broadcast against [n, width] or [n, 1]."""
    score = row_sum(x.float() * direction) + bias
    return (score > low) & (score < high)


class GateRun:
    """One gate for some rows of an eager step; `fired` [rows, 1] after its site was reached."""

    def __init__(self, gate: SiteGate, rows: Sequence[int]):
        self.gate = gate
        self.rows = rows
        self.result: torch.Tensor | None = None

    @property
    def fired(self) -> torch.Tensor:
        assert self.result is not None, "a probe stands before the edits that it gates"
        return self.result


class SiteGates:
    """The gates of an eager step at one site. Gates of few rows are scored at once."""

    def __init__(self) -> None:
        self._runs: list[GateRun] = []
        self._batches: list[tuple[list[GateRun], tuple[torch.Tensor, ...]]] | None = None

    def add(self, run: GateRun) -> None:
        self._runs.append(run)
        self._batches = None

    def __call__(self, x: torch.Tensor) -> None:
        if self._batches is None:
            together = self._runs if sum(len(run.rows) for run in self._runs) <= MAX_STACKED else []
            batches = [together] if together else [[run] for run in self._runs]
            self._batches = [(runs, _numbers(runs, x.device)) for runs in batches]
        for runs, (rows, *numbers) in self._batches:
            fired = fires(x.index_select(0, rows).flatten(1), *numbers)
            for run, own in zip(runs, fired.split([len(run.rows) for run in runs])):
                run.result = own


def _numbers(runs: Sequence[GateRun], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows, directions, biases and bounds of some gates; one direction for all rows if there is one gate."""
    rows = torch.tensor([row for run in runs for row in run.rows], device=device)
    counts = [1 if len(runs) == 1 else len(run.rows) for run in runs]
    gates = [run.gate for run, count in zip(runs, counts) for _ in range(count)]
    bounds = torch.tensor([(gate.bias, gate.low, gate.high) for gate in gates]).to(device)
    return rows, torch.stack([gate.direction for gate in gates]).to(device), *bounds.split(1, dim=1)


class GateBuffers:
    """The gates of recorded steps at one site, at most one for each of `rows` rows."""

    def __init__(self, width: int, rows: int, device: torch.device):
        self.numbers = torch.zeros(rows, width + 3, device=device)
        self.fired = torch.zeros(rows, 1, dtype=torch.bool, device=device)

    def fill(self, gates: Sequence[tuple[int, SiteGate]]) -> None:
        """Set the rows with a gate, replacing those before; the others do not fire."""
        numbers = torch.zeros(self.numbers.shape)
        numbers[:, -2] = torch.inf
        for row, gate in gates:
            numbers[row, :-3] = gate.direction.cpu()
            numbers[row, -3:] = torch.tensor([gate.bias, gate.low, gate.high])
        self.numbers.copy_(numbers)

    def __call__(self, x: torch.Tensor) -> None:
        n = len(x)
        direction, (bias, low, high) = self.numbers[:n, :-3], self.numbers[:n, -3:].split(1, dim=1)
        self.fired[:n].copy_(fires(x.flatten(1), direction, bias, low, high))
