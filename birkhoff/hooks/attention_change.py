"""Changes of attention for single tokens of a step, as data: what the model's attention does differently for a query.

An `AttentionChange` is an edit of the site `attn_weights` of a layer. The model asks its tap for the changes of a step
(`tap.changes`) and computes the attention of those tokens again with them; all other tokens keep their bits. Kernels of
decode steps take them as a table (`key_rules.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from birkhoff.hooks.digest import DigestPart, framed, number
from birkhoff.hooks.edit import Op, Path
from birkhoff.hooks.plan import Key

Ranges = tuple[tuple[int, int], ...]  # disjoint and ascending, ends excluded
EntryRule = Literal["any", "all", "none"]  # an entry is masked if any or all of its tokens are, or never
Ablation = Literal["remove", "zero"]


@dataclass(frozen=True)
class Blocks:
    """Compressed entries of one sequence: by number, or as those that hold any of some tokens."""

    numbers: tuple[int, ...] = ()
    tokens: Ranges = ()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.tokens)

    def digest(self) -> bytes:
        return framed(repr(self.numbers).encode(), repr(self.tokens).encode())


@dataclass(frozen=True)
class AttentionChange:
    """How the attention of a query differs. `heads` limits `mask` and `sink` to some heads.

    `mask`: keys at these positions get no weight, and neither do entries of them (`mask_entries`). `force`, `forbid`:
    blocks that the indexer always and never chooses. `sink`: factor of the sink's share before normalisation. `ablate`:
    entries that the query does not find (`remove`) or finds as zeros (`zero`)."""

    heads: tuple[int, ...] | None = None
    mask: Ranges = ()
    mask_entries: EntryRule = "any"
    force: Blocks = Blocks()
    forbid: Blocks = Blocks()
    sink: float | None = None
    ablate: Blocks = Blocks()
    ablation: Ablation = "remove"

    op: ClassVar[Op] = "attend"
    path: ClassVar[Path] = "both"
    needs_post: ClassVar[bool] = False
    gate: ClassVar[None] = None

    @property
    def host(self) -> Any:
        raise AssertionError("attention runs its changes itself")

    def digest_part(self, key: Key, positions: bytes) -> DigestPart:
        """Canonical bytes of the change at one layer, for the tokens that `positions` describes."""
        hook, layer = key
        content = framed(
            hook.encode(),
            str(layer).encode(),
            repr(self.heads).encode(),
            repr(self.mask).encode(),
            self.mask_entries.encode(),
            self.force.digest(),
            self.forbid.digest(),
            number(self.sink),
            self.ablate.digest(),
            self.ablation.encode(),
            positions,
        )
        return DigestPart("attend", content)


RowChanges = Sequence[tuple[AttentionChange, Sequence[int]]]  # changes and the rows of the step they apply to


def ranges_of(positions: Sequence[int]) -> Ranges:
    """Ascending positions as ranges."""
    ranges: list[tuple[int, int]] = []
    for position in positions:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((int(position), int(position) + 1))
    return tuple(ranges)
