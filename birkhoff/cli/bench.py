"""`birkhoff bench`: measurements as JSON lines."""

import typer

app = typer.Typer(no_args_is_help=True)


@app.command()
def model() -> None:
    pass


@app.callback()
def bench() -> None:
    """Measure; JSON lines, or a table on a terminal."""
