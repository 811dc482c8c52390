"""Both main loops of the experts for prompts (`prompt_experts.cu`, `prompt_pipeline.cu`), compiled for a CPU
(`hopper_on_cpu.h`) and compared with exact products: which thread decodes which code, stages and their barriers, passes
over scales that are far apart, rounding of the result. What only a GPU shows are the asynchronous copies and products.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from birkhoff.kernels import quant
from tests.sizes import FULL

SOURCES = Path(__file__).parents[2] / "birkhoff" / "kernels" / "cuda"
HERE = Path(__file__).parent
CALLS = """
extern "C" void run_gate_up_N(Product p, const int* order, const float* weights, int count, int topk, float limit,
                              int inner, u8* z, float* z_scale, int pairs) {
    run_roles(THREADS, {0, 0}, [=] {
        if (threadIdx.x >= MULTIPLYING) copy_stages<N>(p, memory, GateUpRows{order, 0, count, topk, inner});
        else gate_up<N>(p, memory, order, weights, 0, count, topk, limit, inner, z, z_scale, pairs);
    });
}
extern "C" void run_down_N(Product p, const int* order, int count, int width, u16* y) {
    run_roles(THREADS, {0, 0}, [=] {
        if (threadIdx.x >= MULTIPLYING) copy_stages<N>(p, memory, DownRows{0, count});
        else down<N>(p, memory, order, 0, count, width, y);
    });
}
"""
TOKENS = (32, 80, 112) if FULL else (32, 112)


class Product(ctypes.Structure):
    """As in prompt_common.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("x_rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
    )


def without_ptx(name: str) -> str:
    """A source without its includes, kernels and functions of inline PTX."""
    text = (SOURCES / name).read_text().split('extern "C"')[0]
    text = re.sub(r"^(#include|#pragma once|WGMMA_E4M3).*$", "", text, flags=re.M)
    return "\n\n".join(each for each in text.split("\n\n") if "asm" not in each) + "\n"


@pytest.fixture(scope="module", params=["prompt_experts.cu", "prompt_pipeline.cu"])
def library(request, tmp_path_factory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("hopper_on_cpu")
    names = ("common.cuh", "wgmma.cuh", "prompt_common.cuh", request.param, "prompt_outputs.cuh")
    roles = "#define ROLES\n" if "pipeline" in request.param else ""
    text = roles + '#include "hopper_on_cpu.h"\n' + "".join(without_ptx(name) for name in names)
    text += "".join(re.sub(r"\bN\b|(?<=_)N\b", str(n), CALLS) for n in TOKENS)
    (folder / "kernels.cpp").write_text(text)
    flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", f"-I{HERE}"]
    subprocess.run([compiler, *flags, folder / "kernels.cpp", "-o", folder / "kernels.so"], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


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


def product(x: torch.Tensor, scale: torch.Tensor, matrix: tuple[torch.Tensor, torch.Tensor]) -> Product:
    pointers = [each.data_ptr() for each in (x, scale, *matrix)]
    return Product(pointers[0], pointers[1], scale.shape[1], x.shape[1], *pointers[2:])


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize(
    "tokens, width, distance", [(20, 768, 2), (20, 256, 14), (100, 256, 2), (70, 768, 2)][: 4 if FULL else 3]
)
def test_gate_and_up_are_those_of_exact_products(library, tokens, width, distance):
    """More steps than stages, a second pass, and one set of sums."""
    g = torch.Generator().manual_seed(tokens)
    inner, topk, limit = 128, 2, 10.0
    x, x_scale, values = random_inputs(g, tokens, width)
    matrix = random_matrix(g, 2 * inner, width, distance)
    order = torch.randperm(tokens, generator=g).int() * topk + 1
    weights = torch.rand(tokens, topk, generator=g)
    z, z_scale = torch.full((tokens, inner), 127, dtype=torch.uint8), torch.full((1, tokens), torch.nan)
    room = next(n for n in TOKENS if tokens <= n)
    pointers = (address(order), address(weights), tokens, topk, ctypes.c_float(limit), inner)
    getattr(library, f"run_gate_up_{room}")(
        product(x, x_scale, matrix), *pointers, address(z), address(z_scale), tokens
    )
    rows = order.long() // topk
    gate, up = (values[rows] @ quant.dequant_fp4(*matrix).double().T).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    true = (gate * gate.sigmoid() * up * weights.flatten()[order.long()].unsqueeze(-1)).bfloat16()
    place = fragments(torch.arange(128).view(1, 128))[0].argsort()
    natural = z[:, place].view(torch.float8_e4m3fn).float() * z_scale.T
    rounded = quant.fp8_round(true, 128).float()
    assert (natural != rounded).float().mean() < 0.03, "a value next to a tie may be rounded the other way"
    assert (natural - rounded).norm() < 0.02 * rounded.norm()


@pytest.mark.parametrize("tokens, inner, distance", [(20, 768, 14), (100, 256, 2)])
def test_down_is_that_of_exact_products(library, tokens, inner, distance):
    g = torch.Generator().manual_seed(tokens)
    width = 256
    z, z_scale, values = random_inputs(g, tokens, inner)
    matrix = random_matrix(g, width, inner, distance)
    order = torch.randperm(tokens, generator=g).int()
    y = torch.full((tokens, width), torch.nan).bfloat16()
    room = next(n for n in TOKENS if tokens <= n)
    getattr(library, f"run_down_{room}")(
        product(z, z_scale, matrix), address(order), tokens, width, address(y)
    )
    true = values @ quant.dequant_fp4(*matrix).double().T
    assert (y[order.long()].double() - true).norm() < 2.0**-8 * true.norm()
    assert (y[order.long()].double() - true).abs().max() < 2.0**-8 * true.abs().max()
