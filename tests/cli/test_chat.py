"""The verb `chat`: line by line through a pipe, and in a terminal with Ctrl-C and charts."""

import json

import pytest

import birkhoff as package
from tests.cli.conftest import birkhoff, no_trace_of_python
from tests.cli.terminal import Terminal

SAMPLING = {"max_tokens": 10, "seed": 5}
FLAGS = ("--max-tokens", "10", "--seed", "5")


@pytest.fixture(scope="module")
def engine(tiny):
    with package.load(tiny, max_requests=1) as engine:
        yield engine


def test_a_pipe_holds_a_whole_conversation(tiny, engine):
    done = birkhoff("chat", "--model", tiny, *FLAGS, "--json", stdin=b"hello\n\nand you?\n/reset\nhello\n")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and len(answers) == 3 and no_trace_of_python(done.stderr)
    messages = [{"role": "user", "content": "hello"}]
    first = engine.chat(messages, **SAMPLING)
    assert answers[0]["token_ids"] == first.token_ids == answers[2]["token_ids"]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and you?"}]
    second = engine.chat(messages, **SAMPLING)
    assert answers[1]["prompt_token_ids"] == second.prompt_token_ids
    assert answers[1]["text"] == second.text


def test_commands_through_a_pipe(tiny, engine):
    stdin = b"/mix\n/help\n//slash\n/mix 2\n/mix 99\n/mix x\n/nope\n/system be kind\n\xff\xfe\n"
    done = birkhoff("chat", "--model", tiny, *FLAGS, stdin=stdin)
    assert done.returncode == 1 and no_trace_of_python(done.stderr)
    complaints = [line for line in done.stderr.decode().splitlines() if not line.startswith("birkhoff: ")]
    expected = [
        "prompt-invalid  nothing has been said yet",
        "site-unknown  layer 99: this model has layers 0..5",
        "option-invalid  /mix was given 'x', expected the number of a layer",
        "option-invalid  '/nope' is no command here. There is /help",
        "prompt-invalid  line 9 of standard input is not UTF-8: byte 0xff",
    ]
    assert len(complaints) == len(expected)
    assert all(line.startswith(start) for line, start in zip(complaints, expected)), complaints
    out = done.stdout.decode()
    answer = engine.chat([{"role": "user", "content": "/slash"}], **SAMPLING)
    assert answer.text in out and "/system TEXT" in out
    ids = answer.prompt_token_ids + answer.token_ids
    mix = engine.trace(ids, hooks="mhc_attn_res_mix")["mhc_attn_res_mix", 2][-1]
    assert "layer 2, attention" in out and "layer 2, experts" in out
    for row in mix.tolist():
        assert "  ".join(f"{value:.2f}" for value in row) in out


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_a_command_ends_the_conversation(tiny, word):
    done = birkhoff("chat", "--model", tiny, *FLAGS, stdin=f"{word}\nHello\n".encode())
    assert done.returncode == 0 and not done.stdout.strip()


def test_the_system_message_reaches_the_prompt(tiny, engine):
    done = birkhoff(
        "chat", "--model", tiny, *FLAGS, "--system", "first", "--json", stdin=b"a\n/reset\n/system then\nb\n"
    )
    prompts = [json.loads(line)["prompt_token_ids"] for line in done.stdout.splitlines()]
    for prompt, system, user in zip(prompts, ("first", "then"), "ab", strict=True):
        assert prompt == engine.encode_chat(
            [{"role": "system", "content": system}, {"role": "user", "content": user}]
        )


def test_a_terminal_conversation(tiny):
    flags = ("--model", tiny, "--max-tokens", "3000", "--ignore-eos", "--seed", "5", "--thinking")
    with Terminal("chat", *flags) as terminal:
        at = terminal.wait_for(">>> ")
        assert "/help for commands" in terminal.screen
        terminal.type("hello\n")
        at = terminal.wait_for("\x1b[2m", after=at)  # reasoning is dim
        terminal.type("\x03")
        at = terminal.wait_for("ended by cancelled", after=at)  # Ctrl-C ends the answer, not the program
        at = terminal.wait_for(">>> ", after=at)
        terminal.type("/mix 1\n")
        at = terminal.wait_for("layer 1, attention", after=at)
        at = terminal.wait_for(">>> ", after=at)
        assert "\x1b[38;" in terminal.screen  # cells are shaded
        terminal.type("/nope\n")
        at = terminal.wait_for("is no command here", after=at)
        at = terminal.wait_for(">>> ", after=at)
        terminal.type("\x03")
        assert terminal.ends_with(130)


def test_ctrl_d_exits_in_a_terminal(tiny):
    with Terminal("chat", "--model", tiny) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.ends_with(0)
