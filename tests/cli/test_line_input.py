"""Ctrl-C and Ctrl-D at the prompt take effect at once, whenever they are pressed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from birkhoff.cli.line_input import prompt_interrupts, stop_on_interrupt
from tests.cli.conftest import clean_environment
from tests.cli.terminal import Terminal
from tests.sizes import scaled

PROMPT = """
import signal, sys
from birkhoff.cli.main import _handle_interrupt
from birkhoff.cli.line_input import read_lines
signal.signal(signal.SIGINT, _handle_interrupt)
try:
    for line in read_lines(">>> "):
        print("read", line.upper(), flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
# Raises SIGINT after the prompt is printed and before the wait starts, from C code without a following Python bytecode.
BETWEEN = """
import ctypes, functools, readline
readline.set_pre_input_hook(functools.partial(getattr(ctypes.CDLL(None), "raise"), 2))
"""


@pytest.fixture
def busy():
    """Two processes that keep the cores busy."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in spinning:
        process.kill()
        process.wait()


def test_ctrl_c_between_prompt_and_wait_is_handled():
    with Terminal(command=[sys.executable, "-c", BETWEEN + PROMPT]) as terminal:
        terminal.wait_for(">>> ")
        assert terminal.ends_with(130, seconds=30)


@pytest.mark.parametrize(("key", "status"), [("\x03", 130), ("\x04", 0)], ids=["ctrl-c", "ctrl-d"])
def test_ctrl_c_and_ctrl_d_as_soon_as_the_prompt_shows(busy, key, status):
    for _ in range(scaled(40, 4)):
        with Terminal(command=[sys.executable, "-c", PROMPT]) as terminal:
            terminal.wait_for(">>> ")
            terminal.type(key)
            assert terminal.ends_with(status, seconds=30)


def test_lines_are_read_as_typed():
    with Terminal(command=[sys.executable, "-c", PROMPT]) as terminal:
        at = terminal.wait_for(">>> ")
        for word in ("first", "zweitens"):
            terminal.type(f"{word}\n")
            at = terminal.wait_for(f"read {word.upper()}", after=at)
            at = terminal.wait_for(">>> ", after=at)
        terminal.type("thrown away\x03")
        assert terminal.ends_with(130)


def test_threads_descriptors_and_handlers_are_restored():
    script = """
    import os, signal, threading
    from birkhoff.cli.line_input import prompt_interrupts
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with prompt_interrupts():
            assert threading.active_count() == 2
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/fd")) == before
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=clean_environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_the_handler_runs_during_a_wait_in_c():
    """Waiting for a lock that is never released happens in C; the wake-up signal interrupts it too."""
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(time.monotonic()))
    try:
        with prompt_interrupts():
            signal.raise_signal(signal.SIGINT)
            threading.Event().wait(0.3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(calls) == 1  # wake-up signals do not repeat SIGINT


def test_the_first_ctrl_c_requests_a_stop_and_the_second_raises():
    handler = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler
