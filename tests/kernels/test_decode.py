"""Triton decode kernels compared with the reference kernels, at sizes that are not multiples of their tiles."""

from __future__ import annotations

import pytest
import torch

from birkhoff.kernels import experts as reference_experts
from birkhoff.kernels import index as reference_index
from birkhoff.kernels import quant
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.mhc import reference as reference_mhc
from birkhoff.kernels.rope import frequencies, phases, rotate
from birkhoff.kernels.select import select
from tests.interpreter import DEVICE, experts, index, linear, mhc


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (
        actual.double() - expected.double()
    ).abs().max() <= tolerance * expected.double().abs().max().clamp_min(1.0)


@pytest.mark.parametrize("rows, width", [(1, 64), (3, 40), (9, 72)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_read_and_write_match_the_reference(rows, width, dtype):
    streams, y = normal(1, rows, 4, width).to(dtype), normal(2, rows, width).to(dtype)
    fn, base, scale = normal(3, 24, 4 * width) * (4 * width) ** -0.5, normal(4, 24), normal(5, 3) + 1
    parameters = (fn, base, scale, 20, 1e-6, 1e-6)
    # The interpreter truncates to bfloat16 where a GPU rounds.
    step = 1e-5 if dtype is torch.float32 else 2.0**-7
    for actual, expected in zip(mhc.read(streams, *parameters), reference_mhc.read(streams, *parameters)):
        assert actual.dtype == expected.dtype
        assert_close(actual, expected, step if actual.dtype is torch.bfloat16 else 1e-5)
    _, _, post, mix = reference_mhc.read(streams, *parameters)
    assert_close(mhc.write(streams, y, post, mix), reference_mhc.write(streams, y, post, mix), step)


def test_a_transposed_mixer_is_detected():
    streams, y = normal(1, 2, 4, 32), normal(2, 2, 32)
    post, mix = torch.rand(2, 4, device=DEVICE), torch.rand(2, 4, 4, device=DEVICE)
    assert_close(mhc.write(streams, y, post, mix), reference_mhc.write(streams, y, post, mix))
    with pytest.raises(AssertionError):
        assert_close(
            mhc.write(streams, y, post, mix.transpose(1, 2).contiguous()),
            reference_mhc.write(streams, y, post, mix),
        )


def test_a_boundary_sums_output_parts_and_normalises():
    """Write an output given in three parts, then read with the norm of the next sublayer."""
    n, width = 5, 48
    streams, y = normal(1, n, 4, width), normal(2, n, 3, width)
    post, mix = torch.rand(n, 4, device=DEVICE), torch.rand(n, 4, 4, device=DEVICE)
    fn, base, scale, norm = normal(3, 24, 4 * width) * 0.1, normal(4, 24), normal(5, 3) + 1, normal(6, width)
    written = reference_mhc.write(streams, y.sum(1), post, mix)
    u, pre, new_post, new_mix = reference_mhc.read(written, fn, base, scale, 20, 1e-6, 1e-6)
    parts = torch.full((n, mhc.slices(n, width)[1], mhc.padded(24)), torch.nan, device=DEVICE)
    out = [torch.full(t.shape, torch.nan, device=DEVICE) for t in (u, pre, new_post, new_mix)]
    mhc.write_and_mix(streams, y, post, mix, fn, parts)
    mhc.read_streams(parts, streams, base, scale, norm, 20, 1e-6, 1e-6, 1e-6, *out)
    assert_close(streams, written)
    assert_close(out[0], torch.nn.functional.rms_norm(u, (width,), norm, 1e-6))
    for actual, expected in zip(out[1:], (pre, new_post, new_mix)):
        assert_close(actual, expected)


@pytest.mark.parametrize("count", [1, 5, 18])
def test_products_of_stacked_matrices(count):
    """Two stacked FP8 matrices with partial tiles, and an unquantised one."""
    first, second, third = normal(1, 40, 200) * 0.1, normal(2, 24, 200) * 3, normal(3, 17, 200)
    packed = [quant.quant_fp8(w) for w in (first, second)]
    weights = [PackedWeight.fp8(packed), PackedWeight.plain([third])]
    x = normal(4, count, 200)
    out = torch.full((count, 81), torch.nan, device=DEVICE)
    linear.gemv(weights, x, out)
    expected = torch.cat([quant.dequant_fp8(*pair) for pair in packed] + [third])
    assert_close(out, x @ expected.T)


def test_float16_weights_do_not_round_float32_inputs():
    weight, x = (normal(1, 24, 200) * 0.1).half(), normal(2, 3, 200)
    out = torch.full((3, 24), torch.nan, device=DEVICE)
    linear.gemv([PackedWeight.plain([weight])], x, out)
    assert (out - x @ weight.float().T).abs().max() < 1e-5


def test_weights_are_stored_as_bfloat16_only_if_exact():
    exact = normal(1, 4, 8).bfloat16().float()
    assert PackedWeight.plain([exact]).weight.dtype is torch.bfloat16
    assert PackedWeight.plain([exact, exact + 1e-4]).weight.dtype is torch.float32


def test_a_grouped_product_reads_the_columns_of_each_group():
    weight = normal(1, 64, 96) * 0.1
    codes = quant.quant_fp8(weight)
    x = normal(2, 3, 4 * 96)
    out = torch.full((3, 64), torch.nan, device=DEVICE)
    linear.gemv([PackedWeight.fp8([codes])], x, out, group=16)
    dense = quant.dequant_fp8(*codes).view(4, 16, 96)
    assert_close(out, torch.einsum("ngk,grk->ngr", x.view(3, 4, 96), dense).flatten(1))


def run_route(logits, bias, table, tokens, topk_experts):
    n, count = logits.shape
    options = {"device": DEVICE, "dtype": torch.int32}
    ids, weights = (
        torch.full((n, topk_experts), -1, **options),
        torch.full((n, topk_experts), torch.nan, device=DEVICE),
    )
    order, slots = (
        torch.full((2, n * topk_experts), -1, **options),
        torch.full((min(count, n * topk_experts), 16), -1, **options),
    )
    experts.route(logits, bias, table, tokens, None, ids, weights, order, slots, 1.5)
    return ids, weights, order, slots


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("n", [1, 6])
def test_routing_and_its_plan(n, hashed):
    logits, bias = normal(1, n, 12) * 4, normal(2, 12)
    table = torch.stack([torch.randperm(12)[:3] for _ in range(20)]).int().to(DEVICE) if hashed else None
    tokens = torch.arange(n, device=DEVICE) * 3
    ids, weights, order, slots = run_route(logits, None if hashed else bias, table, tokens, 3)
    hashed_ids = None if table is None else table[tokens].long()
    expected_ids, expected_weights = reference_experts.route(
        logits, None if hashed else bias, hashed_ids, 3, 1.5
    )
    assert torch.equal(ids.long(), expected_ids)
    assert_close(weights, expected_weights)
    assert sorted(order[1].tolist()) == list(range(3 * n))
    seen = []
    for expert, first, count in slots[:, :3].tolist():
        if count == 0:
            continue
        pairs = order[1, first : first + count].tolist()
        assert all(ids.flatten()[p] == expert for p in pairs)
        seen += pairs
    assert sorted(seen) == list(range(3 * n)), "every pair is in exactly one slot"
    used = slots[:, 2].tolist()
    assert sorted(used, key=bool, reverse=True) == used, "slots in use come first"


def test_ties_go_to_the_lowest_expert_and_small_scores_are_not_zero():
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[1] = torch.tensor([-40.0, -30, -41, -35, -30, -50, -60, -70])
    ids, weights, *_ = run_route(
        logits, torch.zeros(8, device=DEVICE), None, torch.zeros(2, device=DEVICE).long(), 2
    )
    assert ids.tolist() == [[0, 1], [1, 4]]
    assert_close(weights[1], torch.tensor([0.75, 0.75], device=DEVICE))


def test_experts_are_read_from_the_addresses_of_the_table():
    n, width, inner, count, topk_experts = 5, 64, 32, 6, 2
    stacks = []
    for expert in range(count):
        gate_up, down = normal(expert, 2 * inner, width) * 0.2, normal(50 + expert, width, inner) * 0.2
        stacks.append([t.contiguous() for w in (gate_up, down) for t in quant.quant_fp4(w)])
    table = torch.tensor([[t.data_ptr() for t in stack] for stack in stacks], device=DEVICE)
    x, logits = normal(1, n, width), normal(2, n, count)
    token_ids = torch.zeros(n, dtype=torch.long, device=DEVICE)
    ids, weights, order, slots = run_route(
        logits, torch.zeros(count, device=DEVICE), None, token_ids, topk_experts
    )
    z, y = (
        torch.full((n * topk_experts, inner), torch.nan, device=DEVICE),
        torch.zeros(n, topk_experts + 1, width, device=DEVICE),
    )
    experts.gate_up(x, table, slots, order, weights, z, 1.0)
    experts.down(z, table, slots, order, y)
    stack = reference_experts.Stack(
        count, lambda e: quant.dequant_fp4(*stacks[e][:2]), lambda e: quant.dequant_fp4(*stacks[e][2:]).T
    )
    assert_close(y.sum(1), reference_experts.experts(x, ids.long(), weights, stack, 1.0, None))


@pytest.mark.parametrize("ties", [False, True])
def test_the_indexer_scores_and_selects(ties):
    """Sequences with few and with many entries, in unordered pages; ties go to the lowest entries."""
    heads, width, topk, entries = 16, 16, 12, 70
    positions = torch.tensor([4 * 70 - 1, 4 * 30 + 1, 4 * 12 + 2, 7], device=DEVICE)
    n = len(positions)
    pages = normal(1, 12, 32, width)
    if ties:
        pages = pages[:, :1].expand(-1, 32, -1).contiguous()
    table = torch.tensor([[2, 5, 7], [1, 0, 3], [4, 6, 8], [9, 10, 11]], device=DEVICE)
    slots, queries, weights = torch.arange(n, device=DEVICE), normal(2, n, heads * width), normal(3, n, heads)
    rotation = phases(positions.cpu(), frequencies(8, 10000.0))
    cos, sin = (torch.stack([t] * 4, 1).to(DEVICE).contiguous() for t in (rotation.cos, rotation.sin))
    scores = torch.full((n, entries), torch.nan, device=DEVICE)
    chosen = torch.full((n, topk), -1, dtype=torch.int32, device=DEVICE)
    index.score(queries, weights, pages, table, slots, positions, cos, sin, scores, topk, 0.5)
    index.topk_entries(scores, positions, chosen)
    rotation.cos, rotation.sin = rotation.cos.to(DEVICE), rotation.sin.to(DEVICE)
    q = rotate(queries.view(n, heads, width), rotation)
    for row in range(n):
        count = int(positions[row] + 1) // 4
        keys = pages[table[row]].flatten(0, 1)[:count]
        if count <= topk:
            assert chosen[row, :count].tolist() == list(range(count))
            continue
        expected = reference_index.score(q[row][None, None], keys[None], weights[row][None, None] * 0.5)
        assert_close(scores[row, :count], expected.view(-1), 1e-5)
        visible = torch.ones(1, 1, count, dtype=torch.bool, device=DEVICE)
        selected = (
            reference_index.topk_mask(scores[row, :count].view(1, 1, -1), visible, topk)
            .view(-1)
            .nonzero()
            .view(-1)
        )
        assert chosen[row].tolist() == selected.tolist()


@pytest.mark.parametrize("one_tile", [True, False])
def test_topk_of_any_scores_matches_the_reference(one_tile, monkeypatch):
    """Equal, small, large, negative, infinite scores and zeros of both signs, in registers and in several tiles."""
    if not one_tile:
        monkeypatch.setattr(index, "MAX_TILE", 64)
    entries, topk = 4300, 12
    scores = normal(1, 9, entries)
    scores[1] = 3.0
    scores[2] = scores[2].round()
    scores[3] *= 1e-30
    scores[4] *= 1e30
    scores[5] = -scores[5].abs()
    scores[6, ::300], scores[6, 1::3] = torch.inf, -torch.inf
    scores[7], scores[7, 5] = -torch.inf, 1.0
    scores[8] = torch.where(scores[8] > 0, 0.0, -0.0)
    counts = torch.tensor([entries, entries, 4000, 4200, 13, 2000, 4299, 300, 4300], device=DEVICE).int()
    chosen = torch.full((9, topk), -1, dtype=torch.int32, device=DEVICE)
    index.topk_entries(scores, counts, chosen, counted=True)
    visible = torch.arange(entries, device=DEVICE) < counts.unsqueeze(-1)
    expected = reference_index.topk_mask(scores, visible, topk)
    assert torch.equal(torch.zeros_like(visible).scatter_(1, chosen.long(), True), expected)
    assert bool((chosen.diff(dim=1) > 0).all())


def test_the_triton_set_uses_the_reference_for_other_stream_counts():
    chosen = select("triton")
    assert chosen.name == "triton"
    for m in (2, 4):
        streams, size = normal(1, 3, m, 16), (2 + m) * m
        parameters = (normal(2, size, m * 16), normal(3, size), normal(4, 3), 5, 1e-6, 1e-6)
        with torch.no_grad():
            for actual, expected in zip(
                chosen.mhc_read(streams, *parameters), reference_mhc.read(streams, *parameters)
            ):
                assert_close(actual, expected)
