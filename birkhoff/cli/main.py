"""The command `birkhoff`: how a run begins and how it ends. The verbs are in `verbs.py`.

Data goes to stdout and talk to stderr. The exit status is 0 when the work is done, 1 when it failed, 2 when the command
was misused and 130 after Ctrl-C; a failure is one typed line, `code  message`, and a traceback is only ever shown for a
defect of ours. Only the standard library is imported here, so that Ctrl-C is answered from the first moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from birkhoff.cli.talk import complain
from birkhoff.errors import BirkhoffError, OptionError


def main() -> None:
    """Entry point."""
    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # a background job has it ignored, and keeps it so
        signal.signal(signal.SIGINT, _interrupt)
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every way to end is here."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a narrow locale must not end an answer
    status: object
    try:
        from birkhoff.cli.verbs import app

        status = app(arguments, prog_name="birkhoff", standalone_mode=True)
    except SystemExit as end:
        status = end.code
    except BirkhoffError as error:
        complain(error.code, str(error))
        status = 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        status = 130
    except OSError as error:
        status = _system_said_no(error)
    except MemoryError:
        complain(
            "memory", "this machine has too little free memory for it. What fits: birkhoff inspect CHECKPOINT"
        )
        status = 1
    try:
        sys.stdout.flush()
    except OSError as error:
        status = status or _system_said_no(error)
        # What could not be written never can be; Python must not try again on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status if isinstance(status, int) else int(status is not None)


def _system_said_no(error: OSError) -> int:
    if not isinstance(error, BrokenPipeError):  # whoever read us has seen enough: nothing to say about that
        where = f"{error.filename}: " if error.filename else ""
        complain("system", f"{where}{error.strerror or error}")
    return 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ctrl-C, except inside an import: there the exception may be swallowed, or dressed up as a failed import."""
    outer = frame
    while outer is not None:
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        outer = outer.f_back
    raise KeyboardInterrupt
