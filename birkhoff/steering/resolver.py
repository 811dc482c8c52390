"""Steering of an engine: named vectors, the edits every request gets, and plans for single ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from birkhoff.errors import RequestError, SteeringError
from birkhoff.hooks.plan import Edit
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.vector_table import TableRows, Tables
from birkhoff.steering.modules import Identity, NamedVectors
from birkhoff.steering.steering_fields import Parser, parse_steering
from birkhoff.steering.vector_edits import ResolvedEdit, VectorEdit, check_directions, check_edits

Steering = Any  # a list of edits for all prompts, or one such list per prompt


class SteeringResolver:
    def __init__(
        self,
        schema: Mapping[str, HookSchema],
        num_layers: int,
        identity: Identity | None = None,
        tables: Tables | None = None,
    ):
        self._schema = schema
        self._num_layers = num_layers
        self.tables = tables or Tables()
        self._widths = {hook: row.width for hook, row in schema.items()}
        self.modules = NamedVectors(schema, num_layers, identity)
        self.runs: dict[str, Mapping[tuple[str, int], Any]] = {}  # captured rows by name, for patches
        self.parsers: dict[str, Parser] = {}  # fields about dictionaries of features
        self._for_all: list[
            tuple[Any, ...]
        ] = []  # the global tier: one entry per open `engine.steering` block

    @contextmanager
    def for_all(self, edits: Sequence[Any]) -> Iterator[None]:
        """Every request submitted inside the block gets these edits too."""
        given = check_edits(list(edits))
        for edit in given:  # refused here, not at the next request
            self._check(edit)
        self._for_all.append(given)
        try:
            yield
        finally:
            self._for_all.remove(given)

    def edits(self, steer: Any, prompt_ids: Sequence[int], max_tokens: int) -> tuple[ResolvedEdit, ...]:
        """The global tier and the request's own edits, resolved for one prompt."""
        own = () if steer is None else check_edits(steer)
        every = [edit for tier in self._for_all for edit in tier]
        resolved = tuple(
            edit.resolve(self._schema, self._num_layers, self.modules, prompt_ids, max_tokens)
            for edit in (*every, *own)
        )
        check_directions(resolved)
        return resolved

    def from_wire(self, fields: Mapping[str, Any]) -> list[Any]:
        """The edits of a request's steering fields, each checked against this model and refused by its field."""
        found = parse_steering(fields, self.modules, self.parsers, self.runs)
        for wired in found:
            try:
                if isinstance(wired.edit, VectorEdit):
                    self._check(wired.edit)
            except RequestError as error:
                raise SteeringError(str(error), wired.path) from None
        return [wired.edit for wired in found]

    def table(self, edits: Sequence[Edit]) -> TableRows | None:
        """Rows for the vectors these edits add, still to be reserved; None when they add none."""
        rows = TableRows(self.tables, [edit.sites for edit in edits], self._widths)
        return rows if len(rows) else None

    def _check(self, edit: Any) -> None:
        """Refuse what this model cannot do, whatever the prompt."""
        edit.resolve(self._schema, self._num_layers, self.modules, None, 0)

    def digest(self) -> str | None:
        """128 bits of the global tier, named vectors by their content; None when there is none."""
        every = [edit for tier in self._for_all for edit in tier]
        named = {
            edit.vector: self.modules[edit.vector].digest for edit in every if isinstance(edit.vector, str)
        }
        said = json.dumps([[edit.to_json() for edit in every], named], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:32] if every else None


def per_prompt_edits(steer: Steering, prompts: int) -> list[Any]:
    """One list of edits for each prompt: the same for all, or as many lists as there are prompts."""
    nested = isinstance(steer, (list, tuple)) and any(
        entry is None or isinstance(entry, (list, tuple)) for entry in steer
    )
    if not nested:
        return [steer] * prompts
    if len(steer) != prompts:
        raise SteeringError(
            f"steer has {len(steer)} lists for {prompts} prompts. Give one list for all, or one each."
        )
    return list(steer)
