"""The verbs `attribute`, `circuit` and `patch-sweep`."""

from __future__ import annotations

import json
import re

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


PAIRS = [
    {"clean": TEXT, "corrupt": OTHER},
    {"clean": "abd abc abe", "corrupt": "abd abf abe", "token": "c", "other": "id:7"},
]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(pair) for pair in PAIRS) + "\n\n")
    return path


def test_attribute_of_several_texts_prints_their_mean(tiny, capsys, pairs):
    arguments = ["attribute", "--pairs", str(pairs), "--token", "a", "--other", "b", "--model", str(tiny)]
    assert run([*arguments, "--top", "4"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 4 and "mean of 2 texts" in shown.err
    assert run([*arguments, "--top", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    with birkhoff.load(tiny, max_requests=1) as engine:
        expected = engine.attribute(
            [pair["clean"] for pair in PAIRS],
            [("a", "b"), ("c", 7)],
            baseline=[pair["corrupt"] for pair in PAIRS],
        )
    assert document["nodes"] == [pytest.approx(node.to_json(), abs=1e-4) for node in expected.mean.top(3)]
    for text, own in zip(document["texts"], expected, strict=True):
        assert text["nodes"] == [pytest.approx(node.to_json(), abs=1e-4) for node in own.top(3)]


def test_patch_sweep_prints_the_cells_that_matter_most(tiny, capsys, tmp_path):
    arguments = ["patch-sweep", TEXT, OTHER, "--token", "a", "--other", "b", "--model", str(tiny)]
    assert run([*arguments, "--top", "3", "--layers", "1,3", "--plot", str(tmp_path / "sweep.svg")]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3 and "clean" in shown.err and "24 cells" in shown.err
    assert "<svg" in (tmp_path / "sweep.svg").read_text()
    assert run([*arguments, "--json", "--over", "heads", "--positions", "all", "--layers", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    with birkhoff.load(tiny, max_requests=1) as engine:
        expected = engine.patch_sweep(TEXT, OTHER, ("a", "b"), "heads", layers=2, positions=None)
        options = {"layers": [2], "positions": [4, -1], "streams": [0, 3]}
        by_stream = engine.patch_sweep(TEXT, OTHER, ("a", "b"), "mhc_streams_pre_mlp", **options)
    assert document["values"] == [pytest.approx(row, abs=1e-4) for row in expected.values.tolist()]
    assert document["axes"] == ["layer", "head"] and document["clean"] == pytest.approx(
        expected.clean, abs=1e-4
    )
    more = [
        "--over",
        "mhc_streams_pre_mlp",
        "--layers",
        "2",
        "--positions",
        "4,-1",
        "--streams",
        "0,3",
        "--json",
    ]
    assert run([*arguments, *more]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["labels"] == by_stream.labels
    assert document["values"][0][1] == pytest.approx(by_stream.values[0, 1].tolist(), abs=1e-4)


def test_patch_sweep_of_pairs_prints_their_mean(tiny, capsys, pairs):
    arguments = ["patch-sweep", "--pairs", str(pairs), "--token", "a", "--other", "b", "--model", str(tiny)]
    assert run([*arguments, "--layers", "2", "--top", "2"]) == 0
    shown = capsys.readouterr()
    assert "mean of 2 pairs, 12 cells" in shown.err and len(shown.out.splitlines()) == 2
    assert run([*arguments, "--layers", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    with birkhoff.load(tiny, max_requests=1) as engine:
        texts = ([pair[side] for pair in PAIRS] for side in ("clean", "corrupt"))
        batch = engine.patch_sweep(*texts, [("a", "b"), ("c", 7)], "mhc_streams_pre_attn", layers=2)
    assert document["values"][0] == pytest.approx(batch.mean.values[0].tolist(), abs=1e-4)
    for pair, own in zip(document["pairs"], batch, strict=True):
        assert pair["values"][0] == pytest.approx(own.values[0].tolist(), abs=1e-4)
        assert pair["corrupt"] == pytest.approx(own.corrupt, abs=1e-4)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "expected an object"),
        ('{"clean": "abc", "corupt": "abd"}', "unknown field 'corupt'.*Did you mean 'corrupt'"),
        ('{"clean": "abc", "corrupt": 3}', "corrupt is 3, expected a text"),
        (
            '{"clean": "abc", "corrupt": "abd", "token": 1.5}',
            "token is 1.5, expected a text or a whole number",
        ),
        ('{"clean": "abc"}', "has no corrupt, others have"),
        ("", "has no pairs"),
    ],
)
def test_wrong_lines_of_pairs_are_named(tiny, capsys, tmp_path, line, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(PAIRS[0])}\n{line}\n" if line else "\n")
    assert run(["patch-sweep", "--pairs", str(path), "--token", "a", "--model", str(tiny)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert re.search(message, error) and (not line.strip("{") or "pairs.jsonl" in error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["patch-sweep", TEXT, "--token", "a"], "CLEAN and CORRUPT"),
        (["patch-sweep", TEXT, OTHER], "Give --token"),
        (["patch-sweep", TEXT, OTHER, "--token", "a", "--pairs", "p.jsonl"], "not both"),
        (["patch-sweep", TEXT, OTHER, "--token", "a", "--positions", "some"], "expected each, all"),
        (["patch-sweep", TEXT, OTHER, "--token", "a", "--streams", "x"], "streams is 'x'"),
        (["attribute", "--token", "a"], "give a TEXT, or several"),
        (["attribute", TEXT, "--token", "a", "--pairs", "p.jsonl"], "give a TEXT, or several"),
    ],
)
def test_texts_are_given_once(capsys, arguments, message):
    assert run(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


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
