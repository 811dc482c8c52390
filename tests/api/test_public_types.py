"""Public methods say what they return, and what they return can be named: `birkhoff.PatchSweep`."""

from __future__ import annotations

import importlib
import inspect
import re
import typing

import pytest

import birkhoff
from birkhoff import Engine
from tests.api import typed_program

# Parts for those who build a server or a runner on an engine; nothing that an analysis returns.
FOR_SERVERS = {
    "capture_counters",
    "capture_rules",
    "chat_format",
    "chat_stream",
    "config",
    "device_captures",
    "driver",
    "edits_from_json",
    "model",
    "modules",
    "projections",
    "request_edits_from_json",
    "requests",
    "resolve",
    "submit_prompt",
    "tokenizer",
    "v4_model",
}


def public_functions(owner: object) -> dict[str, list[typing.Any]]:
    """Functions by name: methods and properties of a class, functions of a module; with their overloads."""
    found = {}
    for name, member in inspect.getmembers(owner):
        function = member.fget if isinstance(member, property) else inspect.unwrap(member)
        function = getattr(function, "__func__", function)
        ours = inspect.isfunction(function) and function.__module__.startswith("birkhoff")
        if inspect.ismodule(owner):  # not what it imports
            ours = ours and function.__module__ == owner.__name__
        if not name.startswith("_") and ours:
            found[name] = [function, *typing.get_overloads(function)]
    return found


def returned(function: typing.Any) -> str:
    return str(function.__annotations__.get("return", "Any"))


PUBLIC = [getattr(birkhoff, name) for name in birkhoff.__all__]


@pytest.mark.parametrize(
    "owner", [each for each in PUBLIC if inspect.isclass(each) or inspect.ismodule(each)], ids=str
)
def test_no_public_function_returns_any(owner):
    functions = public_functions(owner)
    assert (
        functions
        or inspect.ismodule(owner)
        or issubclass(owner, Exception)
        or hasattr(owner, "__dataclass_fields__")
    )
    vague = {
        name: returned(function)
        for name, variants in functions.items()
        for function in variants
        if returned(function) in ("Any", "list[Any]", "object")
    }
    assert not vague


def test_results_of_the_engine_are_public_names():
    hidden = set()
    for name, variants in public_functions(Engine).items():
        for function in variants:
            words = set(re.findall(r"[A-Z]\w+", returned(function)))
            module = importlib.import_module(function.__module__)
            classes = {word for word in words if inspect.isclass(getattr(module, word, None))}
            own = {word for word in classes if getattr(module, word).__module__.startswith("birkhoff")}
            if name not in FOR_SERVERS and not own <= set(birkhoff.__all__):
                hidden.add((name, *sorted(own - set(birkhoff.__all__))))
    assert not hidden


def test_what_overloads_promise_is_what_comes():
    with birkhoff.load("nano", max_context=256, cache_bytes=2**26) as engine:
        for promised, results in (
            (typed_program.ONE, typed_program.analyse_one(engine)),
            (typed_program.TWO, typed_program.analyse_two(engine)),
        ):
            assert [type(result) for result in results] == promised
