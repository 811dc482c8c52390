"""`birkhoff serve`: the HTTP server. One URL goes to stdout once calls are answered; everything else is talk."""

from __future__ import annotations

import json as json_module
from typing import Annotated, Any

import typer

from birkhoff.cli.options import server_settings, takes
from birkhoff.cli.talk import say
from birkhoff.errors import OptionError


@takes("Model", "Server")
def serve(
    max_requests: Annotated[
        int, typer.Option(help="Answers that run at once.", envvar="BIRKHOFF_MAX_REQUESTS", show_envvar=False)
    ] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print the address as a JSON object.")] = False,
    **options: Any,
) -> None:
    """Serve a model over HTTP, to OpenAI's and Anthropic's clients and to curl."""
    settings, loading = server_settings(options)
    loading = {"model": "nano", "max_requests": max_requests, **loading}
    if settings.capture_root:
        loading["capture_root"] = settings.capture_root
    try:
        import fastapi  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"serving needs packages that are not here ({error.name}): install birkhoff[server]."
        ) from None
    from birkhoff.server.process import serve as run

    def load() -> Any:
        import birkhoff

        return birkhoff.load(**loading)

    def announce(url: str) -> None:
        typer.echo(json_module.dumps({"url": url}) if json else url)
        say(f"serving {loading['model']}; Ctrl-C stops")

    status = run(settings, load, announce, loading)
    if status:
        raise typer.Exit(status)
