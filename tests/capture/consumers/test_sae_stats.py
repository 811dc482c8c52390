"""Statistics that do not depend on the chunking, compared with those of the whole data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest
from birkhoff.capture.sinks.sae_stats import SaeStatsConsumer
from birkhoff.capture.spec.dtypes import to_float32
from birkhoff.errors import CaptureWriteError, OptionError
from tests.capture.sample_chunks import chunk

ROWS, WIDTH, FEATURES = 60, 5, 7
RANDOM = np.random.default_rng(7)
DATA = (RANDOM.normal(size=(ROWS, WIDTH)) + 1000).astype(
    np.float32
)  # far from zero: the textbook variance formula would cancel
ENCODER = RANDOM.normal(size=(WIDTH, FEATURES)).astype(np.float32)
BIAS = (-(DATA @ ENCODER).mean(0)).astype(np.float32)
THRESHOLD = np.linspace(0, 1.5, FEATURES).astype(np.float32)
THRESHOLD[-1] = 1e9  # a feature that never fires


def rows(start: int, stop: int) -> Chunk:
    """Rows of the data as chunks of the requests they belong to: ten rows each."""
    count = stop - start
    labels = [row % 10 for row in range(start, stop)]
    return Chunk(
        f"r{start // 10}",
        "run",
        "mlp_out",
        3,
        DATA[start:stop],
        "float32",
        (WIDTH,),
        labels,
        range(start, stop),
        "p" * count,
        start % 10,
    )


@given(cuts=st.lists(st.integers(1, 10), min_size=6, max_size=6), block=st.sampled_from([1, 20, 1 << 22]))
def test_statistics_do_not_depend_on_the_chunking(cuts, block):
    stats = SaeStatsConsumer("mlp_out", 3, ENCODER, BIAS, THRESHOLD, top_k=4, block_activations=block)
    for request, cut in enumerate(cuts):
        for start in range(0, 10, cut):
            stats.submit_chunk(rows(10 * request + start, 10 * request + min(start + cut, 10)))
    result, data = stats.stats(), DATA.astype(np.float64)
    assert result.rows == ROWS
    np.testing.assert_allclose(result.mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(result.variance, data.var(0), rtol=1e-9)
    np.testing.assert_allclose(result.second_moment, (data**2).mean(0), rtol=1e-12)
    norms = np.linalg.norm(data, axis=1)
    assert result.norm_mean == pytest.approx(norms.mean(), rel=1e-12)
    assert result.norm_max == pytest.approx(norms.max(), rel=1e-12)
    assert result.norm_rms == pytest.approx(np.sqrt((norms**2).mean()), rel=1e-12)
    activations = DATA @ ENCODER + BIAS
    # a row on the threshold may fall either way in float32
    clear = np.abs(activations - THRESHOLD).min(0) > 1e-3
    fired = activations > THRESHOLD
    assert (result.firing == fired.sum(0))[clear].all() and clear.sum() >= 5
    np.testing.assert_allclose(
        result.activation_sum[clear], np.where(fired, activations, 0).sum(0)[clear], rtol=1e-4, atol=1e-2
    )
    for feature in np.flatnonzero(clear):
        best = [row for row in np.argsort(-activations[:, feature], kind="stable") if fired[row, feature]][:4]
        contexts = result.top[feature]
        assert [(c.request, c.position, c.token_id) for c in contexts] == [
            (f"r{r // 10}", r % 10, r) for r in best
        ]
        assert [c.activation for c in contexts] == pytest.approx(
            activations[best, feature].tolist(), rel=1e-3
        )
    assert result.top[-1] == [] and result.firing[-1] == 0


def test_stored_dtypes_are_decoded():
    stats = SaeStatsConsumer("mlp_in", 0)
    part = chunk("a", "mlp_in", 0, 0, 40)
    keep = ~np.isnan(to_float32(part.rows, "fp8_e4m3")).any(1)
    assert 0 < keep.sum() < 40
    stats.submit_chunk(part)
    truth = to_float32(part.rows, "fp8_e4m3", part.scale).astype(np.float64)[keep]
    np.testing.assert_allclose(stats.stats().mean, truth.mean(0), rtol=1e-9)
    assert stats.stats().rows == keep.sum() and stats.stats().nonfinite_rows == 40 - keep.sum()
    assert stats.stats().firing is None and stats.stats().top is None


def test_non_finite_rows_do_not_affect_other_rows():
    bad = DATA[:10].copy()
    bad[2, 1], bad[7, 0] = np.nan, np.inf
    keep = [0, 1, 3, 4, 5, 6, 8, 9]
    whole, part = (SaeStatsConsumer("mlp_out", 3, ENCODER, BIAS, top_k=3) for _ in range(2))
    whole.submit_chunk(Chunk(**{**vars(rows(0, 10)), "rows": bad}))
    labels = {"rows": DATA[keep], "positions": keep, "token_ids": keep, "phases": "p" * 8}
    part.submit_chunk(Chunk(**{**vars(rows(0, 10)), **labels}))
    one, two = whole.stats(), part.stats()
    assert one.nonfinite_rows == 2 and one.top == two.top and np.array_equal(one.firing, two.firing)
    assert np.array_equal(one.mean, two.mean) and np.array_equal(one.variance, two.variance)
    only = SaeStatsConsumer("mlp_out", 3)
    only.submit_chunk(Chunk(**{**vars(rows(0, 10)), "rows": bad * np.nan}))
    assert only.stats().rows == 0 and only.stats().nonfinite_rows == 10


def test_other_sites_are_ignored_and_requests_get_results():
    stats = SaeStatsConsumer("post_attn", 1, positions="all_generated")
    assert isinstance(stats, Consumer) and not stats.reads_client_spec
    assert stats.global_capture_spec() == {"hooks": {"post_attn": [1]}, "positions": "all_generated"}
    stats.begin(CaptureRequest("a", "a", "run"))
    for hook, layer in (("post_attn", 1), ("post_attn", 2), ("mlp_out", 1)):
        stats.submit_chunk(Chunk(**{**vars(chunk("a", "post_attn", layer, 0, 2)), "hook": hook}))
    assert stats.get_result("a").status == "pending"
    assert stats.finalize(CaptureFinish("a")).result().rows == 2 == stats.stats().rows
    assert stats.get_result("a").status == "ok"


def test_other_widths_and_bad_options_are_refused():
    stats = SaeStatsConsumer("mlp_out", 3, ENCODER)
    with pytest.raises(CaptureWriteError, match="8 wide"):
        stats.submit_chunk(chunk("a", "mlp_out", 3, 0, 2))
    stats = SaeStatsConsumer("mlp_out", 3)
    stats.submit_chunk(Chunk(**{**vars(chunk("a", "mlp_out", 3, 0, 2)), "rows": np.ones((2, 8), np.float16)}))
    with pytest.raises(CaptureWriteError, match="5 wide"):
        stats.submit_chunk(rows(0, 2))
    for wrong in ({"top_k": 0}, {"encoder": np.zeros(3)}, {"encoder": ENCODER, "bias": np.zeros(3)}):
        with pytest.raises(OptionError):
            SaeStatsConsumer("mlp_out", 3, **wrong)


def test_memory_does_not_depend_on_the_number_of_rows():
    import tracemalloc

    def peak(count: int) -> int:
        stats = SaeStatsConsumer("mlp_out", 3, ENCODER, BIAS)
        tracemalloc.start()
        for request in range(count):
            stats.submit_chunk(rows(10 * (request % 6), 10 * (request % 6) + 10))
            stats.finalize(CaptureFinish(f"r{request % 6}"))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(2000) < 1.5 * peak(100)
