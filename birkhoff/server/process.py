"""`serve`: bind, load, answer, drain, close.

The port is bound before anything slow happens, so a taken one is refused at once. The model is loaded beside the event
loop: `/health` answers 503 until it is there. A model that cannot be loaded ends the server with its own error.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from birkhoff.api.engine import Engine
from birkhoff.errors import OptionError
from birkhoff.server.access_log import AccessLog
from birkhoff.server.app import build_app
from birkhoff.server.async_engine import AsyncEngine
from birkhoff.server.connection import Server, connection_class
from birkhoff.server.metrics import Metrics
from birkhoff.server.sae_routes import attach
from birkhoff.server.server_settings import ServerSettings
from birkhoff.steering.vector_file import SteeringVector

SEND_BUFFER = 128 * 1024
# Two threads share the interpreter: the engine's, which computes, and the loop's, which writes a little and waits. At
# the default of 5 ms the loop would wait that long for its turn after every packet.
SWITCH_SECONDS = 0.0005


def serve(
    settings: ServerSettings,
    load: Callable[[], Engine],
    announce: Callable[[str], None],
    loading: Mapping[str, Any],
) -> int:
    """Serve until told to stop; the exit status. `announce` is given the one URL once calls are answered."""
    listener = _bind(settings)
    sys.setswitchinterval(SWITCH_SECONDS)
    journal, metrics = AccessLog(settings.log), Metrics()
    hub = AsyncEngine(settings, metrics)
    app = build_app(settings, hub, metrics, journal, loading)
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
        timeout_keep_alive=round(settings.keep_alive_seconds),
        timeout_graceful_shutdown=round(settings.drain_seconds),
        backlog=256,
    )
    server = Server(config)
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host

    async def run() -> None:
        async def open_up() -> None:
            engine = await asyncio.to_thread(_loaded, load, settings)
            hub.start(engine)
            announce(f"http://{name}:{port}")

        async def stop_when_asked() -> None:
            while not server.should_exit:
                await asyncio.sleep(0.05)
            hub.draining = True
            if not opening.done():
                os._exit(0)  # a thread that loads cannot be ended in any other way

        opening = asyncio.create_task(open_up())
        watching = asyncio.create_task(stop_when_asked())

        def failed(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                server.should_exit = server.force_exit = True

        opening.add_done_callback(failed)
        try:
            await server.serve([listener])
        finally:
            watching.cancel()
            await asyncio.to_thread(hub.stop)
        await opening  # raises what kept the model from being loaded

    asyncio.run(run())
    return 0


def _loaded(load: Callable[[], Engine], settings: ServerSettings) -> Engine:
    """The engine with this server's limits, vectors and dictionaries."""
    vectors = {Path(path).stem: SteeringVector.load(path) for path in settings.steering_modules}
    engine = load()
    engine.capture_max_request_bytes = settings.capture_max_request_bytes
    engine.capture_inline_max_bytes = settings.capture_inline_max_bytes
    engine.modules.update(vectors)
    attach(settings, engine)
    return engine


def _bind(settings: ServerSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The system would hold megabytes for a reader that takes nothing, and it would take that long to notice.
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
