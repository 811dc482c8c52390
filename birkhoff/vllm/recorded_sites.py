"""All armed sites of a rank as operations of fixed shape on persistent buffers: what CUDA graphs of vLLM record of us.

vLLM records its graphs when it starts, before a request is known, and replays them for every step of that size. So the
pattern (`hooks/graph_tap.py`) is chosen then: every armed site is copied into a capture buffer, and up to `LANES`
vectors of the tables are added to every row. Which rows are delivered and which vectors are added is data that is
written between replays. A request that wants more than this does not fit, and its steps run without a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from birkhoff.hooks.batch_tap import BatchTap
from birkhoff.hooks.edit import SiteEdit
from birkhoff.hooks.graph_tap import GraphPlan, GraphTap, Pattern
from birkhoff.hooks.plan import Key, Plan, Span
from birkhoff.hooks.row_edits import StepGates
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.sites import BY_NAME
from birkhoff.hooks.step_edits import StepEdits
from birkhoff.hooks.step_hooks import StepHooks
from birkhoff.hooks.tap import Tap
from birkhoff.hooks.vector_table import Tables

LANES = 2  # vectors that a recorded step adds to one row at one site


class RecordedSites:
    """`keys` are the armed sites of the rank, `rows` the most rows of a recorded step; `tables` have a fixed size."""

    def __init__(
        self,
        keys: Sequence[Key],
        schema: Mapping[str, HookSchema],
        tables: Tables,
        rows: int,
        device: torch.device | str = "cpu",
    ):
        assert tables.fixed, "tables that grow move"
        steerable = [key for key in keys if schema[key[0]].steerable]
        tables.prepare({(*key, "both"): schema[key[0]].width for key in steerable})
        pattern = Pattern(
            tuple((key, False) for key in sorted(keys)),
            tuple((key, "both") for key in sorted(steerable)),
            LANES,
            (),
            (),
            (),
        )
        self.tables = tables
        self._plan = GraphPlan(pattern, {}, {}, StepGates())
        self._tap = GraphTap(self._plan, StepEdits(tables=tables), rows, torch.device(device))
        for hook, layer in keys:  # the first pass allocates the buffers
            row = schema[hook]
            shown = torch.zeros(1, *row.logical_shape, dtype=getattr(torch, row.dtype), device=device)
            self._tap.at(layer).see(BY_NAME[hook], shown)
        self._tap.end()

    def at(self, layer: int) -> Tap:
        """The tap whose operations are recorded."""
        return self._tap.at(layer)

    def fill(self, tap: BatchTap | None) -> None:
        """Before a replay: write which vectors are added to which rows; None if no request captures or edits."""
        self._tap.fill(tap, self._plan)

    def stage(self, tap: Tap) -> None:
        """After a replay: hand the captured rows to the tap of the step."""
        if isinstance(tap, BatchTap) and self._tap.buffer is not None:
            tap.stage_from(self._tap.buffer)

    @property
    def num_bytes(self) -> int:
        """Device memory of the capture buffer."""
        return 0 if self._tap.buffer is None else self._tap.buffer.data.nbytes


class RecordedSteps:
    """Begins and ends steps that are replays, whatever they capture and edit."""

    def __init__(self, hooks: StepHooks, recorded: RecordedSites):
        self._hooks = hooks
        self._recorded = recorded

    def begin(self, spans: Sequence[Span], num_rows: int) -> None:
        self._recorded.fill(self._hooks.begin(spans, num_rows))

    def end(self) -> None:
        self._recorded.stage(self._hooks.tap)
        self._hooks.end()

    def fail(self) -> None:
        self._hooks.fail()


def fits(plan: Plan, captures_after: bool) -> bool:
    """Whether recorded steps can run this request. `captures_after`: whether it captures rows after their edits.

    Ranks of one group must decide alike, so it depends on what all of them know and not on the captures of one rank."""
    if captures_after or (plan.table is not None and len(plan.table) > LANES):
        return False
    operations = (operation for edit in plan.edits for operation in edit.sites.values())
    return all(
        isinstance(operation, SiteEdit) and operation.is_plain and operation.path == "both"
        for operation in operations
    )
