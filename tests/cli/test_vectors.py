"""The verbs `vectors` and `sae`: files in, files out, data on stdout and tables on stderr."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch

import birkhoff
from birkhoff.analysis.steering_effect import best_trial
from birkhoff.analysis.vector_search import Trial
from birkhoff.cli.main import run
from birkhoff.sae.dictionary import Sae
from birkhoff.steering.vector_file import SteeringVector

UP = ["zzz zzzz zz", "zzzz z zzz zz", "zz zz zz", "zzzzzz", "z zz zzz"]
DOWN = [text.replace("z", "a") for text in UP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vectors")
    (path / "up.txt").write_text("\n".join(UP))
    (path / "down.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOWN))
    (path / "ask.txt").write_text("say a\nsay b\n")
    return path


def sides(folder) -> list[str]:
    return ["--positive", str(folder / "up.txt"), "--negative", str(folder / "down.jsonl")]


def test_contrast_writes_a_vector_and_shows_the_separation(tiny, folder, capfd):
    out, plot = folder / "z.safetensors", folder / "z.svg"
    ask = ["vectors", "contrast", *sides(folder), "--layers", "1,3", "--out", str(out), "--plot", str(plot)]
    assert run([*ask, "--model", tiny]) == 0
    captured = capfd.readouterr()
    assert captured.out.strip() == str(out) and "stream 3" in captured.err and "AUC" in captured.err
    vector = SteeringVector.load(out)
    assert vector.layers == (1, 3) and vector.n_pairs == 5 and vector.hook == "mhc_streams_pre_attn"
    cells = ElementTree.parse(plot).getroot().iter("{http://www.w3.org/2000/svg}title")
    assert len(list(cells)) == 2 * 5

    assert run([*ask[:-4], "--json", "--model", tiny]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["path"] is None and len(result["separation"]) == 10
    assert result["vector"]["digest"] == vector.digest

    assert run(["vectors", "show", str(out)]) == 0 and "mean_diff" in capfd.readouterr().out
    assert run(["vectors", "list", str(folder), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["z"]["layers"] == [1, 3]
    assert run(["generate", "hello", "--model", tiny, "--max-tokens", "3", "--seed", "1"]) == 0


def test_contrast_of_experts_searches_and_writes_edits(tiny, folder, capfd):
    out = folder / "experts.json"
    ask = ["vectors", "contrast", *sides(folder), "--experts", "--model", tiny]
    asked = ["--requests", str(folder / "ask.txt"), "--up", "e,a,o", "--down", "z"]
    assert run([*ask, *asked, "--out", str(out), "--json"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert result["path"] == str(out) and "AUC" in captured.err and "what each edit does" in captured.err
    assert {trial["way"] for trial in result["trials"]} == {"add", "choice"}
    assert json.loads(out.read_text())["interventions"] == result["interventions"]
    for extra, says in (
        (["--up", "a"], "Add --requests"),
        (["--hook", "mlp_out"], "--hook is for vectors"),
        (["--how", "pca"], "--how is for vectors"),
        (["--tokens", "last"], "--tokens is for vectors"),
    ):
        assert run([*ask, *extra]) != 0 and says in capfd.readouterr().err
    with birkhoff.load(tiny, cache_bytes=2**24, max_context=256) as engine:
        edits = engine.edits_from_json({"interventions": result["interventions"]})
        steered = engine.generate("say a", steer=edits, max_tokens=2, ignore_eos=True)
        assert steered.interp["rows_steered"]


def test_search_tries_every_site_and_reports_the_best(tiny, folder, capfd):
    ask = [
        "vectors",
        "search",
        *sides(folder),
        "--requests",
        str(folder / "ask.txt"),
        "--layers",
        "2",
        "--seeds",
        "1",
        "--strengths",
        "0.5,4",
        "--max-tokens",
        "30",
        "--up",
        "e,a,o",
        "--loss-bound",
        "100",
        "--model",
        tiny,
    ]
    assert run([*ask, "--out", str(folder / "best.safetensors"), "--json"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert len(result["trials"]) == (1 + 4) * 2 and result["best"] in result["trials"]
    assert {trial["strength"] for trial in result["trials"]} == {0.5, 4.0} and "stream" in captured.err
    best = SteeringVector.load(folder / "best.safetensors")
    assert best.layers == (2,)
    assert run([*ask[:-4], "--loss-bound", "-100", "--model", tiny]) == 1
    assert "Try lower strengths" in capfd.readouterr().err
    lost = folder / "lost.safetensors"
    assert run([*ask[:-6], "--up", "unheard", "--model", tiny, "--out", str(lost)]) == 1
    assert "no trial moved the answers" in capfd.readouterr().err and not lost.exists()


def test_import_requires_missing_metadata(folder, capfd):
    (folder / "other.json").write_text(
        json.dumps({"vectors": {"mlp_out": {"1": [1.0, 2.0]}, "mlp_in": {"1": [1.0, 2.0]}}})
    )
    ask = ["vectors", "import", str(folder / "other.json"), "--out", str(folder / "imported")]
    assert run(ask) == 1 and "state op" in capfd.readouterr().err
    assert run([*ask, "--op", "project"]) == 0
    paths = capfd.readouterr().out.split()
    assert sorted(SteeringVector.load(path).hook for path in paths) == ["mlp_in", "mlp_out"]
    assert run([*ask[:-1], str(folder / "one.safetensors"), "--op", "add"]) == 2


def test_an_sae_from_training_to_features(tiny, folder, capfd):
    texts = folder / "texts.txt"
    generator = torch.Generator().manual_seed(0)
    lines = [
        "".join(chr(97 + n) for n in torch.randint(26, (40,), generator=generator).tolist())
        for _ in range(12)
    ]
    texts.write_text("\n".join(lines))
    out = folder / "sae"
    ask = [
        "sae",
        "train",
        "--hook",
        "mlp_out",
        "--layer",
        "2",
        "--texts",
        str(texts),
        "--features",
        "64",
        "--k",
        "8",
        "--steps",
        "30",
        "--batch-rows",
        "128",
        "--decay",
        "0.9",
        "--dead-after",
        "500",
        "--out",
        str(out),
        "--model",
        tiny,
    ]
    assert run([*ask, "--json"]) == 0
    captured = capfd.readouterr()
    trained = json.loads(captured.out)
    assert trained["steps"] == 30 and trained["path"] == str(out) and "features dead" in captured.err
    assert "rows of 12 texts are kept" in captured.err and (out / "rows" / "harvest.json").is_file()
    sae = Sae.load(out)
    assert (sae.hook, sae.layer) == ("mlp_out", 2)
    assert (sae.metadata["training"]["decay"], sae.metadata["training"]["dead_after"]) == (0.9, 500)

    assert (
        run(["sae", "eval", str(out), "--texts", str(texts), "--limit", "3", "--model", tiny, "--json"]) == 0
    )
    judged = json.loads(capfd.readouterr().out)
    assert {"explained_variance", "l0", "dead_share", "recovered", "added"} <= set(judged)

    assert run(["sae", "features", str(out), "--texts", str(texts), "--write", "--model", tiny]) == 0
    lines = capfd.readouterr().out.splitlines()
    kept = json.loads((out / "features.json").read_text())
    assert len(lines) == len(kept) > 10 and all("contexts" in entry for entry in kept.values())

    number, told = next(iter(kept.items()))
    assert run(["sae", "show", str(out), number]) == 0
    shown = capfd.readouterr().out
    assert told["label"] in shown and "held-out rows" in shown and "examples:" in shown
    word = told["contexts"][0]["text"].split("[")[1].split("]")[0]
    assert run(["sae", "search", str(out), word, "--limit", "3", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)[0]["feature"] >= 0
    assert run(["sae", "search", str(out), "no such words"]) == 0
    assert "0 of" in capfd.readouterr().err
    assert run(["sae", "show", str(out), "9999"]) == 2 and "not described" in capfd.readouterr().err
    assert run(["sae", "search", str(folder / "up.txt"), "a"]) == 2
    assert "no descriptions" in capfd.readouterr().err

    assert run(["sae", "export", str(out), "--out", str(folder / "half"), "--half"]) == 0
    assert run(["sae", "import", str(folder / "half"), "--out", str(folder / "back")]) == 0
    back = Sae.load(folder / "back")
    assert back.digest == Sae.load(folder / "half").digest and back.hook == "mlp_out"
    assert run(["sae", "train", "--hook", "mlp_out", "--layer", "2", "--out", str(out)]) == 2

    other = folder / "gated"
    again = [*ask[: ask.index("--decay")], "--live", "--kind", "gated", "--out", str(other), "--model", tiny]
    more = ["--products", "bfloat16", "--accumulate", "2", "--sparsity", "0.5"]
    assert run([*again, *more, "--device", "cpu"]) == 0
    capfd.readouterr()
    gated = Sae.load(other)
    assert gated.activation.name == "gated" and gated.metadata["training"]["products"] == "bfloat16"
    assert run([*again, "--device", "cpu", "--share", "0.5"]) == 2
    assert "--share divides a GPU" in capfd.readouterr().err


def test_names_of_what_ships_with_nano_work_as_paths_do(tmp_path, capfd):
    assert run(["vectors", "show", "spooky"]) == 0
    assert "mhc_streams_pre_attn" in capfd.readouterr().out
    assert run(["vectors", "show", "spoky"]) == 1
    assert "Did you mean 'spooky'?" in capfd.readouterr().err
    assert run(["inspect", "nano"]) == 0 and "no problems found" in capfd.readouterr().out
    (tmp_path / "texts.txt").write_text("Once upon a time there was a fox who lived in a wood.\n")
    assert run(["sae", "eval", "nano", "--texts", str(tmp_path / "texts.txt"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["explained_variance"] > 0.5
    ask = ["sae", "active", "nano", "The dog ran to the sea.", "--k", "2"]
    assert run([*ask, "--json"]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert "".join(row["token"] for row in rows[1:]) == "The dog ran to the sea."
    assert (
        all(feature["label"] for row in rows for feature in row["features"])
        and len(rows[-1]["features"]) == 2
    )
    assert run([*ask, "--order", "strength"]) == 0
    shown = capfd.readouterr().out.splitlines()[-1].split("\t")[1]
    assert shown.startswith("#") and not shown.startswith(f"#{rows[-1]['features'][0]['feature']} ")
    assert run(["sae", "export", "nano", "--out", str(tmp_path / "copy")]) == 0
    assert Sae.load(tmp_path / "copy").d_sae == Sae.load("nano").d_sae


def test_a_search_does_not_choose_a_vector_that_did_nothing():
    def trial(gained, loss):
        return Trial("mlp_out", 1, None, 0.5, gained, 0.0, loss, gained, loss)

    assert best_trial([trial(0.0, 0.0), trial(-0.1, 0.0)], 1.0) is None
    assert best_trial([trial(0.2, 2.0), trial(0.0, 0.0)], 1.0) is None
    assert best_trial([trial(0.1, 0.5), trial(0.0, 0.0)], 1.0).gained == 0.1


def test_a_feature_is_shown_by_number_or_label(capfd):
    assert run(["sae", "show", "nano", "the sea"]) == 0
    by_label = capfd.readouterr().out
    assert run(["sae", "show", "nano", by_label.split()[0]]) == 0
    assert capfd.readouterr().out == by_label and by_label.split("\n")[0].endswith("  the sea")
    for name, words in (("the see", "Did you mean 'the sea'?"), ("99999", "birkhoff sae search nano WORD")):
        assert run(["sae", "show", "nano", name]) == 2
        assert words in capfd.readouterr().err
