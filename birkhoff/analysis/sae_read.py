"""Reads the features of a dictionary from a harvest: top activations, density, co-firing and labels, in one pass.

Rows are read once, text by text, and encoded on any device; nothing is run. Memory holds the weights, the sums of rules
(at most 512 MiB), pairs of features (at most 1 GiB, `sae/cofiring.py`), a few places per feature, the rows of one text,
activations of a part of it (`sae/features.py`), the labels of one file and an index of 16 bytes per text, so that it
does not depend on the number of rows. The text around a place comes from the token ids that the harvest stored: a
second look at its sidecars, without rows. The words that labels may name are taken from the first `VOCABULARY_TEXTS`
texts.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.analysis.sae_features import Each, LabelSums, context_of, describe
from birkhoff.analysis.sae_rows import captured_hook, view_rows
from birkhoff.atomic_file import write_atomic
from birkhoff.capture.store.request_reader import RequestReader
from birkhoff.data.export_rows import tag_directory
from birkhoff.errors import SaeError
from birkhoff.sae.cofiring import CoFiring
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_index import FeatureIndex
from birkhoff.sae.features import FeatureBook, Peak

VOCABULARY_TEXTS = 4096
REPORT = "read.json"
Decode = Callable[[list[int]], str]


@dataclass
class FeatureRead:
    """What was read: the descriptions, and over how many rows and texts."""

    features: FeatureIndex
    texts: int
    rows: int
    exact_cofiring: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "texts": self.texts,
            "rows": self.rows,
            "features": len(self.features),
            "exact_cofiring": self.exact_cofiring,
            "seconds": round(self.seconds, 2),
        }

    def save(self, directory: Path) -> Path:
        """Write `features.parquet` and `read.json` to a directory; return the path of the first."""
        directory.mkdir(parents=True, exist_ok=True)
        path = self.features.save_table(directory)
        write_atomic(directory / REPORT, json.dumps(self.to_json(), indent=1) + "\n")
        return path


def read_features(
    sae: Sae,
    run: str | Path,
    decode: Decode,
    *,
    contexts: int = 8,
    examples: int = 3,
    partners: int = 8,
    skip: int = 1,
    device: torch.device | str = "cpu",
    spelled: list[tuple[list[str], ...]] | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureRead:
    """Describe every feature that fires on the rows of a harvest (its output directory or a tag).

    `decode` is the tokenizer's. Rows of the first `skip` positions are left out: at the begin-of-text token most
    features behave differently. `spelled` are the tokens that each feature promotes and suppresses, if they are known.
    """
    if sae.hook is None or sae.layer is None:
        raise SaeError(
            "this dictionary does not say where its rows come from. Load it with hook= and layer=."
        )
    start = time.monotonic()
    on_device = sae.to(device)
    directory, hook = tag_directory(run), captured_hook(sae.hook, sae.view)
    token_text = functools.cache(lambda token: decode([token]))
    with RequestReader(directory, hook, sae.layer, open_files=1) as reader:
        total = len(reader) if limit is None else min(limit, len(reader))
        first = itertools.islice(reader.labels(), min(total, VOCABULARY_TEXTS))
        spoken = [[*map(token_text, entry.token_ids or [])] for _, entry in first]
        labels = LabelSums(sae, spoken, total, device=device)
        book = FeatureBook(on_device, contexts, examples, device=device)
        pairs = CoFiring(sae.d_sae, device)
        for number in range(total):
            entry = reader.read(number)
            used = _first_used(entry.positions or [], skip)
            rows = torch.from_numpy(entry.array[used:])
            per_token = rows.shape[1] if sae.view == "per_stream" else 1
            viewed = view_rows(rows, sae.view) if len(rows) else torch.zeros(0, sae.d_model)
            _check_width(sae, viewed)
            add_labels = labels.adder(number, [*map(token_text, entry.token_ids or [])])

            def add(first: int, activations: torch.Tensor, add_labels: Each = add_labels) -> None:
                add_labels(first, activations)
                pairs.add(activations)

            book.add(viewed.to(device), used, per_token, add)
            if progress is not None:
                progress(number + 1, total)
        places = _places(reader, book, decode, total)
    entries = describe(
        sae,
        book,
        labels,
        lambda peak: places[peak.text, peak.position][1],
        lambda peak: {**places[peak.text, peak.position][0], "value": round(peak.value, 3)},
        None,
        spelled,
        pairs.partners(partners),
    )
    return FeatureRead(FeatureIndex(entries), total, book.rows, pairs.exact, time.monotonic() - start)


def _places(
    reader: RequestReader, book: FeatureBook, decode: Decode, total: int
) -> dict[tuple[int, int], tuple[dict[str, object], str]]:
    """Text around every kept place and the token there, by text number and index of the row in its text."""
    wanted: dict[int, set[int]] = {}
    fired = book.largest.gt(0).nonzero().squeeze(1).tolist()
    for feature in fired:
        peaks: list[Peak] = [*book.peaks(feature), *book.drawn(feature)]
        for peak in peaks:
            wanted.setdefault(peak.text, set()).add(peak.position)
    found = {}
    for number, (name, entry) in enumerate(itertools.islice(reader.labels(), total)):
        ids, positions = entry.token_ids or [], entry.positions or []
        for place in sorted(wanted.get(number, ())):
            shown = context_of(decode, ids, place, 0.0)
            found[number, place] = (
                {**shown, "request": name, "position": positions[place]},
                decode([ids[place]]),
            )
    return found


def _first_used(positions: list[int], skip: int) -> int:
    """Index of the first row at position `skip` or later. Rows are in order of position."""
    return next((index for index, position in enumerate(positions) if position >= skip), len(positions))


def _check_width(sae: Sae, rows: torch.Tensor) -> None:
    if rows.shape[1] != sae.d_model:
        raise SaeError(
            f"the stored rows of {sae.hook}[{sae.layer}] are {rows.shape[1]} wide in the view {sae.view!r}, and the "
            f"dictionary encodes rows of {sae.d_model}. Harvest the site that it was trained on."
        )
