"""Rounding on a GPU and products on FP8 tensor cores against their plain twins; in Triton's interpreter if no GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.kernels import compress as reference_compress
from birkhoff.kernels import experts as reference_experts
from birkhoff.kernels import linear as reference_linear
from birkhoff.kernels import quant
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.row_index import RowIndex
from tests.interpreter import DEVICE
from tests.kernels.test_decode import normal
from tests.kernels.test_prefill import packed_experts

from birkhoff.kernels.experts import fp8 as fp8_experts  # isort: skip
from birkhoff.kernels.compress import prefill as compress
from birkhoff.kernels.experts import prefill as experts

from birkhoff.kernels.linear import fp8 as linear  # isort: skip
from birkhoff.kernels.mhc import prefill as mhc  # isort: skip
from birkhoff.kernels.cuda.prompt_experts import input_order
from birkhoff.kernels.norm import prefill as norm
from birkhoff.kernels.quant import device

HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter cannot multiply bfloat16


def spread(seed: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of many magnitudes, with zeros, a row of zeros and one of tiny values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=g) * torch.exp2(torch.randint(-12, 12, (rows, width), generator=g))
    x[torch.rand(rows, width, generator=g) < 0.1] = 0
    x[0] = 0
    x[-1] *= 2.0**-30
    return x.clamp(-60000, 60000).to(DEVICE, dtype)


@given(
    seed=st.integers(0, 2**31),
    group=st.sampled_from([32, 64, 128]),
    width=st.integers(1, 300),
    keep=st.sampled_from([0, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=15)
def test_fp8_rounding_equals_the_plain_twin_to_the_bit(seed, group, width, keep, dtype):
    x = spread(seed, 3, width, dtype)
    assert torch.equal(device.fp8_round(x, group, keep), quant.fp8_round(x, group, keep))


def test_every_value_of_both_formats_and_every_tie_round_alike():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].sort().values.unique()
    x = torch.cat((every, (every[1:] + every[:-1]) / 2)).to(DEVICE).unsqueeze(-1).expand(-1, 2).contiguous()
    x[:, 1] = 448  # one scale for all
    assert torch.equal(device.fp8_round(x, 2), quant.fp8_round(x, 2))


@pytest.mark.parametrize("order", device.ORDERS)
def test_codes_and_scales_are_those_of_the_rounded_values(order):
    x = spread(5, 19, 256)
    codes, scales = device.quantise_fp8(x, order)
    c = torch.arange(128)
    places = {
        "natural": c,
        "halves": c // 4 % 2 * 64 + c // 8 * 4 + c % 4,
        "fragments": c // 8 % 4 * 32 + c // 4 % 2 * 16 + c // 32 * 4 + c % 4,
    }
    natural = codes.float().view(19, 2, 128)[:, :, places[order].to(DEVICE)]
    assert torch.equal((natural * scales.T.unsqueeze(-1)).flatten(1), quant.fp8_round(x, 128))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "16 bits"])
@pytest.mark.parametrize("width", [32, 128])
def test_hadamard_and_fp4_equal_the_plain_twin(dtype, width):
    x = normal(3, 5, 7, width).to(dtype)
    actual, expected = device.hadamard_fp4(x), quant.hadamard_fp4(x)
    assert (actual != expected).float().mean() < 0.01, "sums are in another order: a tie may differ"
    assert (actual - expected).float().norm() < 0.05 * expected.float().norm()


def released(matrix: torch.Tensor) -> torch.Tensor:
    return quant.fp8_round(matrix, 128)


@pytest.mark.parametrize(
    "width, inner, dtype, distance",
    [(256, 128, HALF, 0), (128, 256, HALF, 16), (96, 160, HALF, 0), (160, 96, torch.float32, 0)],
    ids=["FP8", "FP8, scales far apart", "widths for 16 bits", "float32"],
)
def test_experts_with_rounded_inputs_match_the_reference(width, inner, dtype, distance):
    """The scales of a row up to 2^16 apart are two passes."""
    n, count, topk = 9, 3, 2
    table, dense, matrices = packed_experts(dtype, count, width, inner)
    if distance:
        g = torch.Generator().manual_seed(8)
        for _, gate_up_scale, _, down_scale in matrices:
            for scale in (gate_up_scale, down_scale):
                scale -= torch.randint(0, distance + 1, scale.shape, generator=g).to(scale)
    x = normal(1, n, width).to(dtype)
    ids, weights = reference_experts.route(
        normal(2, n, count), torch.zeros(count, device=DEVICE), None, topk, 1.5
    )
    stack = reference_experts.Stack(
        count, lambda e: dense(e, 0), lambda e: dense(e, 2).T, None, lambda: [(None, table)], inner
    )
    assert fp8_experts.takes(dtype, width, inner) == (dtype is HALF and width != 96)
    actual = experts.experts(x, ids, weights, stack, 1.0, released)
    expected = reference_experts.experts(x, ids, weights, stack, 1.0, released)
    unrounded = reference_experts.experts(x, ids, weights, stack, 1.0, None)
    error, effect = (actual - expected).norm(), (unrounded - expected).norm()
    print(f"off by {error / effect:.1e} of rounding, {error / expected.norm():.1e} of the result")
    # A value of z next to a tie may be rounded the other way: one FP8 step.
    assert error < 0.25 * effect and error < 0.01 * expected.norm() and matrices


@pytest.mark.parametrize("rows", [5, 70])
def test_products_of_rounded_inputs_match_the_reference(rows):
    parts = [quant.quant_fp8(normal(seed, height, 256)) for seed, height in ((1, 128), (2, 256))]
    weight = PackedWeight.fp8(parts)
    x = spread(3, rows, 256).clamp(-8, 8).to(HALF)
    actual, expected = linear.rounded_linear(x, weight), reference_linear.rounded_linear(x, weight)
    unrounded = reference_linear.packed_linear(x, weight)
    assert (actual - expected).norm() < 2.0**-10 * expected.norm()
    assert (unrounded - expected).norm() > 2.0**-8 * expected.norm()
    odd = PackedWeight.fp8([quant.quant_fp8(normal(1, 96, 256))])  # no whole tiles: inputs as numbers
    assert odd.tile_scale is None and weight.tile_scale.shape == (3, 2)
    assert (linear.rounded_linear(x, odd) - reference_linear.rounded_linear(x, odd)).norm() < 0.1


def codes_match(found, rows: torch.Tensor) -> None:
    """Codes and scales are those of separate launches on the same rows."""
    codes, scales = device.quantise_fp8(rows, multiple=device.ROW_MULTIPLE)
    n = len(rows)
    assert torch.equal(found.codes[:n].view(torch.uint8), codes[:n].view(torch.uint8))
    assert torch.equal(found.scales[:, :n], scales[:, :n])
    if found.ordered is not None:
        ordered, _ = device.quantise_fp8(rows, input_order(rows, 128))
        assert torch.equal(found.ordered[:n].view(torch.uint8), ordered.view(torch.uint8))


@pytest.mark.parametrize("inner", [None, 128])
def test_a_norm_with_codes_equals_the_norm_and_its_quantisation(inner):
    x = normal(1, 70, 300).to(HALF)[:, :256]
    weight = normal(2, 256)
    found = norm.norm_input(x, weight, 1e-6, True, inner)
    assert torch.equal(found.rows, norm.rms_norm(x, weight, 1e-6)) and (found.ordered is None) == (
        inner is None
    )
    codes_match(found, found.rows)
    for other in (x[:9], normal(1, 70, 96).to(HALF), x.float()):  # too few rows, no whole groups, float32
        assert isinstance(norm.norm_input(other, normal(2, other.shape[1]), 1e-6, True), torch.Tensor)
    assert isinstance(norm.norm_input(x, weight, 1e-6, False), torch.Tensor)


def test_a_gate_with_codes_equals_the_gate_and_its_quantisation():
    x = normal(1, 70, 512).to(HALF)
    found = experts.glu(x, 1.0, HALF, released=True)
    assert torch.equal(found.rows, experts.glu(x, 1.0, HALF))
    codes_match(found, found.rows)
    weight = PackedWeight.fp8([quant.quant_fp8(normal(3, 128, 256))])
    assert torch.equal(linear.rounded_linear(found, weight), linear.rounded_linear(found.rows, weight))


def test_streams_are_read_normalised_and_rounded_as_by_separate_kernels(monkeypatch):
    monkeypatch.setattr(mhc, "MIN_ROWS", 16)
    monkeypatch.setattr(device, "MIN_ROWS", 16)
    streams, fn, base = normal(1, 20, 4, 128).to(HALF), normal(2, 24, 512) * 0.05, normal(3, 24)
    settings = (base, normal(4, 3), 3, 1e-6, 1e-6)
    u, _, post, mix = mhc.read(streams, fn, *settings)
    weight = normal(5, 128)
    found, *rest = mhc.read_input(streams, fn, *settings, weight, 1e-6, True, 128)
    assert torch.equal(rest[0], post) and torch.equal(rest[1], mix)
    expected = norm.rms_norm(u, weight, 1e-6)
    assert (found.rows - expected).abs().max() <= 2.0**-9 * expected.abs().max()
    codes_match(found, found.rows)
    plain, *_ = mhc.read_input(streams, fn, *settings, weight, 1e-6, False)
    assert torch.equal(plain, found.rows)
    few, *_ = mhc.read_input(streams[:5], fn, *settings, weight, 1e-6, True)
    assert (few - expected[:5]).abs().max() <= 2.0**-8 * expected.abs().max()


def test_entries_are_rounded_as_the_plain_twin_rounds_them():
    width, ratio, n = 128, 4, 8
    raw, ape = normal(1, n, 4 * width), normal(2, ratio, 2 * width) * 0.1
    ring = torch.zeros(1, 16, 4 * width, device=DEVICE)
    rows = RowIndex.of([(0, 0, n)], DEVICE)
    cos, sin = torch.cos(normal(3, n, 16)), torch.sin(normal(3, n, 16))
    norm, table = torch.ones(width, device=DEVICE), torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    seen = []
    for rounding in ("none", "key", "index"):
        pages = [torch.zeros(1, 32, width, device=DEVICE) for _ in range(2)]
        for twin, page in zip((compress, reference_compress), pages):
            part = reference_compress.RawRows(raw, ape, norm, ring, page, rounding)
            twin.compress_blocks([part], table, rows, cos, sin, 1e-6)
        differs = (pages[0] - pages[1]).abs() > 1e-5
        assert differs.float().mean() < 0.01, rounding
        seen.append(pages[0])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])
    assert torch.equal(seen[0][..., -32:], seen[1][..., -32:]), "rotated channels of keys stay"
