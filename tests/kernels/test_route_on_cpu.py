"""Routing of a decode step (route.cu) and the launch before it, router and the shared expert's gate and up (gemv.cu),
compiled for a CPU and compared with the plain twin. A single token is routed by the last of the router's blocks that
ends, whichever that is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from birkhoff.kernels.cuda.backend import CudaBackend
from birkhoff.kernels.cuda.block_experts import DIGITS_X
from birkhoff.kernels.experts import reference
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import TYPES
from tests.kernels.cuda_on_cpu import SOURCES, KernelsOnCpu
from tests.kernels.test_cuda_blocks import worst
from tests.kernels.test_digit_experts_on_cpu import value_of
from tests.packed_matrices import random_matrix
from tests.sizes import FULL

SEEDS = (0, 1, 2, 3, 4, 5) if FULL else (0, 1)
TILES = (1, 2, 4, 8) if FULL else (1,)
KERNELS = {
    **{f"router_gate_up_{tiles}": None for tiles in TILES},
    "router_gate_up_one_8": None,
    "router_gate_up_one_16": None,
    "gemv_f32_1_8_2_1": "gemv<1, 8, 2, 1, float>",
    "gemv_bf16_2_4_1_1": "gemv<2, 4, 1, 1, bf16>",
    "gemv_f32_4_2_1_4": "gemv<4, 2, 1, 4, float>",
    "route_8": None,
    "route_16": None,
}
LIMIT, FACTOR, VOCAB = 10.0, 1.5, 11


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> KernelsOnCpu:
    # The products that `KERNELS` does not name take a minute to compile.
    lines = (SOURCES / "gemv.cu").read_text().splitlines()
    unused = [line for line in lines if line.startswith("GEMV_ALL_TYPES")]
    unused += [
        line for line in lines if line.startswith("ROUTER_GATE_UP(") and line[30] not in map(str, TILES)
    ]
    sources = ("common.cuh", "gemv.cuh", "gemv.cu", "digits.cuh", "route.cu")
    folder = tmp_path_factory.mktemp("route_on_cpu")
    return KernelsOnCpu(sources, KERNELS, folder, {f"\n{line}\n": "\n" for line in unused})


def backend(kernels: KernelsOnCpu) -> CudaBackend:
    made = object.__new__(CudaBackend)  # its constructor compiles for a GPU
    made.pdl, made._gemv, made._route, made._digits = True, kernels, kernels, None
    return made


class Layer:
    """Weights of an expert sublayer and the buffers of a step of n tokens."""

    def __init__(self, n: int, experts: int, topk: int, width: int, hashed: bool, digits: bool):
        g = torch.Generator().manual_seed(n + experts)
        inner = max(experts, 32)
        self.n, self.experts, self.topk = n, experts, topk
        self.router = torch.randn(experts, width, generator=g).bfloat16()
        self.router[3] = self.router[1]  # a tie
        self.shared = random_matrix(TYPES["FP8"], 2 * inner, width, 1)
        self.weights = SimpleNamespace(
            router=PackedWeight.plain([self.router.float()]),
            router_bias=None if hashed else 0.1 * torch.randn(experts, generator=g),
            hash_table=(
                torch.stack([torch.randperm(experts, generator=g)[:topk] for _ in range(VOCAB)]).int()
                if hashed
                else None
            ),
            shared_gate_up=PackedWeight.of([self.shared]),
            expert_addresses=torch.randint(0, 2**40, (experts, 4), generator=g),
        )
        if not hashed:
            self.weights.router_bias[3] = self.weights.router_bias[1]
        x = (0.3 * torch.randn(n, width, generator=g)).bfloat16()
        pairs = n * topk
        self.buffers = SimpleNamespace(
            x=x,
            x_fp16=x.half(),
            x_digits=torch.zeros(n, 4 * width, dtype=torch.uint8) if digits else None,
            token_ids=torch.randint(0, VOCAB, (n,), generator=g),
            router_gate_up=torch.full((n, experts + 2 * inner), torch.nan),
            topk_weights=torch.full((n, topk), torch.nan),
            pair_order=torch.full((2, pairs), -1, dtype=torch.int32),
            expert_slots=torch.full((min(experts, pairs), 16), -1, dtype=torch.int32),
            blocks_done=torch.zeros(1, dtype=torch.int32),
            shared_hidden=torch.full((n, inner), torch.nan).half(),
        )
        self.ids = torch.full((n, topk), -1, dtype=torch.int32)

    def check_plan(self) -> None:
        """Every pair is in the slot of its expert, slots in use come first and have the expert's addresses."""
        buffers, seen = self.buffers, []
        counts = buffers.expert_slots[:, 2].tolist()
        assert sorted(counts, key=bool, reverse=True) == counts
        for slot in buffers.expert_slots[: sum(map(bool, counts))]:
            expert, first, count = slot[:3].tolist()
            pairs = buffers.pair_order[1, first : first + count].tolist()
            assert all(self.ids.flatten()[pair] == expert for pair in pairs)
            assert torch.equal(slot[4:12].view(torch.int64), self.weights.expert_addresses[expert])
            seen += pairs
        assert sorted(seen) == list(range(self.n * self.topk))


CASES = [(1, 16, 2, 512, False), (1, 32, 6, 512, True), (5, 32, 6, 512, False), (2, 16, 2, 512, True)]
if FULL:
    CASES += [
        (1, 272, 16, 512, False),
        (1, 32, 6, 5120, False),
        (33, 64, 8, 512, False),
        (64, 512, 16, 512, False),
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n, experts, topk, width, hashed", CASES)
def test_routing_and_the_shared_expert_are_those_of_the_plain_twin(
    kernels, n, experts, topk, width, hashed, seed
):
    """Two layers in a row with the same buffers, as in a step: the second one finds the counter at zero."""
    layer = Layer(n, experts, topk, width, hashed, digits=n > 1)
    buffers, cuda = layer.buffers, backend(kernels)
    for _ in range(2):
        cuda.route_and_shared(layer.weights, buffers, layer.ids, LIMIT, FACTOR)
    kernels.run(seed)
    logits = buffers.router_gate_up[:, :experts].contiguous()
    assert worst(logits, buffers.x.double() @ layer.router.double().T) < 2e-6
    gate, up = (buffers.x_fp16.double() @ layer.shared.dense().double().T).chunk(2, dim=1)
    hidden = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    assert worst(buffers.shared_hidden, hidden) < 2**-10
    table = layer.weights.hash_table
    hashed_ids = None if table is None else table[buffers.token_ids].long()
    ids, weights = reference.route(logits, layer.weights.router_bias, hashed_ids, topk, FACTOR)
    assert torch.equal(layer.ids.long(), ids)
    assert worst(buffers.topk_weights, weights.double()) < 1e-5
    layer.check_plan()
    assert buffers.blocks_done.item() == 0
    if buffers.x_digits is not None:
        largest = buffers.x.float().view(n, -1, 32).abs().amax(-1).repeat_interleave(32, 1).clamp(min=0.5)
        values = value_of(buffers.x_digits) * DIGITS_X
        assert ((values - buffers.x.double()).abs() / largest).max() <= 2**-19


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("experts, topk", [(16, 2), (512, 16)])
def test_logits_that_are_not_numbers_choose_experts_that_exist(kernels, experts, topk, seed):
    layer = Layer(5, experts, topk, 512, False, False)
    logits = torch.randn(5, experts, generator=torch.Generator().manual_seed(seed))
    logits[0], logits[1], logits[2, 5] = 2.0, -torch.inf, torch.nan
    logits[3] = torch.tensor(-1).int().view(torch.float32)  # NaN with all bits set
    logits[4, 7] = torch.inf
    w, b = layer.weights, layer.buffers
    tables = (w.router_bias, None, b.token_ids, w.expert_addresses)
    plan = (layer.ids, b.topk_weights, b.pair_order, b.expert_slots, FACTOR)
    backend(kernels).route(logits, *tables, *plan)
    kernels.run(seed)
    assert layer.ids.min() >= 0 and layer.ids.max() < experts
    assert all(len(set(row)) == topk for row in layer.ids.tolist())
    ids, _ = reference.route(logits[[0, 1, 4]], w.router_bias, None, topk, FACTOR)
    assert torch.equal(layer.ids[[0, 1, 4]].long(), ids)
    assert layer.ids[2, 0] == 5
    layer.check_plan()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel, n, dtype", [("1_8_2_1", 3, "f32"), ("2_4_1_1", 9, "bf16"), ("4_2_1_4", 25, "f32")]
)
def test_products_of_fp8_and_bfloat16_rows_are_exact(kernels, kernel, n, dtype, seed):
    """Two matrices of FP8 and one of bfloat16; four warps of row blocks leave some of the last block without rows."""
    columns = 640
    warps, blocks = int(kernel.split("_")[1]), int(kernel.split("_")[3])
    packed = [random_matrix(TYPES["FP8"], rows, columns, rows) for rows in (48, 32)]
    weights = [PackedWeight.of([each]) for each in packed]
    numbers = torch.randn(16, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(n, columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    out = torch.full((n, 96), torch.nan, dtype=torch.float32 if dtype == "f32" else torch.bfloat16)
    codes = [part for each in weights for part in (each.weight, each.scale, each.out)]
    inputs = (x.half(), x, n, columns, columns, out, 96, 0)
    grid = (-(-96 // (16 * blocks)), 1)
    kernels.launch(
        f"gemv_{dtype}_{kernel}", grid, blocks * warps * 32, *codes, numbers, 16, *inputs, pdl=True
    )
    kernels.run(seed)
    dense = torch.cat([*(each.dense() for each in packed), numbers]).double()
    assert worst(out, x.double() @ dense.T) < (2e-6 if dtype == "f32" else 2**-8)
