"""Consumers built from text, as `--capture-consumers` takes them: `filesystem:root=captures,fsync=false`.

`name=kind:...` gives the consumer a name of its own, so that a kind can be used twice; otherwise the kind is the name.
`StreamConsumer` is missing here because only Python code in the same process can subscribe to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.log_consumer import LoggingConsumer
from birkhoff.capture.sinks.sae_stats import SaeStatsConsumer
from birkhoff.capture.sinks.shm_consumer import ShmConsumer
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.errors import OptionError, quoted

KINDS: dict[str, Callable[..., Consumer]] = {
    "filesystem": FilesystemConsumer,
    "logging": LoggingConsumer,
    "sae_stats": SaeStatsConsumer,
    "shm": ShmConsumer,
}


def build_consumer(text: str) -> tuple[str, Consumer]:
    """Build the consumer described by `[name=]kind[:key=value,...]`. Returns its name and the instance."""
    head, _, tail = text.partition(":")
    name, equals, kind = head.partition("=")
    kind = kind if equals else name
    if kind not in KINDS or not name:
        raise OptionError(f"capture consumer {quoted(head)} is unknown, expected one of {', '.join(KINDS)}.")
    known = parameters(kind)
    values: dict[str, Any] = {}
    for pair in filter(None, tail.split(",")):
        key, equals, value = pair.partition("=")
        if not equals or key not in known or key in values:
            raise OptionError(
                f"{quoted(pair)} of capture consumer {kind} is not understood, expected each of "
                f"{', '.join(known)} at most once, as key=value."
            )
        values[key] = _value(value)
    missing = [
        key for key, parameter in known.items() if parameter.default is parameter.empty and key not in values
    ]
    if missing:
        raise OptionError(
            f"capture consumer {kind} needs {', '.join(missing)}, as in {kind}:{missing[0]}=...."
        )
    return name, KINDS[kind](**values)


def parameters(kind: str) -> dict[str, inspect.Parameter]:
    """Parameters of a kind that can be written as text, by name."""
    source = FileOptions if kind == "filesystem" else KINDS[kind]
    signature = inspect.signature(source).parameters
    return {name: parameter for name, parameter in signature.items() if name not in ("encoder", "bias")}


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
