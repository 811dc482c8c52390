"""The benchmark of attribution: what it compares, and its rows."""

from __future__ import annotations

import pytest

from birkhoff.bench.attribution import AttributionSetting, bench_attribution
from birkhoff.errors import OptionError


def test_gradients_rank_nodes_of_nano_as_exact_patching_does():
    done = []
    setting = AttributionSetting(texts=1, steps=2, threads=1)
    rows = list(
        bench_attribution("nano", setting, lambda *counts: done.append(counts), ["sublayers"], ["text"])
    )
    assert done == [(1, 1)] and [row["method"] for row in rows] == ["gradient", "integrated", "inputs"]
    for row in rows:
        assert row["bench"] == "attribution" and row["nodes"] == 272 and row["setting"]["steps"] == 2
        assert row["spearman"] == row["worst"] > (0.0 if row["method"] == "inputs" else 0.6)
        assert 5 <= row["overlap"] <= 20


def test_settings_are_checked():
    with pytest.raises(OptionError, match="steps is 0"):
        list(bench_attribution("nano", AttributionSetting(1, 0, 1)))
