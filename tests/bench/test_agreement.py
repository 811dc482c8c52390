"""The agreement check of a benchmark passes for the same model and fails for others."""

import torch

from birkhoff.bench.agreement import MAY_DIFFER, TOLERANCE, compare_logits, compare_tokens


def logits(positions: int = 200, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(1))


def test_rounding_passes_and_is_reported():
    expected = logits()
    result = compare_logits(expected + TOLERANCE / 2, expected)
    assert result["passed"] and result["greedy_same"] == 1.0 and result["share_beyond_tolerance"] == 0.0
    assert abs(result["drift_most"] - TOLERANCE / 2) < 1e-6


def test_a_few_positions_may_differ_but_not_many():
    expected = logits()
    noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * 0.1
    few, many = expected.clone(), expected.clone()
    allowed = int(MAY_DIFFER * len(expected))
    few[:allowed] += noise[:allowed]
    many[: allowed + 1] += noise[: allowed + 1]
    assert compare_logits(few, expected)["passed"] and not compare_logits(many, expected)["passed"]


def test_greedy_tokens_may_diverge_only_at_a_near_tie():
    reference_logits = torch.zeros(4, 10)
    reference_logits[2, 5], reference_logits[2, 6] = 1.0, 0.9995
    reference_logits[3, 5] = 3.0
    assert compare_tokens([1, 2, 5, 5], [1, 2, 5, 5], reference_logits) == {
        "steps": 4,
        "same_for": 4,
        "passed": True,
    }
    assert compare_tokens([1, 2, 6, 9], [1, 2, 5, 5], reference_logits)["passed"]
    assert compare_tokens([1, 2, 6, 9], [1, 2, 5, 5], reference_logits)["same_for"] == 2
    assert not compare_tokens([1, 2, 5, 6], [1, 2, 5, 5], reference_logits)["passed"]
    assert not compare_tokens([1, 2], [1, 2, 5], reference_logits)["passed"]
