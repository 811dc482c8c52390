"""What is said to a person: stderr, one line at a time, and text that a terminal can bear.

Nothing here writes data. Colour and bars are for terminals only; on a pipe the same words come plain or not at all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]  # (done, total)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def say(text: str) -> None:
    print(f"birkhoff: {text}", file=sys.stderr, flush=True)


def complain(code: str, message: str) -> None:
    """`code  message`; further lines of a long message stand under its first."""
    indented = message.replace("\n", "\n" + " " * (len(code) + 2))
    print(f"{code}  {indented}", file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Text for a terminal: a model may say any byte, but it may not move the cursor or retitle the window."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


@contextmanager
def bar(what: str, unit: str = "bytes", wanted: bool = True) -> Iterator[Advance]:
    """A progress bar on stderr when that is a terminal, else nothing; call what it gives with (done, total)."""
    if not wanted or not sys.stderr.isatty():
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
    columns = (TextColumn(what), BarColumn(), *counts, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
