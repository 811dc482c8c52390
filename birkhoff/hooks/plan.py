"""What a request wants of the sites: a `Plan`, already checked, that an engine carries without understanding it.

A plan's jobs say which rows of which sites they want, step by step, and are handed those rows after the step. Whoever
made the job (captures today) keeps its meaning; the engine only knows which rows of a step belong to which request.
Nothing here imports an engine, so that another one can run the same plans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from birkhoff.hooks.digest import DigestPart, Phase, combine
from birkhoff.hooks.edit import SiteEdit, Splice
from birkhoff.hooks.results import RequestResults
from birkhoff.hooks.vector_table import TableRows

Key = tuple[str, int]  # hook name, layer


@dataclass(slots=True, eq=False)
class SiteRows:
    """Rows of one site with their labels, in order of position: `tensor` [rows, *row_shape], on the host.

    `prompt_rows` counts the rows that belong to the prompt; they come first. A row that stands for several tokens (a
    mean) has no position. `scale` is one float32 per row, for rows stored as fp8.
    """

    hook: str
    layer: int
    tensor: torch.Tensor
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    prompt_rows: int = 0
    scale: torch.Tensor | None = None

    def __len__(self) -> int:
        return int(self.tensor.shape[0])


class Job(Protocol):
    """One wish of one request. It must not raise: what goes wrong with it is its own to report."""

    @property
    def keys(self) -> Collection[Key]: ...

    @property
    def after(self) -> bool:
        """The tensor as edited at its own site, not as it came."""
        ...

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        """Which of the tokens at positions `start, start + 1, ...` are wanted."""
        ...

    def open(self) -> None:
        """Acquire files and names. Called once, when an engine accepts the request; may raise to refuse it."""
        ...

    def deliver(self, rows: SiteRows) -> None: ...

    def close(self, finish_reason: str, num_tokens: int) -> None:
        """The request has ended; no more rows will come. Also called if the job was never opened."""
        ...


class Edit(Protocol):
    """One change a request makes: which rows, at which sites."""

    @property
    def sites(self) -> Mapping[Key, SiteEdit | Splice]: ...

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        """Which of the tokens at positions `start, start + 1, ...` are changed."""
        ...

    @property
    def generated(self) -> bool | None:
        """Whether it changes every generated token, or none of them; None when each has to be asked about."""
        ...

    def digest_parts(self, phase: Phase) -> Sequence[DigestPart]:
        """What it does to tokens of a phase, in canonical bytes; nothing when it leaves all of them alone."""
        ...

    def describe(self) -> dict[str, Any] | None:
        """What the edit did, for `interp.features` of the response; None if it reports nothing."""
        ...


class Reservation(Protocol):
    """Room that a request needs while it runs, such as rows of a table. Taken whole or not at all."""

    def reserve(self) -> bool:
        """Take it; False when it is not free now. It was checked before that it can be."""
        ...

    def release(self) -> None:
        """Give it back; harmless when it is not held."""
        ...


@dataclass(eq=False)
class Plan:
    """Everything one request wants. `seen` positions are delivered once, also when they are computed again; edits are
    made every time a token is computed. `steered` are the positions that were edited."""

    jobs: tuple[Job, ...] = ()
    edits: tuple[Edit, ...] = ()
    seen: int = 0
    steered: set[int] = field(default_factory=set)
    holdings: tuple[Reservation, ...] = ()
    table: TableRows | None = None  # rows for the vectors its edits add; without, they are added row by row
    results: RequestResults = field(
        default_factory=RequestResults
    )  # what the caller reads when the request has ended

    @cached_property
    def by_position(self) -> bool:
        """Whether some edit brings a row of its own for each position."""
        changes = (change for edit in self.edits for change in edit.sites.values())
        return any(isinstance(change, SiteEdit) and change.positions is not None for change in changes)

    @cached_property
    def on_generated(self) -> tuple[int, ...] | None:
        """Numbers of the edits of every generated token; None when some edit chooses among those tokens."""
        said = [edit.generated for edit in self.edits]
        return None if None in said else tuple(number for number, changes in enumerate(said) if changes)

    @cached_property
    def rests(self) -> bool:
        """Nothing is wanted of generated tokens and nothing is done to them."""
        return not self.jobs and self.on_generated == ()

    @cached_property
    def prefill_digest(self) -> bytes | None:
        """128 bits of what is done to the tokens of the prompt; None when nothing is."""
        return combine(part for edit in self.edits for part in edit.digest_parts("prefill"))

    @cached_property
    def decode_digest(self) -> bytes | None:
        """128 bits of what is done to generated tokens; None when nothing is."""
        return combine(part for edit in self.edits for part in edit.digest_parts("decode"))

    def reserve(self) -> bool:
        """Take everything the request needs while it runs, or nothing and answer False: then it has to wait."""
        wanted = self._everything()
        for count, holding in enumerate(wanted):
            if not holding.reserve():
                for taken in wanted[:count]:
                    taken.release()
                return False
        return True

    def release(self) -> None:
        """Give it back, at the end or for a while."""
        for holding in self._everything():
            holding.release()

    def _everything(self) -> tuple[Reservation, ...]:
        return self.holdings if self.table is None else (*self.holdings, self.table)

    def open(self) -> None:
        """Open every job, or none: if one raises, those before it are closed again."""
        for index, job in enumerate(self.jobs):
            try:
                job.open()
            except BaseException:
                for opened in self.jobs[:index]:
                    opened.close("cancelled", 0)
                raise

    def close(self, finish_reason: str, num_tokens: int) -> None:
        for job in self.jobs:
            job.close(finish_reason, num_tokens)


class Span(NamedTuple):
    """One request's piece of a step: tokens at `start..` stand in rows `first_row..` of the flattened batch."""

    plan: Plan
    first_row: int
    start: int
    token_ids: Sequence[int]
    prompt_len: int
