"""Entry point of the `birkhoff` command: argument parsing, error reporting and exit statuses.

Data goes to stdout, status messages and errors to stderr. Exit statuses: 0 success, 1 failure, 2 wrong usage, 130 after
Ctrl-C. A failure prints one line, `code  message`; a traceback means a bug in Birkhoff. Only the standard library is
imported at module level, so that Ctrl-C works from the start. The commands are registered in `verbs.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import birkhoff
from birkhoff.cli.terminal import print_error, print_status
from birkhoff.cli.vllm_flags import adopt_environment, translate
from birkhoff.errors import BirkhoffError, OptionError
from birkhoff.free_memory import is_out_of_memory


def main() -> None:
    """Console script: install the Ctrl-C handler, run the command and exit."""
    if not hasattr(birkhoff, "_HOMES"):
        print_error(
            "installation",
            f"{birkhoff.__file__} belongs to another project's package birkhoff. Remove it and repair this one: "
            "pip uninstall birkhoff && pip install --force-reinstall --no-deps birkhoff-v4",
        )
        sys.exit(1)
    # OpenMP threads that wait by spinning take the core from the thread they wait for when the machine is busy: nano
    # then decodes several times slower. Read by libgomp when PyTorch is imported.
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # SIGINT is ignored in background jobs; leave it ignored there.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _handle_interrupt)
    sys.exit(run())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Every exception is converted to a status here."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Never fail on a locale that cannot encode the text.
            stream.reconfigure(errors="backslashreplace")
    status: object
    try:
        words = translate(sys.argv[1:] if arguments is None else arguments, print_status)
        adopt_environment()
        from birkhoff.cli.verbs import app

        status = app(words, prog_name="birkhoff", standalone_mode=True)
    except SystemExit as end:
        status = end.code
    except BirkhoffError as error:
        print_error(error.code, str(error))
        status = 2 if isinstance(error, OptionError) else 1
    except KeyboardInterrupt:
        status = 130
    except (OSError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            hint = "What fits: birkhoff inspect CHECKPOINT --ram 8GiB"
            print_error("memory", f"there is too little free memory for it. {hint}")
            status = 1
        elif isinstance(error, OSError):
            status = _report_os_error(error)
        else:
            raise
    try:
        sys.stdout.flush()
    except OSError as error:
        status = status or _report_os_error(error)
        # Redirect stdout to /dev/null: the interpreter flushes again at exit and would fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status if isinstance(status, int) else int(status is not None)


def _report_os_error(error: OSError) -> int:
    # A reader that closed the pipe early is not an error to report.
    if not isinstance(error, BrokenPipeError):
        prefix = f"{error.filename}: " if error.filename else ""
        print_error("system", f"{prefix}{error.strerror or error}")
    return 1


def _handle_interrupt(signum: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, or exit at once during an import, where the exception could be swallowed or wrapped."""
    outer = frame
    while outer is not None:
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        outer = outer.f_back
    raise KeyboardInterrupt
