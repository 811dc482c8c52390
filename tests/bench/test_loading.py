"""`bench load`: every byte is counted, and a load is timed from its first byte to its last."""

from __future__ import annotations

import json

import pytest

from birkhoff.bench.loading import bench_load, read_rate
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from birkhoff.weights import open_checkpoint


def test_rows_count_the_bytes_of_the_files(tmp_path):
    synth(tmp_path / "tiny", "tiny")
    checkpoint = open_checkpoint(tmp_path / "tiny")
    stored = sum(path.stat().st_size for path in checkpoint.files)
    for threads in (1, 3):
        nbytes, seconds = read_rate(checkpoint.files, threads)
        assert nbytes == stored and seconds > 0
    rows = list(bench_load(str(tmp_path / "tiny"), "cpu", rounds=1))
    json.dumps(rows)
    assert [row["kind"] for row in rows] == ["read, first", "read", "read", "read", "load"]
    loaded = rows[-1]
    assert loaded["bytes"] == sum(ref.nbytes for ref in checkpoint.values())
    assert 0 < loaded["weights_s"] < loaded["total_s"] and loaded["gb_per_s"] > 0


@pytest.mark.parametrize(
    ("device", "rounds", "words"), [("gpu", 1, "device is 'gpu', expected 'auto'"), ("cpu", 0, "rounds is 0")]
)
def test_a_wrong_option_is_refused_before_anything_is_measured(device, rounds, words):
    with pytest.raises(OptionError, match=words):
        next(bench_load("nano", device, rounds))
