"""Interactive line input with editing and history, and reliable Ctrl-C handling.

At the prompt Ctrl-C raises `KeyboardInterrupt`; during generation the first Ctrl-C only requests a stop, so that the
current step completes. readline checks for signals only when one interrupts its wait, so a Ctrl-C that arrives after
the prompt is printed and before the wait starts would be handled only after the next key press. `prompt_interrupts`
closes that gap.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from birkhoff.cli.terminal import print_error
from birkhoff.errors import PromptError

WAKE_INTERVAL_S = 0.05


def read_lines(prompt: str) -> Iterator[str]:
    """Yield lines from the terminal until end of input."""
    import readline  # noqa: F401  line editing and history for input()

    while True:
        try:
            with prompt_interrupts():
                line = input(prompt)
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            print_error(
                PromptError.code, "that line is not UTF-8. Set the terminal to UTF-8, or type it differently."
            )
            continue
        except KeyboardInterrupt:
            print()
            raise
        yield line


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Run the SIGINT handler promptly even if a C call has not started to wait when the signal arrives.

    Python writes each signal to a wakeup pipe immediately. A thread reads that pipe and sends SIGURG to the main thread
    every `WAKE_INTERVAL_S` until the context exits: the first one that arrives during the wait interrupts it, and the
    pending SIGINT handler runs.
    """
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    main_thread = threading.main_thread().ident
    done = threading.Event()
    assert main_thread is not None

    def wake_main_thread() -> None:
        while signals := os.read(read_fd, 256):
            while signal.SIGINT in signals and not done.wait(WAKE_INTERVAL_S):
                signal.pthread_kill(main_thread, signal.SIGURG)
        os.close(read_fd)

    watcher = threading.Thread(target=wake_main_thread, name="ctrl-c", daemon=True)
    watcher.start()
    # SIGURG is ignored by default, and an ignored signal interrupts no wait.
    previous_handler = signal.signal(signal.SIGURG, lambda *_: None)
    previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGURG, previous_handler)
        os.close(write_fd)
        watcher.join()


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C sets; a second Ctrl-C raises KeyboardInterrupt."""
    stop = threading.Event()

    def handle(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous_handler = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous_handler)
