"""Bytes of the cache (`state.py`), from the config alone: pages, slots, snapshots, and a sequence of a given length."""

from __future__ import annotations

from dataclasses import dataclass

from birkhoff.config import KIND_OF_RATIO, PAGE_TOKENS, V4Config


def pages_for(tokens: int) -> int:
    """Number of pages that hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def page_bytes(config: V4Config, item_bytes: int) -> int:
    """Bytes of one page over all layers: compressed entries and index keys."""
    return round(PAGE_TOKENS * sum(each.per_token for each in cache_by_kind(config, item_bytes).values()))


def slot_bytes(config: V4Config, item_bytes: int, lookback: int = 0, mtp: bool = False) -> int:
    """Bytes of one running request that do not depend on its length: window rings and raw compressor rows (float32).

    `lookback` is how many tokens the state can step back after rejected draft tokens."""
    mtp_window = (config.sliding_window + lookback) * config.head_dim * item_bytes if mtp else 0
    layers = cache_by_kind(config, item_bytes, lookback).values()
    return mtp_window + sum(each.per_sequence for each in layers)


def snapshot_bytes(config: V4Config, item_bytes: int, mtp: bool = False) -> int:
    """Bytes of the state needed, besides pages, to resume at a page boundary: windows and overlapping raw rows."""
    total = 0
    for ratio in (*config.compress_ratios, *([0] if mtp else [])):
        total += config.sliding_window * config.head_dim * item_bytes
        if ratio == 4:
            total += 4 * 2 * 2 * (config.head_dim + config.index_head_dim) * 4
    return total


@dataclass(frozen=True)
class LayerCache:
    """Cache bytes of all layers of one kind together, per token of context and per sequence."""

    layers: int
    per_token: float
    per_sequence: int


def cache_by_kind(config: V4Config, item_bytes: int = 2, lookback: int = 0) -> dict[str, LayerCache]:
    """Cache bytes by kind of layer. Windows have a fixed size; compressed entries and index keys grow with context."""
    by_kind: dict[str, LayerCache] = {}
    for ratio, kind in KIND_OF_RATIO.items():
        layers = sum(each == ratio for each in config.compress_ratios)
        width = config.head_dim + (config.index_head_dim if ratio == 4 else 0)
        fixed = (config.sliding_window + lookback) * config.head_dim * item_bytes
        if ratio:
            overlap = 2 if ratio == 4 else 1
            fixed += ratio * (overlap + -(-lookback // ratio)) * 2 * overlap * width * 4  # raw rows, float32
        per_token = layers * width * item_bytes / ratio if ratio else 0.0
        by_kind[kind] = LayerCache(layers, per_token, layers * fixed)
    return by_kind


def context_bytes(config: V4Config, tokens: int, item_bytes: int = 2) -> dict[str, int]:
    """Cache bytes of one sequence of `tokens` tokens by kind of layer, in whole pages."""
    return {
        kind: each.per_sequence + round(each.per_token * pages_for(tokens) * PAGE_TOKENS)
        for kind, each in cache_by_kind(config, item_bytes).items()
    }


def step_cache_bytes(config: V4Config, context: int, item_bytes: int = 2) -> dict[str, float]:
    """Cache bytes that decoding one token reads after `context` tokens, by kind: window, chosen entries, index keys."""
    by_kind: dict[str, float] = {}
    for ratio, kind in KIND_OF_RATIO.items():
        layers = sum(each == ratio for each in config.compress_ratios)
        entries = context / ratio if ratio else 0.0
        items = float(min(context, config.sliding_window) * config.head_dim)
        if ratio == 4:
            items += min(config.index_topk, entries) * config.head_dim + entries * config.index_head_dim
        elif ratio:
            items += entries * config.head_dim
        by_kind[kind] = layers * items * item_bytes
    return by_kind
