"""Exceptions inside the model fail one request with a clear error; later requests are not affected."""

from __future__ import annotations

import asyncio
import re

import httpx2
import pytest

import birkhoff
from birkhoff.convert.synth import synth
from birkhoff.server.access_log import AccessLog
from birkhoff.server.app import build_app
from birkhoff.server.async_engine import AsyncEngine
from birkhoff.server.metrics import Metrics
from birkhoff.server.server_settings import ServerSettings
from tests.sizes import scaled

ASK = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "return_token_ids": True}


class Trap:
    """Raises once inside the model, at the given call of the given layer."""

    def __init__(self, model, layer: int, call: int, error: Exception):
        self.left, self.error = call, error
        self.handle = model.layers[layer].register_forward_pre_hook(self.spring)

    def spring(self, module, arguments):
        self.left -= 1
        if self.left < 0:
            self.handle.remove()
            raise self.error


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    where = tmp_path_factory.mktemp("faults") / "tiny"
    synth(where, "tiny")
    with birkhoff.load(where, kernels="reference", max_requests=4, speculative=False) as engine:
        yield engine


def served(engine, work):
    """Run `work(client, async_engine)` against the real application and engine in this process."""

    async def run():
        settings, metrics = ServerSettings(log="off"), Metrics()
        async_engine = AsyncEngine(settings, metrics)
        app = build_app(settings, async_engine, metrics, AccessLog("off"), {"model": "tiny"})
        async_engine.start(engine)
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        try:
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://localhost", timeout=300
            ) as client:
                await work(client, async_engine)
        finally:
            async_engine.stop_driver()

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
def test_e1_out_of_memory_ends_one_request(tiny, error):
    async def work(client, async_engine):
        fine = (await client.post("/v1/completions", json=ASK)).json()["choices"][0]["token_ids"]
        places = [(layer, call) for layer in range(len(tiny.model.layers)) for call in range(3)]
        for layer, call in places[:: scaled(1, 4)]:
            trap = Trap(tiny.model, layer, call, error)
            answer = await client.post("/v1/completions", json=ASK)
            trap.handle.remove()
            assert answer.status_code == 503 and answer.json()["error"]["type"] == "overloaded_error", (
                answer.text
            )
            assert answer.headers["retry-after"]
            again = await client.post("/v1/completions", json=ASK)
            assert again.status_code == 200 and again.json()["choices"][0]["token_ids"] == fine
            assert not async_engine.active_requests and (await client.get("/health")).status_code == 200

    served(tiny, work)


def test_e6_an_error_in_the_model_leaks_no_details(tiny):
    async def work(client, async_engine):
        for stream in (False, True):
            trap = Trap(tiny.model, 2, 1, ValueError("secret at /usr/lib/secret.py 0x7f00deadbeef"))
            answer = await client.post("/v1/completions", json={**ASK, "stream": stream})
            trap.handle.remove()
            assert answer.status_code == (200 if stream else 500) and "defect" in answer.text
            assert "secret" not in answer.text and not re.search(r"0x|Traceback|/usr", answer.text)
            assert (
                await client.post("/v1/completions", json=ASK)
            ).status_code == 200 and not async_engine.active_requests

    served(tiny, work)


def test_e3_a_stopped_engine_is_reported_as_unhealthy(tiny):
    async def work(client, async_engine):
        async_engine.stop_driver()
        assert (await client.get("/health")).status_code == 503 and (
            await client.get("/ready")
        ).status_code == 503
        answer = await client.post("/v1/completions", json=ASK)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine-closed"

    served(tiny, work)


def test_a_checkpoint_without_a_tokenizer_serves_token_ids(tmp_path):
    async def work(client, async_engine):
        response = (await client.post("/v1/completions", json=ASK)).json()
        assert response["choices"][0]["text"] == "" and len(response["choices"][0]["token_ids"]) == 3
        refused = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]}
        )
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "text-unavailable"

    synth(tmp_path / "mute", "tiny")
    (tmp_path / "mute" / "tokenizer.json").unlink()
    with birkhoff.load(tmp_path / "mute", kernels="reference") as mute:
        served(mute, work)
