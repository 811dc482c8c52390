"""One random checkpoint with a byte tokenizer, loaded once, and a logit bias that restricts it to letters."""

from __future__ import annotations

from pathlib import Path

import pytest

import birkhoff
from birkhoff.convert.synth import synth

CONTEXT = 600
REQUESTS = 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("api") / "tiny"
    synth(path, "tiny", seed=3)
    return path


@pytest.fixture(scope="session")
def wordless(tmp_path_factory) -> Path:
    """The same weights without tokenizer files."""
    path = tmp_path_factory.mktemp("api") / "wordless"
    synth(path, "tiny", seed=3, tokenizer=False)
    return path


def open_engine(path: Path, **options) -> birkhoff.Engine:
    return birkhoff.load(
        path, **{"max_requests": REQUESTS, "max_context": CONTEXT, "cache_bytes": 2**24, **options}
    )


@pytest.fixture(scope="package")
def engine(checkpoint):
    with open_engine(checkpoint) as opened:
        yield opened


@pytest.fixture
def idle(engine):
    """After every test the shared engine has no requests and all its memory is free."""
    yield engine
    assert engine.generate("still there?", max_tokens=2, temperature=0).finish_reason in ("length", "stop")
    scheduler = engine._core.scheduler
    assert (
        scheduler.idle
        and scheduler.slots.num_free == REQUESTS
        and scheduler.pages.num_free == scheduler.pages.size
    )


@pytest.fixture(scope="session")
def letters() -> dict[int, float]:
    """A bias that leaves only tokens of lower-case letters (in the byte tokenizer, byte b has id b + 3)."""
    return {token: -100.0 for token in range(512) if not ord("a") <= token - 3 <= ord("z")}
