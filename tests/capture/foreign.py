"""A reader written from the published format alone, without the additions of this package.

It uses only: the three layouts, raw little-endian rows, `shape`, `dtype` (with the file's as default, float32 for a
per_file sidecar without one), `row_shape`, `positions`, several entries per site in offset order, shards by `seq`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

KINDS = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4"}


def rows_of(payload: bytes, entry: dict, dtype: str) -> np.ndarray:
    rows = np.frombuffer(payload, KINDS[entry.get("dtype", dtype)]).reshape(entry["shape"])
    return rows.reshape(rows.shape[0], *entry["row_shape"]) if entry.get("row_shape") else rows


def per_file(payload: Path) -> tuple[tuple[int, str], np.ndarray, list[int] | None]:
    entry = json.loads(payload.with_suffix(".json").read_text())
    rows = rows_of(payload.read_bytes(), entry, "float32")
    return (entry["layer"], entry["hook"]), rows, entry.get("positions")


def indexed(sidecars: list[Path]) -> dict[tuple[str, int, str], tuple[np.ndarray, list[int] | None]]:
    parts: dict[tuple[str, int, str], list] = {}
    for sidecar in sidecars:
        index = json.loads(sidecar.read_text())
        payload = sidecar.with_suffix(".bin").read_bytes()
        for entry in index["entries"]:
            name = entry.get("request_id", index.get("request_id"))
            piece = payload[entry["offset"] : entry["offset"] + entry["nbytes"]]
            assert len(piece) == entry["nbytes"]
            part = (
                (index.get("seq", 0), entry["offset"]),
                rows_of(piece, entry, index["dtype"]),
                entry.get("positions"),
            )
            parts.setdefault((name, entry["layer"], entry["hook"]), []).append(part)
    joined = {}
    for key, pieces in parts.items():
        pieces.sort(key=lambda piece: piece[0])
        labels = [piece[2] for piece in pieces]
        positions = None if None in labels else [position for label in labels for position in label]
        joined[key] = (np.concatenate([piece[1] for piece in pieces]), positions)
    return joined


def packed(directory: Path) -> dict:
    return indexed(sorted(directory.glob("packed*.json")))


def sharded(directory: Path) -> dict:
    return indexed(sorted(directory.glob("shard-*.json")))
