"""Errors of request fields: which field is at fault, as a path such as `interventions[0].at.layers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from birkhoff.errors import SelectorError, SteeringError, quoted


def join_path(*parts: str) -> str:
    return ".".join(part for part in parts if part)


@contextmanager
def field_path(path: str, error: type[SteeringError]) -> Iterator[None]:
    """Raise errors of edits and selectors in the block as `error`, with `path` before their own path."""
    try:
        yield
    except SelectorError as cause:
        part = f"at.{cause.path}" if cause.path.startswith("layers") else cause.path
        raise error(cause.reason, join_path(path, part)) from None
    except SteeringError as cause:
        raise error(cause.reason, join_path(path, cause.path)) from None


def check_keys(raw: Mapping[str, Any], known: Sequence[str], path: str, error: type[SteeringError]) -> None:
    """Refuse keys of an object that are not in `known`."""
    unknown = [key for key in raw if key not in known]
    if unknown:
        raise error(f"has the unknown key {quoted(unknown[0])}, expected {', '.join(known)}.", path)
