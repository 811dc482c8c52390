"""`birkhoff report`: captures of every layout become a file with tokens, norms and, where complete, pictures."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from birkhoff.capture.store.reader import read_sharded
from birkhoff.cli.main import run
from birkhoff.errors import CaptureFileError
from birkhoff.report.capture_report import captured_texts, report_data

TEXTS = ["The little fox ran to the sea.", "A dog saw a boat and smiled at the moon."]


@pytest.fixture(scope="module")
def acts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("acts")
    (folder / "texts.txt").write_text("\n".join(TEXTS))
    hooks = "mhc_attn_res_mix=*;mhc_ffn_res_mix=*;moe_topk=*;mlp_out=2,4"
    ask = ["capture", str(folder / "texts.txt"), "--hooks", hooks, "--out", str(folder / "run")]
    assert run(ask) == 0
    return folder / "run"


def stored(html: str) -> dict:
    return json.loads(re.search(r"showSaved\((.*)\);", html)[1])


def test_a_capture_becomes_a_file(acts, capfd, tmp_path):
    out = tmp_path / "acts.html"
    assert run(["report", str(acts), "--out", str(out)]) == 0
    captured = capfd.readouterr()
    assert captured.out.strip() == str(out) and "2 texts" in captured.err
    data = stored(out.read_text(encoding="utf-8"))
    assert data["panels"] == ["chat", "captured", "heatmap", "film", "lineage", "experts"]
    for text, given in zip(data["texts"], TEXTS, strict=True):
        tokens = text["state"]["run"]["tokens"]
        assert given in "".join(token["text"] for token in tokens)
        frames = dict(text["state"]["run"]["frames"])
        assert sorted(frames) == list(range(len(tokens)))
        assert np.shape(frames[0]["res_mix"]) == (2 * 8, 4, 4)
        assert np.allclose(np.sum(frames[0]["res_mix"], axis=-1), 1, atol=0.1)


def test_norms_are_those_of_the_stored_rows(acts):
    data = report_data(acts)
    shards = read_sharded(acts / "harvest")
    for text, (request, entries) in zip(data["texts"], sorted(shards.items()), strict=True):
        captured = text["state"]["captured"]
        assert captured["request"] == request
        shown = captured["hooks"]["mlp_out"]
        assert shown["rows"] == ["layer 2", "layer 4"] and shown["shape"] == [384]
        for line, layer in zip(shown["values"], (2, 4), strict=True):
            rows = entries["mlp_out", layer].values()
            assert line == pytest.approx(np.linalg.norm(rows, axis=1).tolist(), rel=1e-4)
        assert text["state"]["run"]["tokens"][0]["text"].startswith("["), "numbers without a tokenizer"


def test_one_tag_one_request_and_a_limit(acts, tmp_path):
    assert [text.name for text in captured_texts(acts)] == [
        text.name for text in captured_texts(acts / "harvest")
    ]
    assert report_data(acts, limit=1)["facts"]["texts"] == "1 of 2"
    (tmp_path / "texts.txt").write_text(TEXTS[0])
    ask = ["capture", str(tmp_path / "texts.txt"), "--hooks", "mlp_out=3", "--layout", "packed"]
    assert run([*ask, "--out", str(tmp_path / "run")]) == 0
    (text,) = captured_texts(tmp_path / "run")
    assert set(text.read()) == {("mlp_out", 3)} and not text.sharded
    data = report_data(text.directory)
    assert data["panels"] == ["chat", "captured"]


def test_what_is_no_capture_is_refused(tmp_path, capfd):
    with pytest.raises(CaptureFileError, match="no directory"):
        list(captured_texts(tmp_path / "none"))
    with pytest.raises(CaptureFileError, match="no finished capture"):
        list(captured_texts(tmp_path))
    assert run(["report", str(tmp_path)]) == 1 and "no finished capture" in capfd.readouterr().err
    assert run(["report", str(tmp_path / "none")]) == 1
    assert "no directory" in (said := capfd.readouterr().err) and "tokenizer" not in said
    assert run(["report", str(tmp_path), "--limit", "0"]) == 2
