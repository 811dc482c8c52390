"""The reuse benchmark at its smallest: complete rows, and the same tokens in all modes."""

from __future__ import annotations

import math

import pytest

from birkhoff.bench.reuse import ReuseSetting, bench_reuse
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError


def test_every_row_is_complete_and_all_tokens_agree(tmp_path):
    synth(tmp_path / "c", "tiny")
    progress_steps = []
    setting = ReuseSetting(shared_tokens=140, turns=3, answer_tokens=4, steps=6, rounds=1, threads=1)
    rows = list(bench_reuse(tmp_path / "c", setting, progress=lambda *step: progress_steps.append(step)))
    assert [row["kind"] for row in rows] == ["prefix", "turns"] + ["speculation"] * 5 + ["rows"]
    assert all(row["same_tokens"] and row["machine"] and row["commit"] is not None for row in rows)
    prefix, turns, plain, adaptive, *drafting, steps = rows
    assert prefix["cached_tokens"] == 128 and math.isfinite(prefix["times_sooner"]["median"])
    assert turns["share_of_recomputation"]["median"] > 0 and turns["prompt_tokens"] > 0
    assert plain["times_plain"]["median"] == 1.0 and plain["drafted"] == 0 and adaptive["pace"]
    assert plain["times_plain_by_processor"]["median"] == plain["tokens_per_step"] == 1.0
    assert all(1 <= row["tokens_per_step"] <= 1 + n for n, row in enumerate(drafting, 1))
    assert sorted(steps["step_ms"]) == [
        "guess_behind_1",
        "guess_behind_2",
        *(f"verify_{n}" for n in (1, 2, 3, 4)),
    ]
    assert all(ms > 0 for ms in steps["step_ms"].values())
    assert all(row["drafted"] > 0 and 0 <= row["acceptance"] <= 1 for row in drafting)
    assert progress_steps[-1] == (8, 8)


def test_invalid_settings_are_refused(tmp_path):
    with pytest.raises(OptionError, match="turns is 0"):
        ReuseSetting(turns=0)
    synth(tmp_path / "c", "tiny", mtp=False)
    with pytest.raises(OptionError, match="no MTP block"):
        next(bench_reuse(tmp_path / "c"))
