"""Pseudo-terminal that runs the command: type text, wait for output, check the exit status."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.cli.conftest import COMMAND, clean_environment

# The first terminal a new session opens becomes its controlling terminal, so that Ctrl-C typed into it sends SIGINT. A
# shell that runs the tests in the background sets SIGINT to ignored, which a child would inherit.
_ATTACH_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.open(os.ttyname(0), os.O_RDWR)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """`with Terminal("chat", …) as terminal`: stdin and stderr are a terminal, and stdout unless `stdout` is given."""

    def __init__(self, *arguments: str, stdout: int | None = None, command: Sequence[str] = COMMAND):
        self.screen = ""
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ATTACH_TERMINAL, *command, *arguments],
            stdin=slave,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            env=clean_environment(TERM="xterm-256color", LINES="40"),
            start_new_session=True,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, words: str, seconds: float = 300, after: int = 0) -> int:
        """Read the screen until `words` appear after offset `after`; return the offset after them."""
        until = time.monotonic() + seconds
        while words not in self.screen[after:]:
            assert time.monotonic() < until, f"{words!r} did not come; the screen has {self.screen[-2000:]!r}"
            if not self._read(0.2) and self._process.poll() is not None and not self._read(0.2):
                raise AssertionError(f"it ended before {words!r}; the screen has {self.screen[-2000:]!r}")
        return self.screen.index(words, after) + len(words)

    def ends_with(self, status: int, seconds: float = 300) -> bool:
        until = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < until:
            self._read(0.1)
        while self._read(0.1):
            pass
        assert self._process.returncode == status, (self._process.returncode, self.screen[-2000:])
        assert "Traceback" not in self.screen
        return True

    @property
    def stdout(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.read()

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.screen += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._master)
