"""Row transforms against their formulas, storage within its documented bounds, reductions equal in any chunking."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.capture.sinks import reduce as rows_module
from birkhoff.capture.sinks.reduce import Transform, accumulator, keep_streams, project
from birkhoff.capture.spec.estimate import REDUCTIONS, stored_row
from birkhoff.errors import OptionError
from birkhoff.hooks.schema import schema_of
from tests.models import TINY
from tests.sizes import scaled

MANY = settings(max_examples=scaled(1000))
SEEDS = st.integers(0, 2**31)


class Stored(NamedTuple):
    """Rows as `store` returns them."""

    values: torch.Tensor
    scale: torch.Tensor | None

    def restore(self):
        """The values as float32, scale applied."""
        values = self.values.float()
        return values if self.scale is None else values * self.scale.view(-1, *[1] * (values.dim() - 1))


def store(rows, dtype):
    return Stored(*rows_module.store(rows, dtype))


def draw(seed, *shape, spread=4.0, dtype=torch.float32):
    """Rows whose magnitudes run over many powers of two."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(shape, generator=g))).to(dtype)


def test_streams_are_kept_in_order():
    rows = draw(1, 5, 4, 3)
    assert torch.equal(keep_streams(rows, (0, 2)), rows[:, [0, 2]])
    assert torch.equal(keep_streams(rows[..., 0], (3,)), rows[:, [3], 0])
    assert keep_streams(rows[:0], (1, 2)).shape == (0, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_projection_is_the_product_in_float32(dtype):
    rows, matrix = draw(2, 6, 4, 8, spread=0.5, dtype=dtype), draw(3, 32, 5, spread=0.5)
    exact = rows.double().reshape(6, 32) @ matrix.double()
    scores = project(rows, matrix)
    assert scores.dtype == torch.float32 and scores.shape == (6, 5)
    bound = 32 * 2**-24 * (rows.double().abs().reshape(6, 32) @ matrix.double().abs())
    assert ((scores - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    "hook", ["mhc_streams_pre_attn", "mhc_attn_post_mix", "mlp_out", "mhc_ffn_res_mix", "moe_topk"]
)
def test_a_transform_makes_the_rows_that_the_estimate_counts(hook):
    schema = schema_of(TINY, "bfloat16")[hook]
    rows = draw(4, 3, *schema.logical_shape, dtype=getattr(torch, schema.dtype))
    for streams in (None, (1, 3)):
        row = stored_row(schema, streams)
        cut = Transform(row.streams)(rows)
        assert tuple(cut.shape[1:]) == row.shape
        matrix = draw(5, row.width, 2)
        scores = Transform(stored_row(schema, streams, 2).streams, matrix)(rows)
        assert tuple(scores.shape[1:]) == stored_row(schema, streams, 2).shape == (2,)
        assert torch.equal(scores, project(cut, matrix))
    if schema.axes[0] == "stream":
        assert torch.equal(cut, rows[:, [1, 3]]) and cut.shape != rows.shape
    else:
        assert torch.equal(cut, rows)
    for dtype in ("bf16", "fp16", "fp32", "fp8_e4m3"):
        row = stored_row(schema, dtype=dtype)
        stored_rows = store(rows.float(), row.dtype)
        scales = 0 if stored_rows.scale is None else stored_rows.scale.nbytes
        assert stored_rows.values.nbytes + scales == 3 * row.nbytes


@MANY
@given(SEEDS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_storage_stays_within_its_bounds(seed, dtype):
    rows = draw(seed, 7, 2, 9, spread=6.0, dtype=dtype)
    rows = torch.where(rows.abs() < 60000, rows, 60000.0).to(dtype)
    exact = rows.double()
    for name, relative, absolute in (
        ("float32", 0.0, 0.0),
        ("bfloat16", 2**-8, 2**-134),
        ("float16", 2**-11, 2**-25),
    ):
        stored_rows = store(rows, name)
        assert (
            stored_rows.scale is None
            and str(stored_rows.values.dtype) == f"torch.{name}"
            and stored_rows.values.shape == rows.shape
        )
        assert (
            (stored_rows.restore().double() - exact).abs() <= (relative * exact.abs()).clamp_min(absolute)
        ).all()
    stored_rows = store(rows, "fp8_e4m3")
    assert (
        stored_rows.values.dtype == torch.float8_e4m3fn
        and stored_rows.values.shape == rows.shape
        and stored_rows.scale.shape == (7,)
    )
    assert torch.equal(stored_rows.scale, (rows.float().flatten(1).abs().amax(1) / 448).clamp_min(2**-126))
    bound = torch.maximum(2**-4 * exact.abs(), 2**-10 * stored_rows.scale.double().view(-1, 1, 1)) * (
        1 + 2**-20
    )
    assert ((stored_rows.restore().double() - exact).abs() <= bound).all()


def test_the_bounds_are_tight():
    """A bound that nothing comes near would hold for worse storage, too."""
    x = torch.linspace(1, 2, 100_001).view(1, -1)
    for name, bound in (("bfloat16", 2**-8), ("float16", 2**-11), ("fp8_e4m3", 2**-4)):
        worst = ((store(x, name).restore() - x).abs() / x).max().item()
        assert 0.9 * bound < worst <= bound * (1 + 2**-20), (name, worst)
    small = torch.cat((torch.tensor([448.0]), torch.linspace(0, 2**-7, 10_001))).view(
        1, -1
    )  # scale 1: the values of fp8 itself
    assert 0.9 * 2**-10 < (store(small, "fp8_e4m3").restore() - small).abs().max() <= 2**-10


def test_rows_already_in_the_dtype_keep_their_bits():
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float32, "float32")):
        rows = draw(9, 4, 33, dtype=dtype)
        assert torch.equal(store(rows, name).values, rows)


def test_numbers_too_large_for_fp16_become_infinite():
    rows = torch.tensor([[1.0, 65504.0, 65519.0, 65520.0, -1e5, math.inf, math.nan]])
    values = store(rows, "float16").values
    assert values[0, 2] == 65504 and values[0, 3:6].isinf().all() and values[0, 6].isnan()


def test_fp8_rows_at_the_edges():
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    rows = torch.tensor(
        [
            [0.0, 0.0, 0.0],
            [-0.0, tiny, -tiny],
            [huge, -huge, 1.0],
            [math.inf, 2.0, -1.0],
            [math.nan, -math.inf, 3.0],
            [math.nan] * 3,
        ]
    )
    stored_rows = store(rows, "fp8_e4m3")
    assert stored_rows.scale.isfinite().all() and (stored_rows.scale > 0).all()
    back = stored_rows.restore()
    assert torch.equal(back[0], rows[0]) and (back[1].abs() <= 2**-126).all()
    assert ((back[2] - rows[2]).abs() <= 2**-4 * huge).all() and back[2].isfinite().all()
    assert back[3].isnan().tolist() == [True, False, False] and back[4].isnan().tolist() == [
        True,
        True,
        False,
    ]
    # What is not finite leaves its row's scale alone.
    assert torch.allclose(back[3, 1:], rows[3, 1:], rtol=2**-4) and torch.allclose(
        back[4, 2:], rows[4, 2:], rtol=2**-4
    )
    assert back[5].isnan().all()
    assert (
        store(torch.empty(0, 4), "fp8_e4m3").scale.shape == (0,)
        and store(torch.empty(2, 0), "fp8_e4m3").scale.sum() == 2
    )


def test_fp8_rows_are_scaled_independently():
    rows = draw(11, 6, 5)
    alone = [store(row, "fp8_e4m3") for row in rows.split(1)]
    together = store(rows, "fp8_e4m3")
    assert torch.equal(torch.cat([one.scale for one in alone]), together.scale)
    codes = torch.cat([one.values.view(torch.uint8) for one in alone])
    assert torch.equal(codes, together.values.view(torch.uint8))


def test_unknown_dtypes_and_reductions_are_refused():
    with pytest.raises(
        OptionError, match="stored as 'fp4', expected one of bfloat16, float16, float32, fp8_e4m3"
    ):
        store(torch.ones(1, 1), "fp4")
    with pytest.raises(OptionError, match="reduce is 'median', expected one of mean, sum, last, max_norm"):
        accumulator("median")


def fed(reduce, rows, cuts, positions=None):
    """The accumulator after the rows came in pieces that end at `cuts`."""
    taken = accumulator(reduce)
    positions = positions or list(range(len(rows)))
    for start, stop in pairwise([0, *cuts, len(rows)]):
        taken.add(rows[start:stop], positions[start:stop], [100 + p for p in positions[start:stop]])
    return taken.result()


@MANY
@given(
    SEEDS,
    st.integers(1, 150),
    st.lists(st.integers(0, 150), max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(REDUCTIONS),
)
def test_any_chunking_reduces_to_the_whole(seed, count, cuts, dtype, reduce):
    rows = draw(seed, count, 2, 5, dtype=dtype)
    exact, cuts = rows.double(), sorted(min(cut, count) for cut in cuts)
    pieces, whole = fed(reduce, rows, cuts), fed(reduce, rows, [])
    assert pieces.count == whole.count == count and pieces.row.shape == (1, 2, 5)
    if reduce in ("mean", "sum"):
        divisor = count if reduce == "mean" else 1
        expected = torch.from_numpy(
            np.array([math.fsum(column) for column in exact.reshape(count, -1).T.tolist()])
        )
        expected, size = expected.view(1, 2, 5) / divisor, exact.abs().sum(0) / divisor
        bound = count * 2**-52 * size + 2**-24 * expected.abs() + 2**-149  # the sum, then rounding to float32
        assert pieces.row.dtype == torch.float32 and pieces.position is None
        assert ((pieces.row - expected).abs() <= bound).all() and (
            (pieces.row - whole.row).abs() <= 2 * bound
        ).all()
    else:
        best = count - 1
        if reduce == "max_norm":
            norms = exact.flatten(1).square().sum(1).sqrt().float()
            best = int((norms == norms.max()).nonzero()[0])
        assert torch.equal(pieces.row, rows[best : best + 1]) and pieces.row.dtype == dtype
        assert (pieces.position, pieces.token_id) == (best, 100 + best) == (whole.position, whole.token_id)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_positions_computed_again_are_counted_once(reduce):
    rows = draw(21, 9, 4)
    taken, plain = accumulator(reduce), fed(reduce, rows, [])
    taken.add(rows[:5], [0, 1, 2, 3, 4], range(100, 105))
    taken.add(rows[:3], [0, 1, 2], range(100, 103))  # from the start again, and then past where it was
    taken.add(rows[3:7], [3, 4, 5, 6], range(103, 107))
    taken.add(rows[7:], [7, 8], range(107, 109))
    again = taken.result()
    assert torch.equal(again.row, plain.row) or reduce in ("mean", "sum")
    assert torch.allclose(again.row, plain.row, rtol=1e-6)
    assert (again.count, again.position, again.token_id) == (plain.count, plain.position, plain.token_id)


def test_no_rows_reduce_to_no_row():
    for reduce in REDUCTIONS:
        taken = accumulator(reduce)
        taken.add(torch.empty(0, 3), [], [])
        assert taken.result() is None


def test_equal_norms_go_to_the_earliest_in_any_chunking():
    row = draw(31, 1, 4096)
    rows = torch.cat([row * 0.5, row, -row, row, row])
    for cuts in ([], [1], [2], [1, 2, 3, 4], [3]):
        result = fed("max_norm", rows, cuts, positions=[3, 5, 8, 9, 12])
        assert (result.position, result.count) == (5, 5) and torch.equal(result.row, row)


def test_a_row_that_is_not_finite_has_the_greatest_norm_and_the_first_stays():
    rows = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [math.inf, 0.0], [9.0, 9.0]])
    for cuts in ([], [1, 2, 3], [2]):
        assert fed("max_norm", rows, cuts).position == 1


def test_an_intermediate_result_is_available_and_keeps_no_rows_alive():
    rows = draw(41, 4, 3)
    for reduce in REDUCTIONS:
        taken = accumulator(reduce)
        taken.add(rows[:2], [0, 1], [5, 6])
        early = taken.result()
        before = early.row.clone()
        taken.add(rows[2:], [2, 3], [7, 8])
        assert torch.equal(early.row, before) and taken.result().count == 4
        assert early.row.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


def test_a_long_sum_does_not_drift():
    """Float32 would lose every addend beyond 2**24; the mean of equal rows is that row."""
    count = scaled(2_000_000)
    rows, taken = torch.full((count // 100, 3), 0.1), accumulator("mean")
    for piece in range(100):
        taken.add(rows, range(piece * len(rows), (piece + 1) * len(rows)), range(len(rows)))
    assert taken.result().row.tolist() == torch.full((1, 3), 0.1).tolist() and taken.result().count == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
def test_on_a_gpu_nothing_waits_and_the_results_are_those_of_a_cpu():
    rows, matrix = draw(51, 300, 4, 512, dtype=torch.bfloat16), draw(52, 1024, 3, spread=0.5)
    rows_on_device, weights, whole = (
        rows.cuda(),
        matrix.cuda(),
        {reduce: fed(reduce, rows, []) for reduce in REDUCTIONS},
    )
    taken, transform = {reduce: accumulator(reduce) for reduce in REDUCTIONS}, Transform((0, 2), weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for start, stop in pairwise([0, 1, 60, 61, 200, 300]):
            for each in taken.values():
                each.add(rows_on_device[start:stop], range(start, stop), range(100 + start, 100 + stop))
        stored_rows, scores = (
            {name: store(rows_on_device, name) for name in ("float16", "float32", "fp8_e4m3")},
            transform(rows_on_device),
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for reduce, each in taken.items():
        result, expected = each.result(), whole[reduce]
        exact = reduce in ("last", "max_norm")
        assert torch.allclose(result.row.cpu(), expected.row, rtol=0 if exact else 1e-6, atol=0)
        assert (result.position, result.token_id, result.count) == (expected.position, expected.token_id, 300)
    for name, stored in stored_rows.items():
        assert torch.equal(stored.restore().cpu(), store(rows, name).restore()), name
    assert torch.allclose(
        scores.cpu(), Transform((0, 2), matrix)(rows), rtol=1e-3, atol=1e-2 * scores.abs().max().item()
    )
