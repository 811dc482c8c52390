"""Readers of captures in every layout, written by this package or by other writers of the format. NumPy only.

    read_request(dir)     CaptureEntries of one request, in any layout
    read_packed(path)     the same for a packed capture: its directory, sidecar or payload
    read_per_file(path)   one CaptureEntry: a payload or its sidecar
    read_sharded(dir)     {request id: CaptureEntries} of the sealed shards of a tag
    iter_rows(dir, ...)   rows of one hook and layer of a whole tag, in batches, in bounded memory (`row_reader.py`)

`entries[hook, layer]` is the key order, as in `output.acts`. Rows of one site that were written in several parts are
joined in the order of writing. Checksums are compared while reading. A damaged record raises an error that names it;
with `on_damage` the error is passed to that function, the record is left out, and the rest is returned. bfloat16 is
returned as uint16 and fp8 as uint8: `entry.values()` gives float32, `to_torch` the tensor.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from birkhoff import notebook
from birkhoff.capture.store.entry import CaptureEntry, concatenate
from birkhoff.capture.store.row_reader import iter_rows
from birkhoff.capture.store.sidecar import CaptureFile, PayloadRange
from birkhoff.errors import CaptureChecksum, CaptureFileError
from birkhoff.hooks.site_names import Address, to_tool

if TYPE_CHECKING:
    import torch

__all__ = [
    "CaptureEntries",
    "CaptureEntry",
    "iter_rows",
    "latest_per_position",
    "read_packed",
    "read_per_file",
    "read_request",
    "read_sharded",
    "rename",
    "to_torch",
]

OnDamage = Callable[[CaptureFileError], None]

_PACKED = re.compile(r"packed(-pp\d+)?\.json")
_SHARD = re.compile(r"shard-(pp\d+-)?\d+-(\d+)\.json")


class CaptureEntries(dict[Address, CaptureEntry]):
    """Entries by (hook, layer). Lookups accept (layer, hook) too, the order of earlier versions."""

    def __missing__(self, key: Any) -> CaptureEntry:
        if key in self:
            return dict.__getitem__(self, (key[1], key[0]))
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        if dict.__contains__(self, key):
            return True
        reverse = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int)
        return reverse and dict.__contains__(self, (key[1], key[0]))  # type: ignore[index]

    def _repr_html_(self) -> str:
        rows = [
            (f"{hook}[{layer}]", list(entry.array.shape), entry.dtype, len(entry.positions or ()) or "")
            for (hook, layer), entry in self.items()
        ]
        return notebook.table(("rows of", "shape", "dtype", "positions"), rows, "Captured rows")

    def get(self, key: Any, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def captured_model(directory: str | os.PathLike[str]) -> str | None:
    """The name of the model that a capture was made with, from one of its files; None if it says none."""
    for sidecar in Path(directory).rglob("*.json"):
        if sidecar.with_suffix(".bin").is_file():
            with CaptureFile(sidecar, labels=False) as file:
                facts = [file.facts, *(file.facts.get("requests") or {}).values()]
            return next((str(each["model"]) for each in facts if each.get("model")), None)
    return None


def read_per_file(path: str | os.PathLike[str], *, verify: bool = True, mmap: bool = False) -> CaptureEntry:
    """Read one `{layer}_{hook}` payload with its sidecar. A sidecar without a dtype means float32."""
    path = Path(path)
    with CaptureFile(path.with_suffix(".json")) as file:
        if len(file.records) != 1 or "layout" in file.facts:
            raise CaptureFileError(
                f"{path} describes {len(file.records)} entries, expected one. Use read_request."
            )
        return _joined([file.read(file.records[0], verify, mmap)], file.facts)


def read_packed(
    path: str | os.PathLike[str],
    *,
    verify: bool = True,
    mmap: bool = False,
    on_damage: OnDamage | None = None,
) -> CaptureEntries:
    """Read a packed capture: one file, or one per pipeline stage if `path` is a directory."""
    path = Path(path)
    if path.is_dir():
        sidecars = [path / name for name in sorted(_names(path)) if _PACKED.fullmatch(name)] or [
            path / "packed.json"
        ]
    else:
        sidecars = [path.with_suffix(".json")]
    entries = CaptureEntries()
    for sidecar in sidecars:
        with CaptureFile(sidecar) as file:
            parts: dict[Address, list[CaptureEntry]] = {}
            for record in sorted(file.records, key=lambda record: record.offset):
                part = _read(file, record, verify, mmap, on_damage)
                if part is not None:
                    parts.setdefault(record.site, []).append(part)
            entries.update({address: _joined(pieces, file.facts) for address, pieces in parts.items()})
    return entries


@overload
def read_request(
    directory: str | os.PathLike[str],
    *,
    names: None = None,
    verify: bool = True,
    mmap: bool = False,
    on_damage: OnDamage | None = None,
) -> CaptureEntries: ...
@overload
def read_request(
    directory: str | os.PathLike[str],
    *,
    names: str,
    verify: bool = True,
    mmap: bool = False,
    on_damage: OnDamage | None = None,
) -> dict[str, CaptureEntry]: ...
def read_request(
    directory: str | os.PathLike[str],
    *,
    names: str | None = None,
    verify: bool = True,
    mmap: bool = False,
    on_damage: OnDamage | None = None,
) -> CaptureEntries | dict[str, CaptureEntry]:
    """Read all entries of one request. `names="transformer_lens"` keys them by the names of that tool."""
    directory = Path(directory)
    present = sorted(_names(directory))
    entries = CaptureEntries()
    if any(_PACKED.fullmatch(name) for name in present):
        entries = read_packed(directory, verify=verify, mmap=mmap, on_damage=on_damage)
    else:
        sidecars = [name for name in present if re.fullmatch(r"\d+_.+\.json", name)]
        if not sidecars:
            waiting = any(name.endswith((".tmp", ".journal")) for name in present)
            raise CaptureFileError(
                f"{directory} holds no finished capture. "
                + (
                    "It is still being written, or its writer died: run the repair."
                    if waiting
                    else "Give a request's "
                    "directory, {root}/{tag}/{request}; for shards use read_sharded on the tag."
                )
            )
        for name in sidecars:
            try:
                entry = read_per_file(directory / name, verify=verify, mmap=mmap)
            except CaptureFileError as error:
                if on_damage is None:
                    raise
                on_damage(error)
                continue
            entries[entry.hook, entry.layer] = entry
    return entries if names is None else rename(entries, names)


def read_sharded(
    directory: str | os.PathLike[str],
    *,
    requests: Iterable[str] | None = None,
    verify: bool = True,
    on_damage: OnDamage | None = None,
) -> dict[str, CaptureEntries]:
    """Read the sealed shards of a tag, or only `requests` of it. A request that spans shards is joined."""
    directory = Path(directory)
    requested = None if requests is None else set(requests)
    parts: dict[tuple[str, Address], list[CaptureEntry]] = {}
    facts: dict[str, dict[str, Any]] = {}
    rows: dict[str, int] = {}  # rows listed by the shards; fewer than a request's total if a shard is missing
    shards = [(int(match[2]), match[0]) for match in map(_SHARD.fullmatch, _names(directory)) if match]
    for _, name in sorted(shards):  # a slot's shards in the order they were written
        with CaptureFile(directory / name) as file:
            _collect_facts(file, requested, facts)
            for record in sorted(file.records, key=lambda record: record.offset):
                if record.request_id is None:
                    raise CaptureFileError(f"{file.path}: an entry of {record.name} names no request_id.")
                if requested is None or record.request_id in requested:
                    rows[record.request_id] = rows.get(record.request_id, 0) + record.rows
                    part = _read(file, record, verify, False, on_damage)
                    if part is not None:
                        parts.setdefault((record.request_id, record.site), []).append(part)
    entries: dict[str, CaptureEntries] = {}
    for request, known in facts.items():
        known["complete"] = bool(known.get("complete")) and known.get("rows", rows.get(request)) == rows.get(
            request, 0
        )
    for (request, site), pieces in parts.items():
        entries.setdefault(request, CaptureEntries())[site] = _joined(pieces, facts.get(request, {}))
    return entries


def latest_per_position(entry: CaptureEntry) -> CaptureEntry:
    """Keep the last row written for each position, in order of position: the accepted rows of speculative drafts."""
    if entry.positions is None:
        raise CaptureFileError(
            f"{entry.hook}[{entry.layer}] has no positions, so its rows cannot be told apart by them."
        )
    last = {position: row for row, position in enumerate(entry.positions)}
    return entry.take([last[position] for position in sorted(last)])


def rename(entries: Mapping[Address, CaptureEntry], names: str) -> dict[str, CaptureEntry]:
    """Entries by the names of another tool; hooks without such a name are keyed `hook.layer`."""
    # Hooks that fire once per model are stored at the last layer: treat each entry's layer as the last of a model.
    return {
        to_tool(names, (hook, layer), layer + 1) or f"{hook}.{layer}": entry
        for (hook, layer), entry in entries.items()
    }


def to_torch(entry: CaptureEntry) -> torch.Tensor:
    """The rows as a tensor that shares their memory: bf16 as bfloat16, fp8 as float8_e4m3fn without scale."""
    import torch

    tensor = torch.from_numpy(entry.array)
    views = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}
    return tensor.view(views[entry.dtype]) if entry.dtype in views else tensor


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError as error:
        raise CaptureFileError(f"{directory} cannot be listed ({error.strerror}).") from None


def _read(
    file: CaptureFile, record: PayloadRange, verify: bool, mmap: bool, on_damage: OnDamage | None
) -> CaptureEntry | None:
    try:
        return file.read(record, verify, mmap)
    except CaptureChecksum as error:
        if on_damage is None:
            raise
        on_damage(error)
        return None


def _joined(parts: list[CaptureEntry], facts: dict[str, Any]) -> CaptureEntry:
    """Join parts of one hook and layer in the given order."""
    first = parts[0]
    for part in parts:
        if (part.dtype, part.array.shape[1:], part.axes) != (first.dtype, first.array.shape[1:], first.axes):
            raise CaptureFileError(
                f"parts of {first.hook}[{first.layer}] differ: {first.dtype} {first.array.shape[1:]} and {part.dtype} "
                f"{part.array.shape[1:]}. The sidecar is damaged; take it from another copy."
            )
    return replace(concatenate(parts), meta=dict(facts))


def _collect_facts(file: CaptureFile, requested: set[str] | None, facts: dict[str, dict[str, Any]]) -> None:
    """Collect what a shard says about each request; the end of a request may be recorded in a later shard."""
    requests = file.facts.get("requests")
    shared = {name: value for name, value in file.facts.items() if name in ("tag", "format_version")}
    for request, known in requests.items() if isinstance(requests, dict) else ():
        if isinstance(known, dict) and (requested is None or request in requested):
            complete = bool(known.get("complete")) or bool(facts.get(request, {}).get("complete"))
            facts.setdefault(request, {}).update(
                {**shared, **known, "request_id": request, "complete": complete}
            )
