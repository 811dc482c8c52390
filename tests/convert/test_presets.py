"""Properties of the named configurations."""

from dataclasses import replace

import pytest

from birkhoff.config import V4Config
from birkhoff.convert.presets import PRESETS, preset
from birkhoff.errors import OptionError


@pytest.mark.parametrize("like", PRESETS)
def test_presets_survive_their_own_spelling(like):
    assert V4Config.from_dict(preset(like).to_dict()) == preset(like)


def test_the_layers_of_the_releases():
    flash, pro = preset("flash"), preset("pro")
    kinds = [[config.layer_kind(i) for i in range(config.num_hidden_layers)] for config in (flash, pro)]
    assert [kinds[0].count(k) for k in ("swa", "csa", "hca")] == [2, 21, 20]
    assert [kinds[1].count(k) for k in ("swa", "csa", "hca")] == [0, 30, 31]
    assert kinds[0][-1] == kinds[1][-1] == "csa"
    assert flash.to_dict()["compress_ratios"] == [0, 0] + [4, 128] * 20 + [4] + [0]


def test_tiny_has_two_of_everything():
    tiny = preset("tiny")
    assert sorted(tiny.compress_ratios) == [0, 0, 4, 4, 128, 128] and tiny.num_nextn_predict_layers == 1
    assert (tiny.hidden_size, tiny.vocab_size, tiny.index_n_heads) == (64, 512, 16)
    assert 0 < tiny.num_hash_layers < tiny.num_hidden_layers
    assert tiny.rope_scaling is not None and tiny.swiglu_limit < 10


def test_layers_and_mtp_can_be_cut():
    assert preset("flash", layers=2, mtp=False) == replace(
        preset("flash"),
        num_hidden_layers=2,
        compress_ratios=(0, 0),
        num_hash_layers=2,
        num_nextn_predict_layers=0,
    )
    assert preset("flash", layers=4).num_hash_layers == 3
    for bad in (0, 44, -1, 2.0, True):
        with pytest.raises(OptionError, match="expected 1 to 43 for flash"):
            preset("flash", layers=bad)
    with pytest.raises(OptionError, match="expected one of flash, pro, nano, tiny"):
        preset("huge")
