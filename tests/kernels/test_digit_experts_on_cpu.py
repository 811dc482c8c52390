"""FP4 experts with inputs in digits (digit_experts.cu), compiled for a CPU and compared with exact products."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from birkhoff.kernels.packed import Q8_ROWS
from tests.kernels.cuda_on_cpu import compile_for_cpu
from tests.kernels.test_cuda_blocks import worst
from tests.kernels.test_cuda_on_cpu import expected_hidden, random_layer, run
from tests.kernels.test_prompt_experts_on_cpu import without_ptx
from tests.packed_matrices import random_matrix

CALLS = """
extern "C" void run_digits(const float* x, u8* digits, int groups, float gain) {
    const int blocks[1][2] = {{0, 0}};
    for (int i = 0; i < groups; i++)
        run_blocks({1, 1}, blocks, 1, 32, [=] { store_digits(digits + i * 128, x[i * 32 + threadIdx.x] * gain); });
}
extern "C" void run_gate_up(Place shape, const int (*blocks)[2], int count, const ExpertSlot* slots, const int* order,
                            const float* weights, const u8* x, u8* z, int inner, int width, int topk, float limit,
                            float gain, float z_gain) {
    run_blocks(shape, blocks, count, THREADS, [=] {
        gate_up(slots, order, weights, x, z, inner, width, topk, limit, gain, z_gain); });
}
extern "C" void run_down(Place shape, const int (*blocks)[2], int count, const ExpertSlot* slots, const int* order,
                         const u8* z, float* y, int inner, int width, int topk, float gain, const u8* codes,
                         const u8* scale, const u16* z_shared, int n) {
    run_blocks(shape, blocks, count, THREADS, [=] {
        if (scale) down<false>(slots, 2, order, z, y, inner, width, topk, gain, codes, scale, z_shared, n);
        else down<true>(slots, 2, order, z, y, inner, width, topk, gain, codes, scale, z_shared, n); });
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("digit_experts")
    text = '#include "hopper_on_cpu.h"\n'
    for name in (
        "common.cuh",
        "gemv.cuh",
        "wgmma.cuh",
        "prompt_common.cuh",
        "digits.cuh",
        "digit_experts.cu",
    ):
        text += re.sub("^extern .*$", "", without_ptx(name), flags=re.M)
    return compile_for_cpu(text + CALLS, folder)


def fp8_rows(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales by 128 columns and row, and their values; scales are common to 128 rows and columns."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no NaN
    scales = torch.randint(
        120, 126, (columns // 128, -(-rows // 128)), generator=generator, dtype=torch.uint8
    )
    scales = scales.repeat_interleave(128, 1)[:, :rows].contiguous()
    factors = torch.exp2(scales.double() - 127).repeat_interleave(128, 0).T
    return codes, scales, codes.view(torch.float8_e4m3fn).double() * factors


def digits_of(library, x: torch.Tensor, gain: float) -> torch.Tensor:
    values, digits = x.float().contiguous(), torch.zeros(x.shape[0], x.shape[1] * 4, dtype=torch.uint8)
    address = ctypes.c_void_p
    library.run_digits(
        address(values.data_ptr()), address(digits.data_ptr()), x.numel() // 32, ctypes.c_float(gain)
    )
    return digits


def value_of(digits: torch.Tensor) -> torch.Tensor:
    """[rows, columns] from [rows, columns / 32, 2, 4, 16] digits."""
    each = digits.view(torch.float8_e4m3fn).double().view(digits.shape[0], -1, 2, 4, 16)
    return (
        (each * 32.0 ** -torch.arange(4.0, dtype=torch.double).view(4, 1)).sum(3).transpose(2, 3).flatten(1)
    )


def test_digits_have_nineteen_bits_of_the_largest(library):
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 512)
    values = value_of(digits_of(library, x, 1 / 16)) * 16
    largest = x.view(2, -1, 32).abs().amax(-1).repeat_interleave(32, 1).clamp(min=0.5)
    assert ((values - x).abs() / largest).max() <= 2**-19


@pytest.mark.parametrize("shared_type", ["FP8", "Q8_0"])
def test_experts_equal_the_product_of_their_values(library, shared_type):
    """Nine tokens ask the first expert (products of four, four and one), two the other."""
    rows, topk, hidden, inner = 9, 2, 1024, 1024
    pairs = [[2 * row for row in range(9)], [1, 17]]
    layer = random_layer("FP4", hidden, inner, rows, pairs, topk)
    layer.x[:, 3] = 40
    x = digits_of(library, layer.x, 1 / 16)
    z = torch.zeros(rows * topk, inner * 4, dtype=torch.uint8)
    y = torch.full((rows, topk + 1, hidden), float("nan"))
    plan = (layer.slots, layer.order)
    blocks = [(31, 0), (3, 1)]
    sizes = (inner, hidden, topk)
    run(
        library.run_gate_up,
        (inner // 32, 2),
        blocks,
        *plan,
        layer.weights,
        x,
        z,
        *sizes,
        10.0,
        64.0 * 16,
        1.0,
    )
    for block, expert in blocks:
        here = slice(32 * block, 32 * block + 32)
        for pair in pairs[expert]:
            expected = expected_hidden(layer, expert, pair)[here]
            assert worst(value_of(z[pair : pair + 1])[0, here], expected) < 1e-4
    inputs = digits_of(library, layer.z, 1.0)
    z_shared = torch.randn(rows, inner).half()
    if shared_type == "FP8":
        codes, scales, values = fp8_rows(hidden, inner, 4)
        shared = (codes, scales, z_shared, rows)
    else:
        matrix = random_matrix(Q8_ROWS, hidden, inner, 4)
        shared, values = (matrix.codes, None, z_shared, rows), matrix.dense().double()
    blocks = [(15, 0), (2, 1)]
    every = [(3, 0), (3, 1), *((block, expert + 2) for block, expert in blocks)]
    run(library.run_down, (hidden // 64, 4), every, *plan, inputs, y, *sizes, 64.0, *shared)
    for block, expert in blocks:
        here = slice(64 * block, 64 * block + 64)
        for pair in pairs[expert]:
            product = layer.last[expert].dense().double() @ layer.z[pair].double()
            assert worst(y[pair // 2, pair % 2, here], product[here]) < 2e-6
    assert worst(y[:, -1, 192:256], z_shared.double() @ values[192:256].T) < 2e-6
    assert y[:, -1, :192].isnan().all()
