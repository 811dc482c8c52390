"""Registers the commands (verbs) of `birkhoff` and its global options.

Each command lives in its own file and wraps one Python function; adding one takes one line here. Commands import
their dependencies when called, so that `--help` is fast. Values come from flags, then `BIRKHOFF_*` environment
variables, then the TOML file given with `--config`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from birkhoff import __version__
from birkhoff.cli.attribute import attribute, circuit
from birkhoff.cli.bench import app as bench
from birkhoff.cli.capture import capture
from birkhoff.cli.chat import chat
from birkhoff.cli.command_group import CommandGroup
from birkhoff.cli.config_file import read_defaults
from birkhoff.cli.convert import convert
from birkhoff.cli.export import export
from birkhoff.cli.generate import generate
from birkhoff.cli.inspect import inspect
from birkhoff.cli.patch_sweep import patch_sweep
from birkhoff.cli.pull import pull
from birkhoff.cli.report import report
from birkhoff.cli.sae import app as sae
from birkhoff.cli.serve import serve
from birkhoff.cli.synth import synth
from birkhoff.cli.validate import validate
from birkhoff.cli.vectors import app as vectors


class AllCommands(CommandGroup):
    """The command `birkhoff`, which takes `--config` anywhere in the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        for index, text in enumerate(options):
            if text == "--config" and index + 1 < len(options):
                args = [*args[index : index + 2], *args[:index], *args[index + 2 :]]
            elif text.startswith("--config="):
                args = [text, *args[:index], *args[index + 1 :]]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    name="birkhoff",
    cls=AllCommands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(serve)
app.command()(capture)
app.command()(export)
app.command()(report)
app.command()(attribute)
app.command()(circuit)
app.command("patch-sweep")(patch_sweep)
app.command()(convert)
app.command()(validate)
app.command()(inspect)
app.command()(pull)
app.command()(synth)
app.add_typer(bench, name="bench")
app.add_typer(vectors, name="vectors")
app.add_typer(sae, name="sae")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"birkhoff {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            envvar="BIRKHOFF_CONFIG",
            help="TOML file with defaults for options; may also stand behind the verb.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Run, read and steer DeepSeek-V4."""
    if config is not None:
        context.default_map = read_defaults(config, context.command)
