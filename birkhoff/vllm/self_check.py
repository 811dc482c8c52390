"""The check at start: a known vector must move a probe row by exactly that vector, at every armed site of the rank.

Every armed site has a row of its own in one forward pass. A hook that is not reached, that acts on an unread copy, or
that touches another row would otherwise give plausible text that is not steered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from birkhoff.errors import UnsupportedModel
from birkhoff.hooks.plan import Edit, Key, Plan, SiteRows, Span
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.vector_table import TableRows, Tables
from birkhoff.steering.vector_edits import Add

# A forward pass of that many rows of fixed input; the output of the rank.
Forward = Callable[[int], torch.Tensor]

ROUNDINGS = 64  # times the precision of the dtype: how far a replay may be from a step without a graph


class ProbeJob:
    """Keeps all rows of one site."""

    def __init__(self, key: Key, after: bool):
        self.keys = (key,)
        self.after = after
        self.rows: torch.Tensor | None = None

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        self.rows = rows.tensor.clone()

    def close(self, finish_reason: str, num_tokens: int) -> None:
        pass


class ProbedSteps(Protocol):
    """What begins and ends the steps that are probed: `StepHooks`, or those of recorded graphs."""

    def begin(self, spans: Sequence[Span], num_rows: int) -> object: ...

    def end(self) -> None: ...

    def fail(self) -> None: ...


@dataclass(frozen=True, eq=False)
class ProbePass:
    """Two forward passes in which every site has a row of its own: `plain`, and `moved` by one vector for each site
    (`vectors`, None where it cannot be edited)."""

    plain: torch.Tensor
    moved: torch.Tensor
    jobs: list[tuple[ProbeJob, ProbeJob | None]]  # the row before and after the edit
    vectors: list[torch.Tensor | None]


def check_sites(
    steps: ProbedSteps,
    forward: Forward,
    keys: Sequence[Key],
    schema: Mapping[str, HookSchema],
    num_layers: int,
    max_rows: int,
    rank: str,
    hidden: Collection[str] = (),
) -> int:
    """Raise `UnsupportedModel` unless every site captures and, if it can be edited, is edited; returns their number.

    `hidden` are hooks of which nothing shows in the output of such a forward pass: attention alone reads them, and
    dummy tokens have no entries in its cache."""
    for some in _chunks(keys, max_rows):
        probed = _probe(steps, forward, some, schema, num_layers)
        for row, (hook, layer) in enumerate(some):
            _check_row(probed, row, f"{hook}[{layer}] on {rank}", hook in hidden)
    return len(keys)


def check_recorded(
    steps: ProbedSteps,
    forward: Forward,
    recorded: ProbedSteps,
    replay: Forward,
    tables: Tables,
    keys: Sequence[Key],
    schema: Mapping[str, HookSchema],
    num_layers: int,
    max_rows: int,
    rank: str,
) -> int:
    """Raise `UnsupportedModel` unless replays of recorded graphs capture and compute what steps without a graph do,
    with and without edits; returns the number of sites. A graph that was recorded without the sites would replay
    plausible text that is not steered. Replays add vectors from `tables`, and do not capture rows after the edit."""
    for some in _chunks(keys, max_rows):
        eager = _probe(steps, forward, some, schema, num_layers)
        graph = _probe(recorded, replay, some, schema, num_layers, tables)
        for row, (hook, layer) in enumerate(some):
            where = f"{hook}[{layer}] on {rank}, in a recorded graph,"
            seen, wanted = graph.jobs[row][0].rows, eager.jobs[row][0].rows
            if seen is None or wanted is None or not _close(seen, wanted):
                raise UnsupportedModel(f"{where} is captured with other numbers than without. {_ADVICE}")
            for name, rows, expected in (
                ("without edits", graph.plain[row], eager.plain[row]),
                ("with its edit", graph.moved[row], eager.moved[row]),
            ):
                if not _close(rows, expected):
                    raise UnsupportedModel(
                        f"{where} gives another output {name} than without a graph. {_ADVICE}"
                    )
    return len(keys)


def _close(rows: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the rounding of another order of sums in the row's dtype."""
    limit = ROUNDINGS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return bool((rows.float() - expected.float()).abs().max() <= limit)


def _chunks(keys: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size]


def _probe(
    steps: ProbedSteps,
    forward: Forward,
    keys: Sequence[Key],
    schema: Mapping[str, HookSchema],
    num_layers: int,
    tables: Tables | None = None,
) -> ProbePass:
    plain = forward(len(keys)).clone()
    spans: list[Span] = []
    jobs: list[tuple[ProbeJob, ProbeJob | None]] = []
    vectors: list[torch.Tensor | None] = []
    for row, (hook, layer) in enumerate(keys):
        pair = (ProbeJob((hook, layer), False), ProbeJob((hook, layer), True) if tables is None else None)
        edits: tuple[Edit, ...] = ()
        vector = None
        if schema[hook].steerable:
            generator = torch.Generator().manual_seed(1000 * layer + row)
            vector = torch.randn(schema[hook].width, generator=generator) * 4
            edits = (Add(vector, hook, [layer]).resolve(schema, num_layers, {}, [0], 1),)
        plan = Plan(tuple(job for job in pair if job is not None), edits)
        if tables is not None:
            widths = {name: row_of.width for name, row_of in schema.items()}
            plan.table = TableRows(tables, [edit.sites for edit in edits], widths)
        assert plan.reserve(), "there is a row of the tables for every site"
        spans.append(Span(plan, row, 0, [0], 1))
        jobs.append(pair)
        vectors.append(vector)
    steps.begin(spans, len(keys))
    try:
        moved = forward(len(keys)).clone()
    except BaseException:
        steps.fail()
        raise
    steps.end()
    for span in spans:
        span.plan.release()
    return ProbePass(plain, moved, jobs, vectors)


def _check_row(probed: ProbePass, row: int, where: str, hidden: bool) -> None:
    before, after = probed.jobs[row]
    vector = probed.vectors[row]
    assert after is not None
    if before.rows is None or after.rows is None:
        raise UnsupportedModel(f"{where} was never reached by a forward pass. {_ADVICE}")
    if vector is None:
        return
    old = before.rows.flatten()
    expected = (old.float() + vector).to(old.dtype)
    if not torch.equal(after.rows.flatten(), expected):
        error = float((after.rows.flatten().float() - expected.float()).abs().max())
        raise UnsupportedModel(
            f"a known vector moved the probe row of {where} by something else; off by {error:.3g}. {_ADVICE}"
        )
    if not hidden and torch.equal(probed.plain[row], probed.moved[row]):
        raise UnsupportedModel(f"an edit at {where} has no effect on what follows. {_ADVICE}")


_ADVICE = "This build of vLLM does not run the layers as they are known here: use another version."
