"""The steering benchmark at a small size: every contender steers as named, and every row has its setting."""

from __future__ import annotations

import pytest

import birkhoff
from birkhoff.bench.steering import LIMITS, SteeringSetting, _contenders, bench_steering
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError

SMALL = SteeringSetting(prompt_tokens=8, steps=6, batch=3, threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny"
    synth(path, "tiny")
    return path


def test_rows_have_their_setting_and_limit(tiny):
    rows = list(bench_steering(tiny, SMALL))
    assert [row["contender"] for row in rows] == [
        "plain",
        "idle",
        "one vector",
        "own vectors",
        "all layers",
        "features",
        "mixer",
        "experts",
        "gated",
        "function",
        "head",
        "key mask",
        "sink",
        "blocks",
        "entries",
        "reconstruction",
    ]
    for row in rows:
        assert row["batch"] == 3 and row["steps"] == 6 and row["machine"]["cpu"] and row["ms"]["median"] > 0
        if row["contender"] in LIMITS:
            assert row["passed"] == (row["times_plain"]["median"] <= row["at_most"])
    assert rows[0]["times_plain"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert rows[-1]["times_products"]["median"] > 0 and rows[-1]["rows"] == 24


def test_contenders_steer_as_named(tiny):
    """Idle contenders steer the prompt alone, others every generated token; equal vectors share a table row."""
    with birkhoff.load(tiny, max_requests=1) as engine:
        results = {}
        for contender in _contenders(engine, SMALL):
            contender.prefill([[5, 6, 7, index] for index in range(SMALL.batch)])
            tables = {
                request.plan.table.tables
                for request in contender._requests
                if request.plan and request.plan.table
            }
            slots = sum(len(slab.uses) for table in tables for slab in table.slabs.values())
            for _ in range(SMALL.steps):
                contender.step([])
            steered = {len(request.plan.steered) if request.plan else 0 for request in contender._requests}
            results[contender.name] = (slots, steered)
            assert all(request.done for request in contender._requests)
            contender.core.close()
    assert results == {
        "plain": (0, {0}),
        "idle": (3, {4}),
        "one vector": (1, {10}),
        "own vectors": (3, {10}),
        "all layers": (3, {10}),
        "features": (0, {10}),
        "mixer": (0, {10}),
        "experts": (0, {10}),
        "gated": (0, {10}),
        "function": (0, {10}),
        "head": (0, {10}),
        "key mask": (0, {10}),
        "sink": (0, {10}),
        "blocks": (0, {10}),
        "entries": (0, {10}),
    }


def test_invalid_settings_are_refused():
    with pytest.raises(OptionError, match="batch is 0"):
        SteeringSetting(batch=0)
