"""How the bytes of a cache are divided among running requests, pages and snapshots of past ones, and captured rows.

Everything follows from the config (`model/cache_size.py`), so that a plan is made before anything is allocated.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from birkhoff.byte_size import format_bytes
from birkhoff.config import PAGE_TOKENS, V4Config
from birkhoff.errors import CapacityError
from birkhoff.model.cache_size import context_bytes, page_bytes, pages_for, slot_bytes, snapshot_bytes

CACHE_SHARE, CACHE_TOKENS = 8, 32_768  # default cache: this context length, within an eighth of the device
MAX_ROW_BYTES = 2**28  # cached captured rows


@dataclass(frozen=True)
class CachePlan:
    """Number of pages, maximum context, and the bytes for snapshots and for cached captured rows."""

    pages: int
    context: int
    prefix_bytes: int = 0
    row_bytes: int = 0


def plan_cache(
    config: V4Config,
    item_bytes: int,
    cache_bytes: int,
    max_requests: int,
    max_context: int | None,
    prefix_cache: str | bool,
    draft_depth: int,
) -> CachePlan:
    """Divide `cache_bytes`: first what running requests need, then pages and snapshots of past ones, then captured
    rows.

    Without `max_context` the context is as long as memory allows, so an eighth is set aside for snapshots first, if
    the requests still fit. With `prefix_cache=True` too little memory is a `CapacityError`; with "auto" the prefix
    cache is left out."""
    mtp = draft_depth > 0
    plain_slot = slot_bytes(config, item_bytes)
    drafting = max_requests * (slot_bytes(config, item_bytes, draft_depth, mtp) - plain_slot)
    available = max(cache_bytes - drafting, 0)

    def left_after(pages: int) -> int:
        return available - max_requests * plain_slot - pages * page_bytes(config, item_bytes)

    pages, context = plan_pages(config, item_bytes, available, max_requests, max_context)
    if prefix_cache is False:
        return CachePlan(pages, context)
    if left_after(pages) < available // 8:
        with suppress(CapacityError):  # the requests alone need the whole cache
            pages, context = plan_pages(config, item_bytes, available * 7 // 8, max_requests, max_context)
    extra, snapshots = plan_prefix(config, item_bytes, left_after(pages), pages, mtp)
    least = snapshot_bytes(config, item_bytes, mtp)
    if snapshots < least:
        if prefix_cache is True:
            raise CapacityError(
                f"prefix_cache is True, but cache_bytes {cache_bytes} leaves {max(snapshots, 0)} bytes for it and the "
                f"state behind one page takes {least}. Raise cache_bytes, lower max_requests, or use 'auto'."
            )
        return CachePlan(pages, context)
    rest = left_after(pages + extra) - snapshots
    rows = min(max(rest, (rest + snapshots - least) // 4), MAX_ROW_BYTES)
    return CachePlan(pages + extra, context, snapshots - max(rows - rest, 0), rows)


def plan_pages(
    config: V4Config, item_bytes: int, cache_bytes: int, max_requests: int, max_context: int | None
) -> tuple[int, int]:
    """Pages and maximum context that fit `cache_bytes`: the model's limit, lowered until `max_requests` requests of
    that length fit."""
    fixed = max_requests * slot_bytes(config, item_bytes)
    each = page_bytes(config, item_bytes)
    limit = max_context or config.max_position_embeddings
    if each == 0:  # sliding-window layers only: the context costs nothing beyond its slot
        if fixed > cache_bytes:
            raise CapacityError(_too_small(cache_bytes, fixed, max_requests))
        return max_requests * pages_for(limit), limit
    pages = (cache_bytes - fixed) // each
    if pages < max_requests:
        raise CapacityError(_too_small(cache_bytes, fixed + each * max_requests, max_requests))
    if max_context is not None:
        return min(pages, max_requests * pages_for(max_context)), max_context
    context = min(limit, pages // max_requests * PAGE_TOKENS)
    return max_requests * pages_for(context), context


def _too_small(cache_bytes: int, needed: int, max_requests: int) -> str:
    return (
        f"cache_bytes is {format_bytes(cache_bytes)}, but {max_requests} requests need at least "
        f"{format_bytes(needed)}. Raise cache_bytes or lower max_requests."
    )


def plan_prefix(
    config: V4Config, item_bytes: int, left: int, pages: int, mtp: bool = False
) -> tuple[int, int]:
    """Divide `left` bytes into additional pages and snapshot bytes: one snapshot per page, and at most three times as
    many additional pages as running requests use. Returns (additional pages, snapshot bytes)."""
    each = page_bytes(config, item_bytes)
    snapshot = snapshot_bytes(config, item_bytes, mtp)
    extra = max(0, min(3 * pages, (left - pages * snapshot) // (each + snapshot)))
    return extra, min(left - extra * each, (pages + extra) * snapshot)


def default_cache_bytes(
    config: V4Config, device_bytes: int, requests: int = 1, context: int | None = None, item_bytes: int = 2
) -> int:
    """Default cache size for `requests` requests: of `context` tokens each, or of 32K tokens within an eighth of the
    device."""
    tokens = min(context or CACHE_TOKENS, config.max_position_embeddings)
    needed = requests * sum(context_bytes(config, tokens, item_bytes).values())
    return needed if context is not None else min(needed, device_bytes // CACHE_SHARE)
