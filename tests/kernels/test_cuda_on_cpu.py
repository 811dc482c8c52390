"""The CUDA kernels for experts of ggml's types and FP8, compiled for a CPU (`cuda_on_cpu.h`) and compared with exact
products.

What this covers is the arithmetic: which lane multiplies which code with which input, scales, signs and sums. What only
a GPU shows (asynchronous copies, early launches) is in `test_cuda_blocks.py`.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import pytest
import torch

from birkhoff.kernels.cuda.variants import BLOCK_DECODERS, BlockVariant
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import Q8_ROWS, TYPES
from birkhoff.kernels.packed.grids import grid
from tests.kernels.cuda_on_cpu import SOURCES, compile_for_cpu
from tests.kernels.test_cuda_blocks import fp4_order, kind_of, worst
from tests.packed_matrices import random_matrix
from tests.sizes import FULL

ARGUMENTS = {
    "gate_up": "const ExpertSlot* slots, {count}const int* order, const float* weights, const u16* x, u16* z, {grid}"
    "int inner, int width, int topk, float limit",
    "down": "const ExpertSlot* slots, {count}const int* order, const u16* z, float* y, {grid}int inner, int width, "
    "int topk{shared}",
}
SHARED = ", int shared_blocks, const u8* shared_codes, const u16* z_shared, int n"
GEMV_ARGUMENTS = (
    "const u8* codes, const u8* scale, int rows8, const u8* codes2, const u8* scale2, int rows8b, const u16* weight16, "
    "int rows16, const u16* xh, const u16* xb, int n, int inner, int x_stride, float* out, int out_stride, int group"
)
QUERY_ARGUMENTS = (
    "const u8* codes, const u8* scale, int rows, const u8* codes2, const u8* scale2, int rows2, const float* raw, "
    "const float* weight, float eps, float* out"
)
# Every decoder, in both forms: a tile per thread block, and a range of tiles in two or three stages. Those that differ
# from another by copies of a table only are left to the full suite.
MORE_COPIES = ("IQ2_XXS_DIGITS16",)
VARIANTS = [
    BlockVariant(name, *((2, 1), (2, 2, 1), (1, 3, 1))[index % 3])
    for index, name in enumerate(name for name in BLOCK_DECODERS if FULL or name not in MORE_COPIES)
]


def without_ptx(text: str) -> str:
    """A source without its includes, kernels and functions of inline PTX."""
    text = re.sub(r"^(#include|#pragma once|#if.*|#endif).*$", "", text, flags=re.M)
    paragraphs = text.split("\n\n")
    return "\n\n".join(each for each in paragraphs if not re.search(r"asm|extern|#define", each))


def caller(name: str, function: str, kernel: str, threads: int, block_type: bool) -> str:
    """A function `name` that runs blocks of a grid of the kernel `function`."""
    count, table, shared = ("int slot_count, ", "const u8* grid, ", SHARED) if block_type else ("", "", "")
    others = {"gemv": GEMV_ARGUMENTS, "query": QUERY_ARGUMENTS}
    declared = (ARGUMENTS | others)[kernel].format(count=count, grid=table, shared=shared)
    passed = ", ".join(each.split()[-1] for each in declared.split(", "))
    return (
        f'extern "C" void {name}(Place shape, const int (*blocks)[2], int block_count, {declared}) {{\n'
        f"    run_blocks(shape, blocks, block_count, {threads}, [=] {{ {function}({passed}); }});\n}}\n"
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    text = '#include "cuda_on_cpu.h"\nstatic uint4 memory[8192];\n'
    for name in ("common.cuh", "gemv.cuh", "blocks.cuh", "block_types.cuh", "blocks.cu"):
        text += without_ptx((SOURCES / name).read_text())
    for variant in VARIANTS:
        parameters = f"<{variant.decoder}, {variant.warps}, {variant.stages}>"
        for kernel in ARGUMENTS:
            name = f"{kernel}_{variant.decoder}"
            text += caller(name, f"{kernel}_blocks{parameters}", kernel, 32 * variant.warps, True)
    text += without_ptx((SOURCES / "fp8_experts.cu").read_text())
    for kernel in ARGUMENTS:
        text += caller(f"{kernel}_FP8", f"{kernel}_fp8", kernel, 128, False)
    text += "#define Q8_CODES 1\n" + without_ptx((SOURCES / "gemv.cu").read_text())
    text += caller("gemv_q8", "gemv<2, 2, 2, 1>", "gemv", 64, False)
    text += without_ptx((SOURCES / "query.cu").read_text())
    text += caller("query", "project_query<float>", "query", 256, False)
    return compile_for_cpu(text, folder)


class Place(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("z", ctypes.c_int))


def argument(value):
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else value


def run(kernel, shape: tuple[int, int], blocks: list[tuple[int, int]], *arguments) -> None:
    """Run some blocks of a grid."""
    chosen = torch.tensor(blocks, dtype=torch.int32)
    kernel(Place(*shape), argument(chosen), len(blocks), *map(argument, arguments))


@dataclass
class Layer:
    """Two experts of one layer and a plan in which `pairs[e]` are the (token, choice) pairs of expert e."""

    hidden: int
    inner: int
    both: list
    last: list
    slots: torch.Tensor
    order: torch.Tensor
    weights: torch.Tensor
    x: torch.Tensor
    z: torch.Tensor
    pairs: list[list[int]]
    topk: int


def random_layer(kind: str, hidden: int, inner: int, rows: int, pairs: list[list[int]], topk: int) -> Layer:
    both = [random_matrix(TYPES[kind], 2 * inner, hidden, seed) for seed in range(2)]
    last = [random_matrix(TYPES[kind], hidden, inner, 7 + seed) for seed in range(2)]
    generator = torch.Generator().manual_seed(1)
    slots, order = torch.zeros(2, 16, dtype=torch.int32), []
    for expert, each in enumerate(pairs):
        slots[expert, :3] = torch.tensor([expert, len(order), len(each)])
        for at, matrix in ((2, both[expert]), (4, last[expert])):
            slots[expert].view(torch.int64)[at] = matrix.codes.data_ptr()
            if matrix.scales is not None:
                slots[expert].view(torch.int64)[at + 1] = matrix.scales.data_ptr()
        order += each
    return Layer(
        hidden,
        inner,
        both,
        last,
        slots,
        torch.tensor(order, dtype=torch.int32),
        torch.rand(rows, topk, generator=generator),
        (0.05 * torch.randn(rows, hidden, generator=generator)).half(),
        torch.randn(rows * topk, inner, generator=generator).half(),
        pairs,
        topk,
    )


def expected_hidden(layer: Layer, expert: int, pair: int) -> torch.Tensor:
    a, b = (layer.both[expert].dense().double() @ layer.x[pair // layer.topk].double()).split(layer.inner)
    return torch.nn.functional.silu(a.clamp(max=10)) * b.clamp(-10, 10) * layer.weights.flatten()[pair]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda each: each.decoder)
def test_experts_equal_the_product_of_their_values(library, variant):
    """Some tiles of both experts. Nine tokens ask the first, so that it has more than one tile of eight tokens; two ask
    the other. A decoder for one token has one, which asks both."""
    decoder, kind = BLOCK_DECODERS[variant.decoder], kind_of(variant.decoder)
    rows, pairs = (1, [[0], [1]]) if decoder.digits else (9, [[2 * row for row in range(9)], [1, 17]])
    # Rows of 2048 columns are a multiple of 32 bytes; with digits they are padded.
    layer = random_layer(kind, 2048 if variant.decoder == "Q2_K_DIGITS" else 768, 256, rows, pairs, 2)
    hidden, inner, topk = layer.hidden, layer.inner, layer.topk
    layer.x[:, 3], layer.z[:, 5] = 40, 3000  # much larger than the others, which digits then round
    assert variant.memory(hidden, rows) <= 8192 * 16
    table = grid(kind).flatten().contiguous() if decoder.table else torch.zeros(1, dtype=torch.uint8)
    z = torch.full((rows * topk, inner), float("nan"), dtype=torch.float16)
    y = torch.full((rows, topk + 1, hidden), float("nan"))
    plan = (layer.slots, 2, layer.order)

    def tiles(rows_of_an_expert: int, step: int) -> tuple[tuple[int, int], list[tuple[int, int]], list]:
        """A grid, blocks around the border of the two experts, and their tiles: (expert, first row)."""
        each = rows_of_an_expert // step
        count = 2 * each if variant.stages == 1 else 2 * each // (variant.stages + 1)
        blocks = [count // 2 - 1, count // 2]
        covered = range(2 * each * blocks[0] // count, 2 * each * (blocks[1] + 1) // count)
        return (count, 1), [(block, 0) for block in blocks], [(t // each, t % each * step) for t in covered]

    shape, blocks, covered = tiles(inner, 8)
    inputs = (layer.weights, fp4_order(layer.x), z, table, inner, hidden, topk, 10.0)
    run(library[f"gate_up_{variant.decoder}"], shape, blocks, *plan, *inputs)
    for expert, row in covered:
        for pair in pairs[expert]:
            expected = fp4_order(expected_hidden(layer, expert, pair))
            assert worst(z[pair, row : row + 8], expected[row : row + 8]) < 2**-10
    assert {expert for expert, _ in covered} == {0, 1}
    shape, blocks, covered = tiles(hidden, 16)
    shared, z_shared = random_matrix(Q8_ROWS, hidden, inner, 3), torch.randn(rows, inner).half()
    shared_blocks = 2 if decoder.digits else 0  # thread blocks before the others
    blocks = [(block + shared_blocks, 0) for block, _ in blocks] + [
        (block, 0) for block in range(shared_blocks)
    ]
    shape = (shape[0] + shared_blocks, 1)
    inputs = (layer.z, y, table, inner, hidden, topk, shared_blocks, shared.codes, z_shared, rows)
    run(library[f"down_{variant.decoder}"], shape, blocks, *plan, *inputs)
    allowed = 4e-6 if decoder.digits else 2e-6  # digits round small inputs beside large ones
    for expert, row in covered:
        for pair in pairs[expert]:
            product = fp4_order(layer.last[expert].dense()).double() @ layer.z[pair].double()
            assert worst(y[pair // 2, pair % 2, row : row + 16], product[row : row + 16]) < allowed
    if shared_blocks:
        assert worst(y[:, -1], z_shared.double() @ shared.dense().double().T) < 2e-6
    else:
        assert y[:, -1].isnan().all()


def test_experts_in_fp8_equal_the_product_of_their_values(library):
    rows, topk = 9, 2
    layer = random_layer("FP8", 512, 256, rows, [[2 * row for row in range(9)], [1, 17]], topk)
    z = torch.full((rows * topk, layer.inner), float("nan"), dtype=torch.float16)
    y = torch.full((rows, topk + 1, layer.hidden), float("nan"))
    blocks = [(8, 0), (15, 1)]  # both tiles of scales
    sizes = (layer.inner, layer.hidden, topk)
    shape = (layer.inner // 16, 2)
    run(library.gate_up_FP8, shape, blocks, layer.slots, layer.order, layer.weights, layer.x, z, *sizes, 10.0)
    run(library.down_FP8, (layer.hidden // 16, 2), blocks, layer.slots, layer.order, layer.z, y, *sizes)
    for block, expert in blocks:
        here = slice(16 * block, 16 * block + 16)
        for pair in layer.pairs[expert]:
            assert worst(z[pair, here], expected_hidden(layer, expert, pair)[here]) < 2**-10
            product = layer.last[expert].dense().double() @ layer.z[pair].double()
            assert worst(y[pair // 2, pair % 2, here], product[here]) < 2e-6


def test_products_of_q8_rows_equal_the_product_of_their_values(library):
    """Four tiles of two matrices and one of numbers, ten tokens, and ten blocks of columns that two warps share."""
    columns, rows = 1280, 10
    weights = [random_matrix(Q8_ROWS, each, columns, each) for each in (48, 16)]
    numbers = torch.randn(16, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(rows, 5 * columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    dense = torch.cat([*(weight.dense() for weight in weights), numbers]).double()
    codes = [part for weight in weights for part in (weight.codes, None, weight.rows)]
    for group in (0, 16):
        out = torch.full((rows, 80), float("nan"))
        inputs = (x.half(), x, rows, columns, 5 * columns, out, 80, group)
        run(library.gemv_q8, (5, 1), [(block, 0) for block in range(5)], *codes, numbers, 16, *inputs)
        own = x.double().view(rows, 5, columns)
        parts = [dense[at : at + 16] @ own[:, at // 16 if group else 0].T for at in range(0, 80, 16)]
        assert worst(out, torch.cat(parts).T) < 2e-6


def test_queries_are_products_with_the_norm_of_the_latent(library):
    generator = torch.Generator().manual_seed(3)
    raw, weight = torch.randn(1024, generator=generator), torch.rand(1024, generator=generator)
    weights = [PackedWeight.of([random_matrix(TYPES["FP8"], rows, 1024, rows)]) for rows in (48, 32)]
    out = torch.full((80,), float("nan"))
    parts = [part for each in weights for part in (each.weight, each.scale, each.out)]
    run(library.query, (5, 1), [(block, 0) for block in range(5)], *parts, raw, weight, 1e-6, out)
    x = raw.bfloat16().float()
    x = (x * torch.rsqrt(x.square().mean() + 1e-6) * weight).bfloat16().half()
    dense = torch.cat([each.dense() for each in weights])
    assert worst(out, dense.double() @ x.double()) < 2e-6
