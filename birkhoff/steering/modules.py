"""`engine.modules`: vectors that requests may name.

A module is a bare row of numbers, a `SteeringVector`, or the path of a vector file. A steering vector is held against
the model before it gets its name: made for another model, at a hook or layer this one lacks, or of another width, it
is refused and nothing changes. Running requests keep the vector they resolved, whatever becomes of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path, PurePath
from typing import Any

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.schema import HookSchema
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_edits import Add, Project
from birkhoff.steering.vector_file import SteeringVector

Module = Vector | SteeringVector
Identity = Callable[[], tuple[str, str]]  # the model's name and what its weights are


class NamedVectors(MutableMapping[str, Module]):
    def __init__(
        self, schema: Mapping[str, HookSchema], num_layers: int, identity: Identity | None = None
    ) -> None:
        self._schema = schema
        self._num_layers = num_layers
        self._identity = identity
        self._held: dict[str, Module] = {}

    def __getitem__(self, name: str) -> Module:
        if name not in self._held:
            known = ", ".join(sorted(self._held)) or "none"
            raise KeyError(f"no module named {quoted(name)}; registered: {known}")
        return self._held[name]

    def __setitem__(self, name: str, vector: Any) -> None:
        if not isinstance(name, str) or not name:
            raise SteeringError(f"a module is named by a text, not {quoted(name)}.")
        if isinstance(vector, (str, Path)):
            vector = SteeringVector.load(vector)
        found = vector if isinstance(vector, (Vector, SteeringVector)) else Vector(vector, name)
        if isinstance(found, SteeringVector):
            self._check(name, found)
        self._held[name] = found

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _check(self, name: str, vector: SteeringVector) -> None:
        """Another model's vector would run and mean nothing, so weights or name have to agree where both are known."""
        if vector.model != "unknown" and self._identity is not None:
            model, revision = self._identity()
            if vector.model_revision != revision and PurePath(vector.model).name != PurePath(model).name:
                raise SteeringError(
                    f"{name} was made for the model {quoted(vector.model)}, and this is {quoted(model)}. Use its own "
                    "model, or say that it fits: dataclasses.replace(vector, model='unknown')."
                )
        (Add if vector.op == "add" else Project)(vector).resolve(self._schema, self._num_layers, {}, 1, 2)
