"""Triton prefill kernels compared with the reference kernels, at sizes that are not multiples of their tiles.

Triton's interpreter multiplies float32 and float16 tiles correctly, but not bfloat16 ones: without a GPU float16
represents both 16-bit dtypes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.kernels import attend as reference_attend
from birkhoff.kernels import experts as reference_experts
from birkhoff.kernels import index as reference_index
from birkhoff.kernels import linear as reference_linear
from birkhoff.kernels import quant
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.attend import prefill as attend
from birkhoff.kernels.experts import prefill as experts
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import reference as reference_mhc
from birkhoff.kernels.norm import reference as reference_norm
from birkhoff.kernels.rope import frequencies, phases
from birkhoff.kernels.rope import rotate as reference_rotate
from tests.interpreter import DEVICE
from tests.kernels.test_decode import assert_close, normal

from birkhoff.kernels.experts import routing  # isort: skip
from birkhoff.kernels.index import prefill as index
from birkhoff.kernels.linear import prefill as linear
from birkhoff.kernels.mhc import prefill as mhc

from birkhoff.kernels.norm import prefill as norm  # isort: skip
from birkhoff.kernels.rope import prefill as rope

# Triton's interpreter multiplies bfloat16 incorrectly, so bfloat16 is tested on a GPU only.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]


@given(
    ids=st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True), max_size=40),
    size=st.sampled_from(experts.BLOCKS),
)
def test_every_pair_is_in_exactly_one_block_of_its_expert(ids, size):
    expert_ids = torch.tensor(ids, dtype=torch.long, device=DEVICE).view(-1, 2)
    order, blocks = experts.plan(expert_ids, 7, size)
    flat, pairs_seen = expert_ids.flatten(), []
    used = [bool(count) for count in blocks[:, 2].tolist()]
    assert used == sorted(used, reverse=True), "blocks in use come first"
    for expert, first, count, _ in blocks.tolist():
        assert 0 <= count <= size
        pairs = order[first : first + count].long()
        assert (flat[pairs] == expert).all() and pairs.tolist() == sorted(pairs.tolist())
        pairs_seen += pairs.tolist()
    assert sorted(pairs_seen) == list(range(2 * len(ids)))


@pytest.mark.parametrize(
    "pairs, count, size", [(0, 8, 16), (48, 256, 16), (24576, 256, 128), (9000, 256, 64)]
)
def test_block_size_follows_the_pairs_per_expert(pairs, count, size):
    assert experts.block_size(pairs, count) == size


def packed_experts(dtype: torch.dtype, count: int, width: int, inner: int):
    matrices = []
    for expert in range(count):
        pair = normal(expert, 2 * inner, width) * 0.2, normal(50 + expert, width, inner) * 0.2
        matrices.append([t.contiguous() for w in pair for t in quant.quant_fp4(w)])
    table = torch.tensor([[t.data_ptr() for t in parts] for parts in matrices], device=DEVICE)

    def dense(expert: int, first: int) -> torch.Tensor:
        return quant.dequant_fp4(*matrices[expert][first : first + 2]).to(dtype)

    return table, dense, matrices


@DTYPES
def test_experts_match_the_reference(dtype):
    """Partial blocks, an unused expert, partial row tiles, and experts that become ready in two groups."""
    n, width, inner, count, topk_experts = 21, 96, 64, 4, 2
    table, dense, matrices = packed_experts(dtype, count, width, inner)
    x = normal(1, n, width).to(dtype)
    logits = normal(2, n, count)
    logits[:, 1] = -50
    ids, weights = reference_experts.route(logits, torch.zeros(count, device=DEVICE), None, topk_experts, 1.5)
    null = torch.zeros_like(table)  # an expert that is not ready has no address
    groups = {
        "all": [(None, table)],
        "two": [
            ([3, 1], torch.where(torch.tensor([[0], [1], [0], [1]], device=DEVICE) > 0, table, null)),
            ([0, 2], table),
        ],
    }
    results = []
    for name in groups:
        stack = reference_experts.Stack(
            count, lambda e: dense(e, 0), lambda e: dense(e, 2).T, None, lambda name=name: groups[name], inner
        )
        results.append(experts.experts(x, ids, weights, stack, 1.0, None))
    expected = reference_experts.experts(x, ids, weights, stack, 1.0, None)
    assert_close(results[0], expected, tolerance(dtype))
    shared = normal(3, n, width).to(dtype)
    with_shared = experts.experts(x, ids, weights, stack, 1.0, None, shared)
    assert with_shared.dtype is dtype
    assert_close(
        with_shared, reference_experts.experts(x, ids, weights, stack, 1.0, None, shared), tolerance(dtype)
    )
    assert torch.equal(*results) and matrices  # keeps the memory of the addresses alive


@pytest.mark.parametrize("given_ids", [False, True], ids=["by score", "by token"])
def test_routing_matches_the_reference(given_ids):
    """Ties go to the lowest expert, very small scores still have weights, and zero rows are accepted."""
    logits = normal(1, 37, 24) * 6
    logits[3], logits[4, :10], logits[5] = 0.5, 2.0, -60.0
    bias = normal(2, 24)
    bias[:8] = 0.25
    ids = (
        torch.randint(24, (37, 3), generator=torch.Generator().manual_seed(3)).to(DEVICE)
        if given_ids
        else None
    )
    actual, expected = (twin(logits, bias, ids, 3, 1.5) for twin in (routing.route, reference_experts.route))
    assert torch.equal(actual[0], expected[0]) and actual[0].dtype is expected[0].dtype
    assert_close(actual[1], expected[1], 1e-5)
    assert routing.route(logits[:0], bias, None, 3, 1.5)[0].shape == (0, 3)


@DTYPES
def test_glu_matches_the_reference(dtype):
    gate_up = (normal(1, 9, 72) * 3).to(dtype)
    assert_close(
        experts.glu(gate_up, 1.5, dtype), reference_experts.glu(gate_up, 1.5, dtype), tolerance(dtype)
    )
    assert experts.glu(gate_up[:0], 1.5, dtype).shape == (0, 36)


def test_experts_without_addresses_or_with_rounding_use_the_reference():
    dense = reference_experts.Stack(2, lambda e: torch.eye(4).repeat(2, 1) * (e + 1), lambda e: torch.eye(4))
    x, ids, weights = normal(1, 3, 4).cpu(), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    for rounded in (None, torch.round):
        actual = experts.experts(x, ids, weights, dense, 1.0, rounded)
        assert torch.equal(actual, reference_experts.experts(x, ids, weights, dense, 1.0, rounded))


@DTYPES
@pytest.mark.parametrize("n", [1, 35])
def test_packed_linear_matches_the_reference(dtype, n):
    weight = normal(1, 72, 200) * 0.1
    weight[:, 128:] *= 8  # a second scale
    x = normal(2, n, 200).to(dtype)
    coded = PackedWeight.fp8([quant.quant_fp8(weight)])
    assert_close(linear.packed_linear(x, coded), reference_linear.packed_linear(x, coded), tolerance(dtype))
    assert_close(linear.packed_linear(x, coded, dtype=torch.float32), x.float() @ coded.dense().T)
    plain = PackedWeight.plain([weight.bfloat16().float()])
    assert_close(linear.packed_linear(x, plain, dtype=torch.float32), x.float() @ plain.weight.float().T)
    groups = PackedWeight.fp8([quant.quant_fp8(normal(3, 64, 96))])
    x = normal(4, n, 4 * 96).to(dtype)
    assert_close(
        linear.packed_linear(x, groups, 16), reference_linear.packed_linear(x, groups, 16), tolerance(dtype)
    )


def test_packed_linear_takes_any_leading_shape_and_no_rows():
    rows = PackedWeight.fp8([quant.quant_fp8(normal(1, 16, 32))])
    assert linear.packed_linear(normal(2, 0, 32), rows).shape == (0, 16)
    x = normal(2, 2, 3, 32)
    assert_close(linear.packed_linear(x, rows), reference_linear.packed_linear(x, rows))


@DTYPES
@pytest.mark.parametrize("n, width", [(3, 40), (37, 72)])
def test_read_rows_matches_the_reference(dtype, n, width):
    streams = normal(1, n, 4, width).to(dtype)
    parameters = (normal(2, 24, 4 * width) * 0.1, normal(4, 24), normal(5, 3) + 1, 20, 1e-6, 1e-6)
    for actual, expected in zip(
        mhc.read_rows(streams, *parameters), reference_mhc.read(streams, *parameters)
    ):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, tolerance(actual.dtype))


def random_topk(entries: int, batch: int, length: int, topk: int) -> list[TopkIndices | None]:
    g = torch.Generator().manual_seed(1)
    counts = torch.randint(0, entries + 1, (batch, length), generator=g).int()
    counts[0, 0], counts[-1, -1] = 0, entries
    ranks = torch.rand(batch, length, entries, generator=g).argsort(-1)[..., :topk]
    indices = ranks.sort(-1).values.int()
    return [
        None,
        TopkIndices(counts.to(DEVICE)),
        TopkIndices(counts.clamp_max(topk).to(DEVICE), indices.to(DEVICE)),
    ]


@DTYPES
@pytest.mark.parametrize("case", range(3), ids=["window alone", "first entries", "listed entries"])
def test_attention_matches_the_reference(dtype, case):
    """Two sequences with a past, one of them padded; partial tiles of heads and widths; large and small sinks."""
    batch, length, heads, width, past, entries = 2, 3, 20, 24, 6, 21
    queries, recent = (
        normal(1, batch, length, heads, width).to(dtype),
        normal(2, batch, past + length, width).to(dtype),
    )
    oldest, sink = torch.tensor([0, 4], device=DEVICE), normal(4, heads) * 3
    chosen = random_topk(entries, batch, length, 12)[case]
    entry_rows = None if chosen is None else normal(3, batch, entries, width).to(dtype)
    arguments = (queries, recent, oldest, entry_rows, chosen, sink, 4, 0.3)
    assert_close(attend.attend(*arguments), reference_attend.attend(*arguments), tolerance(dtype))


def test_the_mask_of_topk_indices_matches_its_lists():
    for picked in random_topk(9, 2, 3, 5)[1:]:
        assert picked is not None
        mask = picked.mask(9)
        assert torch.equal(mask.sum(-1), picked.counts)
        for row in range(3):
            count = int(picked.counts[0, row])
            listed = range(count) if picked.indices is None else picked.indices[0, row, :count].tolist()
            assert mask[0, row].nonzero().flatten().tolist() == list(listed)


@DTYPES
def test_index_topk_matches_the_reference(dtype):
    batch, length, heads, width, topk, entries = 2, 3, 16, 16, 5, 40
    queries, keys = (
        normal(1, batch, length, heads, width).to(dtype),
        normal(2, batch, entries, width).to(dtype),
    )
    weights = normal(3, batch, length, heads)
    counts = torch.tensor([[0, 4, 40], [6, 5, 17]], device=DEVICE)
    actual = index.index_topk(queries, keys, weights, counts, topk)
    expected = reference_index.index_topk(queries, keys, weights, counts, topk)
    assert torch.equal(actual.counts, expected.counts) and torch.equal(
        actual.mask(entries), expected.mask(entries)
    )
    assert torch.equal(expected.mask(entries).sum(-1), counts.clamp_max(topk))


def test_ties_go_to_the_lowest_entries():
    queries, weights = normal(1, 1, 2, 16, 16), normal(3, 1, 2, 16)
    keys = normal(2, 1, 1, 16).expand(-1, 12, -1)
    counts = torch.tensor([[12, 9]], device=DEVICE)
    for twin in (index.index_topk, reference_index.index_topk):
        picked = twin(queries, keys, weights, counts, 4)
        assert picked.indices[0].tolist() == [[0, 1, 2, 3]] * 2


@DTYPES
def test_index_of_chunks_in_pages_matches_the_reference(dtype, monkeypatch):
    """Two sequences of which one is scored in several blocks of rows, and one that keeps all it sees."""
    monkeypatch.setattr(index, "MAX_SCORES", 16 * 20)
    n, heads, width, topk = 41, 16, 16, 3
    queries, weights = normal(1, n, heads, width).to(dtype), normal(2, n, heads + 7)[:, 7:]
    pages, table = normal(3, 9, 4, width).to(dtype), torch.arange(9, device=DEVICE).view(3, 3).flip(1)
    counts = torch.tensor([*range(1, 6), *(1, 2, 3), *[11 - i % 9 for i in range(33)]], device=DEVICE).int()
    chunks = [reference_index.IndexChunk(0, 5, 2, 5), reference_index.IndexChunk(8, 33, 0, 11)]
    arguments = (queries, weights, pages, table, counts, chunks, topk, 0.125)
    actual, expected = index.index_chunks(*arguments), reference_index.index_chunks(*arguments)
    valid = torch.arange(topk, device=DEVICE) < counts.unsqueeze(-1)
    differs = ((actual != expected) & valid).any(1)
    assert int(differs.sum()) <= (0 if dtype is torch.float32 else 3), "a near tie in 16 bits"


@DTYPES
@pytest.mark.parametrize("strided", [False, True])
def test_norm_with_rotation_and_rounding_matches_the_reference(dtype, strided):
    rotation = phases(torch.arange(5, device=DEVICE), frequencies(16, 1e4).to(DEVICE))
    for shape, factor, keep in (
        ((5, 3, 64), None, None),
        ((5, 128), normal(2, 128), 16),
        ((5, 128), None, None),
    ):
        x = normal(1, shape[0], 2, *shape[1:]).to(dtype)[:, 0] if strided else normal(1, *shape).to(dtype)
        expected = reference_norm.norm_rotate(x, factor, 1e-6, rotation, keep)
        actual = norm.norm_rotate(x.clone() if not strided else x, factor, 1e-6, rotation, keep)
        if keep is None:
            assert_close(actual, expected, tolerance(dtype))
        else:  # a last bit may decide a step of FP8
            assert ((actual - expected).float().abs() > tolerance(dtype)).float().mean() < 0.02
            assert (actual - expected).float().norm() < 0.02 * expected.float().norm()
    assert norm.norm_rotate(x[:0], None, 1e-6, rotation.view(lambda part: part[:0])).shape == (0, 128)


@DTYPES
def test_norm_and_rotation_match_the_reference(dtype):
    x, weight = normal(1, 7, 3, 40).to(dtype), normal(2, 40)
    for factor in (None, weight):
        assert_close(
            norm.rms_norm(x, factor, 1e-6), reference_norm.rms_norm(x, factor, 1e-6), tolerance(dtype)
        )
    rotation = phases(torch.arange(7, device=DEVICE) * 5, frequencies(8, 10000.0).to(DEVICE))
    for inverse in (False, True):
        expected = reference_rotate(x, rotation, inverse)
        assert_close(rope.rotate(x, rotation, inverse), expected, tolerance(dtype))
        assert_close(rope.rotate(x.clone(), rotation, inverse, own=True), expected, tolerance(dtype))
    assert norm.rms_norm(x[:0], None, 1e-6).shape == rope.rotate(x[:0], rotation).shape == (0, 3, 40)
