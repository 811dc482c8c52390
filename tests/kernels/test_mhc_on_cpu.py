"""The CUDA kernels of a boundary (mhc.cu), compiled for a CPU and compared with the plain twin: two boundaries,
launched one after the other as in a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from birkhoff.kernels.cuda.backend import CudaBackend
from birkhoff.kernels.mhc import decode as portable
from birkhoff.kernels.mhc import reference
from tests.kernels.cuda_on_cpu import KernelsOnCpu
from tests.kernels.test_cuda_blocks import fp4_order
from tests.sizes import FULL

ITERS, EPS = 20, 1e-6
SEEDS = (0, 1, 2, 3) if FULL else (0, 1)
# From 64 columns, which one thread block writes, to the widest; 4,160 ends within the second round of a thread block.
WIDTHS = (64, 192, 1024, 4160, 8192) if FULL else (64, 192)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> KernelsOnCpu:
    names = ("write_and_mix", "read_streams")
    return KernelsOnCpu(("common.cuh", "mhc.cu"), names, tmp_path_factory.mktemp("mhc_on_cpu"))


def backend(kernels: KernelsOnCpu) -> CudaBackend:
    made = object.__new__(CudaBackend)  # its constructor compiles for a GPU
    made.pdl, made._mhc = True, kernels
    return made


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool(
        (actual.double() - expected.double()).abs().max() <= tolerance * expected.double().abs().max()
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows, parts", [(1, 1), (2, 7), (8, 2)] if FULL else [(1, 7), (2, 1)])
def test_two_boundaries_in_a_row_are_those_of_the_plain_twin(kernels, rows, parts, width, seed):
    g = torch.Generator().manual_seed(width + rows)
    embed = torch.randn(9, width, generator=g).bfloat16()
    tokens = torch.randint(0, 9, (rows,), generator=g)
    tokens[-1] = 8
    y = torch.randn(rows, parts, width, generator=g)
    fns = [torch.randn(24, 4 * width, generator=g) * (4 * width) ** -0.5 for _ in range(2)]
    base, scale, norm = (torch.randn(size, generator=g) for size in (24, 3, width))
    buffers = SimpleNamespace(
        streams=torch.full((rows, 4, width), torch.nan).bfloat16(),
        mix_parts=torch.full((rows, width // 64, 32), torch.nan),
        x=torch.full((rows, width), torch.nan).bfloat16(),
        x_fp16=torch.full((rows, width), torch.nan).half(),
        x_fp4_order=torch.full((rows, width), torch.nan).half(),
        **{name: torch.full((rows, *size), torch.nan) for name, size in COEFFICIENTS.items()},
    )
    cuda = backend(kernels)
    coefficients = (buffers.post, buffers.mix)
    first = (buffers.streams, None, *coefficients, fns[0], buffers.mix_parts, portable.EMBED, embed, tokens)
    cuda.write_and_mix(*first)
    cuda.read_streams(buffers, base, scale, norm, ITERS, EPS, EPS, EPS)
    cuda.write_and_mix(buffers.streams, y, *coefficients, fns[1], buffers.mix_parts)
    cuda.read_streams(buffers, base, scale, norm, ITERS, EPS, EPS, EPS)
    kernels.run(seed)
    streams = embed[tokens].unsqueeze(1).repeat(1, 4, 1)
    _, _, post, mix = reference.read(streams, fns[0], base, scale, ITERS, EPS, EPS)
    streams = reference.write(streams, y.sum(1).bfloat16(), post, mix)
    u, pre, post, mix = reference.read(streams, fns[1], base, scale, ITERS, EPS, EPS)
    assert close(buffers.streams, streams, 2.0**-7)
    for actual, expected in ((buffers.pre, pre), (buffers.post, post), (buffers.mix, mix)):
        assert close(
            actual, expected, 1e-2 if width == 64 else 5e-3
        )  # streams differ by a rounding here and there
    normed = torch.nn.functional.rms_norm(u.float(), (width,), norm, EPS)
    assert close(buffers.x, normed, 2.0**-6)
    assert torch.equal(buffers.x_fp16, buffers.x.half())
    assert torch.equal(buffers.x_fp4_order, fp4_order(buffers.x_fp16))


COEFFICIENTS = {"pre": (4,), "post": (4,), "mix": (4, 4)}
