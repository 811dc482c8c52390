"""The capture benchmark: it runs at a small size, counts stored bytes, and its rows describe their setting."""

from __future__ import annotations

import json

import pytest

from birkhoff.bench.interp import CONTENDERS, CapturingEngine, InterpSetting, UntappedRunner, bench_interp
from birkhoff.capture.spec.request import Capture
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from tests.cli.conftest import birkhoff as command

SMALL = InterpSetting(prompt_tokens=12, steps=3, rounds=2, batch=2, threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny"
    synth(path, "tiny")
    return path


@pytest.fixture(scope="module")
def rows(tiny, tmp_path_factory):
    directory, progress = tmp_path_factory.mktemp("disk"), []
    rows = list(bench_interp(tiny, SMALL, disk=directory, progress=lambda *step: progress.append(step)))
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert not list(directory.iterdir())  # no file is left
    return rows


def test_every_contender_has_a_row_for_each_phase(rows):
    cost = [(row["phase"], row["contender"]) for row in rows if row["kind"] == "cost"]
    assert cost == [(phase, name) for phase in ("prefill", "decode") for name in CONTENDERS]
    for row in rows:
        json.dumps(row)
        assert row["bench"] == "interp" and row["machine"]["cores"] and row["batch"] == 2 and "commit" in row
        if row["kind"] == "cost":
            assert 0 < row["ms"]["p10"] <= row["ms"]["median"] <= row["ms"]["p90"]
            assert row["times_plain"]["median"] > 0
    plain = [row["times_plain"] for row in rows if row.get("contender") == "plain" and row["kind"] == "cost"]
    assert plain == [{"median": 1.0, "p10": 1.0, "p90": 1.0}] * 2


def test_stored_bytes_cover_every_stream_of_every_token(rows):
    files, ready = [row for row in rows if row["kind"] == "stored"]
    assert (files["contender"], ready["contender"]) == ("files", "ready")
    shape = files["shape"]
    row_bytes = shape["streams"] * shape["hidden"] * 4
    assert files["stored_bytes"] == 2 * (12 + 3) * (2 * shape["layers"] + 1) * row_bytes
    assert ready["stored_bytes"] == 2 * 4 * 12 * (2 * shape["layers"] + 1) * row_bytes
    for name in ("stored_mb_per_s", "disk_mb_per_s", "share_of_disk"):
        assert files[name]["median"] > 0 and ready[name]["median"] > 0


def test_contenders_give_the_same_tokens_and_only_captures_get_rows(tiny):
    import birkhoff

    tokens_by_name, plans = {}, {}
    with birkhoff.load(tiny) as engine:
        for name, capture in {
            "plain": None,
            "idle": None,
            "all": Capture({"mlp_out": "all"}, positions="all"),
        }.items():
            contender = CapturingEngine(engine, SMALL, name, capture, None)
            tokens = [contender.prefill([[1, 2, 3] * 4, [4, 5, 6] * 4])]
            tokens += [contender.step(tokens[-1]) for _ in range(SMALL.steps)]
            tokens_by_name[name], plans[name] = tokens, [request.plan for request in contender._requests]
            assert isinstance(contender.core.runner, UntappedRunner) is (name == "plain")
            if capture is not None:
                acts = [request.plan.jobs[0].rows() for request in contender._requests]
                assert all(len(rows) == 15 for each in acts for rows in each.values())
            contender.close()
    assert tokens_by_name["plain"] == tokens_by_name["idle"] == tokens_by_name["all"]
    assert plans["idle"] == [None, None]


def test_the_command_prints_json_lines(tiny):
    process = command(
        "bench",
        "interp",
        "--model",
        tiny,
        "--rounds",
        "1",
        "--steps",
        "2",
        "--prompt-tokens",
        "8",
        "--batch",
        "1",
        "--threads",
        "1",
    )
    assert process.returncode == 0, process.stderr.decode()
    assert [json.loads(line)["kind"] for line in process.stdout.splitlines()] == ["cost"] * 12 + [
        "stored"
    ] * 2


def test_invalid_sizes_are_refused():
    with pytest.raises(OptionError, match="steps is 0"):
        InterpSetting(steps=0)
