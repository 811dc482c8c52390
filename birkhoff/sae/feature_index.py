"""Descriptions of the features of a dictionary: their file, and search by word.

    birkhoff sae search nano "sea"
    engine.search_features("nano", "sea")

The file is `features.json` in the dictionary's directory, `features.json.xz` (the same text, compressed), or
`features.parquet` with a row per feature, which `birkhoff sae read` writes.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birkhoff.atomic_file import atomic_path
from birkhoff.errors import OptionError, SaeFileError, quoted
from birkhoff.extras import require
from birkhoff.json_limits import parse_json
from birkhoff.sae.features import FeatureEntry
from birkhoff.small_file import read_bytes

FILE, COMPRESSED, TABLE = "features.json", "features.json.xz", "features.parquet"
MAX_BYTES = 256 << 20
GROUP = 4096  # features of a row group
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class FeatureMatch:
    """A feature found by a search; `where` names the part of it that has the words."""

    entry: FeatureEntry
    relevance: float
    where: tuple[str, ...]

    def __repr__(self) -> str:
        return f"FeatureMatch({self.entry!r}, found in {', '.join(self.where)})"

    def _repr_html_(self) -> str:
        return self.entry._repr_html_()

    def to_json(self) -> dict[str, Any]:
        shown = {name: getattr(self.entry, name) for name in ("label", "made", "score", "density", "largest")}
        context = self.entry.contexts[0]["text"] if self.entry.contexts else None
        return {"feature": self.entry.feature, **shown, "where": list(self.where), "context": context}


class FeatureIndex(Mapping[int, FeatureEntry]):
    """The described features of one dictionary, by number."""

    def __init__(self, entries: Mapping[int, FeatureEntry]):
        self._entries = dict(sorted(entries.items()))

    @staticmethod
    def read(directory: Path) -> FeatureIndex:
        """The descriptions in a directory; empty if it has none."""
        names = (FILE, COMPRESSED, TABLE)
        path = next((directory / name for name in names if (directory / name).is_file()), None)
        if path is None:
            return FeatureIndex({})
        if path.name == TABLE:
            return _read_table(path)
        try:
            raw = read_bytes(path, MAX_BYTES)
            content = parse_json(raw if path.name == FILE else _decompressed(raw), MAX_BYTES)
        except (OSError, ValueError, RecursionError, lzma.LZMAError) as error:
            raise SaeFileError(f"{path} cannot be read as descriptions of features: {error}.") from None
        if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
            raise SaeFileError(f"{path} holds no object of features, expected one entry per feature number.")
        if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in content):
            raise SaeFileError(f"{path} names features by something else than their numbers.")
        return FeatureIndex(
            {int(key): FeatureEntry.from_json(int(key), entry) for key, entry in content.items()}
        )

    def save(self, directory: Path, compressed: bool = False) -> Path:
        """Write the file, one line per feature, in place of what the directory has; return its path."""
        path = directory / (COMPRESSED if compressed else FILE)
        lines = (
            f"{json.dumps(str(feature))}: {json.dumps(entry.to_json(), ensure_ascii=False, separators=(',', ':'))}"
            for feature, entry in self.items()
        )
        data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
        path.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if compressed else data)
        _remove_others(path)
        return path

    def save_table(self, directory: Path) -> Path:
        """Write `features.parquet` in place of what the directory has; return its path. Needs pyarrow."""
        path = directory / TABLE
        parquet, arrow = require("pyarrow.parquet", f"writing {path}"), require("pyarrow", f"writing {path}")
        schema = _table_schema(arrow)
        with atomic_path(path) as partial, parquet.ParquetWriter(partial, schema, compression="zstd") as file:
            entries = list(self._entries.values())
            for first in range(0, len(entries), GROUP):
                rows = [_to_row(entry) for entry in entries[first : first + GROUP]]
                file.write_table(arrow.Table.from_pylist(rows, schema))
        _remove_others(path)
        return path

    def search(self, words: str, limit: int = 20) -> list[FeatureMatch]:
        """Features whose label, tokens or contexts have these words, best first.

        A label or a token that the feature peaks on counts most, then tokens it promotes, then the text around its
        peaks, by the share of contexts with the word; every word must occur somewhere. Case does not matter, and a
        word of three letters or more also finds longer words that begin with it."""
        wanted = [word.lower() for word in _WORD.findall(words)]
        if not wanted:
            raise OptionError(f"words is {quoted(words)}, expected at least one word to search for.")
        if limit < 1:
            raise OptionError(f"limit is {limit}, expected a positive whole number.")
        found = []
        for entry in self._entries.values():
            match = _match(entry, wanted)
            if match is not None:
                found.append(match)
        found.sort(key=lambda match: (-match.relevance, -(match.entry.score or 0.0), match.entry.feature))
        return found[:limit]

    def __getitem__(self, feature: int) -> FeatureEntry:
        return self._entries[feature]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _table_schema(arrow: Any) -> Any:
    context = arrow.struct(
        [
            ("text", arrow.string()),
            ("value", arrow.float64()),
            ("request", arrow.string()),
            ("position", arrow.int64()),
        ]
    )
    partner = arrow.struct(
        [("feature", arrow.int64()), ("tokens", arrow.int64()), ("correlation", arrow.float64())]
    )
    return arrow.schema(
        [
            ("feature", arrow.int64()),
            ("label", arrow.string()),
            ("made", arrow.string()),
            ("rule", arrow.string()),  # JSON
            ("score", arrow.float64()),
            ("scored_rows", arrow.int64()),
            ("density", arrow.float64()),
            ("largest", arrow.float64()),
            ("promotes", arrow.list_(arrow.string())),
            ("suppresses", arrow.list_(arrow.string())),
            ("contexts", arrow.list_(context)),
            ("examples", arrow.list_(context)),
            ("cofires", arrow.list_(partner)),
        ]
    )


def _to_row(entry: FeatureEntry) -> dict[str, Any]:
    return {
        "feature": entry.feature,
        **entry.to_json(),
        "rule": None if entry.rule is None else json.dumps(entry.rule, ensure_ascii=False),
        "cofires": entry.cofires,
    }


def _read_table(path: Path) -> FeatureIndex:
    parquet, arrow = require("pyarrow.parquet", f"reading {path}"), require("pyarrow", f"reading {path}")
    entries: dict[int, FeatureEntry] = {}
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=GROUP):
            for row in batch.to_pylist():
                feature = row.pop("feature")
                rule = row.pop("rule", None)
                contexts = {
                    name: [_without_none(context) for context in row.pop(name, None) or ()]
                    for name in ("contexts", "examples")
                }
                fields = {
                    **row,
                    **contexts,
                    "rule": None if rule is None else parse_json(rule.encode(), MAX_BYTES),
                }
                entries[feature] = FeatureEntry.from_json(feature, fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, arrow.ArrowException) as error:
        raise SaeFileError(
            f"{path} cannot be read as descriptions of features: {str(error)[:300]}."
        ) from None
    if not all(isinstance(feature, int) and feature >= 0 for feature in entries):
        raise SaeFileError(f"{path} names features by something else than their numbers.")
    return FeatureIndex(entries)


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _remove_others(path: Path) -> None:
    """A directory has one file of descriptions."""
    for name in (FILE, COMPRESSED, TABLE):
        if name != path.name:
            (path.parent / name).unlink(missing_ok=True)


def _decompressed(raw: bytes) -> bytes:
    """The text of a compressed file, refused beyond `MAX_BYTES`."""
    reader = lzma.LZMADecompressor(memlimit=MAX_BYTES)
    data = reader.decompress(raw, MAX_BYTES)
    if not reader.eof:
        raise ValueError(f"it is cut short or has more than {MAX_BYTES} bytes")
    return data


def _match(entry: FeatureEntry, wanted: list[str]) -> FeatureMatch | None:
    texts = [str(context.get("text", "")) for context in entry.contexts]
    peaks = [peak[1] for text in texts if (peak := re.search(r"\[([^]]*)\]", text))]
    total, where = 0.0, dict[str, None]()
    for word in wanted:
        shares = {
            "label": 4.0 * _has(entry.label, word),
            "peaks": 3.0 * _share(peaks, word),
            "promotes": 2.0 * _share(entry.promotes, word),
            "contexts": 1.0 * _share(texts, word),
        }
        if not any(shares.values()):
            return None
        total += sum(shares.values())
        where |= dict.fromkeys(name for name, share in shares.items() if share)
    return FeatureMatch(entry, total / len(wanted), tuple(where))


def _share(texts: list[str], word: str) -> float:
    return sum(_has(text, word) for text in texts) / max(len(texts), 1)


def _has(text: str, word: str) -> float:
    """1 if the text has the word, half of it for a longer word that begins with it, else 0."""
    known = _WORD.findall(text.lower())
    if word in known:
        return 1.0
    return 0.5 if len(word) >= 3 and any(one.startswith(word) for one in known) else 0.0
