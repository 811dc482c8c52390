"""Writes captured rows in formats of other tools, in bounded memory.

    parquet      OUT/mlp_out.3/part-00000.parquet        columns request, position, token_id, phase, row
    datasets     OUT, for `datasets.load_from_disk`      the same columns; every site is a split
    safetensors  OUT/mlp_out.3/part-00000.safetensors    tensors row, position, token_id, request, phase (scale for fp8)
    zarr         OUT, a Zarr v3 group                     a group per site with arrays of the same names

A row keeps its shape (for streams [4, width]) and its values: bf16 and fp8 become float32 where the format lacks them,
which is exact. `request` is the text's number; in safetensors and Zarr, which have no text, requests with other names
are numbered, and the list of names is in the metadata. `phase` is prefill or decode (0, 1; -1 if unknown). The folder
appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from birkhoff.atomic_file import save_tensors, sync_directory, write_atomic
from birkhoff.capture.spec.dtypes import Array
from birkhoff.capture.store.entry import CaptureEntry
from birkhoff.capture.store.naming import short_hash, slug
from birkhoff.capture.store.reader import to_torch
from birkhoff.capture.store.row_reader import StoredSite, iter_rows, stored_sites
from birkhoff.errors import CaptureFileError, CaptureWriteError, OptionError, did_you_mean, quoted
from birkhoff.extras import require
from birkhoff.hooks.site_names import Address
from birkhoff.option_checks import check_int
from birkhoff.small_file import MANIFEST_BYTES, read_json

SHARD_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20  # of a Zarr chunk and a Parquet row group
PHASES = ("prefill", "decode")
_MANIFEST = "harvest.json"


@dataclass
class ExportReport:
    """What was written: rows by site, files and bytes."""

    out: str
    format: str
    rows: dict[str, int] = field(default_factory=dict)
    files: int = 0
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def export_rows(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str,
    *,
    sites: Sequence[Address] | None = None,
    shard_rows: int | None = None,
) -> ExportReport:
    """Write the rows of a capture (its output directory, a tag or a request) to a new folder.

    `sites` are pairs of hook and layer, by default all. A file holds `shard_rows` rows, by default about 256 MiB.
    """
    if format not in WRITERS:
        raise OptionError(
            f"format is {quoted(format)}, expected {', '.join(WRITERS)}.{did_you_mean(format, WRITERS)}"
        )
    if shard_rows is not None:
        check_int("shard_rows", shard_rows)
    directory, target = tag_directory(run), Path(out)
    present = stored_sites(directory)
    missing = [site for site in sites or () if site not in present]
    if missing:
        names = ", ".join(map(site_name, present))
        raise CaptureFileError(
            f"{directory} holds no rows of {site_name(missing[0])}, expected sites among {quoted(names, 400)}."
        )
    report = ExportReport(str(target), format)
    with _new_folder(target) as folder:
        writer = WRITERS[format](folder)
        for site in present if sites is None else dict.fromkeys(sites):
            stored = present[site]
            row_bytes = max(1, int(np.prod(stored.row_shape, dtype=np.int64)) * 4)
            rows = shard_rows or max(1, SHARD_BYTES // row_bytes)
            writer.begin(site, stored)
            for batch in iter_rows(directory, *site, rows, labels=True):
                writer.add(batch)
            writer.end()
            report.rows[site_name(site)] = stored.rows
        writer.close()
        files = [path for path in folder.rglob("*") if path.is_file()]
        report.files, report.bytes = len(files), sum(path.stat().st_size for path in files)
    return report


def tag_directory(run: str | os.PathLike[str]) -> Path:
    """The directory of a capture's rows: of a harvest its tag, else the directory itself."""
    path = Path(run)
    if not path.is_dir():
        raise CaptureFileError(f"{path} is no directory. Give the directory of a capture, its --out.")
    try:
        manifest = read_json(path / _MANIFEST, MANIFEST_BYTES)
        return path / slug(str(manifest["settings"]["capture"]["tag"]))
    except FileNotFoundError:
        return path
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureFileError(f"{path / _MANIFEST} cannot be read ({error!r}). Restore it.") from None


def site_name(site: Address) -> str:
    """`mlp_out.3`, the name of a site in exports."""
    return f"{site[0]}.{site[1]}"


class SiteWriter(Protocol):
    """Writes one site after the other to a folder, each in batches of the size of a file."""

    def __init__(self, folder: Path): ...

    def begin(self, site: Address, stored: StoredSite) -> None: ...

    def add(self, batch: CaptureEntry) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


class _ParquetFiles:
    """One folder of Parquet files per site."""

    ending = ".parquet"
    package = "pyarrow.parquet"

    def __init__(self, folder: Path):
        self._folder = folder
        self._package = require(self.package, f"writing {self.ending[1:]} files")
        self._arrow = require("pyarrow", f"writing {self.ending[1:]} files")
        self._site: Address = ("", 0)
        self._stored: StoredSite | None = None
        self._count = 0

    def begin(self, site: Address, stored: StoredSite) -> None:
        self._site, self._stored, self._count = site, stored, 0
        (self._folder / site_name(site)).mkdir()

    def add(self, batch: CaptureEntry) -> None:
        self._write(
            self._folder / site_name(self._site) / f"part-{self._count:05d}{self.ending}", self._table(batch)
        )
        self._count += 1

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _table(self, batch: CaptureEntry) -> Any:
        arrow, phases = self._arrow, batch.phases
        values = plain_values(batch)
        rows = arrow.array(values.reshape(-1))
        for size in reversed(values.shape[1:]):
            rows = arrow.FixedSizeListArray.from_arrays(rows, size)
        columns = {
            "request": arrow.array(batch.requests, arrow.string()),
            "position": arrow.array(batch.positions, arrow.int64()),
            "token_id": arrow.array(batch.token_ids, arrow.int64()),
            "phase": arrow.nulls(len(batch), arrow.string())
            if phases is None
            else arrow.array(phases, arrow.string()),
            "row": rows,
        }
        return arrow.table(columns).replace_schema_metadata(self._metadata(values.dtype))

    def _metadata(self, dtype: Any) -> dict[str, str]:
        assert self._stored is not None
        return {"birkhoff": json.dumps(_facts(self._site, self._stored))}

    def _write(self, path: Path, table: Any) -> None:
        row_bytes = max(1, table.nbytes // max(1, len(table)))
        self._package.write_table(
            table,
            path,
            row_group_size=max(1, CHUNK_BYTES // row_bytes),
            compression="zstd",
            compression_level=1,
            use_dictionary=["request", "phase"],
        )


class _DatasetFolders(_ParquetFiles):
    """A folder that `datasets.load_from_disk` opens: a split per site, its rows as Arrow streams.

    The layout is that of `save_to_disk`; writing it here needs pyarrow only and no second copy of the rows.
    """

    ending = ".arrow"
    package = "pyarrow.ipc"

    def begin(self, site: Address, stored: StoredSite) -> None:
        super().begin(site, stored)
        self._features: dict[str, Any] = {}

    def end(self) -> None:
        assert self._stored is not None
        folder, name = self._folder / site_name(self._site), site_name(self._site)
        files = []
        for index, path in enumerate(sorted(folder.glob("*.arrow"))):
            files.append(f"data-{index:05d}-of-{self._count:05d}.arrow")
            path.rename(folder / files[-1])
        state: dict[str, Any] = {
            "_data_files": [{"filename": file} for file in files],
            "_fingerprint": short_hash(f"{name} {self._stored.rows}"),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": name,
        }
        info = {
            "citation": "",
            "description": json.dumps(_facts(self._site, self._stored)),
            "features": self._features,
            "homepage": "",
            "license": "",
            "splits": {
                name: {"name": name, "num_bytes": 0, "num_examples": self._stored.rows, "dataset_name": None}
            },
        }
        write_atomic(folder / "state.json", json.dumps(state, indent=1))
        write_atomic(folder / "dataset_info.json", json.dumps(info, indent=1))

    def close(self) -> None:
        splits = sorted(path.name for path in self._folder.iterdir() if path.is_dir())
        write_atomic(self._folder / "dataset_dict.json", json.dumps({"splits": splits}))

    def _metadata(self, dtype: Any) -> dict[str, str]:
        assert self._stored is not None
        row: dict[str, Any] = {"dtype": str(dtype), "_type": "Value"}
        for size in reversed(self._stored.row_shape):
            row = {"feature": row, "length": int(size), "_type": "Sequence"}
        self._features = {
            "request": {"dtype": "string", "_type": "Value"},
            "position": {"dtype": "int64", "_type": "Value"},
            "token_id": {"dtype": "int64", "_type": "Value"},
            "phase": {"dtype": "string", "_type": "Value"},
            "row": row,
        }
        return {"huggingface": json.dumps({"info": {"features": self._features}})}

    def _write(self, path: Path, table: Any) -> None:
        with self._arrow.OSFile(str(path), "wb") as file, self._package.new_stream(file, table.schema) as out:
            out.write_table(table, max_chunksize=1000)


class _SafetensorsFiles:
    """One folder of safetensors files per site; rows keep their dtype."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._numbers = _RequestNumbers(True)
        self._index: dict[str, Any] = {}

    def begin(self, site: Address, stored: StoredSite) -> None:
        self._site, self._stored = site, stored
        self._numbers = _RequestNumbers(stored.numbered)
        self._index[site_name(site)] = {**_facts(site, stored), "files": {}}
        (self._folder / site_name(site)).mkdir()

    def add(self, batch: CaptureEntry) -> None:
        import torch

        name, files = site_name(self._site), self._index[site_name(self._site)]["files"]
        tensors = {"row": to_torch(batch).contiguous()}
        if batch.scale is not None:
            tensors["scale"] = torch.from_numpy(np.ascontiguousarray(batch.scale, np.float32))
        for label, values in _labels(batch, self._numbers).items():
            tensors[label] = torch.from_numpy(values)
        path = self._folder / name / f"part-{len(files):05d}.safetensors"
        metadata = {"birkhoff": json.dumps({**_facts(self._site, self._stored), **self._numbers.facts()})}
        save_tensors(path, tensors, metadata)
        files[path.name] = len(batch)

    def end(self) -> None:
        self._index[site_name(self._site)] |= self._numbers.facts()

    def close(self) -> None:
        write_atomic(self._folder / "index.json", json.dumps(self._index, indent=1) + "\n")


class _ZarrGroups:
    """A Zarr v3 group with a group of arrays per site."""

    def __init__(self, folder: Path):
        self._zarr = require("zarr", "writing Zarr")
        self._root = self._zarr.open_group(str(folder), mode="w", zarr_format=3)

    def begin(self, site: Address, stored: StoredSite) -> None:
        self._group = self._root.create_group(site_name(site), attributes=_facts(site, stored))
        self._stored, self._written = stored, 0
        self._numbers = _RequestNumbers(stored.numbered)

    def add(self, batch: CaptureEntry) -> None:
        arrays = {"row": plain_values(batch), **_labels(batch, self._numbers)}
        for name, values in arrays.items():
            if not self._written:
                row_bytes = max(1, values[:1].nbytes)
                chunk = min(self._stored.rows, max(1, CHUNK_BYTES // row_bytes))
                self._group.create_array(
                    name,
                    shape=(self._stored.rows, *values.shape[1:]),
                    dtype=values.dtype,
                    chunks=(chunk, *values.shape[1:]),
                )
            self._group[name][self._written : self._written + len(values)] = values
        self._written += len(batch)

    def end(self) -> None:
        self._group.attrs.update(self._numbers.facts())

    def close(self) -> None:
        pass


WRITERS: dict[str, type[SiteWriter]] = {
    "parquet": _ParquetFiles,
    "safetensors": _SafetensorsFiles,
    "zarr": _ZarrGroups,
    "datasets": _DatasetFolders,
}


class _RequestNumbers:
    """Numbers of requests, for formats without text: the names themselves if they are numbers, else their order."""

    def __init__(self, numbered: bool):
        self._numbered = numbered
        self._numbers: dict[str, int] = {}

    def __call__(self, request: str) -> int:
        return int(request) if self._numbered else self._numbers.setdefault(request, len(self._numbers))

    def facts(self) -> dict[str, Any]:
        return {} if self._numbered else {"requests": list(self._numbers)}


def plain_values(batch: CaptureEntry) -> Array:
    """The rows with a dtype that NumPy has: bf16 and fp8 as float32, others as stored."""
    return batch.values() if batch.dtype in ("bfloat16", "fp8_e4m3") else batch.array


def _labels(batch: CaptureEntry, number: _RequestNumbers) -> dict[str, Array]:
    phases = batch.phases or [""] * len(batch)
    return {
        "position": np.array(batch.positions, np.int64),
        "token_id": np.array(batch.token_ids, np.int64),
        "request": np.array([number(request) for request in batch.requests or ()], np.int64),
        "phase": np.array([PHASES.index(name) if name in PHASES else -1 for name in phases], np.int8),
    }


def _facts(site: Address, stored: StoredSite) -> dict[str, Any]:
    return {
        "hook": site[0],
        "layer": site[1],
        "stored_dtype": stored.dtype,
        "row_shape": list(stored.row_shape),
        "axes": None if stored.axes is None else list(stored.axes),
        "rows": stored.rows,
    }


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `target` at the end and removed if the block raises."""
    if target.exists():
        raise CaptureWriteError(f"{target} is there already. Choose a new folder.")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        yield partial
        os.replace(partial, target)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise CaptureWriteError(
                f"{target} could not be written ({error}). Make room or choose another place."
            ) from None
        raise
    sync_directory(target.parent)
