"""Random damage to safetensors files, indices and configs gives typed errors quickly."""

from __future__ import annotations

import random
import resource
import shutil
import time
from pathlib import Path

from birkhoff.convert.synth import synth
from birkhoff.errors import BirkhoffError, CheckpointError
from birkhoff.weights.checkpoint import open_checkpoint
from birkhoff.weights.safetensors import read_header
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
