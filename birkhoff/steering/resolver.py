"""Steering of an engine: named vectors, edits of all requests, and resolution of the edits of one request."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from birkhoff.errors import RequestError, SteeringError
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.plan import Edit
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.vector_table import TableRows, Tables
from birkhoff.steering.attention_edits import AttentionEdit, Pieces
from birkhoff.steering.expert_edits import check_gates
from birkhoff.steering.gated_edits import FeatureGate, Gate, TokenTexts, gate_report
from birkhoff.steering.modules import Identity, NamedVectors
from birkhoff.steering.request_edit import RequestEdit
from birkhoff.steering.steering_fields import Parser, parse_steering
from birkhoff.steering.tiers import SteeringModule, WireEdit
from birkhoff.steering.vector_edits import VectorEdit, check_directions, check_edits

Steering = Any  # a list of edits for all prompts, or one such list per prompt


class SteeringResolver:
    def __init__(
        self, schema: Schema, num_layers: int, identity: Identity | None = None, tables: Tables | None = None
    ):
        self._schema = schema
        self._num_layers = num_layers
        self.tables = tables or Tables()
        self._widths = {hook: row.width for hook, row in schema.items()}
        self.modules = NamedVectors(schema, num_layers, identity)
        # Captured rows by name of the run, for patches.
        self.runs: dict[str, Mapping[tuple[str, int], Any]] = {}
        self.pieces: Pieces | None = None  # bytes of tokens, for edits that name a text
        self.parsers: dict[str, Parser] = {}  # parsers of the SAE fields
        self.features: FeatureGate | None = None  # gates by features of attached dictionaries
        self.token_texts: TokenTexts | None = None  # for gates by classes of tokens
        # The global tier: one entry per open `engine.steering` block.
        self._for_all: list[tuple[Any, ...]] = []

    @contextmanager
    def for_all(self, edits: Sequence[Any]) -> Iterator[None]:
        """Apply these edits to every request submitted inside the block."""
        checked = check_edits(list(edits))
        for edit in checked:  # errors are raised here, not at the next request
            list(self._resolve(edit, "", None, 0))
        self._for_all.append(checked)
        try:
            yield
        finally:
            self._for_all.remove(checked)

    def edits(self, steer: Any, prompt_ids: Sequence[int], max_tokens: int) -> tuple[Edit, ...]:
        """The global tier and the request's own edits, resolved for one prompt."""
        items = steer if isinstance(steer, (list, tuple)) else () if steer is None else (steer,)
        paths = [item.path if isinstance(item, WireEdit) else "" for item in items]
        request_edits = () if steer is None else check_edits(_unwrap(steer))
        every = [edit for tier in self._for_all for edit in tier]
        resolved = tuple(
            part
            for edit, path in zip((*every, *request_edits), [*[""] * len(every), *paths])
            for part in self._resolve(edit, path, prompt_ids, max_tokens)
        )
        check_directions(resolved)
        check_gates(resolved)
        return resolved

    def contents(self, steer: Any) -> list[RequestEdit]:
        """The global tier and the request's own edits, with named vectors and classes of tokens replaced by what they
        stand for now: edits that mean the same in another process. To be called after `edits`, which checks them."""
        request_edits = () if steer is None else check_edits(_unwrap(steer))
        parts: list[RequestEdit] = []
        for edit in (*(edit for tier in self._for_all for edit in tier), *request_edits):
            if not isinstance(edit, VectorEdit):
                parts.append(edit)
                continue
            if edit.when is not None:
                edit = replace(edit, when=self._portable(edit.when))
            module = self.modules[edit.vector] if isinstance(edit.vector, str) else None
            if isinstance(module, SteeringModule):
                parts += module.edits(edit)
            else:
                parts.append(edit if module is None else replace(edit, vector=module))
        return parts

    def from_wire(self, fields: Mapping[str, Any]) -> list[Any]:
        """The edits of a request's steering fields, checked against this model; errors name the field."""
        edits = self.parse_wire(fields)
        self.check([item for item in edits if isinstance(item, WireEdit)])
        unwrapped: list[Any] = _unwrap(edits)
        return unwrapped

    def check(self, edits: Sequence[WireEdit]) -> None:
        """Check edits of request fields against this model; errors name the field."""
        for item in edits:
            list(self._resolve(item.edit, item.path, None, 0))

    def parse_wire(self, fields: Mapping[str, Any]) -> list[Any]:
        """The edits of a request's steering fields. All but SAE edits are `WireEdit`s, which `edits` checks against the
        model with the field in errors."""
        wire_edits = parse_steering(fields, self.modules, self.parsers, self.runs)
        return [item if isinstance(item.edit, RequestEdit) else item.edit for item in wire_edits]

    def _resolve(
        self, edit: RequestEdit, path: str, prompt_ids: Sequence[int] | None, max_tokens: int
    ) -> Iterator[ResolvedEdit]:
        """The edit resolved, or the parts of the module of several hooks that it names."""
        try:
            if isinstance(edit, AttentionEdit) and prompt_ids is not None:
                edit = edit.located(prompt_ids, self.pieces)
            parts: Sequence[RequestEdit] = [edit]
            if isinstance(edit, VectorEdit) and isinstance(edit.vector, str):
                module = self.modules.get(edit.vector)
                parts = module.edits(edit) if isinstance(module, SteeringModule) else [edit]
            when = getattr(edit, "when", None)
            gate = None if when is None else self.gate(when)
            for part in parts:
                resolved = part.resolve(self._schema, self._num_layers, self.modules, prompt_ids, max_tokens)
                yield resolved if gate is None else resolved.gated(gate, gate_report(gate, when))
        except RequestError as error:
            if path:
                raise SteeringError(str(error), path) from None
            raise

    def _portable(self, when: Gate) -> Gate:
        if isinstance(when.vector, str):
            return replace(when, vector=self.modules[when.vector])
        if isinstance(when.tokens, str):
            ids = self.gate(when)
            assert isinstance(ids, frozenset)
            return replace(when, tokens=tuple(ids))
        return when

    def gate(self, when: Any) -> SiteGate | frozenset[int]:
        """A `Gate`, or its JSON form, resolved: a probe, or the ids of tokens."""
        return Gate.parse(when).resolve(
            self._schema, self._num_layers, self.modules, self.features, self.token_texts
        )

    def table(self, edits: Sequence[Edit]) -> TableRows | None:
        """Table rows for the vectors these edits add, not yet reserved; None if they add none."""
        rows = TableRows(self.tables, [edit.sites for edit in edits], self._widths)
        return rows if len(rows) else None

    def digest(self) -> str | None:
        """128-bit digest of the global tier, named vectors by their content; None if it is empty."""
        every = [edit for tier in self._for_all for edit in tier]
        names = [
            edit.vector for edit in every if isinstance(edit, VectorEdit) and isinstance(edit.vector, str)
        ]
        named = {name: self.modules[name].digest for name in names}
        content = json.dumps([[edit.to_json() for edit in every], named], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:32] if every else None


def _unwrap(steer: Any) -> Any:
    """Edits without the names of their request fields."""
    if not isinstance(steer, (list, tuple)):
        return steer
    return [item.edit if isinstance(item, WireEdit) else item for item in steer]


def per_prompt_edits(steer: Steering, prompts: int) -> list[Any]:
    """One list of edits per prompt, from one list for all prompts or one list for each."""
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
