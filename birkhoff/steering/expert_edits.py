"""`ExpertSet`: edits of the router of a request.

    ExpertSet([4], force=[3])                       every token gets expert 3 in layer 4
    ExpertSet("all", ban=[0, 7], phase="decode")    generated tokens never get experts 0 and 7
    ExpertSet([4], add={3: 0.5})                    0.5 is added to the score of expert 3
    ExpertSet([4], force=[3], weights={3: 1.0})     with this weight in the sum over experts

`hooks/routing.py` has the rules; hash-routed layers are edited like others. `when=Gate(...)` limits an edit to the
tokens where a gate is open; a layer takes one edit with a gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.layers import is_list
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.routing import ExpertUse, RouterHost
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.sites import MOE_TOPK
from birkhoff.option_checks import as_int
from birkhoff.steering.gated_edits import Gate
from birkhoff.steering.request_edit import Modules, PromptIds, RequestEdit, bound, parse_fields
from birkhoff.steering.vector import finite_number

FORCE, BAN = 1.0, -1.0


@dataclass(frozen=True)
class ExpertSet(RequestEdit):
    """Forces, bans, scores and weights of experts at some layers."""

    layers: Any = None
    force: Any = ()
    ban: Any = ()
    add: Any = ()
    weights: Any = ()
    where: Any = None
    phase: str = "both"
    when: Any = None

    op: ClassVar[str] = "experts"

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name in ("force", "ban"):
            put(self, name, tuple(sorted(set(_experts(getattr(self, name), name)))))
        for name in ("add", "weights"):
            put(self, name, _numbers(getattr(self, name), name))
        if self.layers is None:
            raise SteeringError("ExpertSet says no layers. Give layers=[...] or 'all'.")
        parse_fields(self)
        if self.when is not None:
            put(self, "when", Gate.parse(self.when))
        if not (self.force or self.ban or self.add or self.weights):
            raise SteeringError("ExpertSet changes nothing. Give force, ban, add or weights.")
        both = sorted(set(self.force) & set(self.ban))
        if both:
            raise SteeringError(f"expert {both[0]} is forced and banned. Choose one.")

    def to_json(self) -> dict[str, Any]:
        out = super().to_json()
        for name in ("add", "weights"):
            if name in out:
                out[name] = {str(expert): number for expert, number in out[name]}
        return out

    def resolve(
        self, schema: Schema, num_layers: int, modules: Modules, prompt: PromptIds, max_tokens: int
    ) -> ResolvedEdit:
        if "moe_router_logits" not in schema or self.op not in schema[MOE_TOPK.name].edits:
            raise SteeringError(
                "ExpertSet edits the router of a DeepSeek-V4 model, and this model has none that can be edited."
            )
        experts, topk = schema["moe_router_logits"].width, schema[MOE_TOPK.name].logical_shape[0]
        numbers = self._row(experts, topk)
        layers = self.layers.expand(num_layers)
        use = ExpertUse(numbers, RouterHost(experts, topk))
        nothing = not numbers[:2].any() and bool(numbers[2].isnan().all())
        sites = {} if nothing else {(MOE_TOPK.name, layer): use for layer in layers}
        fields = self.to_json()
        names = ("force", "ban", "add", "weights")
        report = {name: fields[name] for name in names if name in fields} | {"layers": list(layers)}
        selector = bound(self.where, prompt, max_tokens)
        return ResolvedEdit(sites, selector, self.phase, report={"experts": report})

    def _row(self, experts: int, topk: int) -> torch.Tensor:
        """The edit of one row: [3, experts]."""
        named = [*self.force, *self.ban, *(expert for expert, _ in (*self.add, *self.weights))]
        if named and max(named) >= experts:
            raise SteeringError(
                f"expert {max(named)} does not exist: this model has experts 0..{experts - 1}."
            )
        if len(self.force) > topk:
            raise SteeringError(f"{len(self.force)} experts are forced, a token gets {topk}. Force fewer.")
        if experts - len(self.ban) < topk:
            raise SteeringError(
                f"{len(self.ban)} of {experts} experts are banned, a token needs {topk}. Ban fewer."
            )
        row = torch.zeros(3, experts)
        row[1, list(self.force)], row[1, list(self.ban)] = FORCE, BAN
        row[2] = torch.nan
        for line, numbers in ((0, self.add), (2, self.weights)):
            for expert, number in numbers:
                row[line, expert] = number
        return row


def check_gates(edits: Sequence[ResolvedEdit]) -> None:
    """Refuse two edits of one router with gates: which experts a token gets then depends on both."""
    seen: set[int] = set()
    for edit in edits:
        uses = edit.sites.items()
        layers = {layer for (_, layer), use in uses if isinstance(use, ExpertUse) and use.gate is not None}
        if seen & layers:
            raise SteeringError(
                f"two edits of the router of layer {min(seen & layers)} have a gate, expected one. Join them, or leave "
                "one without."
            )
        seen |= layers


def _expert(value: Any, name: str) -> int:
    expert = int(value) if isinstance(value, str) and value.isdecimal() else as_int(value)
    if expert is None or expert < 0:
        raise SteeringError(f"{name} names {quoted(value)}, expected the number of an expert, from 0.")
    return expert


def _experts(value: Any, name: str) -> list[int]:
    values = list(value) if is_list(value) else None
    if values is None:
        raise SteeringError(f"{name} is {quoted(value)}, expected a list of experts.")
    return [_expert(item, name) for item in values]


def _numbers(value: Any, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping) and not (
        isinstance(value, tuple) and all(is_list(item) for item in value)
    ):
        raise SteeringError(f"{name} is {quoted(value)}, expected numbers by expert: {{3: 0.5}}.")
    pairs = [
        (_expert(expert, name), finite_number(number, f"{name} of expert {expert}"))
        for expert, number in (value.items() if isinstance(value, Mapping) else value)
    ]
    if len({expert for expert, _ in pairs}) < len(pairs):
        raise SteeringError(f"{name} names an expert twice. Name each once.")
    return tuple(sorted(pairs))
