"""The CUDA kernels for FP4 experts of a decode step (experts.cu), compiled for a CPU and compared with exact products:
experts in GPU memory and, through shared memory, those in host memory."""

from __future__ import annotations

import ctypes

import pytest
import torch

from birkhoff.kernels.packed import Q8_ROWS
from tests.kernels.cuda_on_cpu import SOURCES, compile_for_cpu
from tests.kernels.test_cuda_blocks import fp4_order, worst
from tests.kernels.test_cuda_on_cpu import expected_hidden, random_layer, run, without_ptx
from tests.kernels.test_digit_experts_on_cpu import fp8_rows
from tests.packed_matrices import random_matrix

FETCH = """
inline void fetch_rows(uint4* into, const u8* codes, int row_bytes, int lane) {
    for (int i = 0; i < 8; i++) {
        const int row = 2 * i + (lane >> 4), at = lane & 15;
        request_copy((u8*)(into + row * 16 + (at ^ (row & 7))), codes + (i64)row * row_bytes + at * 16, 16);
    }
}
inline void wait_for_fetch() {
    commit_requests();
    await_requests(0);
    __syncwarp();
}
"""
GATE_UP = """
extern "C" void gate_up_{name}(Place shape, const int (*blocks)[2], int count, const ExpertSlot* slots,
                               const int* order, const float* weights, const u16* x, u16* z, int inner, int width,
                               int topk, float limit, int offset, float gain, i64 begin, i64 end) {{
    run_blocks(shape, blocks, count, {warps} * 32, [=] {{
        experts_gate_up<{warps}, {host}, {pipe}>(slots, order, weights, x, z, inner, width, topk, limit, offset, gain,
                                                 begin, end); }});
}}
"""
DOWN = """
extern "C" void down_{name}(Place shape, const int (*blocks)[2], int count, const ExpertSlot* slots, int slot_count,
                            const int* order, const u16* z, float* y, int inner, int width, int topk, int offset,
                            float gain, const u8* codes, const u8* scale, const u16* z_shared, int n, i64 begin,
                            i64 end) {{
    run_blocks(shape, blocks, count, {warps} * 32, [=] {{
        experts_down<{warps}, {tiles}, {host}, {pipe}, {q8}>(slots, slot_count, order, z, y, inner, width, topk, offset,
                                                             gain, codes, scale, z_shared, n, begin, end); }});
}}
"""
# name: warps of gate and up, warps and tiles of down, experts in host memory, loads ahead, a shared expert in Q8_0.
VARIANTS = {
    "one_token": (2, 1, 1, False, True, False),
    "several_tokens": (4, 2, 2, False, False, True),
    "host": (2, 2, 2, True, True, False),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    text = '#include "cuda_on_cpu.h"\n'
    for name in ("common.cuh", "gemv.cuh", "experts.cu"):
        text += without_ptx((SOURCES / name).read_text()) + (FETCH if name == "gemv.cuh" else "")
    for name, (of_gate_up, of_down, tiles, *options) in VARIANTS.items():
        host, pipe, q8 = (str(each).lower() for each in options)
        text += GATE_UP.format(name=name, warps=of_gate_up, host=host, pipe=pipe)
        text += DOWN.format(name=name, warps=of_down, tiles=tiles, host=host, pipe=pipe, q8=q8)
    return compile_for_cpu(text, tmp_path_factory.mktemp("experts_on_cpu"))


@pytest.mark.parametrize("name", VARIANTS)
def test_experts_equal_the_product_of_their_values(library, name):
    """Nine tokens ask the first expert (more than a tile of eight), two the other; a single token asks both."""
    _, _, tiles, host, _, q8 = VARIANTS[name]
    rows, pairs = (1, [[0], [1]]) if name == "one_token" else (9, [[2 * row for row in range(9)], [1, 17]])
    topk, hidden, inner = 2, 2048, 1024
    layer = random_layer("FP4", hidden, inner, rows, pairs, topk)
    largest = max(int(each.scales.max()) for each in (*layer.both, *layer.last))
    offset = 28 - largest  # exponents of float16 end at 30
    gain = 2.0 ** (-offset - 127 + 6 + 15)
    first = layer.both[0], layer.last[0]  # the expert in host memory
    ranges = [
        (each.codes.data_ptr(), each.codes.data_ptr() + each.codes.numel()) if host else (0, 0)
        for each in first
    ]
    z = torch.full((rows * topk, inner), float("nan"), dtype=torch.float16)
    y = torch.full((rows, topk + 1, hidden), float("nan"))
    sizes = (inner, hidden, topk)
    address = ctypes.c_longlong
    blocks = [(3, 0), (inner // 16 - 1, 1)]
    plan = (layer.slots, layer.order, layer.weights, fp4_order(layer.x), z)
    run(
        library[f"gate_up_{name}"],
        (inner // 16, 2),
        blocks,
        *plan,
        *sizes,
        10.0,
        offset,
        gain,
        *map(address, ranges[0]),
    )
    for block, expert in blocks:
        here = slice(16 * block, 16 * block + 16)
        for pair in pairs[expert]:
            assert worst(z[pair, here], fp4_order(expected_hidden(layer, expert, pair))[here]) < 2**-10
    z_shared = torch.randn(rows, inner, generator=torch.Generator().manual_seed(5)).half()
    if q8:
        matrix = random_matrix(Q8_ROWS, hidden, inner, 4)
        shared, values = (matrix.codes, None), matrix.dense().double()
    else:
        codes, scales, values = fp8_rows(hidden, inner, 4)
        shared = (codes, scales)
    step = 16 * tiles
    blocks = [(5, 0), (hidden // step - 1, 1)]
    every = [*blocks, *((7, 2 + tile) for tile in range(-(-rows // 8)))]
    plan = (layer.slots, 2, layer.order, layer.z, y)
    run(
        library[f"down_{name}"],
        (hidden // step, 2 + -(-rows // 8)),
        every,
        *plan,
        *sizes,
        offset,
        gain,
        *shared,
        z_shared,
        rows,
        *map(address, ranges[1]),
    )
    for block, expert in blocks:
        here = slice(step * block, step * block + step)
        for pair in pairs[expert]:
            product = fp4_order(layer.last[expert].dense()).double() @ layer.z[pair].double()
            assert worst(y[pair // topk, pair % topk, here], product[here]) < 2e-6
    here = slice(7 * step, 8 * step)
    assert worst(y[:, -1, here], z_shared.double() @ values[here].T) < 2e-6
    assert y[:, -1, : 7 * step].isnan().all()
