"""The judge of a benchmark passes the same model and no other."""

import torch

from birkhoff.bench.agreement import MAY_DIFFER, TOLERANCE, compare_logits, compare_tokens


def logits(positions: int = 200, vocabulary: int = 50) -> torch.Tensor:
    return torch.randn(positions, vocabulary, generator=torch.Generator().manual_seed(1))


def test_rounding_passes_and_is_reported():
    theirs = logits()
    found = compare_logits(theirs + TOLERANCE / 2, theirs)
    assert found["passed"] and found["greedy_same"] == 1.0 and found["share_beyond_tolerance"] == 0.0
    assert abs(found["drift_most"] - TOLERANCE / 2) < 1e-6


def test_a_few_positions_may_have_fallen_the_other_way_but_not_many():
    theirs = logits()
    noise = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(2)) * 0.1
    few, many = theirs.clone(), theirs.clone()
    allowed = int(MAY_DIFFER * len(theirs))
    few[:allowed] += noise[:allowed]
    many[: allowed + 1] += noise[: allowed + 1]
    assert compare_logits(few, theirs)["passed"] and not compare_logits(many, theirs)["passed"]


def test_greedy_answers_may_part_only_at_a_near_tie():
    along = torch.zeros(4, 10)
    along[2, 5], along[2, 6] = 1.0, 0.9995
    along[3, 5] = 3.0
    assert compare_tokens([1, 2, 5, 5], [1, 2, 5, 5], along) == {"steps": 4, "same_for": 4, "passed": True}
    assert compare_tokens([1, 2, 6, 9], [1, 2, 5, 5], along)["passed"]
    assert compare_tokens([1, 2, 6, 9], [1, 2, 5, 5], along)["same_for"] == 2
    assert not compare_tokens([1, 2, 5, 6], [1, 2, 5, 5], along)["passed"]
    assert not compare_tokens([1, 2], [1, 2, 5], along)["passed"]
