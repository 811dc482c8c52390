"""`serve`: bind the port, load the model, serve, drain, close.

The port is bound first, so that a port in use is reported at once. The model is loaded in a worker thread; `/health`
returns 503 until it is ready. If loading fails, the server stops and raises that error.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from birkhoff.api.engine import Engine
from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.consumer_registry import build_consumer
from birkhoff.errors import OptionError, quoted
from birkhoff.sae.files import check_named
from birkhoff.sae.sae_manifest import module_kind
from birkhoff.server.access_log import AccessLog
from birkhoff.server.app import build_app
from birkhoff.server.async_engine import AsyncEngine
from birkhoff.server.connection import Server, connection_class
from birkhoff.server.metrics import Metrics
from birkhoff.server.sae_routes import attach_saes, check_saes
from birkhoff.server.server_settings import ServerSettings
from birkhoff.steering.modules import load_module

SEND_BUFFER = 128 * 1024
CLOSE_SECONDS = 2  # after the drain: for the last bytes of requests that were ended
# The engine thread and the event loop share the GIL. At Python's default of 5 ms the event loop would wait that long
# after every packet.
SWITCH_INTERVAL_SECONDS = 0.0005


def serve(
    settings: ServerSettings,
    load: Callable[[], Engine],
    announce: Callable[[str], None],
    load_options: Mapping[str, Any],
) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status.

    `load` loads the engine. `announce` is called with the URL once the server is ready. `load_options` are the
    options `load` uses; only the model's name is read from them."""
    _check_certificate(settings)
    listener = _bind(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    access_log, metrics = AccessLog(settings.log), Metrics()
    async_engine = AsyncEngine(settings, metrics)
    app = build_app(settings, async_engine, metrics, access_log, load_options)
    config = uvicorn.Config(
        app,
        http=connection_class(settings),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ssl_certfile=settings.ssl_certfile or None,
        ssl_keyfile=settings.ssl_keyfile or None,
        timeout_keep_alive=round(settings.keep_alive_seconds),
        timeout_graceful_shutdown=math.ceil(settings.drain_seconds) + CLOSE_SECONDS,
        backlog=256,
    )
    server = Server(config)
    host, port = listener.getsockname()[:2]

    async def run() -> None:
        async def load_and_start() -> None:
            engine = await asyncio.to_thread(_load_engine, load, settings)
            async_engine.start(engine)
            announce(settings.url(host, port))

        async def watch_for_exit() -> None:
            while not server.should_exit:
                await asyncio.sleep(0.05)
            async_engine.draining = True
            if not loading.done():
                os._exit(0)  # the loading thread cannot be stopped in any other way
            await asyncio.sleep(settings.drain_seconds)
            async_engine.end_calls()

        loading = asyncio.create_task(load_and_start())
        watching = asyncio.create_task(watch_for_exit())

        def stop_on_failure(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                server.should_exit = server.force_exit = True

        loading.add_done_callback(stop_on_failure)
        try:
            await server.serve([listener])
        finally:
            watching.cancel()
            await asyncio.to_thread(async_engine.stop)
        await loading  # raises the error if loading failed

    asyncio.run(run())
    return 0


def _load_engine(load: Callable[[], Engine], settings: ServerSettings) -> Engine:
    """Load the engine and apply this server's capture limits and consumers, steering modules and SAEs."""
    check_saes(settings)  # a wrong option is refused before the model is read
    modules: dict[str, Any] = {}
    for text in settings.steering_modules:
        name, module = _read_module(text)
        if name in modules:
            raise OptionError(
                f"steering_modules has {quoted(text)}, but another one is called {quoted(name)} already. Give every "
                "module a name of its own: NAME=PATH."
            )
        modules[name] = module
    consumers: list[tuple[str, Consumer]] = []
    try:
        for text in settings.capture_consumers:
            consumers.append(build_consumer(text))
        engine = load()
        while consumers:
            engine.add_consumer(*consumers[0])
            del consumers[0]
    except BaseException:
        for _, consumer in consumers:
            consumer.shutdown()
        raise
    engine.capture_max_request_bytes = settings.capture_max_request_bytes
    engine.capture_inline_max_bytes = settings.capture_inline_max_bytes
    for name, module in modules.items():
        if isinstance(module, Path):
            engine.attach(name, module, module_kind(module) or "delta")
        else:
            engine.modules[name] = module
    attach_saes(settings, engine)
    return engine


def _read_module(text: str) -> tuple[str, Any]:
    """Name and content of `[NAME=]PATH`; without a name it is the file's. The directory of an SAE stays a path."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        name, path = Path(text).stem, text
    if not Path(path).is_dir():
        return name, load_module(path)
    check_named(path)
    return name, Path(path)


def _check_certificate(settings: ServerSettings) -> None:
    """Refuse files that cannot be used for HTTPS before the model is read."""
    if not settings.ssl_certfile:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise OptionError(
            f"{settings.ssl_certfile} and {settings.ssl_keyfile} are no certificate and key ({error})."
        ) from None


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named, asyncio disables Nagle on accepted connections; else every answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # With the default buffer of megabytes it would take long to notice a client that does not read.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OptionError(
            f"{settings.host}:{settings.port} cannot be listened on: {reason.lower()}. Choose another --port or --host."
        ) from None
    listener.set_inheritable(False)
    return listener
