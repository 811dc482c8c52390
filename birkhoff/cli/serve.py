"""`birkhoff serve`: the HTTP server. Prints its URL to stdout once it accepts requests; all else goes to stderr."""

from __future__ import annotations

import json as json_module
from dataclasses import fields
from typing import Annotated, Any

import typer

from birkhoff.api.options import EngineOptions, help_text
from birkhoff.cli.options import server_settings, shared_options
from birkhoff.cli.terminal import print_status
from birkhoff.errors import OptionError


@shared_options("Model", "Server")
def serve(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="Model to serve, as for --model: a path, or org/name in the hub cache."
        ),
    ] = None,
    max_requests: Annotated[
        int,
        typer.Option(
            help=help_text(EngineOptions, "max_requests"), envvar="BIRKHOFF_MAX_REQUESTS", show_envvar=False
        ),
    ] = EngineOptions.max_requests,
    json: Annotated[bool, typer.Option("--json", help="Print the URL as a JSON object.")] = False,
    **options: Any,
) -> None:
    """Serve a model over HTTP with OpenAI- and Anthropic-compatible APIs."""
    settings, load_options = server_settings(options)
    if path is not None:
        if load_options.get("model", path) != path:
            raise OptionError(f"both {path} and --model {load_options['model']} are given. Name one model.")
        load_options["model"] = path
    load_options = {"model": "nano", "max_requests": max_requests, **load_options}
    for field in fields(settings):  # settings that are options of the engine
        if field.name in EngineOptions.__dataclass_fields__ and getattr(settings, field.name) != "":
            load_options[field.name] = getattr(settings, field.name)

    def announce(url: str) -> None:
        typer.echo(json_module.dumps({"url": url}) if json else url)
        print_status(f"serving {load_options['model']}; Ctrl-C stops")

    if load_options.get("backend") == "vllm":
        from birkhoff.cli.serve_vllm import serve_vllm

        status = serve_vllm(settings, load_options, announce)
        if status:
            raise typer.Exit(status)
        return
    try:
        import fastapi  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"serving needs packages that are not here ({error.name}): install birkhoff-v4[server]."
        ) from None
    from birkhoff.server.process import serve as run_server

    def load() -> Any:
        import birkhoff

        return birkhoff.load(**load_options)

    status = run_server(settings, load, announce, load_options)
    if status:
        raise typer.Exit(status)
