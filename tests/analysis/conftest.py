"""Fixtures of the API tests: a small random checkpoint and an engine on it."""

from tests.api.conftest import checkpoint, engine, idle, letters, wordless  # noqa: F401
