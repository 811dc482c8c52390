"""The command `birkhoff`: which verbs there are, where settings come from, and how a run ends.

Verbs are one file each and import what they need when they are called, so that help comes at once. Settings come from
flags, `BIRKHOFF_*` variables or a TOML file, in that order. Data goes to stdout and talk to stderr. The exit status is
0 when the work is done, 1 when it failed, 2 when the command was misused and 130 after Ctrl-C; a failure is one typed
line, `code  message`, and a traceback is only ever shown for a defect of ours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from birkhoff import __version__
from birkhoff.cli.bench import app as bench
from birkhoff.cli.capture import capture
from birkhoff.cli.chat import chat
from birkhoff.cli.generate import generate
from birkhoff.cli.inspect import inspect
from birkhoff.cli.settings import defaults_from
from birkhoff.cli.synth import synth
from birkhoff.cli.talk import complain
from birkhoff.errors import BirkhoffError, OptionError


class Verbs(TyperGroup):
    """Names the verbs there are when asked for one there is not."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"there is no {args[0]!r}. There is: {', '.join(sorted(self.list_commands(ctx)))}.")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="birkhoff",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(capture)
app.command()(inspect)
app.command()(synth)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"birkhoff {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(envvar="BIRKHOFF_CONFIG", help="TOML file with defaults for flags.", show_default=False),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Run, read and steer DeepSeek-V4."""
    if config is not None:
        context.default_map = defaults_from(config, context.command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; every way to end is here."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a narrow locale must not end an answer
    try:
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
        complain("memory", "this machine has too little free memory for it. What fits: birkhoff inspect CHECKPOINT")
        status = 1
    try:
        sys.stdout.flush()
    except OSError as error:
        status = _system_said_no(error)
    return status if isinstance(status, int) else int(status is not None)


def _system_said_no(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):  # whoever read us has seen enough; nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        where = f"{error.filename}: " if error.filename else ""
        complain("system", f"{where}{error.strerror or error}")
    return 1


def main() -> None:
    """Entry point."""
    sys.exit(run())
