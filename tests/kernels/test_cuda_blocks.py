"""CUDA kernels for ggml's types compared with exact products. Needs a GPU of compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import TYPES, PackedMatrix
from tests.kernels.test_cuda import WIDE
from tests.kernels.test_cuda import pytestmark as needs_gpu
from tests.packed_matrices import random_matrix

pytestmark = needs_gpu
TWICE = replace(WIDE, hidden_size=2048, moe_intermediate_size=2048, q_lora_rank=512, o_lora_rank=256)


def backend():
    from birkhoff.kernels.cuda.backend import CudaBackend

    return CudaBackend(torch.device("cuda"))


def weight_of(name, rows, columns, seed) -> PackedWeight:
    matrix = random_matrix(TYPES[name], rows, columns, seed)
    return PackedWeight.of([PackedMatrix(matrix.type, columns, matrix.codes.cuda())])


def inputs(rows, columns):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16().cuda()
    return x.half(), x


def fp4_order(rows):
    """Every eight columns in the order in which a word of FP4 codes unpacks."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device=rows.device)
    return rows.unflatten(-1, (-1, 8))[..., order].flatten(-2).contiguous()


def worst(actual, expected) -> float:
    return float((actual.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("rows", [1, 5, 9, 17, 64])
@pytest.mark.parametrize("columns", [256, 1024, 2048, 4096])
@torch.inference_mode()
def test_products_with_q8_rows_are_exact(rows, columns):
    kernels = backend()
    weights = [weight_of("Q8_0", 48, columns, 1), weight_of("Q8_0", 32, columns, 2)]
    plain = PackedWeight(torch.randn(16, columns, dtype=torch.bfloat16, device="cuda"))
    x = inputs(rows, columns)
    out = torch.full((rows, 96), float("nan"), device="cuda")
    kernels.gemv([*weights, plain], x, out)
    expected = torch.cat([x[1].double() @ weight.dense().double().T for weight in (*weights, plain)], 1)
    assert worst(out, expected) < 2e-6


@torch.inference_mode()
def test_rows_in_groups_read_their_own_inputs():
    kernels, weight, x = backend(), weight_of("Q8_0", 128, 512, 3), inputs(3, 4 * 512)
    out = torch.full((3, 128), float("nan"), device="cuda")
    kernels.gemv([weight], x, out, 32)
    parts = x[1].double().view(3, 4, 512).transpose(0, 1) @ weight.dense().double().view(
        4, 32, 512
    ).transpose(1, 2)
    assert worst(out, parts.transpose(0, 1).reshape(3, 128)) < 2e-6


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("kind", ["Q2_K", "IQ2_XXS"])
@torch.inference_mode()
def test_experts_equal_the_product_of_their_values(kind, rows):
    """Twenty tokens ask two experts each of three, so that an expert has more than one tile of eight tokens."""
    kernels, hidden, inner, topk = backend(), 4096, 2048, 2
    both = [weight_of(kind, 2 * inner, hidden, seed) for seed in range(3)]
    last = [weight_of(kind, hidden, inner, 7 + seed) for seed in range(3)]
    x = 0.02 * inputs(rows, hidden)[1]
    ids = torch.stack([torch.randperm(3)[:topk] for _ in range(rows)])
    slots = torch.zeros(3, 16, dtype=torch.int32)
    order, count = [], 0
    for expert in range(3):
        pairs = (ids.flatten() == expert).nonzero().flatten().tolist()
        slots[expert, :3] = torch.tensor([expert, count, len(pairs)])
        slots[expert].view(torch.int64)[2] = both[expert].weight.data_ptr()
        slots[expert].view(torch.int64)[4] = last[expert].weight.data_ptr()
        order, count = order + pairs, count + len(pairs)
    weights = torch.rand(rows, topk, device="cuda")
    buffers = SimpleNamespace(
        rows=rows,
        x=x,
        x_fp4_order=fp4_order(x.half()),
        expert_slots=slots.cuda(),
        pair_order=torch.tensor([order, order], dtype=torch.int32).cuda(),
        topk_weights=weights,
        expert_hidden=torch.full((rows * topk, inner), float("nan"), dtype=torch.float16, device="cuda"),
        shared_hidden=torch.zeros(rows, inner, dtype=torch.float16, device="cuda"),
        expert_out=torch.full((rows, topk + 1, hidden), float("nan"), device="cuda"),
    )
    layer = SimpleNamespace(
        expert_types=(TYPES[kind], TYPES[kind]),
        host_range=None,
        shared_down=weight_of("Q8_0", hidden, inner, 5),
    )
    kernels.gate_up(layer, buffers, 10.0)
    kernels.down(layer, buffers)
    for token in range(rows):
        for place in range(topk):
            expert = int(ids[token, place])
            a, b = (both[expert].dense().double() @ x[token].double()).split(inner)
            hidden_row = torch.nn.functional.silu(a.clamp(max=10)) * b.clamp(-10, 10) * weights[token, place]
            actual = buffers.expert_hidden[token * topk + place]
            assert worst(actual, fp4_order(hidden_row)) < 2**-10
            expected = fp4_order(last[expert].dense()).double() @ actual.double()
            assert worst(buffers.expert_out[token, place], expected) < 2e-6
    assert not buffers.expert_out[:, -1].any()


@pytest.mark.parametrize("rows", [1, 3, 8, 33])
@pytest.mark.parametrize("experts", ["FP4", "Q2_K", "IQ2_XXS"])
@torch.inference_mode()
def test_a_step_matches_the_triton_kernels(experts, rows):
    from birkhoff.bench.decode import set_inputs
    from birkhoff.bench.synthetic import filled_state, random_on_device
    from birkhoff.decode.gpu import Decoder

    device = torch.device("cuda")
    types = (TYPES[experts], TYPES[experts], TYPES["Q8_0"])
    model = random_on_device(TWICE, device, seed=rows, types=types)
    logits = []
    for fast in (False, True):
        torch.manual_seed(rows)
        decoder = Decoder(model, filled_state(TWICE, rows, 384, device), fast=fast)
        buffers = decoder.buffers(rows, 640)
        buffers.poison()
        set_inputs(buffers, list(range(rows)), [380 + 3 * row for row in range(rows)])
        logits.append(decoder.step(buffers).clone())
    error = (logits[1] - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1)
    # The median, because a near tie between two experts may be resolved differently in a few rows.
    assert error.median() < 0.02
