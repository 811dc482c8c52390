"""A Python function as an operation at a site: it is called with the rows of one request and returns new ones.

It takes the place of a splice, and its uses run one after the other. Recorded steps cannot run Python, so a step with
such an edit runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from birkhoff.errors import SteeringError
from birkhoff.hooks.edit import GraphSplice, Op, Path, SiteContext


@dataclass(frozen=True)
class CallSite:
    """Where a function is called: hook, layer, and the positions in the text of the rows it gets."""

    hook: str
    layer: int
    positions: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class CallUse:
    """Host and use in one. `fn(rows, site)` gets rows [r, *row_shape] and returns a tensor of that shape, or None to
    leave them as they are."""

    fn: Callable[[torch.Tensor, CallSite], torch.Tensor | None]
    site: CallSite
    path: Path = "both"
    op: ClassVar[Op] = "call"
    order: ClassVar[int] = 0  # functions at one site run in the order of the request's edits
    needs_post: ClassVar[bool] = False
    gate: ClassVar[None] = None

    @property
    def host(self) -> CallUse:
        return self

    def digest_part(self, key: tuple[str, int], positions: bytes) -> None:
        """None: equal functions need not have equal effects, so nothing computed with one is shared."""
        return

    def at(self, positions: Sequence[int]) -> CallUse:
        """The use for tokens at these positions."""
        return replace(self, site=replace(self.site, positions=tuple(positions)))

    def run(
        self, x: torch.Tensor, uses: Sequence[tuple[Any, list[int]]], context: SiteContext
    ) -> torch.Tensor:
        for use, rows in uses:
            index = torch.tensor(rows, device=x.device)
            old = x.index_select(0, index)
            new = use.fn(old, use.site)
            if new is None:
                continue
            where = f"{use.site.hook}[{use.site.layer}]"
            if not isinstance(new, torch.Tensor):
                raise SteeringError(
                    f"the function at {where} returned {type(new).__name__}, expected a tensor of shape "
                    f"{tuple(old.shape)}, or None to change nothing."
                )
            if new.shape != old.shape:
                raise SteeringError(
                    f"the function at {where} returned a tensor of shape {tuple(new.shape)} for rows of shape "
                    f"{tuple(old.shape)}. Return one row for each row, with the same shape."
                )
            x = x.index_copy(0, index, new.to(x.device, x.dtype))
        return x

    def graph_kind(self, uses: Sequence[tuple[Any, list[int]]]) -> None:
        """Recorded steps do not run Python functions."""
        return

    def graph_splice(self, kind: Any) -> GraphSplice:
        raise AssertionError("a function has no graph kind")
