"""A report of a capture: its texts and rows as one HTML file.

    write_report(Path("acts"), Path("acts.html"), tokenizer)

Each text shows its tokens and, for every hook, the norm of each stored row by layer and token. If all layers of the
mixers, of the streams or of the expert choices were captured, their pictures are there too: film strip, lineage, heat
map, experts. Rows themselves stay in the capture.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from birkhoff.atomic_file import write_atomic
from birkhoff.capture.store.entry import CaptureEntry
from birkhoff.capture.store.reader import CaptureEntries, read_request, read_sharded
from birkhoff.capture.store.sidecar import CaptureFile
from birkhoff.errors import CaptureFileError
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.signals import NAMES, SignalJob
from birkhoff.report.standalone import standalone_html
from birkhoff.text.tokenizer import Tokenizer

DIGITS = 5  # significant digits of the numbers in the file
PANELS_BY_SIGNAL = {"stream_norm": ["heatmap"], "res_mix": ["film", "lineage"], "experts": ["experts"]}
SCALAR_BY_SIGNAL = {"stream_norm": "stream_norm", "res_mix": "keep", "pre_mix": "read", "post_mix": "write"}


@dataclass(frozen=True)
class CapturedText:
    """One text of a capture; its rows are read when they are asked for."""

    name: str
    directory: Path
    sharded: bool

    def read(self) -> CaptureEntries:
        if not self.sharded:
            return read_request(self.directory)
        return read_sharded(self.directory, requests=[self.name]).get(self.name, CaptureEntries())


def captured_texts(run: Path) -> Iterator[CapturedText]:
    """The texts of a capture, by name: of its output directory, of a tag in it, or of one request."""
    if not run.is_dir():
        raise CaptureFileError(f"{run} is no directory. Give the directory of a capture, its --out.")
    names = sorted(path.name for path in run.iterdir())
    if any(name.startswith("shard-") and name.endswith(".json") for name in names):
        for request in sorted(_requests(run, names)):
            yield CapturedText(request, run, True)
        return
    if any(name.endswith(".json") and (name.startswith("packed") or name[:1].isdigit()) for name in names):
        yield CapturedText(run.name, run, False)
        return
    folders = [run / name for name in names if (run / name).is_dir()]
    if not folders:
        raise CaptureFileError(
            f"{run} holds no finished capture. Give the directory of a capture, its --out."
        )
    for folder in folders:
        yield from captured_texts(folder)


def _requests(directory: Path, names: list[str]) -> set[str]:
    """The requests that the shards of a directory list."""
    found = set()
    for name in names:
        if name.startswith("shard-") and name.endswith(".json"):
            with CaptureFile(directory / name) as file:
                found |= {record.request_id for record in file.records if record.request_id is not None}
    return found


def report_data(run: Path, tokenizer: Tokenizer | None = None, limit: int = 8) -> dict[str, Any]:
    """The data of a report on the first `limit` texts. Without a tokenizer tokens are shown by their numbers."""
    found = captured_texts(run)
    texts = list(itertools.islice(found, limit))
    left_out = sum(1 for _ in found)
    if not texts:
        raise CaptureFileError(f"{run} holds no finished capture.")
    entries = [text.read() for text in texts]
    summaries = [_text_data(text, rows, tokenizer) for text, rows in zip(texts, entries)]
    signals = {name for text in summaries for name in text["signals"]}
    wanted = [name for signal, names in PANELS_BY_SIGNAL.items() if signal in signals for name in names]
    if "heatmap" not in wanted and signals & set(SCALAR_BY_SIGNAL):
        wanted.insert(0, "heatmap")
    facts = {
        "capture": str(run),
        "texts": f"{len(texts)}" + (f" of {len(texts) + left_out}" if left_out else ""),
        "rows": str(sum(len(entry) for rows in entries for entry in rows.values())),
        "hooks": ", ".join(sorted({hook for rows in entries for hook, _ in rows})),
    }
    return {
        "title": f"Capture {run.name}",
        "facts": facts,
        "panels": ["chat", "captured", *wanted],
        "texts": [{"title": text["title"], "state": text["state"]} for text in summaries],
    }


def write_report(run: Path, out: Path, tokenizer: Tokenizer | None = None, limit: int = 8) -> dict[str, Any]:
    """Write the report of a capture to `out`; return its facts."""
    data = report_data(run, tokenizer, limit)
    write_atomic(out, standalone_html(data))
    facts: dict[str, Any] = data["facts"]
    return facts


def _text_data(text: CapturedText, entries: CaptureEntries, tokenizer: Tokenizer | None) -> dict[str, Any]:
    tokens = _tokens(entries)
    spoken = [_token_text(token, tokenizer) for token in tokens.values()]
    column = {position: index for index, position in enumerate(tokens)}
    frames, signals = _frames(entries, column)
    shown = [
        {"id": token, "position": index, "text": word}
        for index, (token, word) in enumerate(zip(tokens.values(), spoken))
    ]
    state = {
        "theme": "light",
        "props": _props(entries, frames),
        "scalar": next(
            (SCALAR_BY_SIGNAL[name] for name in SCALAR_BY_SIGNAL if name in signals), "stream_norm"
        ),
        "pin": {"position": len(shown) - 1, "row": 0, "twin": False} if shown else None,
        "captured": {
            "directory": str(text.directory),
            "request": text.name,
            "sharded": text.sharded,
            "hooks": _norms(entries, column),
        },
        "run": {
            "status": "done",
            "author": "captured text",
            "prompt": [],
            "tokens": shown,
            "twin": None,
            "reasoning": "",
            "kept": 0,
            "frames": sorted(frames.items()),
            "twinFrames": [],
            "warnings": [],
        },
    }
    title = " ".join("".join(spoken).split())
    return {"title": f"{text.name}: {title[:60]}", "state": state, "signals": signals}


def _tokens(entries: CaptureEntries) -> dict[int, int]:
    """Token ids by position, in order, over all entries; -1 where a row has no token."""
    tokens: dict[int, int] = {}
    for entry in entries.values():
        positions = entry.positions if entry.positions is not None else range(len(entry))
        for row, position in enumerate(positions):
            known = -1 if entry.token_ids is None else entry.token_ids[row]
            tokens[position] = max(known, tokens.get(position, -1))
    return dict(sorted(tokens.items()))


def _token_text(token: int, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None or not 0 <= token < tokenizer.vocab_size:
        return f"[{token}]" if token >= 0 else "[row]"
    return tokenizer.marker(token) or tokenizer.piece(token).decode("utf-8", "replace")


def _norms(entries: CaptureEntries, column: Mapping[int, int]) -> dict[str, Any]:
    """By hook: norms of its rows, a line per layer and a column per token; null where nothing was captured."""
    hooks: dict[str, Any] = {}
    for (hook, layer), entry in sorted(entries.items()):
        rows = entry.values()
        norms = np.linalg.norm(rows.reshape(len(rows), -1).astype(np.float64), axis=1)
        line: list[float | None] = [None] * len(column)
        for row, position in enumerate(entry.positions if entry.positions is not None else range(len(entry))):
            line[column[position]] = float(f"{norms[row]:.{DIGITS}g}") if np.isfinite(norms[row]) else None
        shown = hooks.setdefault(
            hook, {"shape": list(entry.array.shape[1:]), "dtype": entry.dtype, "rows": []}
        )
        shown["rows"].append(f"layer {layer}")
        shown.setdefault("values", []).append(line)
    return hooks


def _frames(entries: CaptureEntries, column: Mapping[int, int]) -> tuple[dict[int, Any], list[str]]:
    """Frames by column, of the signals whose hooks were captured at every layer, and the names of these signals."""
    layers = 1 + max((layer for _, layer in entries), default=-1)
    known = {key: entry for key, entry in entries.items() if entry.positions is not None}
    names = [name for name in NAMES if set(SignalJob([name], layers).keys) <= set(known)]
    if not names or not layers:
        return {}, []
    job = SignalJob(names, layers)
    for key in job.keys:
        job.deliver(_site_rows(known[key]))
    frames = {
        column[frame["position"]]: {**frame, "position": column[frame["position"]]} for frame in job.take()
    }
    return frames, names if frames else []


def _site_rows(entry: CaptureEntry) -> SiteRows:
    positions = tuple(entry.positions or ())
    tokens = tuple(entry.token_ids) if entry.token_ids is not None else (-1,) * len(positions)
    return SiteRows(entry.hook, entry.layer, torch.from_numpy(entry.values().copy()), positions, tokens)


def _props(entries: CaptureEntries, frames: Mapping[int, Any]) -> dict[str, Any]:
    """The properties of the model that views read, as far as a capture has them."""
    layers = 1 + max((layer for _, layer in entries), default=-1)
    first: Mapping[str, Any] = next(iter(frames.values()), {})
    mixers = first.get("res_mix")
    return {
        "model": "the captured model",
        "num_layers": layers,
        "num_streams": len(mixers[0]) if mixers else 4,
    }
