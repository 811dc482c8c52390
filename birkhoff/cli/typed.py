"""What a person types: lines at a prompt with editing and history, and Ctrl-C, which one press must always do.

At the prompt Ctrl-C is a `KeyboardInterrupt`; during an answer it only asks, so that no step is torn apart. readline
looks for signals only when one cuts its waiting short, so a press that falls between the prompt and the waiting would
be heard with the next key; `heard_at_once` sees to it that it is heard by itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from birkhoff.cli.talk import complain
from birkhoff.errors import PromptError

SECONDS_BETWEEN_NUDGES = 0.05


def typed(prompt: str) -> Iterator[str]:
    """Lines until the end of input."""
    import readline  # noqa: F401  line editing and history for input()

    while True:
        try:
            with heard_at_once():
                line = input(prompt)
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            complain(
                PromptError.code, "that line is not UTF-8. Set the terminal to UTF-8, or type it differently."
            )
            continue
        except KeyboardInterrupt:
            print()
            raise
        yield line


@contextmanager
def heard_at_once() -> Iterator[None]:
    """While open, a Ctrl-C reaches its handler soon after it came, also when a call in C has not begun to wait yet.

    Python tells a pipe of every signal at once. A thread that reads there nudges the main thread, with a signal that
    means nothing, for as long as this is open: the first nudge that meets the waiting ends it, and handlers run."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    main = threading.main_thread().ident
    over = threading.Event()
    assert main is not None

    def nudge() -> None:
        while told := os.read(reading, 256):
            while signal.SIGINT in told and not over.wait(SECONDS_BETWEEN_NUDGES):
                signal.pthread_kill(main, signal.SIGURG)
        os.close(reading)

    watcher = threading.Thread(target=nudge, name="ctrl-c", daemon=True)
    watcher.start()
    meaning = signal.signal(
        signal.SIGURG, lambda *_: None
    )  # by default ignored, and then it would end no waiting
    told_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(told_before)
        signal.signal(signal.SIGURG, meaning)
        os.close(writing)
        watcher.join()


@contextmanager
def asked_to_stop() -> Iterator[threading.Event]:
    """While open, the first Ctrl-C only asks, so that no step is torn apart; a second one insists."""
    asked = threading.Event()

    def ask(*_: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
