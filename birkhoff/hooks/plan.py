"""The captures and edits of a request: a checked `Plan`, which an engine carries without interpreting it.

A plan's jobs select rows of sites step by step and receive those rows after the step. What a job does with them is
known to its maker (captures, signals); the engine only knows which rows of a step belong to which request. Nothing
here imports an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from birkhoff import notebook
from birkhoff.hooks.call_use import CallUse
from birkhoff.hooks.digest import DigestPart, Phase, combine
from birkhoff.hooks.edit import SiteEdit, Splice
from birkhoff.hooks.results import RequestResults
from birkhoff.hooks.sites import BY_NAME
from birkhoff.hooks.vector_table import TableRows

Key = tuple[str, int]  # hook name, layer


class RowLabels(list[int]):
    """Positions or token ids of rows that users read: a list, so that `tensor[rows.positions]` selects rows; a tuple
    there would be one index for each axis. Equal to a tuple of the same numbers."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, list(other) if isinstance(other, tuple) else other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other


@dataclass(slots=True, eq=False)
class SiteRows:
    """Rows of one site with their labels, in order of position: `tensor` [rows, *row_shape], on the host unless the
    job takes rows on the device.

    A row that stands for several tokens (a mean) has no position. `scale` is one float32 per row, for rows stored as
    fp8. While rows are being copied to the host, `ready` blocks until they are there.
    """

    hook: str
    layer: int
    tensor: torch.Tensor
    positions: Sequence[int]
    token_ids: Sequence[int]
    scale: torch.Tensor | None = None
    ready: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until the rows can be read."""
        if self.ready is not None:
            self.ready()
            self.ready = None

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle: waits for the rows, and stores fp8 as bytes, which PyTorch cannot unpickle."""
        self.wait()
        fp8 = self.tensor.is_floating_point() and self.tensor.dtype.itemsize == 1
        stored = self.tensor.contiguous().view(torch.uint8) if fp8 else self.tensor
        labels = self.positions, self.token_ids
        return _unpickled, (self.hook, self.layer, stored, self.tensor.dtype, *labels, self.scale)

    def part(self, start: int, stop: int) -> SiteRows:
        """Rows start..stop, sharing memory."""
        rows = slice(start, stop)
        scale = None if self.scale is None else self.scale[rows]
        labels = self.positions[rows], self.token_ids[rows]
        return SiteRows(self.hook, self.layer, self.tensor[rows], *labels, scale, self.ready)

    @staticmethod
    def concatenate(parts: Sequence[SiteRows]) -> SiteRows:
        """Rows of one site from several steps or texts, in memory of their own."""
        first = parts[0]
        for part in parts:
            part.wait()
        if len(parts) == 1:
            scale = None if first.scale is None else first.scale.clone()
            return replace(first, tensor=first.tensor.clone(), scale=scale)
        scales = [part.scale for part in parts if part.scale is not None]
        return SiteRows(
            first.hook,
            first.layer,
            torch.cat([part.tensor for part in parts]),
            tuple(position for part in parts for position in part.positions),
            tuple(token for part in parts for token in part.token_ids),
            torch.cat(scales) if scales else None,
        )

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    def __repr__(self) -> str:
        shape, dtype = list(self.tensor.shape), str(self.tensor.dtype).removeprefix("torch.")
        places = list(self.positions)
        shown = f"positions {places[0]}..{places[-1]}" if len(places) > 1 else f"positions {places}"
        return f"SiteRows({self.hook}[{self.layer}], tensor {shape} {dtype}, {shown})"

    def _repr_html_(self) -> str:
        return notebook.facts(
            f"Rows of {self.hook}[{self.layer}]",
            {
                "tensor": f"{list(self.tensor.shape)} {str(self.tensor.dtype).removeprefix('torch.')}",
                "positions": list(self.positions),
                "token_ids": list(self.token_ids),
            },
        )


def _unpickled(
    hook: str,
    layer: int,
    stored: torch.Tensor,
    dtype: torch.dtype,
    positions: Sequence[int],
    token_ids: Sequence[int],
    scale: torch.Tensor | None,
) -> SiteRows:
    tensor = stored if stored.dtype is dtype else stored.view(dtype)
    return SiteRows(hook, layer, tensor, positions, token_ids, scale)


class Job(Protocol):
    """A consumer of rows of one request. Its methods must not raise: a job reports its own errors.

    A job with a true attribute `on_device` receives rows where the step computed them, in memory of their own; others
    receive rows on the host."""

    @property
    def keys(self) -> Collection[Key]: ...

    @property
    def after(self) -> bool:
        """Whether it receives the tensor after the edits of its site, not before."""
        ...

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        """Offsets of the selected tokens among those at positions `start, start + 1, ...`."""
        ...

    def open(self) -> None:
        """Acquire files and names. Called once, when an engine accepts the request; may raise to refuse it."""
        ...

    def deliver(self, rows: SiteRows) -> None: ...

    def close(self, finish_reason: str, num_tokens: int) -> None:
        """The request has ended; no more rows will come. Also called if the job was never opened."""
        ...


def on_device(job: Job) -> bool:
    """Whether the job receives rows where they are computed."""
    return getattr(job, "on_device", False)


class Edit(Protocol):
    """One edit of a request: its operations by site, and which tokens it changes."""

    @property
    def sites(self) -> Mapping[Key, SiteEdit | Splice]: ...

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        """Offsets of the changed tokens among those at positions `start, start + 1, ...`."""
        ...

    @property
    def generated(self) -> bool | None:
        """True if it changes every generated token, False if none, None if it differs from token to token."""
        ...

    def digest_parts(self, phase: Phase) -> Sequence[DigestPart]:
        """Its effect on the tokens of a phase, in canonical bytes; empty if it changes none of them."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What a response says about the edit: an entry for each of the named lists of `interp`; usually none."""
        ...


class Reservation(Protocol):
    """Capacity that a request needs while it runs, such as rows of a table. Reserved as a whole or not at all."""

    def reserve(self) -> bool:
        """Reserve it; False if it is not free at the moment. That it can become free was checked before."""
        ...

    def release(self) -> None:
        """Release it; does nothing if it is not reserved."""
        ...


@dataclass(eq=False)
class Plan:
    """All captures and edits of one request.

    Rows of positions below `delivered_until` were delivered and are not delivered again when they are recomputed; edits
    are applied every time a token is computed. `steered` are the edited positions. `withheld` delivers the rows of a
    step that wait: for a copy to the host, or until it is known which draft tokens are kept."""

    jobs: tuple[Job, ...] = ()
    edits: tuple[Edit, ...] = ()
    delivered_until: int = 0
    steered: set[int] = field(default_factory=set)
    withheld: Callable[[int], None] | None = None  # called with the number of tokens that are kept
    reservations: tuple[Reservation, ...] = ()
    table: TableRows | None = None  # rows for the vectors its edits add; if None, they are added row by row
    # What the caller reads when the request has ended.
    results: RequestResults = field(default_factory=RequestResults)

    @cached_property
    def by_position(self) -> bool:
        """Whether some edit has a different row for each position, or is given the positions."""
        operations = (operation for edit in self.edits for operation in edit.sites.values())
        return any(
            isinstance(operation, CallUse)
            or (isinstance(operation, SiteEdit) and operation.positions is not None)
            for operation in operations
        )

    @cached_property
    def on_generated(self) -> tuple[int, ...] | None:
        """Indices of the edits of every generated token; None if some edit selects among those tokens."""
        generated = [edit.generated for edit in self.edits]
        return None if None in generated else tuple(index for index, every in enumerate(generated) if every)

    @cached_property
    def unrecordable(self) -> bool:
        """Whether steps that may capture its rows cannot be recorded: rows of ragged sites have no fixed shape, and a
        recorded step copies rows to the host."""
        return any(on_device(job) or any(BY_NAME[hook].ragged for hook, _ in job.keys) for job in self.jobs)

    @cached_property
    def idle_after_prompt(self) -> bool:
        """Whether generated tokens are neither captured nor edited."""
        return not self.jobs and self.on_generated == ()

    @cached_property
    def runs_ahead(self) -> bool:
        """Whether a generated token can be computed before the host knows it: what is edited is the same for all of
        them. Jobs may still select tokens by their ids."""
        return self.on_generated is not None and not self.by_position and not self.unrecordable

    @cached_property
    def prefill_digest(self) -> bytes | None:
        """128-bit digest of the edits of prompt tokens; None if there are none."""
        return combine(part for edit in self.edits for part in edit.digest_parts("prefill"))

    @cached_property
    def decode_digest(self) -> bytes | None:
        """128-bit digest of the edits of generated tokens; None if there are none."""
        return combine(part for edit in self.edits for part in edit.digest_parts("decode"))

    def reserve(self) -> bool:
        """Reserve everything the request needs while it runs. On False nothing is reserved and the request must
        wait."""
        reservations = self._all_reservations()
        for count, reservation in enumerate(reservations):
            if not reservation.reserve():
                for reserved in reservations[:count]:
                    reserved.release()
                return False
        return True

    def release(self) -> None:
        """Release the reservations, at the end or while the request is preempted."""
        for reservation in self._all_reservations():
            reservation.release()

    def _all_reservations(self) -> tuple[Reservation, ...]:
        return self.reservations if self.table is None else (*self.reservations, self.table)

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

    def settle(self, stop: int) -> None:
        """Deliver withheld rows: tokens before position `stop` are kept, those from there on were rejected."""
        withheld = self.withheld
        self.withheld = None
        if withheld is not None:
            withheld(stop)

    def finish(self, finish_reason: str, num_tokens: int) -> None:
        """The request has ended with `num_tokens` tokens, of which the last was sampled and never computed: deliver
        what was withheld, close the jobs, release the reservations. A request for its prompt alone has computed all of
        them; rows of a prompt are withheld only for a copy, and then delivered whole."""
        self.settle(num_tokens - 1)
        self.close(finish_reason, num_tokens)
        self.release()


class Span(NamedTuple):
    """One request's chunk of a step: tokens at positions `start..` are rows `first_row..` of the step's tensors, which
    have one row per token (padding included) as their first dimension."""

    plan: Plan
    first_row: int
    start: int
    token_ids: Sequence[int]
    prompt_len: int
