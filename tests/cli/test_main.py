"""The command as a whole: help, version, verbs, exit statuses, and no heavy imports for help."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from birkhoff import __version__
from birkhoff.cli.main import run
from birkhoff.cli.verbs import app
from tests.cli.conftest import COMMAND, birkhoff, clean_environment, no_trace_of_python

VERBS = [command.name or command.callback.__name__ for command in app.registered_commands] + [
    g.name for g in app.registered_groups
]


@pytest.mark.parametrize("verb", ["", *VERBS, "bench model"])
def test_every_verb_has_help(verb):
    done = birkhoff(*verb.split(), "--help")
    assert done.returncode == 0 and done.stderr == b""
    text = done.stdout.decode()
    assert "Usage: birkhoff" in text
    if "COMMAND" not in text:
        assert "--json" in text


def commands(group: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield " ".join((*names, name)), command


@pytest.mark.parametrize(("name", "command"), [*commands(typer.main.get_command(app))])
def test_every_command_takes_json(name, command):
    assert "--json" in {option for parameter in command.params for option in parameter.opts}


def test_a_measurement_without_a_table_prints_the_same_with_json(tiny):
    plain, with_json = (
        birkhoff("bench", "load", "--model", tiny, "--rounds", "1", *more) for more in ([], ["--json"])
    )
    assert plain.returncode == with_json.returncode == 0, with_json.stderr
    kinds = [[json.loads(line)["kind"] for line in done.stdout.splitlines()] for done in (plain, with_json)]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 5


def test_help_does_not_wait_for_pytorch():
    code = (
        "import sys; from birkhoff.cli.main import run\n"
        "assert run(['generate', '--help']) == 0\n"
        "assert run(['generate', 'x', '--temperature', '-1']) == 2\n"
        "print(sorted({'torch', 'numpy', 'numba', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment()
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_version():
    done = birkhoff("--version")
    assert (done.returncode, done.stdout.decode()) == (0, f"birkhoff {__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Usage"]),
        (["sevre"], ["no 'sevre'", "Did you mean 'serve'?", ", ".join(sorted(VERBS))]),
        (["vectors", "serch"], ["Did you mean 'search'?", "contrast, import, list, search, show"]),
        (["bench", "speed"], ["no 'speed'", "attribution, decode, goodput"]),
        (["sae", "learn"], ["no 'learn'", "There is: active, crosscoder"]),
        (["bench", "harvest", "--device", "cpu"], ["bench harvest --device cpu --model nano"]),
        (["bench", "sae"], ["bench sae --device cpu"]),
        (["sae", "search", "nowhere", "sea"], ["nowhere does not exist. Give the directory of an SAE"]),
        (["generate", "hi", "--temprature", "0"], ["--temprature", "--temperature"]),
        (["generate"], ["prompt"]),
        (["generate", "hi", "--colour"], ["--colour"]),
        (["generate", "hi", "--max-tokens", "many"], ["--max-tokens"]),
        (["generate", "hi", "--temperature", "-1"], ["option-invalid  temperature is -1.0, expected"]),
        (["generate", "hi", "--logit-bias", "5"], ["option-invalid  logit_bias is '5', expected ID=NUMBER"]),
        (["generate", "hi", "--logit-bias", "5=1", "--logit-bias", "5=2"], ["each token id once"]),
        (["generate", "hi", "--thinking"], ["option-invalid", "Add --chat"]),
        (["chat", "--effort", "high"], ["option-invalid", "Add --thinking"]),
        (["synth"], ["out"]),
        (["bench"], ["Usage"]),
        (
            ["--config", "missing.toml", "synth", "x"],
            ["option-invalid  the settings in missing.toml cannot be read"],
        ),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_problem(arguments, words):
    done = birkhoff(*arguments)
    assert done.returncode == 2 and no_trace_of_python(done.stderr)
    plain = (done.stderr + done.stdout).decode().replace("│", " ")  # the parser wraps lines and draws a box
    printed = " ".join(plain.split()).lower()
    for word in words:
        assert " ".join(word.split()).lower() in printed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["generate", "hi", "--model", "nowhere"],
            "weights  nowhere is missing; expected 'nano', a directory",
        ),
        (["inspect", "nowhere"], "weights  nowhere does not exist."),
    ],
)
def test_a_wrong_path_prints_one_line_and_exits_with_1(arguments, line):
    done = birkhoff(*arguments)
    assert done.returncode == 1 and done.stdout == b""
    assert done.stderr.decode().startswith(line) and done.stderr.count(b"\n") == 1


def test_a_full_disk_prints_one_line_and_exits_with_1(tiny):
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, "inspect", tiny], stdout=full, stderr=subprocess.PIPE, env=clean_environment()
        )
    assert (done.returncode, done.stderr.decode()) == (1, "system  No space left on device\n")


def test_a_closed_pipe_prints_no_error(tiny):
    process = subprocess.Popen(
        [*COMMAND, "generate", "hi", "--model", tiny, "--max-tokens", "2000", "--ignore-eos", "--seed", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(),
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(300) == 1
    assert no_trace_of_python(stderr) and b"Broken" not in stderr


@pytest.fixture
def command_path(tmp_path) -> str:
    """A PATH whose first folder has the command `birkhoff`."""
    program = tmp_path / "birkhoff"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m birkhoff "$@"\n')
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def complete_in_bash(line: str, path: str) -> str:
    words = line.split(" ")
    script = f"""
eval "$(birkhoff --show-completion)"
COMP_WORDS=({" ".join(map(repr, words))}); COMP_CWORD={len(words) - 1}
_birkhoff_completion birkhoff
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    return shell_output(["bash", "-c", script], path)


def complete_in_fish(line: str, path: str) -> str:
    script = f'birkhoff --show-completion | source; complete -C "{line}"'
    return shell_output(["fish", "--no-config", "-c", script], path)


def shell_output(command: list[str], path: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(PATH=path), timeout=300
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def complete_in_zsh(line: str, path: str) -> str:
    """Type `line` and TAB into an interactive zsh; what its prompt shows when the shell has completed the word."""
    child, terminal = pty.fork()
    if child == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], clean_environment(PATH=path, TERM="xterm", PS1="> "))
    try:
        setup = 'autoload -U compinit; compinit -u -D; eval "$(birkhoff --show-completion)"; echo LOA""DED\n'
        os.write(terminal, setup.encode())
        read_until(terminal, b"LOADED\r\n")
        os.write(terminal, line.encode() + b"\t")
        return read_until(terminal, b"\x1b[1m \x1b[0m").decode()  # the blank after a completed word is bold
    finally:
        os.close(terminal)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def read_until(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        assert select.select([terminal], [], [], 300)[0], seen
        seen += os.read(terminal, 4096)
    return seen


COMPLETE = {"bash": complete_in_bash, "fish": complete_in_fish, "zsh": complete_in_zsh}


@pytest.mark.parametrize("shell", COMPLETE)
def test_the_shell_completes_verbs_options_and_vectors(shell, command_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    complete = COMPLETE[shell]
    assert "generate" in complete("birkhoff gen", command_path)
    assert "contrast" in complete("birkhoff vectors cont", command_path)
    assert "--temperature" in complete("birkhoff generate --temp", command_path)
    assert "spooky" in complete("birkhoff generate --steer spo", command_path)


@pytest.mark.parametrize("config", [["--config", "settings.toml"], ["--config=settings.toml"]])
def test_config_may_stand_anywhere(tmp_path, monkeypatch, capfd, config):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings.toml").write_text('[synth]\nlike = "tiny"\ndry_run = true\njson = true\n')
    for line in ([*config, "synth", "out"], ["synth", *config, "out"], ["synth", "out", *config]):
        assert run(line) == 0, line
        assert "tiny" in capfd.readouterr().out
    assert run(["synth", "out", "--config"]) == 2
    assert "--config" in capfd.readouterr().err
    assert run(["synth", "--dry-run", "--like", "tiny", "--", "--config"]) == 0  # behind -- it is an argument


def test_the_first_token_waits_for_no_avoidable_import_and_no_second_compilation():
    code = (
        "import sys; from birkhoff.cli.main import run\n"
        "assert run(['generate', 'x', '--max-tokens', '1']) == 0\n"
        "heavy = {'sympy', 'torch._dynamo', 'torch._inductor', 'transformers', 'fastapi', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=clean_environment()
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]" and "compil" not in done.stderr
    assert "; 1 request of up to" in done.stderr
