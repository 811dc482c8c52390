"""Random damage to safetensors files, indices and configs gives typed errors quickly."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch

from birkhoff.convert.convert import convert
from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, CheckpointError
from birkhoff.model.transformer import Transformer
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.safetensors import read_header
from birkhoff.weights.weight_loader import load_into
from tests.sizes import scaled

COUNT = scaled(3000, 1000)


def damaged(raw: bytes, rng: random.Random, reach: int) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        if len(data) < 16:
            break
        at = rng.randrange(min(reach, len(data) - 8))
        what = rng.randrange(7)
        if what == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            data[at] = rng.choice(b'{}[]",:0123456789eE-.\\\x00\xff')
        elif what == 2:
            data[:8] = rng.choice((0, 1, 2**32, 2**63 - 1, 2**64 - 1, len(data), reach)).to_bytes(8, "little")
        elif what == 3:
            del data[at : at + rng.randrange(1, 40)]
        elif what == 4:
            data[at:at] = data[at : at + rng.randrange(1, 40)]
        elif what == 5:
            data[at : at + 1] = rng.choice(
                (b"99999999999999999999", b"-1", b"1e400", b"null", b"NaN", b'"\\ud800"')
            )
        else:
            del data[rng.randrange(len(data)) :]
    return bytes(data)


def test_damaged_files_give_typed_errors_only(tmp_path):
    synth(tmp_path / "whole", "tiny", layers=2, mtp=False, shard_bytes=120_000, tokenizer=False)
    whole = tmp_path / "whole"
    names = sorted(path.name for path in whole.iterdir())
    raw = {name: (whole / name).read_bytes() for name in names}
    reach = {
        n: 8 + int.from_bytes(raw[n][:8], "little") if n.endswith("tensors") else len(raw[n]) for n in names
    }
    work = Path(shutil.copytree(whole, tmp_path / "work"))
    rng = random.Random(11)
    refused, slowest = 0, 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(COUNT):
        name = rng.choice(names)
        (work / name).write_bytes(damaged(raw[name], rng, reach[name]))
        began = time.process_time()
        try:
            open_checkpoint(work)
        except BirkhoffError as error:
            refused += 1
            assert len(str(error)) > 20
            assert name in str(error) or re.search(r"(layers\.\d|embed|head|norm)[\w.]*", str(error)), error
        slowest = max(slowest, time.process_time() - began)
        (work / name).write_bytes(raw[name])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{COUNT} damaged files, {refused} refused, slowest {1000 * slowest:.0f} ms, memory grew {grown:.0f} MB"
    )
    assert refused > COUNT * 0.8 and slowest < 5 and grown < 64
    open_checkpoint(work)


def test_a_bloated_header_is_refused_at_once(tmp_path):
    """300,000 empty tensors: each is well formed, none belongs to a model."""
    rows = ",".join(f'"t{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(300_000))
    text = ("{" + rows + "}").encode()
    (tmp_path / "bloated.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    began = time.process_time()
    try:
        read_header(tmp_path / "bloated.safetensors")
        raise AssertionError("a header of 300,000 rows was read")
    except CheckpointError as error:
        assert "more than" in str(error)
    assert time.process_time() - began < 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mutated") / "whole"
    synth(path, "tiny", layers=2, mtp=False, shard_bytes=120_000, tokenizer=False)
    return path


def filled(path: Path) -> None:
    """Open a checkpoint and read every number of it."""
    checkpoint = open_checkpoint(path)
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    load_into(model.allocate("cpu").destinations(), checkpoint)


def overwritten(file: Path, offset: int, data: bytes) -> bytes:
    """Overwrite bytes of a file; returns those that were there."""
    with open(file, "r+b") as out:
        out.seek(offset)
        before = out.read(len(data))
        out.seek(offset)
        out.write(data)
    return before


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_damaged_numbers_load_or_are_refused_with_file_and_tensor(kind, whole, tmp_path):
    """Headers stay intact: bytes of the data are overwritten with those of NaN, of infinity and of large ids."""
    if kind == "gguf":
        convert(whole, tmp_path / "m.gguf")
        files = [tmp_path / "m.gguf"]
    else:
        files = sorted(Path(shutil.copytree(whole, tmp_path / "m")).glob("*.safetensors"))
    path = files[0] if kind == "gguf" else tmp_path / "m"
    stored = [ref for ref in open_checkpoint(path).values() if ref.location is not None]
    dice, refused = random.Random(12), 0
    for _ in range(scaled(400, 60)):
        ref = dice.choice(stored)
        file, offset = ref.location
        bad = dice.choice((b"\xff" * 16, b"\x7f\x80\x80\x7f" * 4, b"\x00\x00\x80\x7f" * 4))[: ref.nbytes]
        before = overwritten(file, offset, bad)
        try:
            filled(path)
        except BirkhoffError as error:
            refused += 1
            assert ref.name.removesuffix("weight") in str(error) and file.name in str(error), error
        overwritten(file, offset, before)
    assert refused > 5
    filled(path)


def replaced(name: str, change):
    def damage(folder: Path) -> Path:
        (folder / name).unlink()
        change(folder / name)
        return folder

    return damage


def swapped(folder: Path) -> Path:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    both = first.read_bytes(), second.read_bytes()
    first.write_bytes(both[1])
    second.write_bytes(both[0])
    return folder


def beside(change):
    def damage(folder: Path) -> Path:
        change(folder / "model.gguf")
        return folder / "model.gguf"

    return damage


SHARD, INDEX = "model-00002-of-00004.safetensors", "model.safetensors.index.json"
PLACES = {
    "a link to nowhere": (
        replaced(SHARD, lambda path: path.symlink_to("/no/blob")),
        rf"{SHARD} .* link to /no/blob",
    ),
    "a link to itself": (
        replaced(SHARD, lambda path: path.symlink_to(path.name)),
        rf"{SHARD} .*Too many levels",
    ),
    "a link to a directory": (
        replaced(SHARD, lambda path: path.symlink_to("/")),
        rf"{SHARD} .*it is a directory",
    ),
    "a link without end": (
        replaced(SHARD, lambda path: path.symlink_to("/dev/zero")),
        rf"{SHARD} .*it is a device",
    ),
    "a pipe": (replaced(SHARD, os.mkfifo), rf"{SHARD} .*it is a FIFO"),
    "an empty shard": (replaced(SHARD, lambda path: path.touch()), rf"{SHARD} holds 0 bytes"),
    "no shard": (replaced(SHARD, lambda path: None), rf"1 of 4 shards .*{SHARD}"),
    "shards under each other's names": (swapped, r"model-00001-of-00004.safetensors holds \d+ tensors"),
    "an index that is a link to nowhere": (
        replaced(INDEX, lambda path: path.symlink_to("/no")),
        f"{INDEX} cannot be",
    ),
    "an index that is a pipe": (replaced(INDEX, os.mkfifo), f"{INDEX} .*it is a FIFO"),
    "a config that is a pipe": (replaced("config.json", os.mkfifo), r"config\.json .*it is a FIFO"),
    "a GGUF file that is a pipe": (beside(os.mkfifo), "model.gguf is neither a directory nor a regular file"),
    "a GGUF file without end": (
        beside(lambda path: path.symlink_to("/dev/zero")),
        "model.gguf is neither a directory nor a regular file",
    ),
    "a GGUF file that is a link to nowhere": (
        beside(lambda path: path.symlink_to("/no")),
        "model.gguf .* link to /no",
    ),
    "an empty GGUF file": (beside(lambda path: path.touch()), "model.gguf is cut short"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_is_no_file_is_refused_by_name_and_at_once(case, whole, tmp_path):
    damage, words = PLACES[case]
    path = damage(Path(shutil.copytree(whole, tmp_path / "copy")))
    began = time.process_time()
    with pytest.raises(BirkhoffError, match=words):
        open_checkpoint(path)
    assert time.process_time() - began < 5


def test_shards_may_be_links_to_files_elsewhere(whole, tmp_path):
    """As the hub cache keeps them."""
    folder = Path(shutil.copytree(whole, tmp_path / "links"))
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    filled(folder)
