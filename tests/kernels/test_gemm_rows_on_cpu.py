"""The CUDA kernel for products of 17 to 64 rows (gemm_rows.cu), compiled for a CPU and compared with exact products."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.kernels.cuda_on_cpu import SOURCES, compile_for_cpu
from tests.kernels.test_cuda_blocks import worst
from tests.kernels.test_cuda_on_cpu import run, without_ptx
from tests.kernels.test_digit_experts_on_cpu import fp8_rows

DEFINES = {"TILES": 2, "WARPS": 2, "STAGES": 2}
TILE = 64
ARGUMENTS = (
    "const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2, int rows8b, const u16* weight16, "
    "int rows16, const u16* xh, const u16* xb, int n, int inner, int x_stride, float* out, int out_stride, int group"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("gemm_rows")
    text = "".join(f"#define ROWS_{name} {value}\n" for name, value in DEFINES.items())
    text += '#include "cuda_on_cpu.h"\nstatic uint4 memory[8192];\n'
    for name in ("common.cuh", "gemv.cuh", "gemm_rows.cu"):
        text += without_ptx((SOURCES / name).read_text())
    passed = ", ".join(each.split()[-1] for each in ARGUMENTS.split(", "))
    text += (
        f'extern "C" void rows(Place shape, const int (*blocks)[2], int block_count, {ARGUMENTS}) {{\n'
        f"    run_blocks(shape, blocks, block_count, TILE, [=] {{ gemm_rows({passed}); }});\n}}\n"
    )
    return compile_for_cpu(text, folder)


def inputs(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    return x.half(), x


def test_rows_of_three_matrices_equal_the_product_of_their_values(library):
    """160 rows of two FP8 matrices and 32 of bfloat16, so that tiles end within a matrix; thirteen tokens."""
    columns, n = 384, 13
    first, second = fp8_rows(96, columns, 0), fp8_rows(64, columns, 1)
    dense = torch.randn(32, columns).bfloat16()
    xh, xb = inputs(n, columns)
    out = torch.full((n, 200), float("nan"))
    weights = (*first[:2], 96, *second[:2], 64, dense, 32)
    blocks = [(block, 0) for block in range(4)]
    run(library.rows, (4, 1), blocks, *weights, xh, xb, n, columns, columns, out, 200, 0)
    expected = xb.double() @ torch.cat([first[2], second[2], dense.double()]).T
    assert worst(out[:, :192], expected) < 2e-6
    assert out[:, 192:].isnan().all()


def test_groups_of_rows_have_their_own_inputs(library):
    columns, n, groups = 128, 16, 3
    codes, scales, values = fp8_rows(groups * TILE, columns, 3)
    xh, xb = inputs(n, groups * columns)
    out = torch.full((n, groups * TILE), float("nan"))
    blocks = [(block, 0) for block in range(groups)]
    weights = (codes, scales, groups * TILE, None, None, 0, None, 0)
    sizes = (n, columns, groups * columns)
    run(library.rows, (groups, 1), blocks, *weights, xh, xb, *sizes, out, groups * TILE, TILE)
    each = values.view(groups, TILE, columns)
    expected = torch.einsum("ngk,grk->ngr", xb.double().view(n, groups, columns), each).flatten(1)
    assert worst(out, expected) < 2e-6
