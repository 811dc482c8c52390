"""Files of a capture in three layouts, read by this package and by a reader of the original format."""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.open_file import MAX_ENTRIES, OpenFile, RequestState
from birkhoff.capture.store.reader import read_packed, read_per_file, read_request, read_sharded
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureWriteError, OptionError
from tests.capture import foreign
from tests.capture.disks import SlowDisk, SoftDisk
from tests.capture.sample_chunks import SHAPES, assert_is_prefix, bits, chunk, same_bits

LAYOUTS = ("per_file", "packed", "sharded")
SITES = [
    (hook, layer) for hook in ("mhc_streams_pre_attn", "mhc_attn_res_mix", "mlp_out") for layer in (0, 5)
]


def writer(root: Path, **options) -> CaptureWriter:
    return CaptureWriter(FileOptions(root, **options), options.pop("disk", None) or SoftDisk())


def capture(files: CaptureWriter, request: str, rows: int = 7, sites=SITES, step: int = 2, **extra) -> None:
    """A prompt and some decoded tokens, `step` rows at a time."""
    for start in range(0, rows, step):
        for hook, layer in sites:
            files.append(chunk(request, hook, layer, start, min(step, rows - start), **extra))


def finished(files: CaptureWriter, request: str, reason: str = "stop"):
    return files.finish(CaptureFinish(request, reason, 4)).result(300)


def read_back(root: Path, layout: str, request: str):
    if layout == "sharded":
        return read_sharded(root / "run")[request]
    return read_request(root / "run" / request)


@pytest.mark.parametrize("coalesce", [0, 300, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_come_back_bit_for_bit_with_their_labels(quick_path, layout, coalesce):
    with writer(quick_path, default_layout=layout, coalesce_max_bytes=coalesce) as files:
        for request in ("a", "b"):
            capture(files, request)
        results = [finished(files, request) for request in ("a", "b")]
    assert [result.status for result in results] == ["ok", "ok"]
    assert all(
        result.rows == 7 * len(SITES) and result.keys == len(SITES) and result.durable for result in results
    )
    for request in ("a", "b"):
        entries = read_back(quick_path, layout, request)
        assert set(entries) == set(SITES)
        for entry in entries.values():
            assert_is_prefix(entry, request, 7)
            assert entry.phases == ["prefill"] * 4 + ["decode"] * 3
            assert entry.axes == (["from", "to"] if entry.hook == "mhc_attn_res_mix" else None)
            assert (
                entry.meta["finish_reason"] == "stop"
                and entry.meta["prompt_len"] == 4
                and entry.meta["complete"]
            )
    assert not list(quick_path.rglob("*.tmp")) and not list(quick_path.rglob("*.journal"))


def test_t_cap_4_mixed_dtypes_in_one_packed_file_and_old_sidecars(quick_path):
    """bf16 streams and fp32 coefficients share a file; without the new fields the same bytes read the same."""
    sites = [("mhc_streams_pre_attn", 3), ("mhc_attn_res_mix", 3)]
    with writer(quick_path, coalesce_max_bytes=200) as files:
        capture(files, "a", 9, sites, step=1)
        assert finished(files, "a").status == "ok"
    directory = quick_path / "run" / "a"
    expected = read_packed(directory)
    assert {entry.dtype for entry in expected.values()} == {"bfloat16", "float32"}
    for entry in expected.values():
        assert_is_prefix(entry, "a", 9)
    index = json.loads((directory / "packed.json").read_text())
    assert len(index["entries"]) > len(sites), "several entries per site, or joining is not tested"
    old = {name: index[name] for name in ("request_id", "layout", "dtype")}
    base = ("layer", "hook", "offset", "nbytes", "shape")
    for fields in (("dtype", "row_shape", "positions"), ("dtype", "row_shape"), ("dtype",)):
        old["entries"] = [
            {name: entry[name] for name in (*base, *fields) if name in entry} for entry in index["entries"]
        ]
        (directory / "packed.json").write_text(json.dumps(old))
        for address, entry in read_packed(directory).items():
            flat = (
                entry.array if "row_shape" in fields else entry.array.reshape(expected[address].array.shape)
            )
            assert entry.array.ndim == (3 if "row_shape" in fields else 2)
            assert same_bits(flat, expected[address].array) and entry.dtype == expected[address].dtype
            assert entry.positions == (expected[address].positions if "positions" in fields else None)
            assert entry.token_ids is None and entry.phases is None and entry.axes is None
    # One dtype for the whole file, as in files from before mixed widths.
    old["entries"] = [
        {name: entry[name] for name in base} for entry in index["entries"] if entry["dtype"] == "bfloat16"
    ]
    old["dtype"] = "bfloat16"
    (directory / "packed.json").write_text(json.dumps(old))
    (entry,) = read_packed(directory).values()
    assert entry.dtype == "bfloat16" and same_bits(
        entry.array.reshape(-1, 4, 6), expected[3, entry.hook].array
    )


def test_a_per_file_sidecar_without_dtype_is_float32(quick_path):
    rows = np.arange(12, dtype="<f4").reshape(3, 4)
    (quick_path / "7_post_mlp.bin").write_bytes(rows.tobytes())
    (quick_path / "7_post_mlp.json").write_text(
        '{"request_id": "x", "layer": 7, "hook": "post_mlp", "shape": [3, 4]}'
    )
    entry = read_per_file(quick_path / "7_post_mlp.bin")
    assert entry.dtype == "float32" and same_bits(entry.array, rows) and entry.positions is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_of_the_old_format_reads_our_files(quick_path, layout):
    options = {"default_layout": layout, "coalesce_max_bytes": 500, "num_shards": 2, "shard_max_bytes": 1500}
    with writer(quick_path, **options) as files:
        for request in ("a", "b", "c"):
            capture(files, request, 11)
        for request in ("a", "b", "c"):
            assert finished(files, request).status == "ok"
    if layout == "sharded":
        entries_read = foreign.sharded(quick_path / "run")
        assert len(list(quick_path.rglob("shard-*.bin"))) > 2, (
            "shards must have rotated for this to test joining"
        )
    elif layout == "packed":
        entries_read = {
            key: value for name in "abc" for key, value in foreign.packed(quick_path / "run" / name).items()
        }
    else:
        entries_read = {}
        for payload in quick_path.rglob("*.bin"):
            (layer, hook), rows, positions = foreign.per_file(payload)
            entries_read[payload.parent.name, layer, hook] = (rows, positions)
    assert set(entries_read) == {(request, layer, hook) for request in "abc" for hook, layer in SITES}
    for (request, layer, hook), (rows, positions) in entries_read.items():
        assert same_bits(rows, bits(request, hook, layer, 0, 11).reshape(11, *SHAPES[hook][1]))
        assert positions == list(range(11))


def test_the_sidecar_has_the_fields_of_the_format(quick_path):
    with writer(quick_path) as files:
        meta = {"model": "nano", "steering_hash": "ab12", "capture_point": "before"}
        files.begin(CaptureRequest("key", "probe/1", "my tag", meta=meta))
        files.append(chunk("key", "mhc_attn_res_mix", 2, 0, 3))
        files.append(chunk("key", "mlp_in", 2, 0, 3))
        result = finished(files, "key")
    assert result.id == "my_tag/probe_1" and result.paths == ("my_tag/probe_1/packed.bin",)
    payload = (quick_path / result.paths[0]).read_bytes()
    assert hashlib.sha256(payload).hexdigest() == result.sha256[result.paths[0]] and result.bytes == len(
        payload
    )
    index = json.loads((quick_path / result.paths[0]).with_suffix(".json").read_text())
    facts = {
        name: value for name, value in index.items() if name not in ("entries", "write_id", "created_at")
    }
    assert facts == {
        "request_id": "probe/1",
        "tag": "my tag",
        "layout": "packed",
        "dtype": "float32",
        "format_version": 1,
        "finish_reason": "stop",
        "prompt_len": 4,
        "complete": True,
        "rows": 6,
        **meta,
    }
    mix, fp8 = index["entries"]
    assert mix["axes"] == ["from", "to"] and mix["row_shape"] == [4, 4] and mix["phase"] == "prefill"
    assert fp8["dtype"] == "fp8_e4m3" and len(fp8["scale"]) == 3 and "row_shape" not in fp8
    for entry in (mix, fp8):
        assert entry["crc32"] == zlib.crc32(payload[entry["offset"] : entry["offset"] + entry["nbytes"]])
        assert entry["positions"] == [0, 1, 2] and len(entry["token_ids"]) == 3


def test_many_small_steps_become_one_entry_per_site(quick_path):
    with writer(quick_path) as files:
        capture(files, "a", 300, SITES[:2], step=1)
        finished(files, "a")
    index = json.loads((quick_path / "run/a/packed.json").read_text())
    assert len(index["entries"]) == 2 and index["entries"][0]["steps"] == [0, 299]


def test_a_gap_in_the_rows_is_a_new_entry(quick_path):
    with writer(quick_path) as files:
        for start in (0, 2, 6):  # rows 4 and 5 were dropped earlier
            files.append(chunk("a", "post_attn", 0, start, 2))
        finished(files, "a")
    index = json.loads((quick_path / "run/a/packed.json").read_text())
    assert [(entry["row_offset"], entry["shape"][0]) for entry in index["entries"]] == [(0, 4), (6, 2)]
    assert read_packed(quick_path / "run/a")["post_attn", 0].positions == [0, 1, 2, 3, 6, 7]


def test_a_chunk_larger_than_an_entry_is_cut(quick_path):
    rows = 70_000
    big = Chunk(
        "a",
        "run",
        "post_attn",
        0,
        np.arange(rows, dtype=np.float32).reshape(rows, 1),
        "float32",
        (1,),
        range(rows),
        np.arange(rows),
        "p" * rows,
    )
    with writer(quick_path) as files:
        files.append(big)
        assert finished(files, "a").rows == rows
    index = json.loads((quick_path / "run/a/packed.json").read_text())
    assert [entry["shape"][0] for entry in index["entries"]] == [65536, rows - 65536]
    entry = read_packed(quick_path / "run/a")["post_attn", 0]
    assert same_bits(entry.array, big.rows) and entry.positions == list(range(rows)) == entry.token_ids


def test_a_long_capture_waits_longer_between_entries(quick_path):
    """Readers accept a million entries of a file; halfway there, sixteen times as many rows go into each."""
    header = {"layout": "packed", "request_id": "a", "tag": "run", "replace": False}
    sizes = {}
    for num_entries in (0, MAX_ENTRIES // 2):
        directory = quick_path / str(num_entries)
        directory.mkdir()
        file = OpenFile(
            SoftDisk(),
            str(quick_path),
            str(num_entries),
            "packed",
            header,
            sync=True,
            atomic=True,
            coalesce_bytes=20_000,
            fd_cache_size=4,
            pool=ThreadPoolExecutor(1),
        )
        file.num_entries = num_entries
        state = RequestState(CaptureRequest("a", "a", "run"), "packed")
        for start in range(2000):
            file.append(state, chunk("a", "post_attn", 0, start, 1))
        file.flush()
        sizes[num_entries] = 2000 / (file.num_entries - num_entries)
        file.close()
    assert sizes[MAX_ENTRIES // 2] > 10 * sizes[0] > 100


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_no_token_have_no_labels(quick_path, layout):
    mean = Chunk(
        "a", "run", "post_attn", 1, bits("a", "post_attn", 1, 0, 1), "bfloat16", (8,), None, None, None
    )
    with writer(quick_path, default_layout=layout) as files:
        files.append(mean)
        assert finished(files, "a").status == "ok"
    entry = read_back(quick_path, layout, "a")["post_attn", 1]
    assert same_bits(entry.array, mean.rows) and entry.positions is entry.token_ids is entry.phases is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_labelled_and_unlabelled_rows_of_one_site_are_separate_entries(quick_path, layout):
    """Consecutive rows of different kinds become two entries, and no label is put on a wrong row."""
    with writer(quick_path, default_layout=layout) as files:
        files.append(chunk("a", "post_attn", 1, 0, 2))
        files.append(
            Chunk(**{**vars(chunk("a", "post_attn", 1, 2, 2)), "positions": None, "token_ids": None})
        )
        files.append(chunk("a", "mlp_out", 1, 0, 2))
        assert finished(files, "a").status == "ok"
    entry = read_back(quick_path, layout, "a")["post_attn", 1]
    assert (
        same_bits(entry.array, bits("a", "post_attn", 1, 0, 4)) and entry.positions is entry.token_ids is None
    )
    assert entry.phases == ["prefill"] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_without_rows_is_an_empty_capture(quick_path, layout):
    with writer(quick_path, default_layout=layout) as files:
        files.begin(CaptureRequest("a", "a", "run"))
        result = finished(files, "a")
    assert result.status == "ok" and result.rows == 0
    if layout == "packed":
        assert read_request(quick_path / "run/a") == {} and result.paths == ("run/a/packed.bin",)
    if layout == "sharded":
        assert read_sharded(quick_path / "run") == {}


@pytest.mark.parametrize("layout", ("per_file", "packed"))
def test_nothing_is_visible_before_it_is_finished(quick_path, layout):
    with writer(quick_path, default_layout=layout, coalesce_max_bytes=0) as files:
        capture(files, "a")
        assert not list(quick_path.rglob("*.json")) and not list(quick_path.rglob("*.bin"))
        assert list(quick_path.rglob("*.bin.tmp")) and list(quick_path.rglob("*.journal"))
        finished(files, "a")
        assert list(quick_path.rglob("*.json")) and not list(quick_path.rglob("*.tmp"))


def test_shards_are_visible_when_sealed_and_not_before(quick_path):
    with writer(quick_path, default_layout="sharded") as files:
        capture(files, "a")
        result = finished(files, "a")
        assert result.status == "ok" and result.durable and read_sharded(quick_path / "run") == {}
        files.seal()
        assert set(read_sharded(quick_path / "run")) == {"a"}
        capture(files, "b")
        finished(files, "b")
    assert set(read_sharded(quick_path / "run")) == {"a", "b"}
    assert set(read_sharded(quick_path / "run", requests=["b"])) == {"b"}
    for path, digest in result.sha256.items():
        assert hashlib.sha256((quick_path / path).read_bytes()).hexdigest() == digest  # alone in its shard


def test_a_shard_that_fills_up_in_the_middle_of_a_request_is_continued(quick_path):
    with writer(
        quick_path, default_layout="sharded", num_shards=1, shard_max_bytes=2000, coalesce_max_bytes=0
    ) as files:
        capture(files, "a", 40)
        result = finished(files, "a")
    shards = sorted(quick_path.rglob("shard-*.json"))
    assert len(shards) > 3 and [json.loads(path.read_text())["seq"] for path in shards] == list(
        range(len(shards))
    )
    assert result.status == "ok" and len(result.paths) >= len(shards) - 1
    entries = read_sharded(quick_path / "run")["a"]
    for entry in entries.values():
        assert_is_prefix(entry, "a", 40)
        assert entry.meta["complete"] is True
    shards[1].unlink()
    assert read_sharded(quick_path / "run")["a"]["mlp_out", 0].meta["complete"] is False, (
        "a missing shard is noticed"
    )


def test_the_next_run_continues_the_numbers_of_the_shards(quick_path):
    for request in ("a", "b"):
        with writer(quick_path, default_layout="sharded", num_shards=1) as files:
            capture(files, request)
            finished(files, request)
    assert [path.name for path in sorted(quick_path.rglob("*.bin"))] == [
        "shard-000-000000.bin",
        "shard-000-000001.bin",
    ]
    assert set(read_sharded(quick_path / "run")) == {"a", "b"}


def test_open_shards_are_limited(quick_path):
    disk = SoftDisk()
    with CaptureWriter(FileOptions(quick_path, default_layout="sharded", fd_cache_size=6), disk) as files:
        for index in range(12):
            capture(files, f"r{index}", 3, SITES[:1], tag=f"tag{index}")
            finished(files, f"r{index}")
            assert len(list(quick_path.rglob("*.journal"))) <= 4
    assert len(list(quick_path.rglob("shard-*.json"))) == 12


def test_per_file_captures_of_more_sites_than_descriptors(quick_path):
    sites = [("post_attn", layer) for layer in range(40)]
    with writer(quick_path, default_layout="per_file", fd_cache_size=3, coalesce_max_bytes=0) as files:
        capture(files, "a", 6, sites)
        assert finished(files, "a").status == "ok"
    entries = read_request(quick_path / "run/a")
    assert len(entries) == 40
    for entry in entries.values():
        assert_is_prefix(entry, "a", 6)


def test_pipeline_stages_share_a_request(quick_path):
    for layout in LAYOUTS:
        root = quick_path / layout
        stages = [writer(root, default_layout=layout, pp_rank=rank, pp_size=2) for rank in (0, 1)]
        for rank, files in enumerate(stages):
            capture(files, "a", sites=[("post_attn", 2 * rank), ("mlp_out", 2 * rank + 1)])
        for files in stages:
            assert finished(files, "a").status == "ok"
            files.close()
        names = {path.name for path in root.rglob("*.bin")}
        assert (
            names
            == {
                "packed": {"packed-pp00.bin", "packed-pp01.bin"},
                "sharded": {"shard-pp00-003-000000.bin", "shard-pp01-003-000000.bin"},
                "per_file": {"0_post_attn.bin", "1_mlp_out.bin", "2_post_attn.bin", "3_mlp_out.bin"},
            }[layout]
        )
        entries = read_back(root, layout, "a")
        assert {layer for _, layer in entries} == {0, 1, 2, 3}
        for entry in entries.values():
            assert_is_prefix(entry, "a", 7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_atomic_publishing_the_sidecar_still_comes_last(quick_path, layout):
    with writer(quick_path, default_layout=layout, atomic_publish=False, coalesce_max_bytes=0) as files:
        capture(files, "a")
        assert list(quick_path.rglob("*.bin")) and not list(quick_path.rglob("*.json"))
        assert finished(files, "a").status == "ok"
    for entry in read_back(quick_path, layout, "a").values():
        assert_is_prefix(entry, "a", 7)


def test_a_result_reports_that_nothing_was_synced(quick_path):
    disk = SoftDisk()
    with CaptureWriter(FileOptions(quick_path, fsync=False), disk) as files:
        capture(files, "a")
        result = finished(files, "a")
    assert result.status == "ok" and result.durable is False
    assert disk.calls["fsync"] == disk.calls["sync_directory"] == 0


def test_requests_that_end_together_share_their_syncs(quick_path):
    disk, count = SlowDisk(0.02), 40
    with CaptureWriter(FileOptions(quick_path, default_layout="sharded", num_shards=1), disk) as files:
        capture(files, "first", 2, SITES[:1])
        finished(files, "first")
        before, rounds = disk.calls["fsync"], files.rounds
        for index in range(count):
            capture(files, f"r{index}", 2, SITES[:1])
        futures = [files.finish(CaptureFinish(f"r{index}")) for index in range(count)]
        assert all(future.result(300).status == "ok" for future in futures)
        assert files.rounds - rounds <= 3 and disk.calls["fsync"] - before <= 6, (
            "two syncs a round, three rounds"
        )


def test_requests_from_several_threads(quick_path):
    def work(worker: int) -> None:
        for round_index in range(5):
            request = f"r{worker}-{round_index}"
            files.begin(CaptureRequest(request, request, "run", layout=LAYOUTS[round_index % 3]))
            capture(files, request, 6)
            results[request] = finished(files, request)

    results: dict = {}
    with writer(quick_path, num_shards=2, shard_max_bytes=2000, coalesce_max_bytes=400) as files:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 30 and all(result.status == "ok" for result in results.values())
    sharded = read_sharded(quick_path / "run")
    for worker in range(6):
        for round_index in range(5):
            request = f"r{worker}-{round_index}"
            entries = sharded[request] if round_index % 3 == 2 else read_request(quick_path / "run" / request)
            assert len(entries) == len(SITES)
            for entry in entries.values():
                assert_is_prefix(entry, request, 6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_closing_keeps_unfinished_captures_and_reports_them(quick_path, layout):
    files = writer(quick_path, default_layout=layout)
    capture(files, "a", 5)
    files.close()
    for entry in read_back(quick_path, layout, "a").values():
        assert_is_prefix(entry, "a", 5)
        assert entry.meta["complete"] is False
    with pytest.raises(CaptureWriteError, match="closed"):
        files.begin(CaptureRequest("b", "b", "run"))


def test_a_bad_chunk_loses_its_own_rows_only(quick_path):
    with writer(quick_path) as files:
        files.append(chunk("a", "post_attn", 0, 0, 2))
        bad = chunk("a", "mlp_out", 0, 0, 2)
        files.append(Chunk(**{**vars(bad), "positions": [1]}))
        result = finished(files, "a")
    assert result.status == "partial_error" and result.rows == 2 and result.dropped_rows == 2
    assert "1 positions for 2 rows" in result.error
    assert set(read_request(quick_path / "run/a")) == {("post_attn", 0)}


@pytest.mark.parametrize(
    ("facts", "word"), [({"x": float("nan")}, "JSON"), ({"x": object()}, "JSON"), ({"entries": 1}, "entries")]
)
def test_metadata_that_a_sidecar_cannot_hold_fails_its_request_only(quick_path, facts, word):
    with writer(quick_path, default_layout="sharded") as files:
        files.begin(CaptureRequest("a", "a", "run", meta=facts))
        capture(files, "a")
        capture(files, "b")
        bad, good = finished(files, "a"), finished(files, "b")
    assert bad.status == "error" and word in bad.error and good.status == "ok"
    assert set(read_sharded(quick_path / "run")) == {"b"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"default_layout": "zip"},
        {"on_collision": "maybe"},
        {"num_shards": 0},
        {"num_shards": 2000},
        {"fsync": 1},
        {"shard_max_bytes": True},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": "30"},
        {"root": ""},
        {"pp_rank": 2, "pp_size": 2},
        {"writer_threads": -1},
    ],
)
def test_options_are_checked_when_given(quick_path, wrong):
    with pytest.raises(OptionError):
        FileOptions(**{"root": quick_path, **wrong})
