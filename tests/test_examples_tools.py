"""The examples that create a vector from two sets of texts, and an SAE from generated text."""

from __future__ import annotations

import json
import re

import pytest

from birkhoff.convert.synth import synth
from birkhoff.sae.dictionary import Sae
from birkhoff.steering.vector_file import SteeringVector
from tests.cli.conftest import ROOT
from tests.test_examples import run

NAMES = ["contrast_vector", "feature_clamp"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "tiny"
    synth(path, "tiny")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_a_usage_line(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"python examples/{name}.py" in text.split('"""')[1] and text.count("\n") < 110


def test_contrast_vector_keeps_the_vector_it_used(tiny, tmp_path):
    printed = run("contrast_vector", "--model", tiny, "--out", "v.safetensors", cwd=tmp_path)
    vector = SteeringVector.load(tmp_path / "v.safetensors")
    assert f"best separation at layer {vector.layers[0]}" in printed and vector.n_pairs == 8
    steered = dict(re.findall(r"^ *(\w+): .*\((\d+) tokens steered\)$", printed, re.MULTILINE))
    assert steered["plain"] == "0" and int(steered["dark"]) > 10 and steered["dark"] == steered["bright"]
    texts = re.findall(r"^ *(?:plain|dark|bright): ('.*'|\".*\")  \(", printed, re.MULTILINE)
    assert len(texts) == len(set(texts)) == 3, "each of the three goes on in its own way"


def test_feature_clamp_trains_names_and_clamps(tiny, tmp_path):
    printed = run(
        "feature_clamp",
        "--model",
        tiny,
        "--layer",
        2,
        "--steps",
        20,
        "--texts",
        8,
        "--strength",
        30,
        cwd=tmp_path,
    )
    assert (Sae.load(tmp_path / "features").hook, Sae.load(tmp_path / "features").layer) == ("mlp_out", 2)
    kept = json.loads((tmp_path / "features" / "features.json").read_text())
    assert f"{len(kept)} features in" in printed
    chosen = re.search(r"^feature (\d+) up: ", printed, re.MULTILINE)
    assert chosen and chosen[1] in kept
    plain, up = (
        re.search(rf"^{name}: (.*)$", printed, re.MULTILINE)[1]
        for name in ("plain", f"feature {chosen[1]} up")
    )
    assert plain != up
