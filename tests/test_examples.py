"""Every example runs from the command line, and its output equals values computed directly."""

from __future__ import annotations

import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

import birkhoff
from birkhoff.capture.store.reader import read_sharded
from birkhoff.convert.synth import synth
from tests.cli.conftest import ROOT, clean_environment

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["mixing_matrices", "stream_lens", "harvest", "steering_wake"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "tiny"
    synth(path, "tiny")
    return path


@pytest.fixture(scope="module")
def engine(tiny):
    with birkhoff.load(tiny) as engine:
        yield engine


def run(name: str, *arguments: object, cwd) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean_environment(PYTHONIOENCODING="utf-8"),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_example_has_a_usage_line(name, tmp_path):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert f"python examples/{name}.py" in text.split('"""')[1] and text.count("\n") < 110


def test_mixing_matrices_draws_every_cell(tiny, engine, tmp_path):
    printed = run("mixing_matrices", "a b c", "--model", tiny, "--out", "m.svg", cwd=tmp_path)
    assert "from 0" in printed and "around the experts" in printed
    cells = ElementTree.parse(tmp_path / "m.svg").getroot().findall(f"{SVG}rect/{SVG}title")
    layers = engine.config.num_hidden_layers
    assert len(cells) == layers * 2 * 16
    trace = engine.trace(engine.prompt_ids("a b c"))
    for cell in cells:
        layer, kind, source, target, share = re.fullmatch(
            r"layer (\d+) (attn|ffn): (\d) to (\d) ([\d.]+)", cell.text or ""
        ).groups()  # type: ignore[union-attr]
        mix = trace[f"mhc_{kind}_res_mix", int(layer)].mean(0)
        assert abs(mix[int(source), int(target)].item() - float(share)) < 6e-4


def test_stream_lens_ends_with_the_models_prediction(tiny, engine, tmp_path):
    printed = run("stream_lens", "a b c", "--model", tiny, cwd=tmp_path)
    chances = engine.logits(engine.prompt_ids("a b c"))[-1].softmax(-1)
    last = [line for line in printed.splitlines() if "│ layer" in line][-1]
    assert f"layer {engine.config.num_hidden_layers - 1}" in last
    assert last.split("│")[-2].split()[-1] == f"{chances.max().item():.0%}"
    assert [f"stream {n}" in printed for n in range(4)] == [True] * 4 and "embedding" in printed


def test_harvest_reads_back_what_it_wrote_and_computes_nothing_twice(tiny, tmp_path):
    first = run("harvest", "--model", tiny, "--out", "out", cwd=tmp_path)
    second = run("harvest", "--model", tiny, "--out", "out", cwd=tmp_path)
    assert "new: 3" in first and "new: 0" in second
    assert first.splitlines()[1:] == second.splitlines()[1:]
    read = read_sharded(tmp_path / "out" / "harvest")
    rows = sum(len(entry) for entries in read.values() for entry in entries.values())
    assert f"3 texts, {rows} rows" in first


def test_steering_wake_starts_after_the_edit_and_reaches_every_stream(tiny, engine, tmp_path):
    printed = run(
        "steering_wake", "a b c", "--model", tiny, "--stream", 2, "--layer", 2, "--out", "w.svg", cwd=tmp_path
    )
    assert "stream 2 of layer 2" in printed and "all streams of layer 2" in printed
    titles = [cell.text or "" for cell in ElementTree.parse(tmp_path / "w.svg").getroot().iter(f"{SVG}title")]
    shares = {}
    for title in titles:
        edit, label, stream, share = re.fullmatch(r"(.+), (.+), stream (\d): ([\d.]+)", title).groups()  # type: ignore[union-attr]
        shares[edit, label, int(stream)] = float(share)
    layers = engine.config.num_hidden_layers
    assert len(shares) == 2 * (layers + 1) * 4
    for edit in ("stream 2", "all streams"):
        for stream in range(4):
            assert all(shares[edit, f"layer {layer}", stream] == 0 for layer in range(3))
            assert shares[edit, "layer 3", stream] > 0 and shares[edit, "end", stream] > 0
    ids, hook = engine.prompt_ids("a b c"), "mhc_streams_pre_attn"
    plain = engine.trace(ids)
    direction = torch.randn(engine.config.hidden_size, generator=torch.Generator().manual_seed(0))
    direction *= 0.5 * plain[hook, 2].flatten(1).norm(dim=-1).mean() / direction.norm()
    steered = engine.trace(ids, steer=[birkhoff.Add(direction, hook, [2], streams=[2])])
    for label, site in (("layer 4", (hook, 4)), ("end", ("mhc_streams_final", layers - 1))):
        moved = ((steered[site] - plain[site]).norm(dim=-1) / plain[site].norm(dim=-1)).mean(0)
        assert moved.tolist() == pytest.approx(
            [shares["stream 2", label, stream] for stream in range(4)], abs=1e-3
        )
