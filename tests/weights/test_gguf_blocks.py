"""Block types: lossless in both directions, and equal to the `gguf` package."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import TensorDtype
from birkhoff.kernels import quant
from birkhoff.weights.gguf_blocks import decode, pack_mxfp4, pack_q8_0, unpack_mxfp4, unpack_q8_0


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), seed=st.integers(0, 2**31))
def test_repacking_moves_nibbles_and_nothing_else(rows, groups, seed):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, groups * 16), generator=g, dtype=torch.uint8).view(torch.int8)
    scale = torch.randint(255, (rows, groups), generator=g, dtype=torch.uint8)
    blocks = pack_mxfp4(codes, scale)
    assert blocks.shape == (rows, groups * 17)
    back_codes, back_scale = unpack_mxfp4(blocks)
    assert torch.equal(back_codes, codes) and torch.equal(back_scale, scale)


def test_mxfp4_means_the_same_to_the_gguf_package():
    import gguf

    g = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (64, 48), generator=g, dtype=torch.uint8)
    scale = torch.randint(2, 250, (64, 3), generator=g, dtype=torch.uint8)
    ours = quant.dequant_fp4(codes, scale)
    theirs = gguf.quants.dequantize(pack_mxfp4(codes, scale).numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(ours, torch.from_numpy(theirs))


def test_element_j_and_j_plus_16_share_a_byte():
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    codes[0, 0], codes[0, 8] = 0x21, 0x43  # elements 0 and 1 are 1 and 2, elements 16 and 17 are 3 and 4
    assert pack_mxfp4(codes, torch.full((1, 1), 127, dtype=torch.uint8))[0].tolist()[:3] == [127, 0x31, 0x42]


@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_q8_0_rounds_as_ggml_does(spread):
    import gguf

    values = torch.randn(40, 96, generator=torch.Generator().manual_seed(2)) * spread
    values[3] = 0
    blocks = pack_q8_0(values)
    theirs = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(blocks.numpy(), theirs)
    back = unpack_q8_0(blocks)
    assert np.array_equal(back.numpy(), gguf.quants.dequantize(theirs, gguf.GGMLQuantizationType.Q8_0))
    assert float((back - values).abs().max()) <= float(values.abs().max()) / 250


def test_numbers_a_float16_step_cannot_hold_are_refused():
    with pytest.raises(TensorDtype, match="too large or too small"):
        pack_q8_0(torch.full((1, 32), 1e30))


@pytest.mark.parametrize(
    "kind",
    [
        "Q4_0",
        "Q5_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ3_XXS",
        "IQ1_S",
        "IQ4_XS",
    ],
)
def test_other_types_come_through_the_gguf_package(kind):
    import gguf

    index = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[index]
    raw = np.random.default_rng(3).integers(0, 256, (4, 2 * size), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, index)
    got = decode(torch.from_numpy(raw), kind, "x")
    assert got.shape == (4, 2 * block) and np.array_equal(got.numpy(), expected, equal_nan=True)


def test_a_type_nobody_can_decode_is_refused_by_name():
    with pytest.raises(TensorDtype, match="blk is stored as Q9_X"):
        decode(torch.zeros(1, 32, dtype=torch.uint8), "Q9_X", "blk")
