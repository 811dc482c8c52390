"""Vector files: round trips, invalid files, and the fields that an edit takes from its vector."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from birkhoff.errors import SteeringError, VectorFileError
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.steering.vector_edits import Add, Clamp, Patch, Project
from birkhoff.steering.vector_file import FORMAT, REQUIRED, SteeringVector

HIDDEN, STREAMS, LAYERS = 8, 4, 6
SCHEMA = build_hook_schema(HIDDEN, "float32", STREAMS, 8, 2)


def make_vector(hook="mlp_out", width=HIDDEN, layers=(1, 3), **fields) -> SteeringVector:
    generator = torch.Generator().manual_seed(5)
    rows = {layer: torch.randn(width, generator=generator) for layer in layers}
    return SteeringVector(
        rows, "add", hook, **{"model": "tiny", "method": "mean_diff", "n_pairs": 7, **fields}
    )


def rewrite(source, target, change) -> None:
    """Copy a file with changed tensors or metadata."""
    with safe_open(source, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, target, metadata)


@pytest.mark.parametrize("streams", ["flat", "all", (0, 2)])
def test_save_and_load_round_trip(tmp_path, streams):
    width = HIDDEN * (STREAMS if streams == "flat" else 1)
    vector = make_vector(
        "mhc_streams_pre_attn", width, streams=streams, scale=1.5, note="a note", effect={"moved": 0.9}
    )
    first = vector.save(tmp_path / "a.safetensors")
    back = SteeringVector.load(first)
    assert back == vector and back.describe() == vector.describe() and back.to_json() == vector.to_json()
    assert back.save(tmp_path / "b.safetensors").read_bytes() == first.read_bytes()
    assert SteeringVector.from_json(json.loads(json.dumps(vector.to_json()))) == vector
    with safe_open(first, "pt") as file:
        assert set(REQUIRED) <= set(file.metadata()) and file.metadata()["format"] == FORMAT


def test_vectors_compare_by_effect_not_by_provenance():
    vector = make_vector()
    assert vector == replace(vector, created_at="another day", note="x", method="pca")
    assert (
        hash(vector) == hash(make_vector())
        and vector != make_vector(layers=(1, 2))
        and vector != replace(vector, op="project")
    )
    assert vector != replace(vector, scale_unit="row_norm") and vector.only([3]).layers == (3,)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_file_without_required_metadata_is_refused(tmp_path, name):
    make_vector().save(tmp_path / "whole.safetensors")
    rewrite(tmp_path / "whole.safetensors", tmp_path / "less.safetensors", lambda _, words: words.pop(name))
    with pytest.raises(VectorFileError, match=rf"does not say {name}\."):
        SteeringVector.load(tmp_path / "less.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, words: tensors["layer.1"].mul_(2),
        lambda tensors, words: words.update(hook="mlp_in"),
        lambda tensors, words: words.update(scale="9.0"),
        lambda tensors, words: tensors.pop("layer.3"),
    ],
    ids=["numbers", "hook", "a word more", "a layer less"],
)
def test_a_file_that_was_changed_is_refused(tmp_path, change):
    make_vector().save(tmp_path / "whole.safetensors")
    rewrite(tmp_path / "whole.safetensors", tmp_path / "other.safetensors", change)
    with pytest.raises(VectorFileError, match="sha256 does not match"):
        SteeringVector.load(tmp_path / "other.safetensors")


def test_files_of_other_kinds_are_refused(tmp_path):
    (tmp_path / "text.safetensors").write_text("hello")
    save_file({"layer.1": torch.ones(3)}, tmp_path / "bare.safetensors")
    for name, words in (("text", "cannot be read"), ("bare", "does not say op, hook"), ("none", "missing")):
        with pytest.raises(VectorFileError, match=words):
            SteeringVector.load(tmp_path / f"{name}.safetensors")
    with pytest.raises(VectorFileError, match=r"expected \.safetensors"):
        make_vector().save(tmp_path / "vector.pt")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rows": {}}, "at least one layer"),
        ({"rows": {-1: [1.0]}}, "layer numbers from 0"),
        ({"rows": {0: [1.0], 1: [1.0, 2.0]}}, "one width"),
        ({"rows": {0: [float("nan")]}}, "finite"),
        ({"rows": {0: [0.0, 0.0]}}, "is zero"),
        ({"op": "push"}, "expected one of add, project, clamp"),
        ({"hook": "mlp"}, "hook is 'mlp'"),
        ({"streams": [1]}, "has one stream"),
        ({"streams": "some"}, "'flat', 'all' or a list"),
        ({"scale_unit": "metre"}, "scale_unit"),
        ({"normalised": True}, "has norm"),
        ({"normalised": 1}, "true or false"),
        ({"n_pairs": -1}, "n_pairs"),
        ({"model": 3}, "model is 3"),
    ],
)
def test_invalid_fields_are_refused_on_construction(fields, words):
    with pytest.raises(SteeringError, match=words):
        SteeringVector(**{"rows": {0: [3.0, 4.0]}, "op": "add", "hook": "mlp_out", **fields})


def resolved(edit):
    return edit.resolve(SCHEMA, LAYERS, {"calm": make_vector()}, 4, 2).sites


def test_an_edit_takes_hook_and_layers_from_the_vector():
    vector = make_vector()
    sites = resolved(Add("calm", scale=2.0))
    assert list(sites) == [("mlp_out", 1), ("mlp_out", 3)]
    for (_, layer), edit in sites.items():  # one row per layer
        assert torch.equal(edit.vector, vector.at(layer).tensor()) and edit.scale == 2.0
    assert list(resolved(Add("calm", layers=[3]))) == [("mlp_out", 3)]
    assert resolved(Add(vector, layers=[3]))["mlp_out", 3].vector.equal(vector.at(3).tensor())
    with pytest.raises(SteeringError, match=r"rows for layers \[1, 3\] of mlp_out, not for layer 2"):
        resolved(Add("calm", layers=[2]))


def test_an_edit_takes_streams_and_unit_from_the_vector():
    one = make_vector("mhc_streams_pre_attn", layers=(2,), streams=(1,), scale_unit="row_norm")
    ((key, edit),) = resolved(Add(one)).items()
    assert key == ("mhc_streams_pre_attn", 2) and edit.streams == (1,) and edit.norm_match
    assert resolved(Add(one, streams=[0, 3]))[key].streams == (0, 3)
    leaving = make_vector("mhc_streams_post_mlp", layers=(2,), streams="all")
    assert list(resolved(Add(leaving))) == [("mhc_streams_pre_attn", 3)]
    final = make_vector("mhc_streams_final", HIDDEN * STREAMS, layers=(0,))
    assert list(resolved(Add(final))) == [("mhc_streams_final", LAYERS - 1)]


def test_a_direction_to_project_cannot_be_added():
    direction = replace(make_vector(), op="project")
    for kind in (Add, Patch):
        with pytest.raises(SteeringError, match="made to project"):
            resolved(kind(direction))
    assert len(resolved(Project(direction))) == len(resolved(Clamp(direction, max=0.0))) == 2
    assert len(resolved(Project("calm"))) == 2  # any vector gives a direction


def test_json_round_trip_of_an_edit_with_a_vector():
    edit = Add(make_vector(), scale=-1.0)
    again = Add.from_json(json.loads(json.dumps(edit.to_json())))
    assert again == edit and hash(again) == hash(edit)
