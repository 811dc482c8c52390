"""Kills of real processes, a few of each kind; `python -m tests.kills` does the full number and prints the table."""

from __future__ import annotations

import random

import pytest

from tests.kills import VICTIMS
from tests.sizes import scaled


@pytest.mark.parametrize("victim", VICTIMS)
def test_nothing_acknowledged_is_lost_and_what_is_resumed_is_equal(victim, tmp_path):
    count = VICTIMS[victim](tmp_path, scaled(40, 2), random.Random(victim))
    assert count.in_time and count.acknowledged, count
    assert not count.lost and not count.unequal, count
