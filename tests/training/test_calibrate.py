"""A temperature put into the norm: found where it is known, and nothing else of the checkpoint moves."""

from __future__ import annotations

import json

import pytest
import torch

from tests.training.tiny import small_config
from training import calibrate
from training.evaluate import weights_of
from training.export import export, load_named
from training.initial import initialise
from training.parameters import Store


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3, 2.0])
def test_a_known_temperature_is_found(temperature):
    draw = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(20_000, 16, generator=draw), torch.randn(50, 16, generator=draw)
    share = (hidden @ head.T / temperature).softmax(-1)
    wanted = torch.multinomial(share, 1, generator=draw).squeeze(1)
    found = calibrate.fit(hidden, wanted, head)
    assert found == pytest.approx(temperature, rel=0.03)
    best = calibrate.loss_at(hidden, wanted, head, 1 / found)[0]
    assert all(best < calibrate.loss_at(hidden, wanted, head, factor / found)[0] for factor in (0.9, 1.1))


def test_the_slope_is_the_slope():
    draw = torch.Generator().manual_seed(1)
    hidden, head = torch.randn(50, 8, generator=draw), torch.randn(20, 8, generator=draw)
    wanted = torch.randint(20, (50,), generator=draw)
    below, at, above = (calibrate.loss_at(hidden, wanted, head, s) for s in (0.99, 1.0, 1.01))
    assert at[1] == pytest.approx((above[0] - below[0]) / 0.02, rel=1e-2)
    assert at[2] == pytest.approx((above[1] - below[1]) / 0.02, rel=1e-2)


def test_only_the_two_norms_move(data, tmp_path):
    """A surer model than it should be is cured; every other tensor comes back bit for bit, ranks stay."""
    folder, _, _ = data
    store = Store(small_config())
    initialise(store, 0, spread=0.2)
    export(tmp_path / "sure", small_config(), store.export(), folder / "tokenizer")
    arguments = [str(tmp_path / "sure"), "--data", str(folder), "--out", str(tmp_path / "cured")]
    assert calibrate.main(arguments) == 0
    found = json.loads((tmp_path / "cured" / "calibration.json").read_text())
    (_, before), (_, after) = load_named(tmp_path / "sure"), load_named(tmp_path / "cured")
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert moved == {"norm.weight", "mtp.0.norm.weight"}
    for block, norm in calibrate.NORMS.items():
        assert found[block]["temperature"] > 1.5  # random weights know nothing
        assert found[block]["fitted_after"] < found[block]["fitted_before"]
        assert found[block]["others_after"] < found[block]["others_before"]
        wanted = before[norm] / found[block]["temperature"]
        assert torch.allclose(after[norm], wanted, rtol=2**-8)  # stored in bf16
    assert weights_of(tmp_path / "cured", "cpu")[0] == weights_of(tmp_path / "sure", "cpu")[0]
