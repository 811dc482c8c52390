"""Arbitrary bytes instead of captures: typed errors or correct rows, quickly, and never a large allocation."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from pathlib import Path

import pytest

from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.reader import iter_rows, read_packed, read_per_file, read_request, read_sharded
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureFileError
from tests.capture.disks import SoftDisk
from tests.capture.sample_chunks import SHAPES, bits, chunk
from tests.sizes import scaled

SITES = [("mhc_streams_pre_attn", 0), ("mhc_attn_res_mix", 1), ("mlp_in", 2), ("post_attn", 3)]
NUMBERS = [
    0,
    1,
    -1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    1.5,
    1e300,
    True,
    None,
    "1",
    [],
    {},
]
WORDS = [
    "",
    "x",
    "float32",
    "bfloat16",
    "fp8_e4m3",
    "float64",
    "../x",
    "\0",
    "é" * 300,
    7,
    None,
    [1],
    {"a": 1},
]


@pytest.fixture(scope="module")
def captures(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("mutated")
    with CaptureWriter(FileOptions(root, coalesce_max_bytes=0, num_shards=1), SoftDisk()) as files:
        for layout in ("packed", "per_file", "sharded"):
            files.begin(CaptureRequest(layout, layout, "run", layout))
            for start in (0, 3):
                for hook, layer in SITES:
                    files.append(chunk(layout, hook, layer, start, 3))
            assert files.finish(CaptureFinish(layout)).result(300).status == "ok"
    return root / "run"


def read(directory: Path, layout: str) -> dict:
    return read_sharded(directory) if layout == "sharded" else {layout: read_request(directory / layout)}


def mutated_json(document, chance: random.Random):
    """The same document with one change: a value, a key, a list, or a nesting."""
    slots = []

    def walk(node):
        if isinstance(node, (dict, list)):
            for key in node if isinstance(node, dict) else range(len(node)):
                slots.append((node, key))
                walk(node[key])

    walk(document)
    for _ in range(chance.randint(1, 3)):
        node, key = chance.choice(slots)
        choice = chance.random()
        if choice < 0.55:
            node[key] = chance.choice(NUMBERS + WORDS)
        elif choice < 0.7 and isinstance(node, dict):
            node.pop(key, None)
        elif choice < 0.8 and isinstance(node, dict):
            node[chance.choice(["entries", "dtype", "layout", "shape", "scale", "extra"])] = chance.choice(
                NUMBERS
            )
        elif isinstance(node, list) and node:
            node.extend(node[:1] * chance.randint(1, 40))
        else:
            node[key] = [node[key]] if key in node or isinstance(node, list) else 0
    return document


def mutated_bytes(raw: bytes, chance: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(chance.randint(1, 8)):
        offset, length = chance.randrange(len(data) + 1), chance.choice([0, 1, 1, 4, 40])
        data[offset : offset + length] = chance.randbytes(chance.choice([0, 1, 1, 4, 40]))
    return bytes(data[: chance.randrange(len(data) + 1)]) if chance.random() < 0.2 else bytes(data)


@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded"])
def test_mutated_sidecars_and_payloads(captures, layout):
    """After any change, reading raises a `CaptureFileError` or returns rows that match the checksums."""
    chance = random.Random(layout)
    directory = captures if layout == "sharded" else captures / layout
    files = sorted(
        path for path in directory.iterdir() if path.is_file() and path.suffix in (".json", ".bin")
    )
    saved = {path: path.read_bytes() for path in files}
    refused = accepted = 0
    slowest = most = 0.0
    tracemalloc.start()
    try:
        for _ in range(scaled(3000, 300)):
            path = chance.choice(files)
            if path.suffix == ".json" and chance.random() < 0.7:
                path.write_text(json.dumps(mutated_json(json.loads(saved[path]), chance)))
            else:
                path.write_bytes(mutated_bytes(saved[path], chance))
            tracemalloc.reset_peak()
            started = time.process_time()
            try:
                captures_read = read(captures, layout)
                accepted += 1
                check_rows(captures_read, layout)
            except CaptureFileError as error:
                refused += 1
                assert len(str(error)) < 2000
            slowest = max(slowest, time.process_time() - started)
            most = max(most, tracemalloc.get_traced_memory()[1])
            path.write_bytes(saved[path])
    finally:
        tracemalloc.stop()
    print(
        f"{layout}: {refused} refused, {accepted} read; slowest {slowest * 1e3:.0f} ms, most {most / 2**20:.1f} MiB"
    )
    assert refused > scaled(1000, 100) and slowest < 0.2 and most < 64 << 20


def check_rows(captures_read: dict, layout: str) -> None:
    """Rows that were read are rows that were written, unless a label or view was changed on purpose."""
    for entries in captures_read.values():
        for (hook, layer), entry in entries.items():
            known = [(h, n) for h, n in SITES if entry.dtype == SHAPES[h][0]]
            if (hook, layer) in known and entry.positions == list(range(len(entry.array))):
                truth = bits(layout, hook, layer, 0, 6).tobytes()
                assert entry.array.tobytes() in (
                    truth,
                    truth[: len(truth) // 2],
                    truth[len(truth) // 2 :],
                    b"",
                )


def sidecar(**changes) -> dict:
    entry = {"layer": 0, "hook": "post_attn", "offset": 0, "nbytes": 32, "shape": [2, 8], "dtype": "bfloat16"}
    return {"request_id": "x", "layout": "packed", "dtype": "bfloat16", "entries": [{**entry, **changes}]}


BAD = {
    "not an object": ([], "expected an object"),
    "entries missing": ({"layout": "packed"}, "layer"),
    "entries of another kind": ({"entries": {}}, "entries are"),
    "an entry of another kind": ({"entries": [3]}, "an entry is 3"),
    "negative offset": (sidecar(offset=-1), "offset"),
    "offset past the end": (sidecar(offset=1), "bytes 1 to 33"),
    "huge offset": (sidecar(offset=2**61), "bytes"),
    "offset past all numbers": (sidecar(offset=2**70), "offset"),
    "more bytes than the shape": (sidecar(nbytes=33), "33 bytes, expected 32"),
    "a shape that wraps around": (sidecar(shape=[2**32, 2**32], nbytes=0), "shape"),
    "a shape of three": (sidecar(shape=[1, 2, 8]), "shape"),
    "a width of nothing": (sidecar(shape=[16, 0], nbytes=0), "shape"),
    "rows as truth": (sidecar(shape=[True, 16]), "shape"),
    "a row shape of another size": (sidecar(row_shape=[3, 3]), "row_shape"),
    "a row shape too deep": (sidecar(row_shape=[1] * 9), "row_shape"),
    "an unknown dtype": (sidecar(dtype="int3"), "dtype"),
    "fp8 without scale": (sidecar(dtype="fp8_e4m3", nbytes=16), "scale"),
    "a scale that is no number": (sidecar(dtype="fp8_e4m3", nbytes=16, scale=[1, "x"]), "scale"),
    "too many positions": (sidecar(positions=[1, 2, 3]), "positions"),
    "positions that are no numbers": (sidecar(positions=[1, "2"]), "positions"),
    "too few token ids": (sidecar(token_ids=[1]), "token_ids"),
    "an unknown phase": (sidecar(phase="warm-up"), "phase"),
    "too few phases": (sidecar(phase=["decode"]), "phase"),
    "a sum too large": (sidecar(crc32=2**32), "crc32"),
    "a sum that is wrong": (sidecar(crc32=5), "checksum"),
    "axes that are no names": (sidecar(axes=[1, 2]), "axes"),
    "a hook that is no name": (sidecar(hook=["post_attn"]), "hook"),
    "a layer below zero": (sidecar(layer=-3), "layer"),
}


@pytest.mark.parametrize("name", BAD)
def test_each_kind_of_error_has_its_own_message(quick_path, name):
    document, word = BAD[name]
    (quick_path / "packed.bin").write_bytes(bytes(range(32)))
    (quick_path / "packed.json").write_text(json.dumps(document))
    for mmap in (False, True):
        with pytest.raises(CaptureFileError, match=word.replace("[", r"\[")):
            read_packed(quick_path, mmap=mmap)


RAW = {
    "empty": b"",
    "cut": b'{"entries": [',
    "NaN": b'{"entries": [], "dtype": NaN}',
    "not UTF-8": b'{"a": "\xff"}',
    "too deep": b"[" * 200_000,
    "a number of 10,000 digits": b'{"layer": ' + b"9" * 10_000 + b"}",
    "null bytes": b"\0" * 64,
}


@pytest.mark.parametrize("name", RAW)
def test_invalid_json_is_refused(quick_path, name):
    (quick_path / "packed.bin").write_bytes(b"")
    (quick_path / "packed.json").write_bytes(RAW[name])
    with pytest.raises(CaptureFileError, match="sidecar"):
        read_packed(quick_path)
    (quick_path / "0_x.bin").write_bytes(b"")
    (quick_path / "0_x.json").write_bytes(RAW[name])
    with pytest.raises(CaptureFileError):
        read_per_file(quick_path / "0_x.bin")


def test_entries_that_share_bytes_cannot_ask_for_more_than_the_file(quick_path):
    """A thousand entries that all refer to the same mebibyte."""
    (quick_path / "packed.bin").write_bytes(bytes(1 << 20))
    entry = {
        "layer": 0,
        "hook": "post_attn",
        "offset": 0,
        "nbytes": 1 << 20,
        "shape": [1 << 20, 1],
        "dtype": "uint8",
    }
    (quick_path / "packed.json").write_text(json.dumps({"dtype": "uint8", "entries": [entry] * 1000}))
    tracemalloc.start()
    with pytest.raises(CaptureFileError, match="claim more"):
        read_packed(quick_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_too_many_entries_are_refused_before_they_are_parsed(quick_path):
    (quick_path / "packed.bin").write_bytes(b"")
    with open(quick_path / "packed.json", "w") as file:
        file.write('{"dtype": "float32", "entries": [' + "0," * (1 << 20) + "0]}")
    started = time.process_time()
    with pytest.raises(CaptureFileError, match="up to 1048576"):
        read_packed(quick_path)
    assert time.process_time() - started < 5


def test_iterating_over_damaged_runs_raises_typed_errors(captures, quick_path):
    chance = random.Random(1)
    sidecar_path = captures / "packed/packed.json"
    saved = sidecar_path.read_bytes()
    refused = 0
    try:
        for _ in range(scaled(1000, 100)):
            sidecar_path.write_text(json.dumps(mutated_json(json.loads(saved), chance)))
            try:
                list(iter_rows(captures, "post_attn", 3, 2))
            except CaptureFileError:
                refused += 1
    finally:
        sidecar_path.write_bytes(saved)
    assert refused > scaled(300, 30)
