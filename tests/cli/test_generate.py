"""The verb `generate` in a separate process: streaming, pipes, JSON, Ctrl-C and invalid input."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import birkhoff as package
from birkhoff.cli.main import run
from tests.cli.conftest import COMMAND, birkhoff, clean_environment, no_trace_of_python
from tests.cli.terminal import Terminal

FIELDS = {"text", "token_ids", "prompt_token_ids", "finish_reason", "logprobs", "acts", "interp", "timings"}
SAME = ("--max-tokens", "12", "--seed", "3", "--ignore-eos")
LONG = ("--max-tokens", "3000", "--seed", "3", "--ignore-eos")


@pytest.fixture(scope="module")
def expected(tiny) -> package.Output:
    with package.load(tiny, max_requests=1) as engine:
        return engine.generate("hello", max_tokens=12, seed=3, ignore_eos=True)


def test_text_on_stdout_and_status_on_stderr(tiny, expected):
    done = birkhoff("generate", "hello", "--model", tiny, *SAME)
    assert done.returncode == 0
    shown = re.sub(r"<｜[^｜]*｜>|</?think>", "", expected.text)  # markers are not printed
    assert done.stdout.decode().rstrip("\n") == shown.rstrip("\n") and done.stdout.endswith(b"\n")
    lines = done.stderr.decode().splitlines()
    assert all(
        line.startswith("birkhoff: ") for line in lines
    )  # the first run on a machine prints one more line
    assert "on cpu, float32" in lines[-3] and lines[-2] == "birkhoff: seed 3"
    assert "12 tokens, ended by length" in lines[-1]


def test_the_prompt_may_come_from_stdin_and_the_answer_as_json(tiny, expected):
    done = birkhoff("generate", "-", "--model", tiny, *SAME, "--json", "--logprobs", "2", stdin=b"hello")
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and set(answer) == FIELDS and done.stdout.count(b"\n") == 1
    assert (answer["text"], answer["token_ids"]) == (expected.text, expected.token_ids)
    assert answer["prompt_token_ids"] == expected.prompt_token_ids and answer["finish_reason"] == "length"
    assert [entry["token_id"] for entry in answer["logprobs"]] == expected.token_ids
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in answer["logprobs"])


def test_a_seed_that_was_drawn_can_be_used_again(tiny, capfd):
    ask = ["generate", "hello", "--model", tiny, "--max-tokens", "12", "--ignore-eos", "--json"]
    assert run(ask) == 0
    first = capfd.readouterr()
    seed = next(line.split()[-1] for line in first.err.splitlines() if line.startswith("birkhoff: seed "))
    assert run([*ask, "--seed", seed]) == 0
    again, answer = capfd.readouterr(), json.loads(first.out)
    assert json.loads(again.out)["token_ids"] == answer["token_ids"] and len(answer["token_ids"]) == 12


def test_several_answers_are_several_objects(tiny, capfd):
    assert run(["generate", "hello", "--model", tiny, *SAME, "--n", "3", "--json"]) == 0
    answers = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(answers) == 3 and len({tuple(answer["token_ids"]) for answer in answers}) == 3


def test_chat_answers_in_the_chat_format(tiny, capfd):
    ask = [
        "generate",
        "hello",
        "--chat",
        "--system",
        "be kind",
        "--thinking",
        "--model",
        tiny,
        *SAME,
        "--json",
    ]
    assert run(ask) == 0
    answer = json.loads(capfd.readouterr().out)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    with package.load(tiny, max_requests=1) as engine:
        output = engine.chat(messages, thinking=True, max_tokens=12, seed=3, ignore_eos=True)
    assert answer["prompt_token_ids"] == output.prompt_token_ids and answer["token_ids"] == output.token_ids
    assert (answer["text"], answer["reasoning"]) == (output.text, output.message.reasoning)


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(tiny, capfd, expected):
    stop = expected.text[2:4]
    assert run(["generate", "hello", "--model", tiny, *SAME, "--stop", stop, "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["finish_reason"] == "stop" and answer["text"] == expected.text[: expected.text.index(stop)]


@pytest.mark.parametrize(
    ("prompt", "stdin", "words"),
    [
        ("-", b"caf\xe9 au lait", "standard input is not UTF-8: byte 0xe9 at offset 3"),
        (b"caf\xe9", b"", "surrogate"),
    ],
)
def test_invalid_utf8_is_one_error_line(tiny, prompt, stdin, words):
    done = subprocess.run(
        [*COMMAND, "generate", prompt, "--model", tiny],
        input=stdin,
        capture_output=True,
        env=clean_environment(),
    )
    line = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 1 and done.stdout == b"" and no_trace_of_python(done.stderr)
    assert line.startswith("prompt-invalid  ") and words in line


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [("", "prompt-invalid", "the prompt is empty"), ("x" * 5000, "context-length", "the context holds")],
    ids=["empty", "long"],
)
def test_an_empty_or_too_long_prompt_is_one_error_line(tiny, capfd, prompt, code, words):
    assert run(["generate", prompt, "--model", tiny]) == 1
    captured = capfd.readouterr()
    line = captured.err.splitlines()[-1]
    assert line.startswith(f"{code}  ") and words in line and captured.out == ""


@pytest.fixture
def interruptible():
    """Restore the default SIGINT handler: background jobs ignore SIGINT, and a child would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    )


def test_ctrl_c_keeps_the_printed_text(tiny, interruptible):
    process = start("generate", "hello", "--model", tiny, *LONG)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, stderr = process.communicate(timeout=300)
    assert process.returncode == 130 and no_trace_of_python(stderr)
    assert len(first + rest) > 1 and rest.endswith(b"\n") and b"ended by cancelled" in stderr


def test_ctrl_c_with_json_prints_a_cancelled_answer(tiny):
    with Terminal("generate", "hello", "--model", tiny, *LONG, "--json", stdout=subprocess.PIPE) as terminal:
        terminal.wait_for("/3000")  # the progress bar counts tokens
        terminal.type("\x03")
        assert terminal.ends_with(130)
        answer = json.loads(terminal.stdout)
    assert answer["finish_reason"] == "cancelled" and 0 < len(answer["token_ids"]) < 3000


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="looks at /proc to see how far the process has come"
)
@pytest.mark.parametrize("library", ["pydantic_core", "libtorch_cpu", "numpy"])
def test_ctrl_c_in_the_middle_of_the_imports(tiny, interruptible, library):
    process = start("generate", "hello", "--model", tiny)
    maps = Path(f"/proc/{process.pid}/maps")
    while library not in maps.read_text():
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130 and no_trace_of_python(stderr) and stdout == b""


def test_a_terminal_gets_a_progress_bar_and_escaped_control_characters(tiny):
    with Terminal("generate", "hello", "--model", tiny, *SAME, "--json", stdout=subprocess.PIPE) as terminal:
        terminal.wait_for("answering")
        assert terminal.ends_with(0)
        assert json.loads(terminal.stdout)["finish_reason"] == "length"
        assert "\x1b" in terminal.screen  # the progress bar moves the cursor; on a pipe it is not drawn
    bias = (
        "--logit-bias",
        "30=100",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
    )  # byte 0x1b, the escape character
    with Terminal("generate", "hello", "--model", tiny, *bias) as terminal:
        terminal.wait_for("\\x1b\\x1b\\x1b\\x1b")
        assert terminal.ends_with(0)


def test_a_raw_completion_prints_no_chat_markers(capfd):
    """nano's <｜User｜> is token 4055; --json keeps the exact text."""
    ask = ["generate", "Hello", "--max-tokens", "6", "--seed", "1", "--logit-bias", "4055=100"]
    for more in ([], ["--n", "2"]):
        assert run([*ask, *more]) == 0
        assert "User" not in capfd.readouterr().out
    assert run([*ask, "--json"]) == 0
    assert "<｜User｜>" in capfd.readouterr().out


def test_a_machine_without_a_compiler_says_what_is_slower(tiny, tmp_path):
    here = birkhoff(
        "generate", "Hello", "--model", tiny, "--max-tokens", "2", "--seed", "1", "--temperature", "0"
    )
    bare = birkhoff(
        *("generate", "Hello", "--model", tiny, "--max-tokens", "2", "--seed", "1", "--temperature", "0"),
        PATH=str(tmp_path),
        CXX="",
    )
    assert bare.returncode == 0 and bare.stdout == here.stdout
    assert b"no C++ compiler" in bare.stderr and b"Install g++ or clang++" in bare.stderr
    assert b"no C++ compiler" not in here.stderr
