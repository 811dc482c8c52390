"""Fixtures: `birkhoff serve` as a subprocess, shared by all tests that need no special flags."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.cli.conftest import COMMAND, clean_environment
from tests.sae.reference import random_sae


@dataclass
class Served:
    """A running server process, with helpers to call it."""

    process: subprocess.Popen[str]
    url: str
    log: Path
    root: Path

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @property
    def http(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=300)

    def post(self, path: str, body: Any = None, **headers: str) -> httpx2.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.http as client:
            return client.post(path, content=content, headers={"content-type": "application/json", **headers})

    def get(self, path: str, **headers: str) -> httpx2.Response:
        with self.http as client:
            return client.get(path, headers=headers)

    def chat(self, text: str = "Hello.", **more: Any) -> dict[str, Any]:
        answer = self.post(
            "/v1/chat/completions", {"messages": user(text), "temperature": 0, "max_tokens": 8, **more}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str, body: Any) -> list[Any]:
        """The parsed data of a streamed response, without [DONE]."""
        text = self.post(path, {**body, "stream": True}).text
        frames = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        return [json.loads(frame) for frame in frames if frame != "[DONE]"]

    def metric(self, name: str, **headers: str) -> float:
        """Value of a metric, summed over its labels."""
        lines = [line for line in self.get("/metrics", **headers).text.splitlines() if line.startswith(name)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def idle(self, seconds: float = 300) -> bool:
        """Wait up to `seconds` until no request is active; returns whether that happened."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if not self.get("/slots").json()["requests"]:
                return True
            time.sleep(0.02)
        return False


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@contextlib.contextmanager
def serving(
    folder: Path, *flags: str, model: str = "nano", command: Sequence[str] = COMMAND, **environment: str
) -> Iterator[Served]:
    folder.mkdir(parents=True, exist_ok=True)
    log, root = folder / "log", folder / "captures"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [
                *command,
                "serve",
                "--model",
                model,
                "--port",
                "0",
                "--capture-root",
                str(root),
                "--log",
                "json",
                *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=clean_environment(**environment),
            cwd=folder,
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), log.read_text()
        yield Served(process, url, log, root)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(300)
        process.stdout.close()


@pytest.fixture(scope="session")
def dictionary(tmp_path_factory) -> Path:
    """Files of a random SAE for nano, attached to the server as `delta` and as `full`."""
    sae = random_sae("jumprelu", 48, 384, seed=4, hook="mlp_out", layer=2, view="single")
    return sae.save(tmp_path_factory.mktemp("dictionary") / "random")


@pytest.fixture(scope="session")
def served(tmp_path_factory, dictionary) -> Iterator[Served]:
    flags = ("--sae", f"delta={dictionary}", "--sae-full", f"full={dictionary}")
    with serving(tmp_path_factory.mktemp("served"), *flags) as running:
        yield running
