"""The verbs `attribute` and `circuit`."""

from __future__ import annotations

import json

import pytest

import birkhoff
from birkhoff.cli.main import run
from tests.sae.reference import random_sae

TEXT, OTHER = "abc abd abe", "abc abf abe"


def test_attribute_prints_the_largest_parts(tiny, capsys):
    arguments = ["attribute", TEXT, "--token", "a", "--other", "b", "--baseline", OTHER, "--model", str(tiny)]
    assert run([*arguments, "--top", "4", "--over", "streams"]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert len(lines) == 4 and all("mhc_streams" in line and "stream" in line for line in lines)
    assert "logit of 'a' minus logit of 'b'" in shown.err
    assert run([*arguments, "--top", "4", "--json", "--method", "integrated", "--steps", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    with birkhoff.load(tiny, max_requests=1) as engine:
        expected = engine.attribute(TEXT, ("a", "b"), baseline=OTHER, method="integrated", steps=2)
    assert document["nodes"] == [pytest.approx(node.to_json(), abs=1e-4) for node in expected.top(4)]


def test_circuit_prints_nodes_and_how_good_they_are(tiny, capsys, tmp_path):
    arguments = ["circuit", TEXT, "--token", "id:7", "--baseline", OTHER, "--model", str(tiny)]
    assert run([*arguments, "--faithfulness", "0.5"]) == 0
    shown = capsys.readouterr()
    assert "faithfulness" in shown.err and "completeness" in shown.err and "token" not in shown.out.lower()
    assert any("->" in line for line in shown.out.splitlines())
    assert run([*arguments, "--json", "--svg", str(tmp_path / "circuit.svg")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["nodes"] and document["faithfulness"] >= 0.79
    assert (tmp_path / "circuit.svg").read_text().count("<circle") == len(document["nodes"])


def test_features_of_a_file(tiny, capsys, tmp_path):
    with birkhoff.load(tiny, max_requests=1) as engine:
        d = engine.config.hidden_size
    random_sae("relu", 9, d, hook="mlp_out", layer=1).save(tmp_path / "sae")
    arguments = ["attribute", TEXT, "--token", "a", "--model", str(tiny), "--json"]
    assert run([*arguments, "--over", f"features:{tmp_path / 'sae'}"]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert nodes and all(node["hook"] == "mlp_out" and 0 <= node["feature"] < 9 for node in nodes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--token", "abc"], "tokens"),
        (["--token", "a", "--baseline", "other"], "same length"),
        (["--token", "a", "--method", "gradients"], "Did you mean"),
        (["--token", "a", "--over", "mlp_oat"], "Groups"),
    ],
)
def test_what_is_refused(tiny, capsys, more, message):
    assert run(["attribute", TEXT, "--model", str(tiny), *more]) in (1, 2)
    assert message in capsys.readouterr().err
