"""The CUDA kernels for attention of a decode step (attend.cu), compiled for a CPU and compared with the plain twin."""

from __future__ import annotations

import pytest
import torch

from birkhoff.kernels.attend import attend_one
from birkhoff.kernels.cuda.entry_attention import EntryAttention
from birkhoff.kernels.rope import Phases, rotate
from tests.kernels.cuda_on_cpu import KernelsOnCpu
from tests.sizes import FULL

RING, WINDOW, CONTEXT, TOPK, EPS = 40, 33, 640, 70, 1e-6
KERNELS = tuple(f"{name}_{width}" for name in ("attend", "combine") for width in (128, 512))
SEEDS = (0, 1, 2, 3) if FULL else (0, 1)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> KernelsOnCpu:
    return KernelsOnCpu(("common.cuh", "attend.cu"), KERNELS, tmp_path_factory.mktemp("attend_on_cpu"))


class Backend(EntryAttention):
    def __init__(self, attend: KernelsOnCpu):
        self.pdl, self._attend = True, attend


class Step:
    """Caches of two slots more than there are rows, whose unwritten keys are NaN; a step of one token per row."""

    def __init__(
        self, positions: list[int], ratio: int, indexed: bool, width: int, heads: int, rope_dim: int
    ):
        g = torch.Generator().manual_seed(sum(positions) + ratio)
        n, per_page = len(positions), 128 // (ratio or 128)
        self.positions, self.ratio, self.width, self.heads = torch.tensor(positions), ratio, width, heads
        self.slots = torch.randperm(n + 2, generator=g)[:n]
        self.table = torch.randperm((n + 2) * CONTEXT // 128, generator=g).view(n + 2, -1)
        self.queries = 3 * torch.randn(n, heads * width + 8, generator=g).bfloat16()
        angles = torch.randn(n, 4, rope_dim // 2, generator=g)
        self.cos, self.sin = angles.cos().contiguous(), angles.sin().contiguous()
        self.sink = torch.randn(heads, generator=g)
        self.keys = torch.full((n + 2, RING, width), torch.nan).bfloat16()
        self.pages = (
            torch.full((self.table.numel(), per_page, width), torch.nan).bfloat16() if ratio else None
        )
        self.chosen = torch.full((n, TOPK), -(2**30), dtype=torch.int32) if indexed else None
        self.seen: list[torch.Tensor] = []  # of each row, the keys that its query sees
        for row, position in enumerate(positions):
            slot = self.slots[row]
            written = torch.arange(max(position - RING + 1, 0), position + 1)
            self.keys[slot, written % RING] = torch.randn(len(written), width, generator=g).bfloat16()
            seen = [self.keys[slot, torch.arange(max(position - WINDOW + 1, 0), position + 1) % RING]]
            if self.pages is not None:
                entries = torch.arange((position + 1) // ratio)
                where = self.table[slot, entries // per_page], entries % per_page
                self.pages[where] = torch.randn(len(entries), width, generator=g).bfloat16()
                if self.chosen is not None:
                    entries = torch.randperm(len(entries), generator=g)[:TOPK].sort().values
                    self.chosen[row, : len(entries)] = entries
                seen.append(self.pages[self.table[slot, entries // per_page], entries % per_page])
            self.seen.append(torch.cat(seen))

    def run(self, kernels: KernelsOnCpu, split: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        n, heads, width = len(self.positions), self.heads, self.width
        entries = 0 if not self.ratio else CONTEXT // self.ratio if self.chosen is None else TOPK
        splits = -(-(RING + entries) // split)
        parts = [
            torch.full(size, torch.nan) for size in ((n, splits, heads, width), *[(n, splits, heads)] * 2)
        ]
        out = torch.full((n, heads * width), torch.nan).bfloat16()
        half = out.half()
        caches = (self.keys, WINDOW, self.pages, self.ratio, self.table, self.chosen, self.slots)
        rest = (self.sink, split, width**-0.5, EPS, out, half)
        Backend(kernels).attend(self.queries, *caches, self.positions, self.cos, self.sin, *parts, *rest)
        kernels.run(seed)
        return out, half

    def expected(self) -> torch.Tensor:
        n, heads, width = len(self.positions), self.heads, self.width
        phases = Phases(self.cos[:, 0], self.sin[:, 0])
        queries = self.queries[:, : heads * width].view(n, heads, width).float()
        queries = (queries * torch.rsqrt(queries.square().mean(-1, keepdim=True) + EPS)).bfloat16()
        queries = rotate(queries, phases)
        rows = [
            attend_one(queries[row : row + 1], keys.unsqueeze(0), None, None, self.sink, width**-0.5)
            for row, keys in enumerate(self.seen)
        ]
        return rotate(torch.cat(rows), phases, inverse=True).flatten(1)


# One token; before and after a page of 128 tokens; a full ring; the last token that the pages have room for.
POSITIONS = ([0, 127], [2, 128], [RING - 1, CONTEXT - 1]) if FULL else ([0, 128], [2, CONTEXT - 1])
KINDS = [(0, False), (4, False), (4, True), (128, False)]
SPLITS = [32, 64, 96, 128] if FULL else [32, 96]  # one tile, two, and tiles that take the place of others
SHAPES = [(128, 16, 32), (128, 32, 128), (512, 16, 64)] if FULL else [(128, 16, 32)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ratio, indexed", KINDS)
@pytest.mark.parametrize("width, heads, rope_dim", SHAPES)
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_attention_is_that_of_the_plain_twin(
    kernels, positions, width, heads, rope_dim, ratio, indexed, split, seed
):
    step = Step(positions, ratio, indexed, width, heads, rope_dim)
    out, half = step.run(kernels, split, seed)
    expected = step.expected().float()
    # Both round the same products; the order of summation changes a probability or an output by one rounding.
    for actual in (out.float(), half.float()):
        assert ((actual - expected).norm(dim=1) <= 2.0**-7 * expected.norm(dim=1)).all()
