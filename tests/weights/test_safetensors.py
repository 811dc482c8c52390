"""The file format against the safetensors library in both directions, and damaged files."""

import json
import os
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from birkhoff.errors import BirkhoffError, CheckpointError, TensorDtype, TensorShape
from birkhoff.small_file import HEADER_BYTES
from birkhoff.weights.safetensors import TORCH_DTYPES, SafetensorsWriter, read_header, read_rows

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
declarations = st.dictionaries(
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=12).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), shapes),
    max_size=8,
)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    item = TORCH_DTYPES[dtype].itemsize
    raw = torch.randint(0, 256, (*shape, item), dtype=torch.uint8, generator=generator)
    return raw.reshape(-1).view(TORCH_DTYPES[dtype]).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@given(declared=declarations, seed=st.integers(0, 1000))
def test_what_we_write_the_library_reads(declared, seed, tmp_path_factory):
    path = tmp_path_factory.mktemp("write") / "a.safetensors"
    tensors = {
        name: random_tensor(dtype, shape, seed + i)
        for i, (name, (dtype, shape)) in enumerate(declared.items())
    }
    with SafetensorsWriter(path, declared, {"format": "pt"}) as writer:
        for name in sorted(tensors, reverse=True):  # any order
            writer.write(name, tensors[name])
    assert os.listdir(path.parent) == ["a.safetensors"]
    theirs = load_file(path)
    assert theirs.keys() == tensors.keys()
    for name, tensor in theirs.items():
        assert tuple(tensor.shape) == declared[name][1] and raw_bytes(tensor) == raw_bytes(tensors[name])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@given(declared=declarations, seed=st.integers(0, 1000))
def test_what_the_library_writes_we_read(declared, seed, tmp_path_factory):
    path = tmp_path_factory.mktemp("read") / "a.safetensors"
    tensors = {}
    for i, (name, (dtype, shape)) in enumerate(declared.items()):
        tensor = random_tensor(dtype, shape, seed + i)
        tensors[name] = tensor.view(torch.float8_e8m0fnu) if dtype == "F8_E8M0" else tensor
    save_file(tensors, path, {"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"} and header.tensors.keys() == tensors.keys()
    for name, entry in header.tensors.items():
        assert (entry.dtype, entry.shape) == declared[name]
        ours = read_rows(entry)
        assert ours.dtype == TORCH_DTYPES[entry.dtype] and raw_bytes(ours) == raw_bytes(tensors[name])


@given(rows=st.integers(1, 9), cuts=st.lists(st.integers(0, 9), max_size=4))
def test_rows_join_to_the_whole(rows, cuts, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "a.safetensors"
    whole = random_tensor("BF16", (rows, 3, 2), rows)
    borders = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    with SafetensorsWriter(path, {"first": ("F32", (5,)), "w": ("BF16", (rows, 3, 2))}) as writer:
        for start, stop in reversed(list(pairwise(borders))):
            writer.write("w", whole[start:stop], start)
        writer.write("first", torch.arange(5.0))
    entry = read_header(path).tensors["w"]
    pieces = [read_rows(entry, start, stop) for start, stop in pairwise(borders)]
    assert raw_bytes(torch.cat(pieces)) == raw_bytes(whole)


def test_a_scalar_and_an_unaligned_neighbour(tmp_path):
    path = tmp_path / "a.safetensors"
    with SafetensorsWriter(path, {"byte": ("U8", (3,)), "one": ("F32", ())}) as writer:
        writer.write("byte", torch.tensor([1, 2, 3], dtype=torch.uint8))
        writer.write("one", torch.tensor(7.0))
    entries = read_header(path).tensors
    assert entries["one"].offset % 4 == 0, "wide items come first, so they are aligned"
    assert read_rows(entries["one"]).item() == 7.0


def test_a_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "a.safetensors"
    with pytest.raises(CheckpointError, match="1 declared tensors were not fully written, first b"):
        with SafetensorsWriter(path, {"a": ("F32", (2,)), "b": ("F32", (2,))}) as writer:
            writer.write("a", torch.zeros(2))
    assert not os.listdir(tmp_path)
    with pytest.raises(ZeroDivisionError):
        with SafetensorsWriter(path, {"a": ("F32", (2,))}) as writer:
            assert os.listdir(tmp_path) == ["a.safetensors.partial"]
            raise ZeroDivisionError
    assert not os.listdir(tmp_path)


def test_the_writer_refuses_what_was_not_declared(tmp_path):
    with SafetensorsWriter(tmp_path / "a.safetensors", {"a": ("F32", (2, 3))}) as writer:
        with pytest.raises(TensorDtype, match=r"declared F32, got torch\.float16"):
            writer.write("a", torch.zeros(2, 3, dtype=torch.float16))
        for wrong, start in ((torch.zeros(2, 4), 0), (torch.zeros(2, 3), 1), (torch.zeros(3), 0)):
            with pytest.raises(TensorShape, match="declared"):
                writer.write("a", wrong, start)
        writer.write("a", torch.zeros(2, 3))


def file_of(tmp_path, header: object, payload: bytes = b"", length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + payload)
    return path


def row(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


GARBAGE = {
    "empty": (b"", 0, b"", "header"),
    "not json": (b"{nonsense", None, b"", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', None, b"", "not valid JSON"),
    "utf-16": ("{}".encode("utf-16"), None, b"", "not valid JSON"),
    "a list": ([], None, b"", "expected an object"),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None, b"", "not valid JSON"),
    "long number": (b'{"a": ' + b"9" * 5000 + b"}", None, b"", "not valid JSON"),
    "header beyond the file": ({}, 1000, b"", "cut short"),
    "header beyond the cap": ({}, HEADER_BYTES + 1, b"", "expected 2 to"),
    "header of 2^63": ({}, 2**63, b"", "expected 2 to"),
    "a name twice": (b'{"a": 1, "a": 2}', None, b"", "names 'a' twice"),
    "row without dtype": (
        {"a": {"shape": [2], "data_offsets": [0, 8]}},
        None,
        bytes(8),
        "not dtype, shape and",
    ),
    "row with more": ({"a": row(extra=1)}, None, bytes(8), "not dtype, shape and"),
    "row is a number": ({"a": 3}, None, bytes(8), "not dtype, shape and"),
    "unknown dtype": ({"a": row("F128")}, None, bytes(8), "stored as 'F128'"),
    "dtype is a list": ({"a": row(["F32"])}, None, bytes(8), "expected one of"),
    "negative size": ({"a": row(shape=(-2,))}, None, bytes(8), "whole numbers"),
    "size is a float": ({"a": row(shape=(2.0,))}, None, bytes(8), "whole numbers"),
    "size is true": ({"a": row(shape=(True, 2))}, None, bytes(8), "whole numbers"),
    "too many axes": ({"a": row(shape=(1,) * 9 + (2,))}, None, bytes(8), "whole numbers"),
    "huge product": ({"a": row(shape=(2**62, 2**62))}, None, bytes(8), "has 8 bytes, expected"),
    "shape and bytes differ": ({"a": row(shape=(3,))}, None, bytes(8), "has 8 bytes, expected 12"),
    "descending offsets": ({"a": row(offsets=(8, 0))}, None, bytes(8), "ascending"),
    "three offsets": ({"a": row(offsets=(0, 8, 8))}, None, bytes(8), "ascending"),
    "overlap": ({"a": row(), "b": row(offsets=(4, 12))}, None, bytes(12), "overlaps"),
    "same place": ({"a": row(), "b": row()}, None, bytes(8), "overlaps"),
    "gap": ({"a": row(), "b": row(offsets=(12, 20))}, None, bytes(20), "gap"),
    "late start": ({"a": row(offsets=(8, 16))}, None, bytes(16), "gap"),
    "payload cut short": ({"a": row()}, None, bytes(7), "cut short"),
    "payload too long": ({"a": row()}, None, bytes(9), "too long"),
    "payload without tensors": ({}, None, bytes(1), "too long"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, None, b"", "map of strings"),
    "metadata is a list": ({"__metadata__": ["a"]}, None, b"", "map of strings"),
    "unprintable name": ({"a\n": row()}, None, bytes(8), "damaged"),
    "half a surrogate": (
        b'{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        None,
        bytes(8),
        "damaged",
    ),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_garbage_is_refused_with_the_reason(case, tmp_path):
    header, length, payload, reason = GARBAGE[case]
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_header(file_of(tmp_path, header, payload, length))
    assert "bad.safetensors" in str(caught.value)


def test_missing_files_directories_and_stubs_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is missing"):
        read_header(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)
    (tmp_path / "stub.safetensors").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="7 bytes"):
        read_header(tmp_path / "stub.safetensors")


@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_changed_byte_or_a_cut_never_escapes(position, value, cut, tmp_path_factory):
    """A damaged header still describes the file exactly, or raises our error; we accept nothing the library rejects."""
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    save_file({"first.weight": torch.zeros(4, 3), "second.scale": torch.zeros(7, dtype=torch.uint8)}, path)
    raw = bytearray(path.read_bytes())
    raw[position % len(raw)] = value
    path.write_bytes(raw if cut % 2 else raw[: cut % len(raw)])
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
        theirs = True
    except SafetensorError:
        theirs = False
    try:
        for entry in read_header(path).tensors.values():
            read_rows(entry)
        assert theirs, "we accept what the library refuses"
    except BirkhoffError:
        pass


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    entry = read_header(path).tensors["a"]
    os.truncate(path, path.stat().st_size - 50)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_rows(entry)
