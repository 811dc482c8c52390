"""`engine.modules`: vectors that requests can refer to by name.

A module is a row of numbers, a `SteeringVector`, a `SteeringModule` of several hooks, layers and phases, or the path
of a file of either. It is checked against the model before it is registered: one made for another model, for a hook or
layer that this model lacks, or of another width is refused and nothing changes. Running requests keep the vector they
resolved when a name is reassigned or deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path, PurePath
from typing import Any

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.schema import Schema
from birkhoff.steering.tiers import SteeringModule
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_edits import Add, Project
from birkhoff.steering.vector_file import SteeringVector

Module = Vector | SteeringVector | SteeringModule
Identity = Callable[[], tuple[str, str]]  # the model's name and the revision of its weights


def load_module(path: str | Path) -> SteeringVector | SteeringModule:
    """Read a module from a file: JSON of tiers (`tiers.py`), or a vector file."""
    return SteeringModule.load(path) if Path(path).suffix == ".json" else SteeringVector.load(path)


class NamedVectors(MutableMapping[str, Module]):
    def __init__(self, schema: Schema, num_layers: int, identity: Identity | None = None) -> None:
        self._schema = schema
        self._num_layers = num_layers
        self._identity = identity
        self._modules: dict[str, Module] = {}

    def __getitem__(self, name: str) -> Module:
        if name not in self._modules:
            known = ", ".join(sorted(self._modules)) or "none"
            raise KeyError(f"no module named {quoted(name)}; registered: {known}")
        return self._modules[name]

    def __setitem__(self, name: str, vector: Any) -> None:
        if not isinstance(name, str) or not name:
            raise SteeringError(f"a module is named by a text, not {quoted(name)}.")
        if isinstance(vector, (str, Path)):
            vector = load_module(vector)
        module = vector if isinstance(vector, Module) else Vector(vector, name, shaped=True)
        if isinstance(module, SteeringVector):
            self._check(name, module)
        elif isinstance(module, Vector):
            widths = {row.width for row in self._schema.values() if row.steerable}
            widths |= {row.logical_shape[-1] for row in self._schema.values() if row.steerable}
            if len(module) not in widths:
                shown = ", ".join(map(str, sorted(widths)))
                raise SteeringError(f"{name} has {len(module)} numbers, rows of this model have {shown}.")
        elif isinstance(module, SteeringModule):
            for part in module.parts:
                part.resolve(self._schema, self._num_layers, {}, 1, 2)
        self._modules[name] = module

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._modules)

    def __repr__(self) -> str:
        return f"NamedVectors({', '.join(self._modules) or 'none'})"

    def _check(self, name: str, vector: SteeringVector) -> None:
        """Refuse vectors of other models: they would run and be meaningless. Weights or name must match if both are
        known."""
        if vector.model != "unknown" and self._identity is not None:
            model, revision = self._identity()
            if vector.model_revision != revision and PurePath(vector.model).name != PurePath(model).name:
                raise SteeringError(
                    f"{name} was made for the model {quoted(vector.model)}, and this is {quoted(model)}. Use its own "
                    "model, or say that it fits: dataclasses.replace(vector, model='unknown')."
                )
        (Add if vector.op == "add" else Project)(vector).resolve(self._schema, self._num_layers, {}, 1, 2)
