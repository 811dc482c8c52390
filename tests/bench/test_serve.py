"""The benchmark of serving: a real server for a second or two; its rows say what happened and that everything ended."""

from __future__ import annotations

import json

from birkhoff.bench.serve import Setting, bench_serve
from birkhoff.convert.synth import synth


def test_a_short_run_ends_everything(tmp_path):
    synth(tmp_path / "tiny", "tiny")
    engine, held, over = bench_serve(str(tmp_path / "tiny"), Setting(seconds=1.5, streams=2, tokens=12))
    json.dumps([engine, held, over])
    assert [row["kind"] for row in (engine, held, over)] == ["engine", "streams", "overload"]
    assert held["answers"] > 0 and not held["failed"] and held["everything_ended"] and held["share_of_engine"] > 0
    assert held["first_token_ms"]["p50"] <= held["first_token_ms"]["p95"] and held["resident_bytes"]["before"] > 1 << 26
    assert sum(over["statuses"].values()) == over["callers"] == 20 and set(over["statuses"]) <= {200, 429}
    assert not over["failed"] and over["recovered"] and engine["machine"]["cores"]
