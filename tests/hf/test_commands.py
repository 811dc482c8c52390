"""The commands on an ordinary model whose tokenizer is not byte-level: rows, dictionaries, vectors, a conversation."""

from __future__ import annotations

import json

import pyarrow.parquet as parquet
import pytest

import birkhoff as package
from birkhoff.cli import main
from birkhoff.steering.vector_file import SteeringVector
from tests.cli.conftest import birkhoff, no_trace_of_python
from tests.cli.terminal import Terminal
from tests.hf.models import LAYERS, D, make
from tests.hf.test_loading import TEMPLATE, own, sentencepiece
from tests.report.test_capture_report import stored
from tests.sae.reference import random_sae

POSITIVE = [f"the {animal} jumps over the dog" for animal in ("fox", "quick fox", "brown fox", "lazy fox")]
NEGATIVE = [f"once upon a time there was {more}" for more in ("a", "a dog", "time", "a time")]
SEEN = ["dog over fox, lazy time", "was the brown upon quick?", *POSITIVE, *NEGATIVE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    tokenizer = own(sentencepiece(), TEMPLATE)
    make("gemma2", folder / "model", vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.save_pretrained(folder / "model")
    for name, texts in (("texts", SEEN), ("positive", POSITIVE), ("negative", NEGATIVE)):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "prompts.txt").write_text("once upon")
    return folder


@pytest.fixture
def run(capsys):
    def command(*arguments, status=0):
        done = main.run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert done == status, err
        assert "Loading weights" not in err, "Transformers' bar on something that is no terminal"
        return out, err

    return command


@pytest.fixture(scope="module")
def rows(folder):
    flags = ["--model", str(folder / "model"), "--out", str(folder / "rows"), "--hooks", "post_mlp=1"]
    assert main.run(["capture", str(folder / "texts.jsonl"), *flags]) == 0
    return folder / "rows"


def test_a_report_reads_tokens_with_the_captured_model(rows, folder, run):
    run("report", rows, "--out", folder / "rows.html")
    data = stored((folder / "rows.html").read_text(encoding="utf-8"))
    shown = ["".join(token["text"] for token in text["state"]["run"]["tokens"]) for text in data["texts"]]
    assert sorted(shown) == sorted("<s>" + text for text in SEEN[:8])


def test_a_dictionary_from_rows_to_descriptions(rows, folder, run):
    sae, model = folder / "sae", ("--model", folder / "model")
    size = ("--features", 32, "--k", 4, "--steps", 20, "--batch-rows", 16)
    run("sae", "train", "--store", rows, "--hook", "post_mlp", "--layer", 1, "--out", sae, *size)
    run("sae", "read", sae, "--store", rows, "--out", folder / "read", "--contexts", 2)
    read = parquet.read_table(folder / "read" / "features.parquet").to_pylist()
    texts = json.dumps(read, ensure_ascii=False, default=str)
    assert " quick" in texts and "▁" not in texts
    measured = json.loads(run("sae", "eval", sae, "--texts", folder / "texts.jsonl", *model, "--json")[0])
    assert measured["rows"] == measured["tokens"] and measured["spliced"] != measured["plain"]
    out, _ = run("sae", "active", sae, "the quick fox", *model)
    assert [line.split("\t")[0] for line in out.splitlines()][:1] == ["'<s>'"] and "#" in out
    run("sae", "train", "--texts", folder / "texts.jsonl", *model, "--hook", "attn_out", "--layer", 0, *size,
        "--out", folder / "sae2")  # fmt: skip
    _, err = run("sae", "train", "--store", rows, "--hook", "post_mlp", "--layer", 1, "--view", "flat", "--out",
                 folder / "sae3", *size, status=2)  # fmt: skip
    assert "expected single at post_mlp" in err


def test_rows_of_a_model_that_is_gone(rows, folder, run, tmp_path):
    random_sae("jumprelu", 8, D, seed=4, hook="post_mlp", layer=1, view="single").save(tmp_path / "sae")
    for file in (rows / "harvest").iterdir():
        copied = file.read_bytes().replace(str(folder / "model").encode(), b"no/such-model")
        (tmp_path / file.name).write_bytes(copied)
    _, err = run("report", tmp_path, "--out", tmp_path / "x.html")
    assert "no/such-model has no tokenizer here: tokens are shown by their numbers" in err
    _, err = run("sae", "read", tmp_path / "sae", "--store", tmp_path, "--out", tmp_path / "read", status=2)
    assert "need a tokenizer, and no/such-model has none" in err
    run("report", tmp_path, "--out", tmp_path / "x.html", "--model", folder / "model")
    assert "jumps" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_vectors_are_made_at_the_residual_by_default(folder, run):
    sides = ("--positive", folder / "positive.jsonl", "--negative", folder / "negative.jsonl")
    model = ("--model", folder / "model")
    run("vectors", "contrast", *sides, *model, "--out", folder / "fox.safetensors")
    vector = SteeringVector.load(folder / "fox.safetensors")
    assert vector.hook == "pre_attn" and list(vector.layers) == list(range(LAYERS)) and vector.width == D
    search = ("--requests", folder / "prompts.txt", "--up", "fox", "--strengths", "0.5", "--seeds", 1)
    done = main.run(
        [*map(str, ("vectors", "search", *sides, *model, *search, "--max-tokens", 4, "--layers", 1))]
    )
    assert done in (0, 1)  # 1: random weights were not moved towards the words
    _, err = run("vectors", "contrast", *sides, *model, "--experts", status=1)
    assert "no router that can be edited" in err


def test_a_conversation_in_a_terminal(folder, run):
    sides = ("--positive", folder / "positive.jsonl", "--negative", folder / "negative.jsonl")
    vector = folder / "chat.safetensors"
    run("vectors", "contrast", *sides, "--model", folder / "model", "--out", vector)
    line = f"+3.0 {vector} @ post_mlp[1]"
    said: list[str] = []
    with Terminal(
        "chat", "--model", str(folder / "model"), "--max-tokens", "8", "--temperature", "0"
    ) as terminal:
        at = 0
        for typed in ("a fox", "/mix", "/help", "and you?", f"/steer {line}", "and you?", "/nope", "/quit"):
            at = terminal.wait_for(">>> ", after=at)
            terminal.type(typed + "\n")
        assert terminal.ends_with(0)
        said = terminal.screen.split(">>> ")[1:]
    assert "Loading weights" not in terminal.screen
    assert "/mix shows how the residual streams of DeepSeek-V4 are mixed" in said[1]
    assert "/steer LINE" in said[2] and "/mix" not in said[2] and "stream=1" not in said[2]
    assert f"steering: {line}" in said[4] and "'/nope' is no command here" in said[6]
    with package.load(folder / "model", max_requests=1, device="cpu", cache_bytes=1 << 24) as engine:
        messages: list[dict[str, str]] = []
        for turn, text in ((0, "a fox"), (3, "and you?")):
            messages.append({"role": "user", "content": text})
            output = engine.chat(messages, max_tokens=8, temperature=0)
            messages.append({"role": "assistant", "content": output.text})
            count, asked = len(output.token_ids), len(output.prompt_token_ids)
            assert f"{count} tokens, ended by {output.finish_reason}, prompt of {asked} " in said[turn]
    assert no_trace_of_python(terminal.screen.encode())
    piped = birkhoff("chat", "--model", folder / "model", "--max-tokens", "4", stdin=b"hello\n/mix\n")
    assert (
        piped.returncode == 1 and b"option-invalid  /mix" in piped.stderr and b"Loading" not in piped.stderr
    )
