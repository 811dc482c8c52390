"""Experts that separate two sets of texts: counted as captures show them, turned into edits, searched, on the command
line."""

from __future__ import annotations

import json

import pytest
import torch

import birkhoff
from birkhoff import Capture, ExpertSet
from birkhoff.analysis.expert_contrast import ExpertContrast, contrast_experts, search_experts
from birkhoff.analysis.steering_effect import best_trial
from birkhoff.cli.main import run
from birkhoff.errors import OptionError

UP = ["The dog saw a cat.", "The fox ran to the bear.", "A bird and a mouse."]
DOWN = ["The girl met a boy.", "The man spoke to the king.", "A teacher and a mother."]


def test_shares_are_those_of_captured_experts_and_edits_favour_them():
    with birkhoff.load("nano") as engine:
        contrast = contrast_experts(engine, UP, DOWN, [2, 5])
        out = engine.generate(UP[0], max_tokens=1, capture=Capture({"moe_topk": [5]}))
        rows = out.acts["moe_topk", 5]
        ids = rows.tensor[1 if rows.token_ids[0] == engine.config.bos_token_id else 0 :, :, 0]
        for expert in range(engine.config.n_routed_experts):
            share = (ids == expert).any(-1).float().mean()
            assert abs(float(contrast.positive[5][0, expert]) - float(share)) < 1e-6
        assert torch.allclose(contrast.positive[2].sum(-1), torch.tensor(float(contrast.topk)))
        trials = search_experts(
            engine, contrast, ["Tell me a story."], len, 1, [1], [0.5], max_tokens=4, ways=["add"]
        )
        assert [(trial.count, trial.way, trial.strength) for trial in trials] == [(1, "add", 0.5)]
        with pytest.raises(OptionError, match="ways"):
            search_experts(engine, contrast, ["a"], len, 1, [1], [0.5], ways=["push"])


def test_edits_of_a_contrast():
    up, down = torch.tensor([[1.0, 0.0, 0.5, 0.5]] * 2), torch.tensor([[0.0, 1.0, 0.5, 0.5]] * 2)
    up[0, 0], down[0, 1] = 0.9, 0.9
    contrast = ExpertContrast({3: up}, {3: down}, 2)
    assert contrast.edits(1, "add", 0.4) == [ExpertSet([3], add={0: 0.4, 1: -0.4})]
    assert contrast.edits(2, "choice") == [ExpertSet([3], force=[0], ban=[1])]
    assert [(entry.expert, entry.d_prime > 0) for entry in contrast.separation()[:2]] in (
        [(0, True), (1, False)],
        [(1, False), (0, True)],
    )
    assert best_trial([], 1.0) is None


def test_command_line(tmp_path, capfd):
    for name, texts in (("up", UP), ("down", DOWN)):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
    files = ["--positive", str(tmp_path / "up.txt"), "--negative", str(tmp_path / "down.txt")]
    out = tmp_path / "edits.json"
    ask = ["vectors", "contrast", *files, "--experts", "--layers", "4"]
    assert run([*ask, "--out", str(out), "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["interventions"] == json.loads(out.read_text())["interventions"] and not printed["trials"]
    assert {entry["layer"] for entry in printed["separation"]} == {4}
    with birkhoff.load("nano") as engine:
        edits = engine.edits_from_json({"interventions": printed["interventions"]})
        assert all(isinstance(edit, ExpertSet) for edit in edits) and edits
    assert run([*ask, "--note", "x"]) != 0
    assert "is for vectors" in capfd.readouterr().err
