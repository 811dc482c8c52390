"""`--steer` of generate and chat: modules, vector files, and invalid lines."""

from __future__ import annotations

import json

import pytest

import birkhoff as package
from birkhoff import Add
from birkhoff.cli.main import run
from birkhoff.steering.vector_file import SteeringVector
from tests.cli.conftest import birkhoff

SAME = ("--max-tokens", "8", "--temperature", "0", "--ignore-eos")


HIDDEN = 64  # of the tiny model


@pytest.fixture(scope="module")
def vector():
    return SteeringVector({1: [0.9 if n % 3 else -1.3 for n in range(HIDDEN)]}, "add", "mlp_out")


@pytest.fixture(scope="module")
def file(vector, tmp_path_factory):
    return vector.save(tmp_path_factory.mktemp("vectors") / "loud.safetensors")


def test_a_vector_file_steers_as_python_does(tiny, file, vector, capfd):
    with package.load(tiny, max_requests=1) as engine:
        expected = engine.generate(
            "hello", steer=[Add(vector, scale=4.0)], max_tokens=8, temperature=0, ignore_eos=True
        )
        plain = engine.generate("hello", max_tokens=8, temperature=0, ignore_eos=True)
    assert expected.token_ids != plain.token_ids
    ask = ["generate", "hello", "--model", tiny, *SAME, "--json"]
    for line in (f"+4.0 {file}", f"+1 {file} @ mlp_out[1]; +3 {file}"):
        assert run([*ask, "--steer", line]) == 0
        answer = json.loads(capfd.readouterr().out)
        assert answer["token_ids"] == expected.token_ids and answer["interp"]["rows_steered"] > 0
    assert run(ask) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == plain.token_ids


def test_chats_are_steered_too(tiny, file, vector):
    with package.load(tiny, max_requests=1) as engine:
        edit = Add(vector, scale=4.0, phase="decode")
        ask = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        expected = engine.chat([{"role": "user", "content": "hello"}], steer=[edit], **ask)
    done = birkhoff(
        "chat", "--model", tiny, *SAME, "--json", "--steer", f"+4.0 {file} phase=decode", stdin=b"hello\n"
    )
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == expected.token_ids and answer["interp"]["steering_hash"]["prefill"] is None
    assert answer["interp"]["rows_steered"] == 7


def test_a_syntax_error_is_shown_with_a_caret_before_a_model_is_loaded(capfd):
    assert run(["generate", "hello", "--model", "/nowhere", "--steer", "+2.0 calm @ mlp_out[x]"]) in (1, 2)
    err = capfd.readouterr().err
    assert "steering-syntax" in err and "nowhere" not in err
    shown, caret = (line for line in err.splitlines() if "mlp_out[x]" in line or line.strip() == "^")
    assert shown[caret.index("^")] == "x"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("+1 nobody", "neither a module"),
        ("nobody", "neither a module"),
        ("+1 gone.safetensors", "missing"),
        ("+1 {file} @ mlp_in[1,99]", "99"),
    ],
)
def test_unknown_names_files_and_layers_are_refused(tiny, file, capfd, line, words):
    assert run(["generate", "hello", "--model", tiny, *SAME, "--steer", line.format(file=file)]) in (1, 2)
    captured = capfd.readouterr()
    assert words in captured.err and not captured.out


def test_a_name_alone_steers_with_strength_one_and_a_misspelt_name_is_corrected(capfd):
    ask = ["generate", "Once upon a time", *SAME, "--json"]
    assert run([*ask, "--steer", "spooky"]) == 0
    alone = json.loads(capfd.readouterr().out)
    assert run([*ask, "--steer", "+1.0 spooky"]) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == alone["token_ids"]
    assert alone["interp"]["rows_steered"] > 0
    assert run([*ask, "--steer", "spooki"]) == 1
    assert "Did you mean 'spooky'?" in capfd.readouterr().err
