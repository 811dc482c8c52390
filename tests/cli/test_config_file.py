"""Precedence of settings: flags, then environment variables, then the file; unknown keys are errors."""

import json

import pytest

from birkhoff.cli.main import run


@pytest.fixture
def file(tmp_path, tiny):
    path = tmp_path / "settings.toml"
    path.write_text(
        f'model = "{tiny}"\nmax_tokens = 7\ntemperature = 0\nignore_eos = true\n[generate]\nmax_tokens = 3\n'
    )
    return str(path)


def tokens(capfd, *arguments: str) -> int:
    assert run([*arguments]) == 0
    return json.loads(capfd.readouterr().out)["timings"]["output_tokens"]


def test_flags_beat_variables_beat_the_file(file, capfd, monkeypatch):
    ask = ("--config", file, "generate", "hi", "--json")
    assert tokens(capfd, *ask) == 3  # from the [generate] table, not the top-level 7
    monkeypatch.setenv("BIRKHOFF_MAX_TOKENS", "4")
    assert tokens(capfd, *ask) == 4
    assert tokens(capfd, *ask, "--max-tokens", "5") == 5


def test_the_file_can_be_named_by_a_variable(file, capfd, monkeypatch):
    monkeypatch.setenv("BIRKHOFF_CONFIG", file)
    assert tokens(capfd, "generate", "hi", "--json") == 3


def test_a_key_of_other_verbs_is_ignored(file, capfd):
    assert run(["--config", file, "synth", "nowhere", "--dry-run", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["written"] is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tempereture = 1", "'tempereture' is no flag"),
        ("tempereture = 1", "Did you mean 'temperature'?"),
        ("[generate]\nlike = 'tiny'", "[generate]: 'like' is no flag"),
        ("[bench.model]\nseed = 1", "[bench] [model]: 'seed' is no flag"),
        ("generate = 5", "'generate' is no flag"),
        ("[genrate]\nseed = 5", "[genrate] is no verb"),
        ("[genrate]\nseed = 5", "Did you mean 'generate'?"),
        ("model = ", "cannot be read"),
        ("model = '\xff'", "cannot be read"),
    ],
)
def test_unknown_keys_are_refused_by_name(tmp_path, capfd, text, words):
    path = tmp_path / "settings.toml"
    path.write_bytes(text.encode("latin1"))
    assert run(["--config", str(path), "synth", "nowhere", "--dry-run"]) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("option-invalid  ") and words in captured.err and captured.out == ""
