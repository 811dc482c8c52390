"""Which tokens of a chunk belong to a phase: prompt tokens, generated tokens or both, decided by position alone.

The size of a chunk does not matter: prompt chunks, cache hits and recomputed tokens belong to the phase of their
position."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from birkhoff.hooks.digest import Phase, framed, int64_bytes
from birkhoff.hooks.selector import PositionSelector

Phases = Literal["both", "prefill", "decode"]
PHASES: tuple[Phases, ...] = ("both", "prefill", "decode")


def covers(phases: str, phase: Phase) -> bool:
    return phases in ("both", phase)


def every_generated(phases: str, selector: PositionSelector | None) -> bool | None:
    """True if all generated tokens are selected, False if none is, None if it differs from token to token."""
    if not covers(phases, "decode"):
        return False
    return True if selector is None else None


def offsets(
    phases: str, selector: PositionSelector | None, start: int, token_ids: Sequence[int], prompt_len: int
) -> Sequence[int]:
    """Offsets of the tokens of these phases in the chunk that starts at position `start`, ascending; with a selector,
    only those it selects."""
    count, prompt_end = len(token_ids), max(prompt_len - start, 0)
    first = prompt_end if phases == "decode" else 0
    stop = min(prompt_end, count) if phases == "prefill" else count
    if first >= stop:
        return ()
    if selector is None:
        return range(first, stop)
    rows = np.asarray(selector.rows(start, token_ids))
    selected: list[int] = rows[(rows >= first) & (rows < stop)].tolist()
    return selected


def of_tokens(
    selected: Sequence[int], token_ids: Sequence[int], tokens: frozenset[int] | None
) -> Sequence[int]:
    """The selected offsets whose token is one of `tokens`; None: all."""
    if tokens is None:
        return selected
    return [offset for offset in selected if int(token_ids[offset]) in tokens]


def with_tokens(signature: bytes, tokens: frozenset[int] | None) -> bytes:
    """Canonical bytes of selected positions that are limited to some tokens."""
    if tokens is None:
        return signature
    return framed(signature, hashlib.sha256(int64_bytes(sorted(tokens))).digest())
