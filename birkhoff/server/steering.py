"""Steering on the wire, for one request and for all: the fields of a call, and the routes of the global tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from birkhoff.server.problems import bad

if TYPE_CHECKING:
    from birkhoff.api import Engine


def edits_of(fields: dict[str, Any], engine: Engine) -> list[Any] | None:
    """The edits that the steering fields of a body come to."""
    if not fields:
        return None
    raise bad("steering is not served yet.", next(iter(fields)))
