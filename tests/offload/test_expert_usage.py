"""Files of expert counts: a round trip, and refusal with a reason when anything is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from birkhoff.errors import CountsFileError
from birkhoff.offload.expert_usage import ExpertCounts, _digest
from tests.sizes import scaled


def saved(path, layers=3, experts=4, steps=100):
    reads = torch.randint(0, steps + 1, (layers, experts), generator=torch.Generator().manual_seed(0))
    ExpertCounts(reads, steps).save(path)
    return reads


def test_counts_round_trip(tmp_path):
    reads = saved(tmp_path / "counts.json")
    result = ExpertCounts.load(tmp_path / "counts.json", 3, 4)
    assert torch.equal(result.reads, reads) and result.reads.dtype is torch.int64 and result.steps == 100
    assert [file.name for file in tmp_path.iterdir()] == ["counts.json"], "no temporary file remains"


def test_counts_of_another_model_are_refused_with_both_shapes(tmp_path):
    saved(tmp_path / "c.json")
    with pytest.raises(CountsFileError, match=r"counts 3 layers of 4 experts, this model has 43 of 256"):
        ExpertCounts.load(tmp_path / "c.json", 43, 256)


def resealed(path, **changes):
    """Change the contents of a file and update its checksum."""
    body = json.loads(path.read_text())
    body.pop("sha256")
    body.update(changes)
    body = {key: value for key, value in body.items() if value is not ...}
    path.write_text(json.dumps({**body, "sha256": _digest(body)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2, this build reads 1"),
        ({"version": True}, "layers, experts or steps|version"),
        ({"format": "something"}, "holds no expert counts"),
        ({"steps": ...}, "lacks or adds steps"),
        ({"more": 1}, "lacks or adds more"),
        ({"layers": 0, "counts": []}, "no counts"),
        ({"layers": "3"}, "no counts"),
        ({"steps": -1}, "no counts"),
        ({"steps": 1e3}, "no counts"),
        ({"counts": [[1, 2, 3, 4]]}, "not that many"),
        ({"counts": [[1], [2], [3]]}, "not that many"),
        ({"counts": {"0": 1}}, "not that many"),
        ({"counts": [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, -4]]}, "no whole number from 0 to its 100 steps"),
        ({"counts": [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 101]]}, "no whole number from 0 to its 100 steps"),
        ({"counts": [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4.0]]}, "no whole number"),
        ({"counts": [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, True]]}, "no whole number"),
    ],
)
def test_invalid_counts_are_refused(tmp_path, changes, words):
    path = tmp_path / "c.json"
    saved(path)
    resealed(path, **changes)
    if changes == {"version": True}:  # True equals 1 in Python
        assert ExpertCounts.load(path, 3, 4).steps == 100
        return
    with pytest.raises(CountsFileError, match=words):
        ExpertCounts.load(path, 3, 4)


@settings(max_examples=scaled(300, 60), deadline=None)
@given(data=st.data())
def test_any_changed_character_is_detected(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("counts") / "c.json"
    reads = saved(path)
    text = path.read_bytes()
    at = data.draw(st.integers(0, len(text) - 2))  # all but the final newline
    if data.draw(st.booleans()):
        path.write_bytes(text[:at])
    else:
        path.write_bytes(text[:at] + bytes([data.draw(st.integers(0, 255))]) + text[at + 1 :])
    try:
        result = ExpertCounts.load(path, 3, 4)
    except CountsFileError:
        return
    assert torch.equal(result.reads, reads) and result.steps == 100, (
        "accepted contents equal the written ones"
    )


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff\xfe", b"NaN", b"[" * 100_000])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(CountsFileError, match=r"Count again, or load without the file"):
        ExpertCounts.load(path, 3, 4)


def test_errors_name_paths_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(CountsFileError, match=r"cannot be read \(No such file"):
        ExpertCounts.load(tmp_path / "missing.json", 3, 4)
    with pytest.raises(CountsFileError, match=r"cannot be written \(No such file"):
        saved(tmp_path / "no" / "c.json")
    with pytest.raises(CountsFileError, match=r"cannot be read \(it is a directory"):
        ExpertCounts.load(tmp_path, 3, 4)
