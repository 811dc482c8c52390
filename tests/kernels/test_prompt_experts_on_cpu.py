"""The experts for prompts (`prompt_experts.cu`), compiled for a CPU (`hopper_on_cpu.h`) and compared with exact
products: which thread decodes which code, stages and their barriers across the ends of tiles, passes over scales that
are far apart, rounding of the result. What only a GPU shows are the asynchronous copies and products.
"""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from birkhoff.kernels import quant
from tests.kernels.cuda_on_cpu import SOURCES, compile_for_cpu
from tests.sizes import FULL

CALLS = """
extern "C" void run_gate_up(Arguments a, GateUp kernel, int grid) {
    for (int i = 0; i < grid; i++) run_roles(THREADS, {i, 0}, grid, [=] { run_tiles(a, kernel, memory); });
}
extern "C" void run_down(Arguments a, Down kernel, int grid) {
    for (int i = 0; i < grid; i++) run_roles(THREADS, {i, 0}, grid, [=] { run_tiles(a, kernel, memory); });
}
"""
TOPK, LIMIT = 2, 10.0
ADDRESS, INT, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


def structure(**fields: type) -> type[ctypes.Structure]:
    return type("Fields", (ctypes.Structure,), {"_fields_": list(fields.items())})


Arguments = structure(
    x=ADDRESS,
    x_scale=ADDRESS,
    x_rows=INT,
    width=INT,
    addresses=ADDRESS,
    blocks=ADDRESS,
    order=ADDRESS,
    row_tiles=INT,
)
GateUp = structure(weights=ADDRESS, topk=INT, inner=INT, limit=FLOAT, z=ADDRESS, z_scale=ADDRESS, pairs=INT)
Down = structure(y=ADDRESS, width=INT)


def without_ptx(name: str) -> str:
    """A source without its includes, kernels and functions of inline PTX."""
    text = (SOURCES / name).read_text().split('extern "C"')[0]
    text = re.sub(r"^(#include|#pragma once|WGMMA_E4M3).*$", "", text, flags=re.M)
    return "\n\n".join(each for each in text.split("\n\n") if "asm" not in each) + "\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("hopper_on_cpu")
    names = ("common.cuh", "wgmma.cuh", "prompt_common.cuh", "prompt_experts.cu")
    text = '#include "hopper_on_cpu.h"\n' + "".join(without_ptx(name) for name in names) + CALLS
    return compile_for_cpu(text, folder)


def fragments(codes: torch.Tensor) -> torch.Tensor:
    """Codes with the columns of every 128 in the order that the kernels read."""
    c = torch.arange(128)
    place = c // 8 % 4 * 32 + c // 4 % 2 * 16 + c // 32 * 4 + c % 4
    ordered = torch.empty_like(codes).view(len(codes), -1, 128)
    ordered[:, :, place] = codes.view(len(codes), -1, 128)
    return ordered.view_as(codes)


def random_inputs(
    g: torch.Generator, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in the order of the kernels, scales [width / 128, rows], and the values."""
    codes = (
        torch.randint(0, 120, (rows, width), generator=g)
        + 128 * torch.randint(0, 2, (rows, width), generator=g)
    ).to(torch.uint8)
    scales = torch.exp2(torch.randint(-9, -5, (width // 128, rows), generator=g).float())
    values = codes.view(torch.float8_e4m3fn).double() * scales.T.repeat_interleave(128, 1).double()
    return fragments(codes), scales, values


def random_matrix(
    g: torch.Generator, rows: int, width: int, distance: int
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, width // 2), generator=g).to(torch.uint8)
    return codes, torch.randint(121 - distance, 122, (rows, width // 32), generator=g).to(torch.uint8)


class Case:
    """Experts with some numbers of tokens, the matrices, and the plan; the expert `absent` has an empty block."""

    def __init__(self, tokens: list[int], width: int, inner: int, distance: int, absent: int | None):
        self.g = torch.Generator().manual_seed(sum(tokens))
        self.width, self.inner, self.pairs = width, inner, sum(tokens)
        shapes = ((2 * inner, width), (width, inner))
        self.matrices = [[random_matrix(self.g, *shape, distance) for shape in shapes] for _ in tokens]
        starts = [sum(tokens[:i]) for i in range(len(tokens))]
        self.experts = [
            (expert, slice(start, start + count))
            for expert, (start, count) in enumerate(zip(starts, tokens))
            if count and expert != absent
        ]
        blocks = [(i, starts[i], 0 if i == absent else n, 0) for i, n in enumerate(tokens) if n]
        self.blocks = torch.tensor([*blocks, (0, 0, 0, 0)], dtype=torch.int32)  # the last one is not in use
        self.blocks[:, 3] = len(blocks)
        choice = torch.randint(0, TOPK, (self.pairs,), generator=self.g)
        self.order = (torch.randperm(self.pairs, generator=self.g) * TOPK + choice).int()
        self.table = torch.tensor(
            [[part.data_ptr() for pair in each for part in pair] for each in self.matrices]
        )

    def arguments(self, x: torch.Tensor, scale: torch.Tensor, row_tiles: int) -> ctypes.Structure:
        addresses = [each.data_ptr() for each in (self.table, self.blocks, self.order)]
        return Arguments(x.data_ptr(), scale.data_ptr(), scale.shape[1], x.shape[1], *addresses, row_tiles)

    def values(self, expert: int, matrix: int) -> torch.Tensor:
        return quant.dequant_fp4(*self.matrices[expert][matrix]).double()


CASES = {
    "tiles of many lengths": ([20, 90, 0, 70, 33], 256, 256, 2, 3),
    "several passes": ([128, 45], 768, 256, 14, None),
    **({"one set of codes": ([100, 120, 5], 512, 512, 2, None)} if FULL else {}),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request) -> Case:
    return Case(*request.param)


def test_gate_and_up_are_those_of_exact_products(library, case):
    x, x_scale, values = random_inputs(case.g, case.pairs, case.width)
    weights = torch.rand(case.pairs, TOPK, generator=case.g)
    z = torch.full((case.pairs, case.inner), 127, dtype=torch.uint8)
    z_scale = torch.full((case.inner // 128, case.pairs), torch.nan)
    kernel = GateUp(weights.data_ptr(), TOPK, case.inner, LIMIT, z.data_ptr(), z_scale.data_ptr(), case.pairs)
    library.run_gate_up(case.arguments(x, x_scale, case.inner // 128), kernel, 2)
    place = fragments(torch.arange(128).view(1, 128))[0].argsort()
    natural = z.view(case.pairs, -1, 128)[:, :, place].flatten(1).view(torch.float8_e4m3fn).float()
    found = natural * z_scale.T.repeat_interleave(128, 1)
    for expert, rows in case.experts:
        pair = case.order[rows].long()
        gate, up = (values[pair // TOPK] @ case.values(expert, 0).T).chunk(2, dim=-1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        true = (gate * gate.sigmoid() * up * weights.flatten()[pair].unsqueeze(-1)).bfloat16()
        rounded = quant.fp8_round(true, 128).float()
        differ = (found[rows] != rounded).float().mean()
        assert differ < 0.03, "a value next to a tie may be rounded the other way"
        assert (found[rows] - rounded).norm() < 0.02 * rounded.norm()


def test_down_is_that_of_exact_products(library, case):
    z, z_scale, values = random_inputs(case.g, case.pairs, case.inner)
    y = torch.full((case.pairs * TOPK, case.width), torch.nan).bfloat16()
    arguments = case.arguments(z, z_scale, case.width // 256)
    library.run_down(arguments, Down(y.data_ptr(), case.width), 3)
    for expert, rows in case.experts:
        true = values[rows] @ case.values(expert, 1).T
        found = y[case.order[rows].long()].double()
        assert (found - true).norm() < 2.0**-8 * true.norm()
        assert (found - true).abs().max() < 2.0**-8 * true.abs().max()
    written = torch.zeros(len(y), dtype=torch.bool)
    for _, rows in case.experts:
        written[case.order[rows].long()] = True
    assert y[~written].isnan().all() and not y[written].isnan().any()
