"""The CUDA kernels for experts of ggml's types, compiled for a CPU (`cuda_on_cpu.h`) and compared with exact products.

What this covers is the arithmetic: which lane multiplies which code with which input, scales, signs and sums. What only
a GPU shows (asynchronous copies, early launches) is in `test_cuda_blocks.py`.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from birkhoff.kernels.cuda.variants import BLOCK_TYPES, BLOCK_WARPS, block_memory
from birkhoff.kernels.packed import TYPES
from birkhoff.kernels.packed.grids import grid
from tests.kernels.test_cuda_blocks import fp4_order, worst
from tests.packed_matrices import random_matrix

SOURCES = Path(__file__).parents[2] / "birkhoff" / "kernels" / "cuda"
HERE = Path(__file__).parent
CALLS = """
extern "C" void run_gate_up(const ExpertSlot* slots, int count, const int* order, const float* weights, const u16* x,
                            u16* z, const u8* grid, int inner, int width, int topk, float limit) {
    run_grid(2, count, 32 * WARPS, [=] { gate_up_blocks<TYPE, WARPS>(slots, order, weights, x, z, grid, inner,
                                                                            width, topk, limit); });
}
extern "C" void run_down(const ExpertSlot* slots, int count, const int* order, const u16* z, float* y, const u8* grid,
                         int inner, int width, int topk) {
    run_grid(2, count, 32 * WARPS, [=] { down_blocks<TYPE, WARPS>(slots, order, z, y, grid, inner, width,
                                                                          topk); });
}
"""


def without_ptx(text: str) -> str:
    """A source without its includes, kernels and functions of inline PTX."""
    text = re.sub(r"^(#include|#pragma once|extern __shared__).*$", "", text, flags=re.M)
    paragraphs = text.split("\n\n")
    return "\n\n".join(each for each in paragraphs if "asm" not in each and "#define" not in each)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("cuda_on_cpu")

    def build(kind: str) -> ctypes.CDLL:
        text = '#include "cuda_on_cpu.h"\nstatic uint4 memory[4096];\n'
        for name in ("common.cuh", "gemv.cuh", "blocks.cuh", "blocks.cu"):
            text += without_ptx((SOURCES / name).read_text())
        text = re.sub(r"(?m)^EXPERTS_BLOCKS.*$", "", text)
        file = folder / f"{kind}.cpp"
        file.write_text(text + CALLS.replace("TYPE", kind).replace("WARPS", str(BLOCK_WARPS)))
        flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", f"-I{HERE}"]
        subprocess.run([compiler, *flags, str(file), "-o", str(folder / f"{kind}.so")], check=True)
        return ctypes.CDLL(str(folder / f"{kind}.so"))

    return build


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("kind", list(BLOCK_TYPES))
def test_experts_equal_the_product_of_their_values(library, kind):
    """The first two thread blocks of every expert. Eleven tokens ask one of them, so that it has more than one tile of
    eight tokens; three ask the other."""
    compiled, hidden, inner, rows, topk = library(kind), 1280, 512, 11, 2
    both = [random_matrix(TYPES[kind], 2 * inner, hidden, seed) for seed in range(2)]
    last = [random_matrix(TYPES[kind], hidden, inner, 7 + seed) for seed in range(2)]
    generator = torch.Generator().manual_seed(1)
    x = (0.05 * torch.randn(rows, hidden, generator=generator)).bfloat16()
    weights = torch.rand(rows, topk, generator=generator)
    pairs = [[2 * row for row in range(rows)], [1, 5, 21]]
    slots, order = torch.zeros(2, 16, dtype=torch.int32), []
    for expert, each in enumerate(pairs):
        slots[expert, :3] = torch.tensor([expert, len(order), len(each)])
        slots[expert].view(torch.int64)[2] = both[expert].codes.data_ptr()
        slots[expert].view(torch.int64)[4] = last[expert].codes.data_ptr()
        order += each
    assert block_memory(kind, hidden, rows) <= 4096 * 16
    places = torch.tensor(order, dtype=torch.int32)
    table = grid(kind).flatten().contiguous() if kind.startswith("IQ") else torch.zeros(1, dtype=torch.uint8)
    z = torch.full((rows * topk, inner), float("nan"), dtype=torch.float16)
    z_down = torch.randn(rows * topk, inner, generator=generator).half()
    y = torch.full((rows, topk + 1, hidden), float("nan"))
    inputs = fp4_order(x.half())
    plan = (pointer(slots), 2, pointer(places))
    compiled.run_gate_up(
        *plan,
        pointer(weights),
        pointer(inputs),
        pointer(z),
        pointer(table),
        inner,
        hidden,
        topk,
        ctypes.c_float(10.0),
    )
    compiled.run_down(*plan, pointer(z_down), pointer(y), pointer(table), inner, hidden, topk)
    for expert, each in enumerate(pairs):
        for pair in each:
            token, place = divmod(pair, topk)
            a, b = (both[expert].dense().double() @ x[token].double()).split(inner)
            hidden_row = torch.nn.functional.silu(a.clamp(max=10)) * b.clamp(-10, 10) * weights[token, place]
            assert worst(z[pair, :16], fp4_order(hidden_row)[:16]) < 2**-10
            product = fp4_order(last[expert].dense()).double() @ z_down[pair].double()
            assert worst(y[token, place, :32], product[:32]) < 2e-6
    assert y[:, -1].isnan().all()
