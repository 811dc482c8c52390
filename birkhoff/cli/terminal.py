"""Terminal output: status and error lines on stderr, escaping of control characters, progress bars.

Nothing here writes to stdout. Progress bars are drawn only when stderr is a terminal.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ProgressCallback = Callable[[int, int | None], None]  # (done, total)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def print_status(text: str) -> None:
    """Print `birkhoff: text` to stderr."""
    print(f"birkhoff: {text}", file=sys.stderr, flush=True)


def print_error(code: str, message: str) -> None:
    """Print `code  message` to stderr; continuation lines are indented to the start of the message."""
    indented = message.replace("\n", "\n" + " " * (len(code) + 2))
    print(f"{code}  {indented}", file=sys.stderr, flush=True)


def escape_control(text: str) -> str:
    """Escape control characters, so that generated text cannot move the cursor or retitle the window."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


@contextmanager
def progress_bar(label: str, unit: str = "bytes", enabled: bool = True) -> Iterator[ProgressCallback]:
    """Yield a callback `(done, total)` that draws a progress bar on stderr; a no-op unless stderr is a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = (
        (DownloadColumn(), TransferSpeedColumn())
        if unit == "bytes"
        else (MofNCompleteColumn(), TextColumn(unit))
    )
    columns = (TextColumn(label), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
