"""GGUF headers: hand-made malformed ones, each with its message, and random mutations: typed errors only."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
import time

import pytest

from birkhoff.convert.gguf_bytes import TensorRow
from birkhoff.errors import BirkhoffError, CheckpointError, TensorDtype, TensorShape
from birkhoff.weights import gguf_header
from birkhoff.weights.checkpoint import check_layout, open_checkpoint
from birkhoff.weights.gguf import header_from, open_gguf, read_header
from birkhoff.weights.gguf_header import TYPES, MalformedGGUF
from birkhoff.weights.gguf_keys import MetadataEntry
from tests.sizes import scaled
from tests.weights.gguf_files import head, raw_file, string, tensor_row, tiny_gguf

PAD = b"\0" * 64
KEY_U32 = struct.pack("<I", 4)
ROW = tensor_row("a", [32], 0, 0)


def array(inner: int, count: int) -> bytes:
    return struct.pack("<IIQ", 9, inner, count)


CORRUPT = {
    "magic": (head(magic=b"GGML"), "begins with b'GGML'"),
    "empty": (b"", "is cut short: the magic"),
    "version 1": (head(version=1), "has version 1, expected 2 or 3"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "counts cut": (b"GGUF" + struct.pack("<IQ", 3, 1), "is cut short: the key count"),
    "300,000 tensors": (head(tensors=300_000) + PAD, "announces 300000 tensors"),
    "2^63 - 1 tensors": (head(tensors=2**63 - 1), "announces 9223372036854775807 tensors"),
    "2^64 - 1 keys": (head(keys=2**64 - 1), "announces 18446744073709551615 keys"),
    "key name of 2^63 bytes": (head(keys=1) + struct.pack("<Q", 2**63), "for the name of key 0"),
    "key name cut": (head(keys=1) + struct.pack("<Q", 200), "is cut short: the name of key 0"),
    "key name not text": (head(keys=1) + string(b"\xff\xfe") + KEY_U32 + b"1234", "not UTF-8"),
    "key twice": (head(keys=2) + 2 * (string("k") + KEY_U32 + b"1234"), "has the key 'k' twice"),
    "unknown value type": (head(keys=1) + string("k") + struct.pack("<I", 77), "the value type 77"),
    "value cut": (head(keys=1) + string("k") + KEY_U32 + b"12", "is cut short: the value of 'k'"),
    "string of 2^62 bytes": (
        head(keys=1) + string("k") + struct.pack("<IQ", 8, 2**62),
        "more than the 67108864",
    ),
    "string cut": (
        head(keys=1) + string("k") + struct.pack("<IQ", 8, 1000),
        "is cut short: the value of 'k'",
    ),
    "array of arrays": (head(keys=1) + string("k") + array(9, 1), "has an array of type 9"),
    "array of 2^61 numbers": (
        head(keys=1) + string("k") + array(10, 2**61),
        "announces 18446744073709551616 bytes",
    ),
    "array cut": (head(keys=1) + string("k") + array(4, 1000), "is cut short: the value of 'k'"),
    "long array cut": (head(keys=1) + string("k") + array(4, 1_000_000), "is cut short: the value of 'k'"),
    "2^40 strings": (head(keys=1) + string("k") + array(8, 2**40), "announces 1099511627776 strings"),
    "alignment 3": (
        head(keys=1) + string("general.alignment") + KEY_U32 + struct.pack("<I", 3),
        "the alignment 3",
    ),
    "alignment 2^31": (
        head(keys=1) + string("general.alignment") + KEY_U32 + struct.pack("<I", 2**31),
        "power of two from 8",
    ),
    "alignment a text": (
        head(keys=1) + string("general.alignment") + struct.pack("<I", 8) + string("x"),
        "alignment 'x'",
    ),
    "tensor row cut": (head(tensors=1) + ROW[:-4], "is cut short: the offset of a"),
    "tensor name of 2^63 bytes": (head(tensors=1) + struct.pack("<Q", 2**63 - 1), "for the name of tensor 0"),
    "tensor name empty": (head(tensors=1) + tensor_row("", [32], 0, 0) + PAD, "a tensor named ''"),
    "tensor name unprintable": (head(tensors=1) + tensor_row("a\x00", [32], 0, 0) + PAD, "a tensor named"),
    "no dimensions": (head(tensors=1) + tensor_row("a", [], 0, 0) + PAD, "gives a 0 dimensions"),
    "nine dimensions": (head(tensors=1) + tensor_row("a", [1] * 9, 0, 0) + PAD, "gives a 9 dimensions"),
    "size zero": (head(tensors=1) + tensor_row("a", [32, 0], 0, 0) + PAD, "expected positive sizes"),
    "size wraps to zero": (
        head(tensors=1) + tensor_row("a", [2**32, 2**32], 0, 0) + PAD * 4,
        "its tensors need 73786976294838206",
    ),
    "size of 2^63": (head(tensors=1) + tensor_row("a", [2**63], 0, 0) + PAD, "expected positive sizes"),
    "unknown type": (head(tensors=1) + tensor_row("a", [32], 250, 0) + PAD, "stores a as type 250"),
    "half a block": (head(tensors=1) + tensor_row("a", [33], 8, 0) + PAD, "expected a multiple of 32"),
    "name twice": (head(tensors=2) + 2 * ROW + PAD * 8, "names the tensor a twice"),
    "overlap": (
        head(tensors=2) + ROW + tensor_row("b", [32], 0, 64) + PAD * 8,
        "overlaps the tensor before it",
    ),
    "hole": (head(tensors=2) + ROW + tensor_row("b", [32], 0, 256) + PAD * 8, "leaves a hole before it"),
    "offset 2^64 - 32": (head(tensors=1) + tensor_row("a", [32], 0, 2**64 - 32) + PAD * 4, "leaves a hole"),
    "tail cut": (head(tensors=1) + ROW + PAD, "is cut short: its tensors need"),
    "tail too long": (head(tensors=1) + ROW + PAD * 20, "is too long"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_every_lie_has_its_own_message(case, tmp_path):
    raw, words = CORRUPT[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    began = time.process_time()
    with pytest.raises(MalformedGGUF) as caught:
        gguf_header.read_header(str(path))
    assert words in str(caught.value) and time.process_time() - began < 5


def test_lies_arrive_typed_through_the_child(tmp_path):
    kinds = {"nine dimensions": TensorShape, "unknown type": TensorDtype, "overlap": CheckpointError}
    for case, kind in kinds.items():
        path = tmp_path / "model.gguf"
        path.write_bytes(CORRUPT[case][0])
        with pytest.raises(kind, match="Download it again"):
            open_checkpoint(path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_header(tmp_path / "nowhere.gguf")


def test_the_child_says_exactly_what_the_parser_says(tiny_path, tmp_path):
    path = tiny_gguf(tiny_path, tmp_path / "m.gguf")
    here = header_from(path, {"header": gguf_header.read_header(str(path))})
    assert read_header(path) == here and len(here.tensors) > 100
    done = subprocess.run(
        [sys.executable, "-I", "-S", gguf_header.__file__, str(path)], capture_output=True, text=True
    )
    assert json.loads(done.stdout)["header"]["tensors"][0][0] == here.tensors[0].name


def test_a_child_that_gives_up_is_an_error_and_not_a_hang(tiny_path, tmp_path, monkeypatch):
    from birkhoff.weights import gguf

    path = tiny_gguf(tiny_path, tmp_path / "m.gguf")
    monkeypatch.setitem(gguf.CHILD_LIMITS, "bytes", 8 << 20)  # too little to start: the child fails
    with pytest.raises(CheckpointError, match="within its limits"):
        read_header(path)
    monkeypatch.setattr(gguf, "DEADLINE_SECONDS", 0.001)
    with pytest.raises(CheckpointError, match="within its limits"):
        read_header(path)


def test_types_are_those_of_the_gguf_package():
    import gguf

    for index, (name, block, size) in TYPES.items():
        kind = gguf.GGMLQuantizationType(index)
        assert kind.name == name and gguf.GGML_QUANT_SIZES[kind] == (block, size)


def test_all_kinds_of_values_come_back(tmp_path):
    values = [
        MetadataEntry("u8", 0, 7),
        MetadataEntry("i8", 1, -7),
        MetadataEntry("u16", 2, 60000),
        MetadataEntry("i16", 3, -9),
        MetadataEntry("u32", 4, 2**31),
        MetadataEntry("i32", 5, -1),
        MetadataEntry("f32", 6, 0.5),
        MetadataEntry("yes", 7, True),
        MetadataEntry("text", 8, "多 words"),
        MetadataEntry("u64", 10, 2**63),
        MetadataEntry("i64", 11, -(2**62)),
        MetadataEntry("f64", 12, 1e300),
        MetadataEntry("names", (9, 8), ["a", "", "ö"]),
        MetadataEntry("few", (9, 5), [1, -2]),
        MetadataEntry("many", (9, 4), list(range(5000))),
        MetadataEntry("bytes", (9, 0), bytes(range(250)) * 20),
    ]
    path = raw_file(
        tmp_path / "v.gguf", values, [(TensorRow("t", "F32", (2, 3)), struct.pack("<6f", *range(6)))]
    )
    read = read_header(path)
    for key in values:
        assert list(read.keys[key.name]) == list(key.value) if isinstance(key.kind, tuple) else True
        assert isinstance(key.kind, tuple) or read.keys[key.name] == key.value
    assert read.tensors[0][1:4] == ("t", "F32", (2, 3))


def mutated(raw: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """Flip bits, replace integers, delete or duplicate ranges, mostly in the header."""
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(max(1, min(header_bytes, len(data) - 8)))
        what = rng.randrange(6)
        if len(data) < 16:
            break
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at] = rng.randrange(256)
        elif what == 2:
            at = at // 4 * 4
            data[at : at + 8] = rng.choice((0, 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
        elif what == 3:
            del data[at : at + rng.randrange(1, 64)]
        elif what == 4:
            data[at:at] = data[at : at + rng.randrange(1, 64)]
        else:
            del data[rng.randrange(len(data)) :]
    return bytes(data)


def test_mutated_headers_give_typed_errors_only(tiny_path, tmp_path):
    """In this process, some through the child; at full size 2,000, all through the child."""
    source = tiny_gguf(tiny_path, tmp_path / "m.gguf", mtp=False)
    raw = source.read_bytes()
    header_bytes = gguf_header.read_header(str(source))["data"]
    rng, path = random.Random(7), tmp_path / "x.gguf"
    refused = 0
    in_child, count = scaled(2000, 40), scaled(2000, 1000)
    for index in range(count):
        path.write_bytes(mutated(raw, header_bytes, rng))
        try:
            if index < in_child:
                open_checkpoint(path)
            else:
                _open_here(path)
        except BirkhoffError as error:
            refused += 1
            assert str(error)
    print(f"{count} mutations, {refused} refused, {in_child} through the child")
    assert refused > 0.75 * count


def _open_here(path):
    """Open a file with the parser in this process instead of a child."""

    def read(path):
        try:
            answer = {"header": gguf_header.read_header(str(path))}
        except MalformedGGUF as error:
            answer = {"kind": error.kind, "malformed": str(error)}
        return header_from(path, answer)

    opened = open_gguf(path, read=read)
    check_layout(opened.config, opened.refs)


def test_what_is_no_gguf_is_refused_by_its_bytes(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_gguf(tmp_path / "model.gguf")
