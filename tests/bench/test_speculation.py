"""The speculation benchmark on a CPU: predictable weights, the forced acceptance rate, and equal tokens."""

from __future__ import annotations

import pytest
import torch

from birkhoff.bench.speculation import Generation, make_engine, make_predictable, speculation_rows
from birkhoff.bench.synthetic import random_on_device
from birkhoff.cli.main import run as run_command
from birkhoff.convert.presets import preset
from tests.sizes import FULL

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def predictable():
    model = random_on_device(preset("tiny", 3), CPU, dtype=torch.float32, mtp=True)
    return model, make_predictable(model)


def test_the_model_follows_its_successors_and_mtp_agrees(predictable):
    model, successors = predictable
    core = make_engine(model, "always", 1, 64, 3, 1.0, CPU)
    run = Generation(core, [[5, 6, 7]], 20)
    expected = [7]
    while len(expected) < 21:
        expected.append(int(successors[expected[-1]]))
    assert run.outputs == [expected[1:]] and run.accepted == run.drafted > 10
    core.close()


@pytest.mark.parametrize(("rate", "depth"), [(0.8, 1), (0.5, 3), (0.0, 2)] if FULL else [(0.5, 2)])
def test_rows_show_the_forced_rate_and_the_same_tokens(predictable, rate, depth):
    model, _ = predictable
    off, always, auto = speculation_rows(model, 2, 12, rate, depth, 30, CPU, rounds=1)
    assert off["passed"] and always["passed"] and auto["passed"]
    assert off["drafted"] == 0 and off["times_plain"] == 1 and off["accepted_share"] is None
    per_token = sum(rate**n for n in range(1, depth + 1)) / depth  # a draft after a wrong one is rejected
    assert abs(always["accepted_share"] - per_token) < 0.25
    assert auto["pace"]["2"]["mode"] in ("trying", "guessing", "plain")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--speculate", "1.5"], "acceptance rate of 0 to 1"),
        (["--speculate", "0.8", "--depth", "4"], "expected 1, 2 or 3"),
        (["--speculate", "0.8", "--placement", "0.5"], "one of them at a time"),
    ],
)
def test_options_are_checked_before_a_gpu_is_needed(options, message, capsys):
    assert run_command(["bench", "decode", *options]) == 2
    assert message in capsys.readouterr().err
