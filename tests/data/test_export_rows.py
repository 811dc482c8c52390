"""Captured rows in formats of others, read back by the packages that define these formats."""

from __future__ import annotations

import json
import math

import datasets
import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors import safe_open
from torch.utils.data import DataLoader

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import read_sharded, to_torch
from birkhoff.capture.store.row_reader import iter_rows
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.data.export_rows import export_rows
from birkhoff.data.row_dataset import RowDataset
from birkhoff.errors import CaptureFileError, CaptureWriteError, OptionError
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import chunk
from tests.cli.conftest import ROOT, birkhoff

SITES = [("mhc_streams_pre_attn", 2), ("mhc_attn_res_mix", 0), ("mlp_out", 3), ("mlp_in", 1)]
REQUESTS = [f"{number:09d}" for number in range(12)]


def stored(root, requests=REQUESTS, rows=5, layout="sharded"):
    with CaptureWriter(
        FileOptions(root, coalesce_max_bytes=0, num_shards=3, default_layout=layout), SoftDisk()
    ) as files:
        for request in requests:
            files.begin(CaptureRequest(request, request, "run", meta={"model": "nano"}))
            for start in (0, 3):
                for hook, layer in SITES:
                    files.append(chunk(request, hook, layer, start, 3 if start == 0 else rows - 3))
            assert files.finish(CaptureFinish(request, "stop", rows)).result(300).status == "ok"
    return root / "run"


@pytest.fixture
def run(quick_path):
    return stored(quick_path)


def expected(run):
    """Rows of every site by (request, position): float32 values as bytes (they may be NaN), token id, entry."""
    found = {}
    for request, entries in read_sharded(run).items():
        for site, entry in entries.items():
            for row, position in enumerate(entry.positions):
                value = entry.values()[row].astype(np.float32).tobytes()
                found[site, request, position] = (value, entry.token_ids[row])
    assert len(found) == len(SITES) * len(REQUESTS) * 5
    return found


def as_found(site, requests, positions, tokens, rows):
    rows = np.asarray(rows).astype(np.float32)
    return {
        (site, request, int(position)): (row.tobytes(), int(token))
        for request, position, token, row in zip(requests, positions, tokens, rows, strict=True)
    }


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_parquet_is_read_by_pyarrow(run, tmp_path):
    report = export_rows(run, tmp_path / "out", "parquet", shard_rows=17)
    assert report.rows == {f"{hook}.{layer}": 60 for hook, layer in sorted(SITES)} and report.files == 4 * 4
    found = {}
    for hook, layer in SITES:
        table = parquet.read_table(tmp_path / "out" / f"{hook}.{layer}")
        facts = json.loads(table.schema.metadata[b"birkhoff"])
        assert (facts["hook"], facts["layer"], facts["rows"]) == (hook, layer, 60)
        flat = table["row"].combine_chunks()
        while hasattr(flat.type, "list_size"):
            flat = flat.flatten()
        rows = flat.to_numpy(zero_copy_only=False).reshape(60, *facts["row_shape"])
        labels = [table[name].to_pylist() for name in ("request", "position", "token_id")]
        assert set(table["phase"].to_pylist()) == {"prefill", "decode"}
        found |= as_found((hook, layer), *labels, rows)
    assert found == expected(run)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_folder_is_loaded_by_datasets(run, tmp_path):
    export_rows(run, tmp_path / "out", "datasets", shard_rows=17)
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert set(loaded) == {f"{hook}.{layer}" for hook, layer in SITES}
    found = {}
    for hook, layer in SITES:
        split = loaded[f"{hook}.{layer}"]
        alone = datasets.load_from_disk(str(tmp_path / "out" / f"{hook}.{layer}"))
        assert len(split) == len(alone) == 60 and split.features == alone.features
        columns = split.with_format("numpy")[:]
        labels = [columns[name] for name in ("request", "position", "token_id")]
        found |= as_found((hook, layer), *labels, columns["row"])
    assert found == expected(run)
    assert loaded["mlp_out.3"].with_format("torch")[0]["row"].shape == (8,)
    assert loaded["mhc_streams_pre_attn.2"].with_format("torch")[:2]["row"].shape == (2, 4, 6)


def test_safetensors_keep_every_bit(run, tmp_path):
    export_rows(run, tmp_path / "out", "safetensors", shard_rows=17)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    entries = read_sharded(run)
    for hook, layer in SITES:
        files = sorted((tmp_path / "out" / f"{hook}.{layer}").iterdir())
        assert index[f"{hook}.{layer}"]["files"] == {
            path.name: rows for path, rows in zip(files, (17, 17, 17, 9), strict=True)
        }
        seen = 0
        for path in files:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for row in range(len(tensors["row"])):
                entry = entries[f"{int(tensors['request'][row]):09d}"][hook, layer]
                at = entry.positions.index(int(tensors["position"][row]))
                bits = to_torch(entry)[at]
                assert tensors["row"].dtype == bits.dtype
                assert torch.equal(
                    tensors["row"][row].contiguous().view(torch.uint8), bits.contiguous().view(torch.uint8)
                )
                assert int(tensors["token_id"][row]) == entry.token_ids[at]
                assert int(tensors["phase"][row]) == (at >= 4)
                if entry.scale is not None:
                    assert float(tensors["scale"][row]) == float(entry.scale[at])
                seen += 1
        assert seen == 60


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_zarr_is_read_by_zarr(run, tmp_path):
    export_rows(run, tmp_path / "out", "zarr", shard_rows=17)
    group = zarr.open_group(str(tmp_path / "out"), mode="r")
    assert group.metadata.zarr_format == 3
    found = {}
    for hook, layer in SITES:
        site = group[f"{hook}.{layer}"]
        assert site.attrs["hook"] == hook and "requests" not in site.attrs
        requests = [f"{number:09d}" for number in site["request"][:]]
        found |= as_found((hook, layer), requests, site["position"][:], site["token_id"][:], site["row"][:])
    assert found == expected(run)


def test_requests_with_names_are_numbered_and_listed(quick_path, tmp_path):
    run = stored(quick_path, ["chatcmpl-a", "chatcmpl-b"])
    for format in ("zarr", "safetensors"):
        export_rows(run, tmp_path / format, format, sites=[("mlp_out", 3)])
    site = zarr.open_group(str(tmp_path / "zarr"), mode="r")["mlp_out.3"]
    index = json.loads((tmp_path / "safetensors" / "index.json").read_text())["mlp_out.3"]
    assert sorted(site.attrs["requests"]) == sorted(index["requests"]) == ["chatcmpl-a", "chatcmpl-b"]
    entries = read_sharded(run)
    for number, token, position in zip(site["request"][:], site["token_id"][:], site["position"][:]):
        entry = entries[site.attrs["requests"][number]]["mlp_out", 3]
        assert entry.token_ids[entry.positions.index(position)] == token


def test_what_cannot_be_exported_leaves_nothing(run, tmp_path):
    for arguments, error, words in (
        (("hdf5",), OptionError, "expected parquet, safetensors, zarr, datasets"),
        (("parkuet",), OptionError, "Did you mean 'parquet'"),
    ):
        with pytest.raises(error, match=words):
            export_rows(run, tmp_path / "out", *arguments)
    with pytest.raises(CaptureFileError, match=r"no rows of mlp_out\.9.*mlp_in\.1"):
        export_rows(run, tmp_path / "out", "parquet", sites=[("mlp_out", 9)])
    with pytest.raises(CaptureFileError, match="no finished capture"):
        export_rows(tmp_path, tmp_path / "out", "parquet")
    damaged = next(path for path in sorted(run.glob("*.bin")) if path.stat().st_size)
    raw = bytearray(damaged.read_bytes())
    raw[10] ^= 1
    damaged.write_bytes(raw)
    with pytest.raises(CaptureFileError, match="changed since it was written"):
        export_rows(run, tmp_path / "out", "parquet")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(CaptureWriteError, match="there already"):
        export_rows(run, tmp_path / "out", "parquet")


def test_the_command_exports_and_names_what_is_missing(run, tmp_path):
    done = birkhoff(
        "export", run, "--format", "parquet", "--out", tmp_path / "a", "--site", "mlp_out.3", "--json"
    )
    assert done.returncode == 0 and json.loads(done.stdout)["rows"] == {"mlp_out.3": 60}, done.stderr
    absent = tmp_path / "absent" / "zarr"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('not installed')\n")
    arguments = ("export", run, "--format", "zarr", "--out", tmp_path / "b")
    done = birkhoff(*arguments, PYTHONPATH=f"{absent.parent}:{ROOT}")
    assert done.returncode == 1 and b"package-missing" in done.stderr and b"birkhoff-v4[zarr]" in done.stderr
    assert not list(tmp_path.glob("b*"))


def keys(items):
    return [(item["request"], int(item["position"])) for item in items]


@settings(max_examples=25, deadline=None)
@given(
    readers=st.integers(1, 5),
    batch=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    pool=st.integers(1, 40),
)
def test_parts_of_an_iteration_are_disjoint_and_complete(shared_run, readers, batch, shuffle, seed, pool):
    seen = []
    for reader in range(readers):
        options = {"shuffle": shuffle, "seed": seed, "labels": True, "pool_rows": pool}
        for rows in iter_rows(shared_run, "mlp_out", 3, batch, part=(reader, readers), **options):
            seen += zip(rows.requests, rows.positions)
    assert len(seen) == 60 and set(seen) == {(name, row) for name in REQUESTS for row in range(5)}


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("shared"))


def test_a_torch_dataset_has_every_row_once_and_shuffles_by_seed_and_epoch(shared_run):
    plain = list(RowDataset(shared_run, "mlp_out", 3))
    assert plain[0]["row"].shape == (8,) and plain[0]["row"].dtype == torch.float16
    every = {(name, row) for name in REQUESTS for row in range(5)}
    assert set(keys(plain)) == every and len(plain) == 60
    mixed = RowDataset(shared_run, "mlp_out", 3, shuffle=True, seed=1)
    first, again = keys(mixed), keys(mixed)
    mixed.set_epoch(1)
    assert first == again != keys(plain) and set(first) == every
    assert set(keys(mixed)) == every and keys(mixed) != first
    ranks = [keys(RowDataset(shared_run, "mlp_out", 3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert set(ranks[0]) | set(ranks[1]) == every and not set(ranks[0]) & set(ranks[1])
    batches = list(RowDataset(shared_run, "mhc_streams_pre_attn", 2, batch_rows=16))
    assert [tuple(batch["row"].shape) for batch in batches] == [(16, 4, 6)] * 3 + [(12, 4, 6)]
    assert batches[0]["row"].dtype == torch.bfloat16
    scaled = next(iter(RowDataset(shared_run, "mlp_in", 1, dtype=torch.float64)))
    assert scaled["row"].dtype == torch.float64
    with pytest.raises(CaptureFileError, match=r"no rows of mlp_out\.7"):
        RowDataset(shared_run, "mlp_out", 7)
    with pytest.raises(OptionError, match="rank is 2"):
        RowDataset(shared_run, "mlp_out", 3, rank=2, world_size=2)


def test_a_data_loader_collates_it_and_its_workers_share_the_rows(shared_run):
    dataset = RowDataset(shared_run, "mlp_out", 3, shuffle=True)
    collated = list(DataLoader(dataset, batch_size=7))
    assert [len(batch["row"]) for batch in collated] == [7] * 8 + [4]
    assert collated[0]["row"].shape == (7, 8) and math.isfinite(float(collated[0]["position"].sum()))
    workers = DataLoader(
        RowDataset(shared_run, "mlp_out", 3, batch_rows=4, shuffle=True), batch_size=None, num_workers=2
    )
    seen = [key for batch in workers for key in zip(batch["request"], batch["position"].tolist())]
    assert len(seen) == 60 and set(seen) == {(name, row) for name in REQUESTS for row in range(5)}
