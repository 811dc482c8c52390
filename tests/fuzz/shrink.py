"""Make a failing input smaller: parts are removed or simplified while it still fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.fuzz.bodies import places

SIMPLE: tuple[Any, ...] = (None, 0, "", [], {})


def shrunk(body: Any, fails: Callable[[Any], bool], tries: int = 400) -> Any:
    """The smallest body found that still fails. `fails` is called at most `tries` times."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in _simpler(body):
            tries -= 1
            if tries <= 0:
                break
            if fails(candidate):
                body, smaller = candidate, True
                break
    return body


def shrunk_bytes(raw: bytes, fails: Callable[[bytes], bool], tries: int = 400) -> bytes:
    """The shortest bytes found that still fail: pieces of halving length are cut out."""
    size = len(raw) // 2
    while size and tries > 0:
        start = 0
        while start < len(raw) and tries > 0:
            candidate = raw[:start] + raw[start + size :]
            tries -= 1
            if fails(candidate):
                raw = candidate
            else:
                start += size
        size //= 2
    return raw


def _simpler(body: Any) -> list[Any]:
    """Bodies with one part removed or simplified, largest parts first."""
    result = []
    for index, (node, key) in enumerate(places(body)):
        removed = copy.deepcopy(body)
        at, name = places(removed)[index]
        del at[name]
        result.append(removed)
        if isinstance(node[key], list) and len(node[key]) > 1:
            halved = copy.deepcopy(body)
            at, name = places(halved)[index]
            at[name] = at[name][: len(at[name]) // 2]
            result.append(halved)
        for simple in SIMPLE:
            weight = len(repr(node[key]))
            if weight > len(repr(simple)):
                changed = copy.deepcopy(body)
                at, name = places(changed)[index]
                at[name] = copy.deepcopy(simple)
                result.append(changed)
    return sorted(result, key=lambda each: len(repr(each)))
