"""What a prompt must compute, against figures derived by hand elsewhere; the measurement itself needs a GPU."""

from __future__ import annotations

import pytest

from birkhoff.bench.prefill import CLASSES, required_operations, two_layers
from birkhoff.convert.presets import preset


@pytest.mark.parametrize("tokens, behind, least, most", [(4096, 0, 26e9, 28.5e9), (8192, 0, 26e9, 28.5e9)])
def test_a_token_of_flash_takes_26_to_28_billion_operations(tokens, behind, least, most):
    assert least < required_operations(preset("flash", 43, False), tokens, behind) / tokens < most


def test_a_longer_past_costs_more_and_only_where_it_is_looked_at():
    config = preset("flash", 43, False)
    near, far = (required_operations(config, 1024, behind) for behind in (32768, 131072))
    assert near < far < 1.5 * near
    windows = preset("flash", 2, False)
    assert set(windows.compress_ratios) == {0}
    assert required_operations(windows, 1024, 32768) == required_operations(windows, 1024, 131072)


def test_kernels_are_told_apart_by_name():
    assert set(CLASSES.values()) >= {"products", "experts", "attention", "indexer", "streams"}
    assert two_layers().compress_ratios == (4, 128) and two_layers().hidden_size == 4096
