"""Projection matrices: copied, refused if no row could fit, identified by their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from birkhoff.capture.sinks.reduce import project
from birkhoff.capture.spec.projections import Projections
from birkhoff.capture.spec.request import Capture, capture_hash
from birkhoff.errors import OptionError
from birkhoff.hooks.schema import build_hook_schema
from tests.capture.requests import PLAIN, V4, D, M


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_matrix_is_copied_and_comes_back_as_float32():
    projections, matrix = Projections(V4), draw(D, 3).double()
    projections["probe"] = matrix
    before = matrix.float()
    matrix.zero_()
    assert torch.equal(projections["probe"], before)
    projections["probe"].zero_()
    assert torch.equal(projections["probe"], before)  # the returned matrix is a copy as well
    projections["probe"] = before.numpy()
    projections["other"] = before.tolist()
    assert (
        dict(projections.shapes) == {"probe": (D, 3), "other": (D, 3)}
        and len(projections) == 2
        and "other" in projections
    )
    del projections["other"]
    assert list(projections) == ["probe"]


@pytest.mark.parametrize("width", [D, *(streams * D for streams in range(1, M + 1)), M, 1, M * M])
def test_every_width_of_a_row_is_accepted(width):
    Projections(V4)["w"] = torch.ones(width, 2)


@pytest.mark.parametrize(
    ("name", "matrix", "words"),
    [
        ("", torch.ones(D, 1), "1 to 256 characters"),
        (3, torch.ones(D, 1), "the name of a projection is 3"),
        ("p", torch.ones(D), r"direction\[:, None\]"),
        ("p", torch.ones(D, 0), "width, columns"),
        ("p", torch.ones(D, 2, dtype=torch.complex64), "expected real numbers"),
        ("p", torch.ones(D + 1, 2), "no hook of this model has such rows"),
        ("p", torch.full((D, 1), torch.inf), "not finite"),
        ("p", torch.full((D, 1), 1e300, dtype=torch.float64), "not finite"),
        ("p", "matrix", "not a matrix of numbers"),
        ("p", None, "not a matrix of numbers"),
        ("p", [[1], [2, 3]], "not a matrix of numbers"),
        ("p", np.array([["a"]]), "not a matrix of numbers"),
    ],
)
def test_matrices_that_fit_no_row_are_refused(name, matrix, words):
    projections = Projections(V4)
    with pytest.raises(OptionError, match=words):
        projections[name] = matrix
    assert not len(projections)


def test_an_unknown_name_is_reported_with_the_known_ones():
    projections = Projections(PLAIN)
    projections["here"] = torch.ones(32, 1)
    for use in (projections.find, projections.__getitem__, projections.__delitem__):
        with pytest.raises(OptionError, match=r"no projection is called 'gone'\. Registered: here"):
            use("gone")


def test_the_digest_covers_values_and_shape():
    projections = Projections(build_hook_schema(4, "float32", 2, None, None))
    digests = []
    for matrix in (torch.zeros(4, 2), torch.zeros(8, 1), torch.zeros(4, 1), torch.eye(4)):
        projections["m"] = matrix
        digests.append(projections.find("m").digest)
    projections["again"] = torch.zeros(4, 2)
    assert len(set(digests)) == 4 and projections.find("again").digest == digests[0]


def test_other_values_under_the_same_name_are_another_capture():
    captures = {"memory": Capture({"mlp_out": [0]}, project="p")}
    assert capture_hash(captures, {"p": "one"}) != capture_hash(captures, {"p": "two"})
    plain = {"memory": Capture({"mlp_out": [0]})}
    assert capture_hash(plain, {"p": "one"}) == capture_hash(plain)


def test_a_product_does_not_depend_on_other_rows():
    rows, matrix = draw(37, 4, 48), draw(192, 5, seed=1)
    whole = project(rows, matrix)
    for cut in (1, 2, 7, 36):
        assert torch.equal(torch.cat([project(rows[:cut], matrix), project(rows[cut:], matrix)]), whole)
    exact = rows.flatten(1).double() @ matrix.double()
    bound = rows.flatten(1).double().abs() @ matrix.double().abs()
    assert ((whole - exact).abs() <= 192 * 2.0**-24 * bound).all() and project(rows[:0], matrix).shape == (
        0,
        5,
    )
