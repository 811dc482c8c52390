"""Consumers by name, as a flag writes them: `filesystem:root=captures,fsync=false`.

`name=kind:...` gives an instance a name of its own, so that one kind can be used twice; else the kind is the name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from birkhoff.capture.sinks.consumer import Consumer
from birkhoff.capture.sinks.filesystem import FilesystemConsumer
from birkhoff.capture.sinks.log_consumer import LoggingConsumer
from birkhoff.capture.sinks.memory_consumer import MemoryConsumer
from birkhoff.capture.sinks.sae_stats import SaeStatsConsumer
from birkhoff.capture.sinks.shm_consumer import ShmConsumer
from birkhoff.capture.sinks.stream_consumer import StreamConsumer
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.errors import OptionError, quoted

KINDS: dict[str, Callable[..., Consumer]] = {
    "filesystem": FilesystemConsumer,
    "logging": LoggingConsumer,
    "memory": MemoryConsumer,
    "sae_stats": SaeStatsConsumer,
    "shm": ShmConsumer,
    "stream": StreamConsumer,
}


def build_consumer(text: str) -> tuple[str, Consumer]:
    """An instance and its name from `[name=]kind[:key=value,...]`."""
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
    """What a kind can be told in text, by name."""
    source = FileOptions if kind == "filesystem" else KINDS[kind]
    own = inspect.signature(source).parameters.values()
    return {
        parameter.name: parameter for parameter in own if parameter.name not in ("disk", "encoder", "bias")
    }


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
