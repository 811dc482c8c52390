"""The Triton twins for many rows against the plain ones, at sizes that do not fit their tiles.

The interpreter multiplies float32 and float16 tiles as they are, and bfloat16 ones not at all: float16 stands in for
both forms of 16 bits.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.kernels import attend as plain_attend
from birkhoff.kernels import experts as plain_experts
from birkhoff.kernels import index as plain_index
from birkhoff.kernels import linear as plain_linear
from birkhoff.kernels import quant
from birkhoff.kernels.attend import TopkIndices
from birkhoff.kernels.attend import prefill as attend
from birkhoff.kernels.experts import prefill as experts
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import reference as plain_mhc
from birkhoff.kernels.norm import reference as plain_norm
from birkhoff.kernels.rope import frequencies, phases
from birkhoff.kernels.rope import rotate as plain_rotate
from tests.interpreter import DEVICE
from tests.kernels.test_decode import close, normal

from birkhoff.kernels.experts import routing  # isort: skip
from birkhoff.kernels.index import prefill as index
from birkhoff.kernels.linear import prefill as linear
from birkhoff.kernels.mhc import prefill as mhc

from birkhoff.kernels.norm import prefill as norm  # isort: skip
from birkhoff.kernels.rope import prefill as rope

# Triton's interpreter multiplies bfloat16 wrongly, so only a GPU is asked for it.
TYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def slack(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}[dtype]


@given(
    ids=st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True), max_size=40),
    size=st.sampled_from(experts.BLOCKS),
)
def test_every_pair_is_in_one_block_of_its_expert(ids, size):
    given_ids = torch.tensor(ids, dtype=torch.long, device=DEVICE).view(-1, 2)
    order, blocks = experts.plan(given_ids, 7, size)
    flat, met = given_ids.flatten(), []
    used = [bool(count) for count in blocks[:, 2].tolist()]
    assert used == sorted(used, reverse=True), "blocks in use come first"
    for expert, first, count, _ in blocks.tolist():
        assert 0 <= count <= size
        pairs = order[first : first + count].long()
        assert (flat[pairs] == expert).all() and pairs.tolist() == sorted(pairs.tolist())
        met += pairs.tolist()
    assert sorted(met) == list(range(2 * len(ids)))


@pytest.mark.parametrize(
    "pairs, count, size", [(0, 8, 16), (48, 256, 16), (24576, 256, 128), (9000, 256, 64)]
)
def test_blocks_suit_an_average_expert(pairs, count, size):
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
def test_experts_of_a_prompt(dtype):
    """Blocks cut short, an expert nobody asks, rows that no tile fits, and experts that come in two turns."""
    n, width, inner, count, places = 21, 96, 64, 4, 2
    table, dense, held = packed_experts(dtype, count, width, inner)
    x = normal(1, n, width).to(dtype)
    logits = normal(2, n, count)
    logits[:, 1] = -50
    ids, weights = plain_experts.route(logits, torch.zeros(count, device=DEVICE), None, places, 1.5)
    nowhere = torch.zeros_like(table)  # an expert that is not ready has no address yet
    turns = {
        "all": [(None, table)],
        "two": [
            ([3, 1], torch.where(torch.tensor([[0], [1], [0], [1]], device=DEVICE) > 0, table, nowhere)),
            ([0, 2], table),
        ],
    }
    answers = []
    for how in turns:
        stack = plain_experts.Stack(
            count, lambda e: dense(e, 0), lambda e: dense(e, 2).T, None, lambda how=how: turns[how], inner
        )
        answers.append(experts.experts(x, ids, weights, stack, 1.0, None))
    true = plain_experts.experts(x, ids, weights, stack, 1.0, None)
    close(answers[0], true, slack(dtype))
    beside = normal(3, n, width).to(dtype)
    both = experts.experts(x, ids, weights, stack, 1.0, None, beside)
    assert both.dtype is dtype
    close(both, plain_experts.experts(x, ids, weights, stack, 1.0, None, beside), slack(dtype))
    assert torch.equal(*answers) and held


@pytest.mark.parametrize("given_ids", [False, True], ids=["by score", "by token"])
def test_routing_of_a_prompt(given_ids):
    """Equal scores go to the lowest number, hopeless ones still have weights, and no row is too many for a program."""
    logits = normal(1, 37, 24) * 6
    logits[3], logits[4, :10], logits[5] = 0.5, 2.0, -60.0
    bias = normal(2, 24)
    bias[:8] = 0.25
    ids = (
        torch.randint(24, (37, 3), generator=torch.Generator().manual_seed(3)).to(DEVICE)
        if given_ids
        else None
    )
    mine, true = (twin(logits, bias, ids, 3, 1.5) for twin in (routing.route, plain_experts.route))
    assert torch.equal(mine[0], true[0]) and mine[0].dtype is true[0].dtype
    close(mine[1], true[1], 1e-5)
    assert routing.route(logits[:0], bias, None, 3, 1.5)[0].shape == (0, 3)


@DTYPES
def test_a_gated_product_of_a_prompt(dtype):
    opened = (normal(1, 9, 72) * 3).to(dtype)
    close(experts.glu(opened, 1.5, dtype), plain_experts.glu(opened, 1.5, dtype), slack(dtype))
    assert experts.glu(opened[:0], 1.5, dtype).shape == (0, 36)


def test_experts_that_are_rounded_or_not_addressed_go_the_plain_way():
    dense = plain_experts.Stack(2, lambda e: torch.eye(4).repeat(2, 1) * (e + 1), lambda e: torch.eye(4))
    x, ids, weights = normal(1, 3, 4).cpu(), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    for rounded in (None, torch.round):
        mine = experts.experts(x, ids, weights, dense, 1.0, rounded)
        assert torch.equal(mine, plain_experts.experts(x, ids, weights, dense, 1.0, rounded))


@DTYPES
@pytest.mark.parametrize("n", [1, 35])
def test_products_with_weights_as_stored(dtype, n):
    weight = normal(1, 72, 200) * 0.1
    weight[:, 128:] *= 8  # another scale
    x = normal(2, n, 200).to(dtype)
    coded = PackedWeight.fp8([quant.quant_fp8(weight)])
    close(linear.packed_linear(x, coded), plain_linear.packed_linear(x, coded), slack(dtype))
    close(linear.packed_linear(x, coded, dtype=torch.float32), x.float() @ coded.dense().T)
    plain = PackedWeight.plain([weight.bfloat16().float()])
    close(linear.packed_linear(x, plain, dtype=torch.float32), x.float() @ plain.weight.float().T)
    groups = PackedWeight.fp8([quant.quant_fp8(normal(3, 64, 96))])
    x = normal(4, n, 4 * 96).to(dtype)
    close(linear.packed_linear(x, groups, 16), plain_linear.packed_linear(x, groups, 16), slack(dtype))


def test_products_take_any_leading_shape_and_no_rows():
    rows = PackedWeight.fp8([quant.quant_fp8(normal(1, 16, 32))])
    assert linear.packed_linear(normal(2, 0, 32), rows).shape == (0, 16)
    x = normal(2, 2, 3, 32)
    close(linear.packed_linear(x, rows), plain_linear.packed_linear(x, rows))


@DTYPES
@pytest.mark.parametrize("n, width", [(3, 40), (37, 72)])
def test_streams_of_many_rows_are_read_as_the_plain_twin_does(dtype, n, width):
    streams = normal(1, n, 4, width).to(dtype)
    given = (normal(2, 24, 4 * width) * 0.1, normal(4, 24), normal(5, 3) + 1, 20, 1e-6, 1e-6)
    for mine, true in zip(mhc.read_rows(streams, *given), plain_mhc.read(streams, *given)):
        assert mine.dtype == true.dtype
        close(mine, true, slack(mine.dtype))


def picks(entries: int, batch: int, length: int, topk: int) -> list[TopkIndices | None]:
    g = torch.Generator().manual_seed(1)
    counts = torch.randint(0, entries + 1, (batch, length), generator=g).int()
    counts[0, 0], counts[-1, -1] = 0, entries
    ranks = torch.rand(batch, length, entries, generator=g).argsort(-1)[..., :topk]
    numbers = ranks.sort(-1).values.int()
    return [
        None,
        TopkIndices(counts.to(DEVICE)),
        TopkIndices(counts.clamp_max(topk).to(DEVICE), numbers.to(DEVICE)),
    ]


@DTYPES
@pytest.mark.parametrize("how", range(3), ids=["window alone", "first entries", "listed entries"])
def test_attention_over_window_and_entries(dtype, how):
    """Two sequences with a past, one of them padded; heads and widths that fit no tile; sinks that drain and do not."""
    batch, length, heads, width, past, entries = 2, 3, 20, 24, 6, 21
    queries, recent = (
        normal(1, batch, length, heads, width).to(dtype),
        normal(2, batch, past + length, width).to(dtype),
    )
    oldest, sink = torch.tensor([0, 4], device=DEVICE), normal(4, heads) * 3
    chosen = picks(entries, batch, length, 12)[how]
    far = None if chosen is None else normal(3, batch, entries, width).to(dtype)
    given = (queries, recent, oldest, far, chosen, sink, 4, 0.3)
    close(attend.attend(*given), plain_attend.attend(*given), slack(dtype))


def test_a_mask_and_numbers_say_the_same():
    for picked in picks(9, 2, 3, 5)[1:]:
        assert picked is not None
        mask = picked.mask(9)
        assert torch.equal(mask.sum(-1), picked.counts)
        for row in range(3):
            count = int(picked.counts[0, row])
            listed = range(count) if picked.indices is None else picked.indices[0, row, :count].tolist()
            assert mask[0, row].nonzero().flatten().tolist() == list(listed)


@DTYPES
def test_the_indexer_picks_for_every_query(dtype):
    batch, length, heads, width, topk, entries = 2, 3, 16, 16, 5, 40
    queries, keys = (
        normal(1, batch, length, heads, width).to(dtype),
        normal(2, batch, entries, width).to(dtype),
    )
    weights = normal(3, batch, length, heads)
    counts = torch.tensor([[0, 4, 40], [6, 5, 17]], device=DEVICE)
    mine = index.index_topk(queries, keys, weights, counts, topk)
    true = plain_index.index_topk(queries, keys, weights, counts, topk)
    assert torch.equal(mine.counts, true.counts) and torch.equal(mine.mask(entries), true.mask(entries))
    assert torch.equal(true.mask(entries).sum(-1), counts.clamp_max(topk))


def test_equal_scores_are_picked_from_the_first():
    queries, weights = normal(1, 1, 2, 16, 16), normal(3, 1, 2, 16)
    keys = normal(2, 1, 1, 16).expand(-1, 12, -1)
    counts = torch.tensor([[12, 9]], device=DEVICE)
    for twin in (index.index_topk, plain_index.index_topk):
        picked = twin(queries, keys, weights, counts, 4)
        assert picked.indices[0].tolist() == [[0, 1, 2, 3]] * 2


@DTYPES
def test_norms_and_turns(dtype):
    x, weight = normal(1, 7, 3, 40).to(dtype), normal(2, 40)
    for factor in (None, weight):
        close(norm.rms_norm(x, factor, 1e-6), plain_norm.rms_norm(x, factor, 1e-6), slack(dtype))
    turn = phases(torch.arange(7, device=DEVICE) * 5, frequencies(8, 10000.0).to(DEVICE))
    for inverse in (False, True):
        true = plain_rotate(x, turn, inverse)
        close(rope.rotate(x, turn, inverse), true, slack(dtype))
        close(rope.rotate(x.clone(), turn, inverse, own=True), true, slack(dtype))
    assert norm.rms_norm(x[:0], None, 1e-6).shape == rope.rotate(x[:0], turn).shape == (0, 3, 40)
