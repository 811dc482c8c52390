"""Readers: labels, joins, damage, and independence from torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.spec.dtypes import to_float32
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import (
    CaptureEntry,
    latest_per_position,
    read_packed,
    read_per_file,
    read_request,
    read_sharded,
    to_torch,
)
from birkhoff.capture.store.sidecar import CaptureFile
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureChecksum, CaptureFileError, OptionError
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import assert_is_prefix, bits, chunk, same_bits
from tests.sizes import scaled


def written(root: Path, rows: int = 6, sites=(("post_attn", 0), ("mhc_attn_res_mix", 1)), **options) -> Path:
    options.setdefault("coalesce_max_bytes", 0)
    with CaptureWriter(FileOptions(root, **options), SoftDisk()) as files:
        for start in range(0, rows, 2):
            for hook, layer in sites:
                files.append(chunk("a", hook, layer, start, 2))
        assert files.finish(CaptureFinish("a")).result(300).status == "ok"
    return root / "run/a" if options.get("default_layout") != "sharded" else root / "run"


def entry_of(positions: list[int] | None, **extra) -> CaptureEntry:
    count = 6 if positions is None else len(positions)
    return CaptureEntry(
        0, "post_attn", np.arange(2 * count, dtype="<u2").reshape(count, 2), "bfloat16", positions, **extra
    )


def test_t_cap_5_the_last_row_of_each_position_wins():
    entry = entry_of(
        [5, 6, 7, 6, 7, 8], token_ids=[1, 2, 3, 4, 5, 6], phases=["decode"] * 6, scale=np.arange(6.0)
    )
    latest = latest_per_position(entry)
    assert (
        latest.positions == [5, 6, 7, 8]
        and latest.token_ids == [1, 4, 5, 6]
        and latest.scale.tolist() == [0, 3, 4, 5]
    )
    assert latest.array.tolist() == [entry.array[row].tolist() for row in (0, 3, 4, 5)]
    assert len(entry.positions) == 6, "the entry itself is left as it was"


def test_t_cap_5_raises_without_positions():
    with pytest.raises(ValueError, match="positions"):
        latest_per_position(entry_of(None))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_t_cap_5_against_the_definition(positions):
    entry = entry_of(positions)
    latest = latest_per_position(entry)
    assert latest.positions == sorted(set(positions))
    for position, row in zip(latest.positions, latest.array):
        last = max(index for index, other in enumerate(positions) if other == position)
        assert row.tolist() == entry.array[last].tolist()


def test_speculative_rows_read_back_and_collapse(quick_path):
    """A draft is captured, rejected, and captured again: both rows are in the file, in the order of writing."""
    with CaptureWriter(FileOptions(quick_path), SoftDisk()) as files:
        for start, offset in ((0, 0), (4, 4), (5, 5), (5, 6)):  # position 5 twice
            part = chunk("a", "post_attn", 0, start, 1 if start else 4)
            files.append(Chunk(**{**vars(part), "row_offset": offset, "rows": part.rows + offset}))
        files.finish(CaptureFinish("a")).result(300)
    entry = read_request(quick_path / "run/a")["post_attn", 0]
    assert entry.positions == [0, 1, 2, 3, 4, 5, 5]
    latest = latest_per_position(entry)
    assert latest.positions == [0, 1, 2, 3, 4, 5]
    assert same_bits(latest.array[5], bits("a", "post_attn", 0, 5, 1)[0] + np.uint16(6))


@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded"])
def test_a_truncated_payload_names_the_bytes_it_needs(quick_path, layout):
    directory = written(quick_path, default_layout=layout)
    payload = next(directory.glob("0_post_attn.bin" if layout == "per_file" else "*.bin"))
    size = payload.stat().st_size
    os.truncate(payload, size - 1)
    with pytest.raises(ValueError, match=rf"{size}") as caught:
        read_sharded(directory) if layout == "sharded" else read_request(directory)
    assert isinstance(caught.value, CaptureFileError) and "bytes" in str(caught.value)
    payload.unlink()
    with pytest.raises(CaptureFileError, match="no such payload"):
        read_sharded(directory) if layout == "sharded" else read_request(directory)


def test_a_flipped_bit_is_found_named_and_left_out(quick_path):
    """Every flip in every record, and the others still read."""
    directory = written(quick_path, rows=6)
    payload = directory / "packed.bin"
    clean = payload.read_bytes()
    entries = json.loads((directory / "packed.json").read_text())["entries"]
    random = np.random.default_rng(0)
    for flip in range(scaled(10_000, 300)):
        index = int(random.integers(len(clean))) if flip else len(clean) - 1
        dirty = bytearray(clean)
        dirty[index] ^= 1 << int(random.integers(8))
        payload.write_bytes(dirty)
        hit = next(entry for entry in entries if entry["offset"] <= index < entry["offset"] + entry["nbytes"])
        with pytest.raises(
            CaptureChecksum, match=rf"{hit['hook']}\[{hit['layer']}\], bytes {hit['offset']} to"
        ):
            read_packed(directory)
        damaged: list[CaptureFileError] = []
        entries_read = read_packed(directory, on_damage=damaged.append)
        assert len(damaged) == 1
        lost = set(hit["positions"])
        for (hook, layer), entry in entries_read.items():
            is_hit = (hook, layer) == (hit["hook"], hit["layer"])
            assert entry.positions == [p for p in range(6) if not (is_hit and p in lost)]
            for row, position in zip(entry.array, entry.positions):
                assert row.tobytes() == bits("a", hook, layer, position, 1).tobytes()
    payload.write_bytes(clean)
    assert read_packed(directory, verify=True).keys() == entries_read.keys()


def test_a_flip_in_a_shard_or_a_file_loses_that_record_only(quick_path):
    for layout in ("sharded", "per_file"):
        directory = written(quick_path / layout, default_layout=layout)
        payload = next(directory.glob("*.bin")) if layout == "sharded" else directory / "0_post_attn.bin"
        raw = bytearray(payload.read_bytes())
        raw[3] ^= 16
        payload.write_bytes(raw)
        damaged: list[CaptureFileError] = []
        if layout == "sharded":
            entries_read = read_sharded(directory, on_damage=damaged.append)["a"]
            assert entries_read["post_attn", 0].positions == [2, 3, 4, 5]
        else:
            entries_read = read_request(directory, on_damage=damaged.append)
            assert set(entries_read) == {("mhc_attn_res_mix", 1)}
        assert_is_prefix(entries_read["mhc_attn_res_mix", 1], "a", 6)
        assert len(damaged) == 1 and "post_attn" in str(damaged[0])


def test_one_part_without_positions_removes_positions_of_the_whole(quick_path):
    directory = written(quick_path)
    sidecar = directory / "packed.json"
    index = json.loads(sidecar.read_text())
    del index["entries"][2]["positions"]
    sidecar.write_text(json.dumps(index))
    entries_read = read_packed(directory)
    assert (
        entries_read["post_attn", 0].positions is None and entries_read["post_attn", 0].token_ids is not None
    )
    assert entries_read["mhc_attn_res_mix", 1].positions == list(range(6))


def test_entries_are_joined_by_offset_whatever_their_order(quick_path):
    directory = written(quick_path)
    sidecar = directory / "packed.json"
    index = json.loads(sidecar.read_text())
    index["entries"].reverse()
    sidecar.write_text(json.dumps(index))
    for entry in read_packed(directory).values():
        assert_is_prefix(entry, "a", 6)


def test_paths_may_be_a_directory_a_sidecar_or_a_payload(quick_path):
    directory = written(quick_path)
    for path in (directory, directory / "packed.json", directory / "packed.bin"):
        assert_is_prefix(read_packed(path)["post_attn", 0], "a", 6)
    other = written(quick_path / "b", default_layout="per_file")
    for path in (other / "0_post_attn.json", other / "0_post_attn.bin"):
        assert_is_prefix(read_per_file(path), "a", 6)
    with pytest.raises(CaptureFileError, match="read_request"):
        read_per_file(directory / "packed.bin")


@pytest.mark.parametrize(
    ("make", "word"), [(lambda d: None, "no finished capture"), (os.rmdir, "cannot be listed")]
)
def test_missing_files_are_reported(quick_path, make, word):
    (quick_path / "x").mkdir()
    make(quick_path / "x")
    with pytest.raises(CaptureFileError, match=word):
        read_request(quick_path / "x")


def test_the_error_for_an_open_capture_names_the_repair(quick_path):
    files = CaptureWriter(FileOptions(quick_path, coalesce_max_bytes=0), SoftDisk())
    files.append(chunk("a", "post_attn", 0, 0, 2))
    with pytest.raises(CaptureFileError, match="repair"):
        read_request(quick_path / "run/a")
    with pytest.raises(CaptureFileError, match="repair"):
        read_packed(quick_path / "run/a")
    files.close()


def test_pipes_and_directories_in_place_of_files_do_not_hang(quick_path):
    directory = written(quick_path)
    (directory / "packed.bin").unlink()
    os.mkfifo(directory / "packed.bin")
    with pytest.raises(CaptureFileError, match="expected a regular file"):
        read_packed(directory)
    (directory / "packed.bin").unlink()
    (directory / "packed.bin").mkdir()
    with pytest.raises(CaptureFileError, match="expected a regular file"):
        read_packed(directory)


def test_names_of_transformer_lens(quick_path):
    sites = [("mhc_streams_pre_attn", 2), ("post_attn", 2), ("mhc_attn_res_mix", 0), ("mlp_in", 1)]
    directory = written(quick_path, sites=sites)
    entries_read = read_request(directory, names="transformer_lens")
    assert set(entries_read) == {
        "blocks.2.hook_in",
        "blocks.2.attn.hook_out",
        "blocks.0.attn_hc.hook_comb",
        "blocks.1.mlp_hc.hook_out",
    }
    assert_is_prefix(entries_read["blocks.2.hook_in"], "a", 6)
    with pytest.raises(OptionError, match="transformer_lens"):
        read_request(directory, names="nonsense")


def test_values_of_every_dtype():
    codes = np.arange(65536, dtype="<u2")
    actual = to_float32(codes, "bfloat16")
    expected = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert same_bits(actual, expected)
    codes = np.arange(256, dtype="u1").reshape(64, 4)
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(to_float32(codes, "fp8_e4m3"), expected, equal_nan=True)
    scale = np.linspace(0.5, 2, 64, dtype=np.float32)
    assert np.array_equal(to_float32(codes, "fp8_e4m3", scale), expected * scale[:, None], equal_nan=True)


@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_share_the_memory_of_the_array(quick_path, mmap):
    sites = [("post_attn", 0), ("mhc_attn_res_mix", 1), ("mlp_in", 2), ("mlp_out", 3)]
    directory = written(quick_path, rows=2, sites=sites)
    for entry in read_packed(directory, mmap=mmap).values():
        tensor = to_torch(entry)
        assert tensor.data_ptr() == entry.array.ctypes.data and tuple(tensor.shape) == entry.array.shape
        assert (
            str(tensor.dtype)
            .removeprefix("torch.")
            .startswith(entry.dtype.split("_")[0].replace("fp8", "float8"))
        )
        assert np.array_equal(tensor.float().numpy(), to_float32(entry.array, entry.dtype), equal_nan=True)
        tensor.view(torch.uint8).fill_(1)  # private to this process
    for entry in read_packed(directory, mmap=mmap).values():
        assert_is_prefix(entry, "a", 2)


def test_the_reader_needs_no_torch():
    code = (
        "import sys; sys.modules.update(torch=None, safetensors=None); import birkhoff.capture.store.reader as r, "
        "birkhoff.capture.store.repair, birkhoff.capture.sinks.dispatcher, birkhoff.capture.sinks.consumer_registry; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'safetensors', 'tokenizers')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0 and done.stdout.strip() == "['safetensors', 'torch']", done.stderr


def test_readers_see_one_capture_or_the_other_while_it_is_replaced(quick_path):
    """Snapshots: a reader that runs during many replacements gets whole captures, old or new, and typed refusals."""

    def replace_often() -> None:
        for turn in range(scaled(400, 60)):
            with CaptureWriter(FileOptions(quick_path, on_collision="overwrite"), SoftDisk()) as files:
                key = f"t{turn}"
                files.begin(CaptureRequest(key, "a", "run", meta={"turn": turn}))
                files.append(chunk(key, "post_attn", 0, 0, 1 + turn % 5))
                assert files.finish(CaptureFinish(key)).result(300).status == "ok"
        over.set()

    over = threading.Event()
    thread = threading.Thread(target=replace_often)
    thread.start()
    seen, refused = set(), 0
    while not over.is_set():
        try:
            entry = read_request(quick_path / "run/a")["post_attn", 0]
        except CaptureFileError as error:
            assert not isinstance(error, CaptureChecksum), "bytes of one capture with the sums of another"
            refused += 1
            continue
        turn = entry.meta["turn"]
        assert_is_prefix(entry, f"t{turn}", 1 + turn % 5)
        seen.add(turn)
    thread.join()
    assert len(seen) > 5


def test_deleting_a_capture_does_not_affect_its_readers(quick_path):
    directory = written(quick_path)
    with CaptureFile(directory / "packed.json") as file:
        for path in directory.iterdir():
            path.unlink()
        parts = [file.read(record).array for record in file.records if record.site == ("post_attn", 0)]
    assert same_bits(np.concatenate(parts), bits("a", "post_attn", 0, 0, 6))


def test_entries_are_keyed_by_hook_and_layer_and_found_in_the_old_order(quick_path):
    with CaptureWriter(FileOptions(quick_path)) as files:
        files.begin(CaptureRequest("a", "a", "run"))
        files.append(chunk("a", "post_attn", 3, 0, 2))
        files.finish(CaptureFinish("a", "stop", 2))
    entries = read_request(quick_path / "run/a")
    assert list(entries) == [("post_attn", 3)]
    assert entries["post_attn", 3] is entries[3, "post_attn"] is entries.get((3, "post_attn"))
    assert ("post_attn", 3) in entries and (3, "post_attn") in entries
    for missing in (("post_attn", 4), (4, "post_attn"), "post_attn", (3, "post_attn", 1)):
        assert missing not in entries and entries.get(missing) is None
        with pytest.raises(KeyError):
            entries[missing]
