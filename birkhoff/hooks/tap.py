"""Taps: the argument through which a forward pass is captured or edited.

The model calls a tap at every site of `sites.py`:

    x = tap(site, x)                          may be edited
    read, carried = tap.part(site, x, reads)  streams: what the sublayer reads and what is carried past it, one tensor
                                              unless edited; `reads` returns the weights the sublayer reads them with
    ids, weights = tap.route(site, ids, weights, routing)    chosen experts; `routing` is what they were chosen by
    tap.see(site, x)                          capture only
    tap.see(site, x, y)                       capture several tensors as one, stacked last as float32
    tap.read(site, rows, edited)              ragged sites: functions that compute the rows of given tokens, before and
                                              after the edits; called for captured tokens only. `tap.ragged` says
                                              whether any ragged site of the layer is captured or edited
    tap.changes(site)                         edits of a ragged site and the rows of the step they apply to
    tap.rules(rows, heads, ratio)             the same of `attn_weights` as a table for kernels; None if there are none,
                                              or if they do not fit

`NoTap` does nothing and leaves no operation in a traced graph. `EagerTap` calls Python functions, for notebooks, traces
and tests. A tap has no access to the model: what it can change is visible in the model's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from birkhoff.hooks.attention_change import RowChanges
from birkhoff.hooks.edit import Routing
from birkhoff.hooks.key_rules import KeyRules
from birkhoff.hooks.sites import Site

Seen = Callable[[Site, int, torch.Tensor], None]
Edit = Callable[[Site, int, torch.Tensor], torch.Tensor | None]
TensorPair = tuple[torch.Tensor, torch.Tensor]
# streams [n, m, d] -> the weights [n, m] they would be read with
Reads = Callable[[torch.Tensor], torch.Tensor]
RowReader = Callable[[Sequence[int]], list[torch.Tensor]]  # rows of a step -> for each, its rows [k, width]
Part = Callable[[Site, int, torch.Tensor], TensorPair | None]


class Tap(Protocol):
    @property
    def ragged(self) -> bool: ...
    @property
    def streams_only(self) -> bool:
        """Whether nothing is edited, and nothing captured inside the sublayers of a layer."""
        ...

    def read(self, site: Site, before: RowReader, after: RowReader | None = None) -> None: ...
    def changes(self, site: Site) -> RowChanges: ...
    def rules(self, rows: int, heads: int, ratio: int) -> KeyRules | None: ...
    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor: ...
    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> TensorPair: ...
    def route(self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing) -> TensorPair: ...
    def see(self, site: Site, *parts: torch.Tensor) -> None: ...
    def at(self, layer: int) -> Tap: ...


def stack_parts(*parts: torch.Tensor) -> torch.Tensor:
    """The arguments of `see` as the one tensor of the site."""
    return parts[0] if len(parts) == 1 else torch.stack([part.float() for part in parts], dim=-1)


def split_parts(x: torch.Tensor, ids: torch.Tensor) -> TensorPair:
    """Ids and weights of experts stacked as [n, k, 2] float32; the ids in the dtype of `ids`."""
    return x[..., 0].to(ids.dtype), x[..., 1].contiguous()


class NoTap:
    """Captures and edits nothing."""

    ragged = False

    @property
    def streams_only(self) -> bool:
        return type(self) is NoTap  # subclasses do something

    def read(self, site: Site, before: RowReader, after: RowReader | None = None) -> None:
        pass

    def changes(self, site: Site) -> RowChanges:
        return ()

    def rules(self, rows: int, heads: int, ratio: int) -> KeyRules | None:
        return None

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        return x

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> TensorPair:
        return x, x

    def route(self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing) -> TensorPair:
        return ids, weights

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        pass

    def at(self, layer: int) -> Tap:
        return self


class EagerTap(NoTap):
    """Calls `seen(site, layer, tensor)` with the unedited tensor, then the edit of that kind, if any.

    An edit returns the new tensor, or None to leave it unchanged. `part` edits streams and returns (read, carried); a
    plain `edit` at a stream site changes both. Ragged sites are not called.
    """

    def __init__(
        self, seen: Seen | None = None, edit: Edit | None = None, part: Part | None = None, layer: int = -1
    ):
        self._seen = seen
        self._edit = edit
        self._part = part
        self.layer = layer

    def at(self, layer: int) -> EagerTap:
        return EagerTap(self._seen, self._edit, self._part, layer)

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        if self._seen is not None:
            self._seen(site, self.layer, stack_parts(*parts))

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        self.see(site, x)
        edited = self._edit(site, self.layer, x) if self._edit is not None else None
        return x if edited is None else edited

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> TensorPair:
        edited = self(site, x)
        parted = self._part(site, self.layer, edited) if self._part is not None else None
        return (edited, edited) if parted is None else parted

    def route(self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing) -> TensorPair:
        """The edit gets ids and weights as one tensor [n, k, 2]."""
        x = stack_parts(ids, weights)
        edited = self(site, x)
        return (ids, weights) if edited is x else split_parts(edited, ids)


class RecordingTap:
    """Calls `seen(site, layer, tensor)` at every site but ragged ones with the unedited tensor, then the tap inside."""

    streams_only = False

    def __init__(self, inner: Tap, seen: Seen, layer: int = -1):
        self._inner = inner
        self._seen = seen
        self.layer = layer

    def at(self, layer: int) -> RecordingTap:
        return RecordingTap(self._inner.at(layer), self._seen, layer)

    @property
    def ragged(self) -> bool:
        return self._inner.ragged

    def read(self, site: Site, before: RowReader, after: RowReader | None = None) -> None:
        self._inner.read(site, before, after)

    def changes(self, site: Site) -> RowChanges:
        return self._inner.changes(site)

    def rules(self, rows: int, heads: int, ratio: int) -> KeyRules | None:
        return self._inner.rules(rows, heads, ratio)

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        self._seen(site, self.layer, stack_parts(*parts))
        self._inner.see(site, *parts)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        self._seen(site, self.layer, x)
        return self._inner(site, x)

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> TensorPair:
        self._seen(site, self.layer, x)
        return self._inner.part(site, x, reads)

    def route(self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing) -> TensorPair:
        self._seen(site, self.layer, stack_parts(ids, weights))
        return self._inner.route(site, ids, weights, routing)


class LeavingTap(RecordingTap):
    """Calls `seen(site, layer, tensor)` at every site but ragged ones with the tensor that leaves the tap inside.

    Of streams that an edit parts this is the carried row, or the row that is read where only that one changed; with
    `carried` always the carried one."""

    def __init__(self, inner: Tap, seen: Seen, layer: int = -1, carried: bool = False):
        super().__init__(inner, seen, layer)
        self._carried = carried

    def at(self, layer: int) -> LeavingTap:
        return LeavingTap(self._inner.at(layer), self._seen, layer, self._carried)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        x = self._inner(site, x)
        self._seen(site, self.layer, x)
        return x

    def part(self, site: Site, x: torch.Tensor, reads: Reads | None = None) -> TensorPair:
        read, carried = self._inner.part(site, x, reads)
        leaving = carried
        if read is not carried and not self._carried:
            changed = (carried != x).flatten(1).any(1)  # [n]
            leaving = torch.where(changed.view(-1, *(1,) * (x.dim() - 1)), carried, read)
        self._seen(site, self.layer, leaving)
        return read, carried

    def route(self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing) -> TensorPair:
        ids, weights = self._inner.route(site, ids, weights, routing)
        self._seen(site, self.layer, stack_parts(ids, weights))
        return ids, weights


class ReadingTap(RecordingTap):
    """Calls `reader(layer, rows)` at one ragged site, where `rows` computes the rows of given tokens after the edits of
    the tap inside."""

    ragged = True

    def __init__(self, inner: Tap, site: Site, reader: Callable[[int, RowReader], None], layer: int = -1):
        super().__init__(inner, _ignore, layer)
        self._site = site
        self._reader = reader

    def at(self, layer: int) -> ReadingTap:
        return ReadingTap(self._inner.at(layer), self._site, self._reader, layer)

    def read(self, site: Site, before: RowReader, after: RowReader | None = None) -> None:
        super().read(site, before, after)
        if site is self._site:
            self._reader(self.layer, after or before)


def _ignore(site: Site, layer: int, tensor: torch.Tensor) -> None:
    pass
