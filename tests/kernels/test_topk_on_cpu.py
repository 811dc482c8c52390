"""The CUDA kernels that choose the indexer's best entries (topk.cu), compiled for a CPU and compared with a sort."""

from __future__ import annotations

import pytest
import torch

from birkhoff.kernels.cuda.entry_attention import EntryAttention
from tests.kernels.cuda_on_cpu import KernelsOnCpu
from tests.sizes import FULL

# A cluster of eight blocks of 64 threads in the place of 1,024: what they exchange does not depend on the warps.
KERNELS = {"topk_4": "topk_4", "topk_8": "topk_8", "topk_cluster_4": "topk_entries<4, 2, 8>"}
CLUSTER_ENTRIES = 8 * 64 * 4


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> KernelsOnCpu:
    return KernelsOnCpu(("common.cuh", "topk.cu"), KERNELS, tmp_path_factory.mktemp("topk_on_cpu"))


class Backend(EntryAttention):
    def __init__(self, topk: KernelsOnCpu):
        self.pdl, self._topk = True, topk


def random_scores(kind: str, rows: int, entries: int) -> torch.Tensor:
    scores = torch.randn(rows, entries, generator=torch.Generator().manual_seed(entries))
    if kind == "equal":
        return torch.full_like(scores, -3.5)
    if kind == "ties":
        return (scores * 2).round()
    if kind == "infinite":
        scores[:, ::7], scores[:, 1::3] = torch.inf, -torch.inf
    if kind == "mostly minus infinity":
        scores[:, 5:] = -torch.inf
    if kind == "zeros of both signs":
        scores = torch.where(scores > 0.5, scores, torch.where(scores > -1, 0.0, -0.0))
    return scores


def expected_indices(scores: torch.Tensor, count: int, topk: int) -> torch.Tensor:
    """Of the highest scores, the lower index first among equal ones, in ascending order."""
    return scores[:count].sort(descending=True, stable=True).indices[:topk].sort().values


KINDS = ("random", "equal", "ties", "infinite", "mostly minus infinity", "zeros of both signs")
SEEDS = (0, 1, 2, 3) if FULL else (0, 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("entries", [1000, 1024, 1025, 2048] if FULL else [1000, 1025])
@pytest.mark.parametrize("topk", [1, 48, 512] if FULL else [48])
@pytest.mark.parametrize("kind", KINDS)
def test_one_block_chooses_what_a_sort_does(kernels, kind, topk, entries, seed):
    """Sequences without entries, with as many as are chosen, one more, and all that there is room for."""
    counts = [0, topk, topk + 1, entries]
    scores = random_scores(kind, len(counts), entries)
    chosen = torch.full((len(counts), topk), -7, dtype=torch.int32)
    Backend(kernels).topk(scores, torch.tensor([4 * count + 2 for count in counts]), chosen)
    kernels.run(seed)
    for row, count in enumerate(counts):
        best = expected_indices(scores[row], count, topk)
        assert torch.equal(chosen[row, : len(best)].long(), best)
        assert (chosen[row, len(best) :] == -7).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cluster_chooses_what_a_sort_does(kernels, kind, seed):
    topk, counts = 48, [CLUSTER_ENTRIES - 3, 100] if FULL else [CLUSTER_ENTRIES - 3]
    scores = random_scores(kind, len(counts), CLUSTER_ENTRIES)
    chosen = torch.full((len(counts), topk), -7, dtype=torch.int32)
    positions = torch.tensor([4 * count - 1 for count in counts])
    arguments = (scores, positions, chosen, CLUSTER_ENTRIES, topk)
    kernels.launch("topk_cluster_4", (8 * len(counts), 1), 64, *arguments, pdl=True)
    kernels.run(seed)
    for row, count in enumerate(counts):
        assert torch.equal(chosen[row].long(), expected_indices(scores[row], count, topk))
