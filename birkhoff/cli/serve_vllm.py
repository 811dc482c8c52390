"""`birkhoff serve --backend vllm`: composes and runs `vllm serve` with our worker, scheduler, middleware and routes."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from birkhoff.api.options import NOT_VLLM, EngineOptions
from birkhoff.errors import OptionError, quoted
from birkhoff.server.server_settings import ServerSettings
from birkhoff.vllm.open_engine import VllmSettings, installed_version
from birkhoff.vllm.serve_command import STEERING_KEY, serve_command, serve_environment
from birkhoff.weights.locate import locate

# Settings of our own server that `vllm serve` has too; the others must have their defaults.
SHARED = (
    "host",
    "port",
    "api_key",
    "steering_api_key",
    "served_name",
    "i_know_this_is_open",
    "ssl_certfile",
    "ssl_keyfile",
    "capture_root",
    "capture_overload_policy",
    "capture_dispatch_queue_size",
    "capture_spill_dir",
    "capture_spill_max_bytes",
    "log",
)


def serve_vllm(
    settings: ServerSettings, load_options: Mapping[str, Any], announce: Callable[[str], None]
) -> int:
    """Run `vllm serve` until it ends; returns its exit status. Signals are passed on."""
    for field in fields(settings):
        if field.name not in SHARED and getattr(settings, field.name) != field.default:
            raise OptionError(
                f"{field.name} is {quoted(getattr(settings, field.name))}, a setting of our own server that vllm serve "
                "does not have. Leave it out."
            )
    installed_version()
    model = load_options["model"]
    chosen = EngineOptions.from_kwargs(
        None, **{name: value for name, value in load_options.items() if name != "model"}
    )
    for each in fields(EngineOptions):
        if each.name in NOT_VLLM and getattr(chosen, each.name) not in (each.default, False):
            raise OptionError(
                f"{each.name} is {quoted(getattr(chosen, each.name))}, no option of the backend vllm."
            )
    engine = VllmSettings.of(
        locate(model, chosen.revision, chosen.download, lambda done, total: None), model, chosen
    )
    on_cpu = not _has_cuda()
    port = settings.port or _free_port(settings.host)
    more = {"ssl-certfile": settings.ssl_certfile, "ssl-keyfile": settings.ssl_keyfile}
    command = serve_command(
        engine,
        on_cpu,
        settings.host,
        port,
        settings.served_name,
        settings.api_key,
        {name: value for name, value in more.items() if value},
    )
    environment = serve_environment(engine, on_cpu, os.environ)
    if settings.steering_api_key:
        environment[STEERING_KEY] = " ".join(settings.steering_api_key)
    process = subprocess.Popen(command, env=environment, stdout=2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: process.send_signal(received))
    url = settings.url(settings.host, port)
    threading.Thread(target=_announce_when_ready, args=(process, url, announce), daemon=True).start()
    return process.wait()


def _announce_when_ready(process: subprocess.Popen[bytes], url: str, announce: Callable[[str], None]) -> None:
    context = ssl.create_default_context()  # the certificate may be for another name than this address
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5, context=context):
                announce(url)
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
