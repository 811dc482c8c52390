"""The measurement of steering, small: every contender does what its name says, and every row can be traced back."""

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


def test_rows_carry_their_setting_and_their_bar(tiny):
    rows = list(bench_steering(tiny, SMALL))
    assert [row["contender"] for row in rows] == [
        "plain",
        "idle",
        "one vector",
        "own vectors",
        "all layers",
        "features",
        "reconstruction",
    ]
    for row in rows:
        assert row["batch"] == 3 and row["steps"] == 6 and row["machine"]["cpu"] and row["ms"]["median"] > 0
        if row["contender"] in LIMITS:
            assert row["passed"] == (row["times_plain"]["median"] <= row["at_most"])
    assert rows[0]["times_plain"] == {"median": 1.0, "p10": 1.0, "p90": 1.0}
    assert rows[-1]["times_products"]["median"] > 0 and rows[-1]["rows"] == 24


def test_contenders_do_what_their_names_say(tiny):
    """Idle ones touch the prompt alone, live ones every generated token; rows are shared where vectors are."""
    with birkhoff.load(tiny, max_requests=1) as engine:
        found = {}
        for who in _contenders(engine, SMALL):
            who.prefill([[5, 6, 7, number] for number in range(SMALL.batch)])
            tables = {
                request.plan.table.tables for request in who._requests if request.plan and request.plan.table
            }
            slots = sum(len(slab.uses) for table in tables for slab in table.slabs.values())
            for _ in range(SMALL.steps):
                who.step([])
            steered = {len(request.plan.steered) if request.plan else 0 for request in who._requests}
            found[who.name] = (slots, steered)
            assert all(request.done for request in who._requests)
            who.core.close()
    assert found == {
        "plain": (0, {0}),
        "idle": (3, {4}),
        "one vector": (1, {10}),
        "own vectors": (3, {10}),
        "all layers": (3, {10}),
        "features": (0, {10}),
    }


def test_settings_that_measure_nothing_are_refused():
    with pytest.raises(OptionError, match="batch is 0"):
        SteeringSetting(batch=0)
