"""Each format compared with its definition, element by element, in exact arithmetic."""

import math
from bisect import bisect_left
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.errors import ConfigError, TensorDtype, TensorShape, TensorValue
from birkhoff.kernels import quant

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(code: int) -> float:
    """The definition: sign, four exponent bits with bias 7, three mantissa bits, no infinity."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


E4M3 = [e4m3(code) for code in range(256)]
seeds = st.integers(0, 2**31 - 1)


def ceil_log2(ratio: Fraction) -> int:
    """Smallest integer k with ratio <= 2^k, in integer arithmetic."""
    k = ratio.numerator.bit_length() - ratio.denominator.bit_length() - 1
    while ratio > Fraction(2) ** k:
        k += 1
    return k


def nearest_even(value: float, grid: list[float]) -> float:
    """The value of `grid` closest to `value`; ties go to the even code. `grid` ascends from code 0.

    Values and grids are short dyadic numbers, so the differences are exact in double precision.
    """
    above = bisect_left(grid, abs(value))
    around = [code for code in (above - 1, above) if 0 <= code < len(grid)]
    return math.copysign(grid[min(around, key=lambda code: (abs(abs(value) - grid[code]), code % 2))], value)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_decode_e8m0_of_every_byte():
    values = quant.decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])
    as_float8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert same_bits(quant.decode_e8m0(as_float8), values)


def test_dequant_fp8_of_every_code():
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    values = quant.dequant_fp8(codes, torch.full((1, 1), 127, dtype=torch.uint8)).flatten().tolist()
    for code, value in enumerate(values):
        assert value == E4M3[code] or (math.isnan(value) and code & 0x7F == 0x7F)


@given(rows=st.integers(1, 300), columns=st.integers(1, 300), seed=seeds)
def test_dequant_fp8_matches_the_definition_with_partial_tiles(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    scale = torch.randint(
        0, 255, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8, generator=generator
    )
    rows_of, columns_of = torch.arange(rows) // 128, torch.arange(columns) // 128
    exact = torch.tensor(E4M3, dtype=torch.float64)[codes.long()]
    exact = exact * torch.exp2(scale.double() - 127)[rows_of][:, columns_of]
    torch.testing.assert_close(quant.dequant_fp8(codes, scale), exact.float(), rtol=0, atol=0, equal_nan=True)
    as_float8 = codes.view(torch.float8_e4m3fn)
    assert same_bits(quant.dequant_fp8(as_float8, scale), quant.dequant_fp8(codes, scale))


@given(rows=st.integers(1, 20), groups=st.integers(1, 6), seed=seeds)
def test_dequant_fp4_matches_the_definition_low_nibble_first(rows, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 16 * groups), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 255, (rows, groups), dtype=torch.uint8, generator=generator)
    actual = quant.dequant_fp4(codes, scale)
    assert same_bits(actual, quant.dequant_fp4(codes.view(torch.int8), scale))
    table = torch.tensor(E2M1, dtype=torch.float64)
    exact = torch.empty(rows, 32 * groups, dtype=torch.float64)
    exact[:, 0::2], exact[:, 1::2] = table[(codes & 15).long()], table[(codes >> 4).long()]
    exact *= torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    assert same_bits(actual, exact.float())


@given(rows=st.integers(1, 260), columns=st.integers(1, 260), seed=seeds)
def test_requantising_fp8_is_exact(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[::128, ::128] = 0x7E  # 448 in every tile: makes codes and scales unique
    scale = torch.randint(
        20, 240, (-(-rows // 128), -(-columns // 128)), dtype=torch.uint8, generator=generator
    )
    again_codes, again_scale = quant.quant_fp8(quant.dequant_fp8(codes, scale))
    assert torch.equal(again_scale, scale)
    assert torch.equal(again_codes.view(torch.uint8), codes)


@given(rows=st.integers(1, 40), groups=st.integers(1, 6), seed=seeds)
def test_requantising_fp4_is_exact(rows, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, 16 * groups), dtype=torch.uint8, generator=generator)
    codes[:, ::16] = 0xF7  # 6 and -6 in every group
    scale = torch.randint(20, 240, (rows, groups), dtype=torch.uint8, generator=generator)
    again_codes, again_scale = quant.quant_fp4(quant.dequant_fp4(codes, scale))
    assert torch.equal(again_scale, scale) and torch.equal(again_codes, codes)


@given(seed=seeds, max_code=st.integers(0, 0x7E))
def test_requantising_is_exact_if_the_scale_changes(seed, max_code):
    """A tile whose largest code is small gets a smaller scale; its values must not change."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, max_code + 1, (9, 64), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=generator) << 7
    weight = quant.dequant_fp8(codes, torch.full((1, 1), 120, dtype=torch.uint8))
    assert same_bits(quant.dequant_fp8(*quant.quant_fp8(weight)), weight)
    nibbles = torch.randint(0, max_code % 8 + 1, (9, 64), dtype=torch.uint8, generator=generator)
    weight = quant.dequant_fp4(
        nibbles[:, 0::2] | nibbles[:, 1::2] << 4, torch.full((9, 2), 120, dtype=torch.uint8)
    )
    assert same_bits(quant.dequant_fp4(*quant.quant_fp4(weight)), weight)


@given(seed=seeds, exponent=st.integers(-60, 60))
def test_weights_are_quantised_to_the_nearest_code(seed, exponent):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 64, generator=generator) * 2.0**exponent
    codes, scale = quant.quant_fp8(weight)
    k = ceil_log2(Fraction(weight.abs().max().item()) / 448)
    assert scale.tolist() == [[k + 127]]
    expected = [[nearest_even(w / 2.0**k, E4M3[:127]) * 2.0**k for w in row] for row in weight.tolist()]
    assert quant.dequant_fp8(codes, scale).tolist() == expected

    codes, scale = quant.quant_fp4(weight)
    for row in range(2):
        for group in range(2):
            members = weight[row, 32 * group : 32 * group + 32]
            k = ceil_log2(Fraction(members.abs().max().item()) / 6)
            assert scale[row, group] == k + 127
            actual_group = quant.dequant_fp4(codes, scale)[row, 32 * group : 32 * group + 32]
            assert actual_group.tolist() == [
                nearest_even(w / 2.0**k, E2M1[:8]) * 2.0**k for w in members.tolist()
            ]


def test_zero_and_tiny_weights_quantise():
    codes, scale = quant.quant_fp8(torch.zeros(130, 4))
    assert scale.tolist() == [[127], [127]] and not codes.view(torch.uint8).any()
    codes, scale = quant.quant_fp4(torch.zeros(2, 32))
    assert scale.tolist() == [[127], [127]] and not codes.any()
    tiny = torch.full((1, 32), 2.0**-127)
    assert torch.equal(quant.dequant_fp8(*quant.quant_fp8(tiny)), tiny)
    assert torch.equal(quant.dequant_fp4(*quant.quant_fp4(tiny)), tiny)


def test_scale_is_exact_for_every_bfloat16_amax():
    """ceil(log2(amax / 448)) and ceil(log2(amax / 6)) in integer arithmetic, for all bfloat16 from 0 to 2^127."""
    bits = torch.arange(0x7F00, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)[:, None]
    fp8, fp4 = quant.fp8_round(values, 1).flatten().tolist(), quant.fp4_round(values, 1).flatten().tolist()
    for value, actual8, actual4 in zip(values.flatten().tolist()[1:], fp8[1:], fp4[1:], strict=True):
        s8 = 2.0 ** ceil_log2(Fraction(max(value, 1e-4)) / 448)
        s4 = 2.0 ** ceil_log2(Fraction(max(value, 6 * 2.0**-126)) / 6)
        assert actual8 == nearest_even(value / s8, E4M3[:127]) * s8
        assert actual4 == nearest_even(value / s4, E2M1[:8]) * s4
    assert fp8[0] == fp4[0] == 0.0


@given(width=st.integers(1, 300), group=st.sampled_from([32, 64, 128]), seed=seeds)
def test_activation_rounding_matches_the_definition_with_a_partial_group(width, group, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, width, generator=generator) * torch.exp(3 * torch.randn(2, width, generator=generator))
    fp8, fp4 = quant.fp8_round(x, group), quant.fp4_round(x, group)
    for row in range(2):
        for start in range(0, width, group):
            members = x[row, start : start + group].tolist()
            amax = max(abs(v) for v in members)
            s8 = 2.0 ** ceil_log2(Fraction(max(amax, 1e-4)) / 448)
            s4 = 2.0 ** ceil_log2(Fraction(amax) / 6)
            assert fp8[row, start : start + group].tolist() == [
                nearest_even(v / s8, E4M3[:127]) * s8 for v in members
            ]
            assert fp4[row, start : start + group].tolist() == [
                nearest_even(v / s4, E2M1[:8]) * s4 for v in members
            ]


def test_a_group_with_amax_448_keeps_scale_one():
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1], x[0, 2] = 448.0, 2.0**-9, 2.0**-10
    # The step 2^-9 is representable, so the scale is 1; half of the step is a tie and rounds to even.
    assert quant.fp8_round(x, 128)[0, :3].tolist() == [448.0, 2.0**-9, 0.0]
    x[0, 0] = torch.nextafter(torch.tensor(448.0), torch.tensor(449.0))
    assert quant.fp8_round(x, 128)[0, :2].tolist() == [448.0, 0.0]  # the scale is 2, and 2^-9 is a tie


def test_fp4_ties_go_to_even_codes():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    assert quant.fp4_round(ties, 8).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert quant.fp4_round(-ties, 8).tolist() == [-0.0, -1.0, -1.0, -2.0, -2.0, -4.0, -4.0, -6.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_keeps_dtype_shape_and_input(dtype):
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = x.clone()
    for rounded in (quant.fp8_round(x, 64), quant.fp4_round(x), quant.hadamard(x[..., :64])):
        assert rounded.dtype == dtype and rounded.shape[:-1] == (3, 5)
    assert torch.equal(x, before)
    assert torch.equal(quant.fp8_round(quant.fp8_round(x, 64), 64), quant.fp8_round(x, 64))
    assert quant.fp8_round(x[:0], 64).shape == (0, 5, 96)


@pytest.mark.parametrize("width", [1, 2, 8, 64, 128])
def test_hadamard_is_sylvester_order_and_orthogonal(width):
    from scipy.linalg import hadamard as sylvester

    x = torch.randn(7, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    actual = quant.hadamard(x.float())
    exact = x.float().double() @ torch.tensor(sylvester(width), dtype=torch.float64) * width**-0.5
    assert (actual.double() - exact).abs().max() < 2e-6
    assert (quant.hadamard(actual) - x.float()).abs().max() < 2e-6


def test_hadamard_rows_do_not_depend_on_the_batch():
    x = torch.randn(33, 4, 128, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    whole = quant.hadamard(x)
    assert all(same_bits(whole[i : i + 1], quant.hadamard(x[i : i + 1])) for i in range(33))


def test_bad_inputs_raise_typed_errors():
    fp8, byte = torch.zeros(130, 64, dtype=torch.float8_e4m3fn), torch.zeros(1, 1, dtype=torch.uint8)
    with pytest.raises(TensorShape, match=r"\(1, 1\), expected \(2, 1\)"):
        quant.dequant_fp8(fp8, byte)
    with pytest.raises(TensorDtype):
        quant.dequant_fp8(torch.zeros(2, 2), byte)
    with pytest.raises(TensorShape, match="one byte per 32"):
        quant.dequant_fp4(torch.zeros(2, 16, dtype=torch.uint8), byte)
    with pytest.raises(TensorDtype):
        quant.dequant_fp4(torch.zeros(2, 16), byte)
    with pytest.raises(TensorDtype, match="uint8"):
        quant.decode_e8m0(torch.zeros(1))
    with pytest.raises(TensorShape, match="multiple of 32"):
        quant.quant_fp4(torch.zeros(2, 48))
    with pytest.raises(TensorShape, match="matrix"):
        quant.quant_fp8(torch.zeros(3))
    with pytest.raises(ConfigError, match="power-of-two width, got 96"):
        quant.hadamard(torch.zeros(2, 96))
    for bad in (math.nan, math.inf):
        with pytest.raises(TensorValue, match="NaN or infinity"):
            quant.quant_fp8(torch.full((2, 32), bad))
        with pytest.raises(TensorValue, match="NaN or infinity"):
            quant.quant_fp4(torch.full((2, 32), bad))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_bits():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(300, 384, generator=generator) * torch.exp(2 * torch.randn(300, 384, generator=generator))
    rounded = {
        "fp8": lambda x: quant.fp8_round(x, 128),
        "fp4": quant.fp4_round,
        "hadamard": lambda x: quant.hadamard(x[:, :128]),
        "fp8 weight": lambda x: quant.dequant_fp8(*quant.quant_fp8(x)),
        "fp4 weight": lambda x: quant.dequant_fp4(*quant.quant_fp4(x)),
    }
    for name, operation in rounded.items():
        for dtype in (torch.float32, torch.bfloat16):
            assert same_bits(operation(x.to(dtype).cuda()).cpu(), operation(x.to(dtype))), (name, dtype)
