"""Operation counts of a prompt, compared with figures derived by hand. The measurement itself needs a GPU."""

from __future__ import annotations

import pytest

from birkhoff.bench.prefill import CLASSES, required_operations, two_layers
from birkhoff.convert.presets import preset


@pytest.mark.parametrize("tokens, past, low, high", [(4096, 0, 26e9, 28.5e9), (8192, 0, 26e9, 28.5e9)])
def test_a_token_of_flash_takes_26_to_28_billion_operations(tokens, past, low, high):
    assert low < required_operations(preset("flash", 43, False), tokens, past) / tokens < high


def test_a_longer_past_costs_more_only_in_compressed_layers():
    config = preset("flash", 43, False)
    short, long = (required_operations(config, 1024, past) for past in (32768, 131072))
    assert short < long < 1.5 * short
    windows = preset("flash", 2, False)
    assert set(windows.compress_ratios) == {0}
    assert required_operations(windows, 1024, 32768) == required_operations(windows, 1024, 131072)


def test_kernels_are_classified_by_name():
    assert set(CLASSES.values()) >= {"products", "experts", "attention", "indexer", "streams"}
    assert two_layers().compress_ratios == (4, 128) and two_layers().hidden_size == 4096
