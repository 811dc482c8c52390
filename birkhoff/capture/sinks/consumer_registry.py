"""Consumers built from text, as `--capture-consumers` takes them: `filesystem:root=captures,fsync=false`.

`name=kind:...` gives the consumer a name of its own, so that a kind can be used twice; otherwise the kind is the name.
A kind is one of `KINDS` or an entry point of the group `birkhoff.capture_consumers` of an installed package: a class,
or a function that returns a consumer. `StreamConsumer` is missing here because only Python code in the same process can
subscribe to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
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


GROUP = "birkhoff.capture_consumers"


def consumer_kinds() -> dict[str, Callable[[], Callable[..., Consumer]]]:
    """Kinds by name, with a function that returns the class; code of a package is imported when that is called."""
    kinds: dict[str, Callable[[], Callable[..., Consumer]]] = {
        entry.name: entry.load for entry in entry_points(group=GROUP)
    }
    return kinds | {name: partial(KINDS.__getitem__, name) for name in KINDS}


def build_consumer(text: str) -> tuple[str, Consumer]:
    """Build the consumer described by `[name=]kind[:key=value,...]`. Returns its name and the instance."""
    head, _, tail = text.partition(":")
    name, equals, kind = head.partition("=")
    kind = kind if equals else name
    kinds = consumer_kinds()
    if kind not in kinds or not name:
        raise OptionError(
            f"capture consumer {quoted(head)} is unknown, expected one of {', '.join(sorted(kinds))}."
        )
    try:
        make = kinds[kind]()
    except Exception as error:  # code of an installed package
        raise OptionError(
            f"capture consumer {kind} cannot be imported: {type(error).__name__}: {error}"
        ) from error
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
    consumer = make(**values)
    if not isinstance(consumer, Consumer):
        raise OptionError(
            f"capture consumer {kind} makes a {type(consumer).__name__}, which lacks methods of a consumer "
            "(birkhoff.capture.sinks.consumer.Consumer)."
        )
    return name, consumer


def parameters(kind: str) -> dict[str, inspect.Parameter]:
    """Parameters of a kind that can be written as text, by name."""
    source = FileOptions if kind == "filesystem" else consumer_kinds()[kind]()
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
