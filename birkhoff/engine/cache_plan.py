"""What a loaded engine reuses: pages of past prompts, and the model's own guesses. Checked, and fitted into memory."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.config import V4Config
from birkhoff.engine.cache import page_bytes, plan_prefix, slot_bytes, snapshot_bytes
from birkhoff.engine.engine import plan_cache
from birkhoff.engine.model_identity import model_identity
from birkhoff.engine.page_files import PageFiles
from birkhoff.errors import CapacityError, OptionError, quoted
from birkhoff.model.transformer import Transformer

DEPTHS = (1, 2, 3)
MOST_ROW_BYTES = 2**28


@dataclass(frozen=True)
class DraftOptions:
    """How many tokens are guessed ahead, and whether also when it does not pay."""

    depth: int = 0
    always: bool = False

    def __str__(self) -> str:
        if not self.depth:
            return "no guessing"
        return f"guessing {self.depth} ahead" + ("" if self.always else " while it pays")


@dataclass(frozen=True)
class CachePlan:
    """Pages, the longest context, and the bytes of snapshots and of captured rows beside them."""

    pages: int
    context: int
    prefix_bytes: int = 0
    row_bytes: int = 0


def drafts_of(speculative: Any, has_mtp: bool, batch_invariant: bool) -> DraftOptions:
    """`"auto"`: one token ahead while it pays; True: always; 1 to 3: always, that many ahead."""
    if not (speculative == "auto" or isinstance(speculative, bool) or speculative in DEPTHS):
        raise OptionError(f"speculative is {quoted(speculative)}, expected 'auto', True, False, 1, 2 or 3.")
    if speculative is False:
        return DraftOptions()
    why = None
    if not has_mtp:
        why = "this checkpoint has no MTP block to guess with"
    elif batch_invariant:
        why = "batch_invariant computes every token by itself, and guesses are computed beside one"
    if why is None:
        return DraftOptions(1) if speculative == "auto" else DraftOptions(int(speculative), always=True)
    if speculative != "auto":
        raise OptionError(f"speculative is {speculative!r}, but {why}. Use 'auto' or False.")
    return DraftOptions()


def check_prefix_cache(prefix_cache: Any) -> None:
    if prefix_cache != "auto" and not isinstance(prefix_cache, bool):
        raise OptionError(f"prefix_cache is {quoted(prefix_cache)}, expected 'auto', True or False.")


def files_for(model: Transformer, root: str | Path | None, limit_bytes: int) -> PageFiles | None:
    """Where pages of this very model go on disk, or nowhere."""
    if root is None:
        return None
    if not isinstance(root, (str, Path)):
        raise OptionError(f"context_root is {quoted(root)}, expected the path of a folder, or None.")
    return PageFiles(Path(root).expanduser(), model_identity(model), limit_bytes)


def plan_memory(
    config: V4Config,
    item_bytes: int,
    cache_bytes: int,
    requests: int,
    context: int | None,
    prefix: Any,
    depth: int,
) -> CachePlan:
    """Share `cache_bytes` out: what running requests need, then pages and snapshots of past ones, then captured rows.

    Contexts may be as long as memory allows, so an eighth is set aside for snapshots first, unless that is too much."""
    slots = requests * (slot_bytes(config, item_bytes, depth, depth > 0) - slot_bytes(config, item_bytes))
    given = max(cache_bytes - slots, 0)  # what guessing needs beside the plain plan

    def left_after(pages: int) -> int:
        return given - requests * slot_bytes(config, item_bytes) - pages * page_bytes(config, item_bytes)

    pages, longest = plan_cache(config, item_bytes, given, requests, context)
    if prefix is False:
        return CachePlan(pages, longest)
    if left_after(pages) < given // 8:
        with suppress(CapacityError):  # there is room for requests and for nothing else
            pages, longest = plan_cache(config, item_bytes, given * 7 // 8, requests, context)
    extra, snapshots = plan_prefix(config, item_bytes, left_after(pages), pages, depth > 0)
    least = snapshot_bytes(config, item_bytes, depth > 0)
    if snapshots < least:
        if prefix is True:
            raise CapacityError(
                f"prefix_cache is True, but cache_bytes {cache_bytes} leaves {max(snapshots, 0)} bytes for it and the "
                f"state behind one page takes {least}. Raise cache_bytes, lower max_requests, or use 'auto'."
            )
        return CachePlan(pages, longest)
    rest = left_after(pages + extra) - snapshots
    rows = min(max(rest, (rest + snapshots - least) // 4), MOST_ROW_BYTES)
    return CachePlan(pages + extra, longest, snapshots - max(rows - rest, 0), rows)
