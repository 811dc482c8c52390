"""Which verbs there are, and the flags that stand before a verb.

One file per verb, each a thin shell over one Python function; a new verb is one line here. Verbs import what they need
when they are called, so that help comes at once. Settings come from flags, `BIRKHOFF_*` variables or a TOML file, in
that order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from birkhoff import __version__
from birkhoff.cli.bench import app as bench
from birkhoff.cli.capture import capture
from birkhoff.cli.chat import chat
from birkhoff.cli.convert import convert
from birkhoff.cli.generate import generate
from birkhoff.cli.inspect import inspect
from birkhoff.cli.sae import app as sae
from birkhoff.cli.serve import serve
from birkhoff.cli.settings import defaults_from
from birkhoff.cli.synth import synth
from birkhoff.cli.validate import validate
from birkhoff.cli.vectors import app as vectors


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
app.command()(serve)
app.command()(capture)
app.command()(convert)
app.command()(validate)
app.command()(inspect)
app.command()(synth)
app.add_typer(bench, name="bench")
app.add_typer(vectors, name="vectors")
app.add_typer(sae, name="sae")


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
