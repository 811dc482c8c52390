"""The global tier: edits that apply to every later request.

`POST /v1/steering/set` takes two spellings. The fields of a call (`interventions`, `steering_vectors`, ...) replace
what was set before, or are added to it with `"replace": false`. The spelling of vLLM steering servers (`vectors`,
`prefill_vectors`, `decode_vectors`, `clamps`, ...) keeps its meaning there: only the layers given change, and
`"replace": true` clears every tier first. A reply says which spelling was used.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

from birkhoff.hooks.layers import parse_layers
from birkhoff.server.api_errors import bad_request
from birkhoff.server.body import StrictBody
from birkhoff.server.fields import SteeringFields
from birkhoff.steering.steering_fields import intervention
from birkhoff.steering.tiers import CLAMPS, VECTORS, SteeringModule, SteeringTiers
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TIER_FIELDS = (*VECTORS, *CLAMPS)


class TierFields(StrictBody):
    """Vectors and clamps by tier, hook and layer, as on vLLM steering servers."""

    vectors: dict[str, Any] | None = None
    prefill_vectors: dict[str, Any] | None = None
    decode_vectors: dict[str, Any] | None = None
    clamps: dict[str, Any] | None = None
    prefill_clamps: dict[str, Any] | None = None
    decode_clamps: dict[str, Any] | None = None

    @property
    def tiers(self) -> dict[str, Any]:
        """The tiers that are set."""
        return self.given(TIER_FIELDS)


class TargetBody(StrictBody):
    """The model that a change applies to; this server has no draft model with steering of its own."""

    target: Literal["main", "draft"] | None = None

    def check_target(self) -> None:
        if self.target == "draft":
            raise bad_request(
                "target is 'draft', but drafts come from the model's own prediction layer and are verified by the "
                "steered model. Leave target out, or say 'main'.",
                "target",
            )


class GlobalSteeringBody(SteeringFields, TierFields, TargetBody):
    """The steering fields of a call or tiers, applied to every later request."""

    replace: bool | None = None


MAX_GLOBAL_EDITS = 1024


class GlobalSteering:
    """The edits of the global tier, in both spellings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._context: AbstractContextManager[None] | None = None
        self._own: list[Any] = []
        self._tiers = SteeringTiers()

    @property
    def edits(self) -> list[Any]:
        return [*self._own, *(wired.edit for wired in self._tiers.edits())]

    def set(self, body: GlobalSteeringBody, engine: Engine) -> dict[str, Any]:
        """Validate and apply a body; returns the fields that a reply adds to the status."""
        body.check_target()
        own, tiers = body.steering_fields, body.tiers
        if own and tiers:
            raise bad_request(
                f"{next(iter(tiers))} is given beside {next(iter(own))}: two spellings with two meanings. Use one.",
                next(iter(tiers)),
            )
        if not own and not tiers:
            raise bad_request(
                f"nothing to set: give steering fields or {', '.join(VECTORS)}, or call /v1/steering/clear.",
                "interventions",
            )
        if own:
            edits = engine.edits_from_json(own)
            keep = body.replace is False
            self._change(engine, [*self._own, *edits] if keep else edits, self._tiers if keep else None)
            return {"spelling": "fields of a call"}
        given = SteeringTiers.parse(tiers)
        check_tiers(given, engine)
        before = SteeringTiers() if body.replace else self._tiers
        after = before.updated(given, engine.config.num_hidden_layers)
        self._change(engine, [] if body.replace else self._own, after)
        return {
            "spelling": "tiers",
            "status": "ok",
            "hook_points": given.hooks,
            "layers_updated": SteeringTiers().updated(given, engine.config.num_hidden_layers).layers,
        }

    def clear(self, engine: Engine) -> None:
        self._change(engine, [], None)

    def uses(self, module: str) -> bool:
        return any(getattr(edit, "vector", None) == module for edit in self.edits)

    def status(self, engine: Engine) -> dict[str, Any]:
        """The edits, and the summed norms of their vectors by hook and layer and by layer and hook."""
        norms: dict[str, dict[str, float]] = {}
        active: dict[str, dict[str, dict[str, float]]] = {}
        for edit in self.edits:
            for (hook, layer, phase), norm in _norms(edit, engine).items():
                by_layer = norms.setdefault(hook, {})
                by_layer[str(layer)] = by_layer.get(str(layer), 0.0) + norm
                tier = active.setdefault(str(layer), {}).setdefault(hook, {})
                name = "norm" if phase == "both" else f"{phase}_norm"
                tier[name] = tier.get(name, 0.0) + norm
        return {
            "interventions": [intervention(edit) for edit in self.edits],
            "norms": norms,
            "active_layers": dict(sorted(active.items(), key=lambda entry: int(entry[0]))),
            "digest": engine.settings["steering"],
        }

    def _change(self, engine: Engine, own: list[Any], tiers: SteeringTiers | None) -> None:
        """Enter the new tier before leaving the old one, so that no request starts without either."""
        tiers = tiers or SteeringTiers()
        edits = [*own, *(wired.edit for wired in tiers.edits())]
        if len(edits) > MAX_GLOBAL_EDITS:
            raise bad_request(
                f"the global tier would have {len(edits)} edits, at most {MAX_GLOBAL_EDITS} are kept. Clear it, or "
                "replace them.",
                "interventions",
            )
        with self._lock:
            context = engine.steering(*edits) if edits else None
            if context is not None:
                context.__enter__()
            if self._context is not None:
                self._context.__exit__(None, None, None)
            self._context, self._own, self._tiers = context, own, tiers


def check_tiers(tiers: SteeringTiers, engine: Engine) -> None:
    """Check hooks, layers and widths against the model; errors name the field."""
    engine.check_edits(tiers.edits())


def _norms(edit: Any, engine: Engine) -> dict[tuple[str, int, str], float]:
    """Scaled norm of an edit's vector, by hook, layer and phase; empty for edits without a vector."""
    vector = getattr(edit, "vector", None)
    module = engine.modules[vector] if isinstance(vector, str) else vector
    if isinstance(module, SteeringModule):
        norms: dict[tuple[str, int, str], float] = {}
        for part in module.edits(edit):
            for key, norm in _norms(part, engine).items():
                norms[key] = norms.get(key, 0.0) + norm
        return norms
    scale, phase = getattr(edit, "scale", 1.0), getattr(edit, "phase", "both")
    if isinstance(module, SteeringVector):
        rows = module.rows.items()
        return {
            (edit.hook or module.hook, layer, phase): scale * float(row.tensor().norm())
            for layer, row in rows
        }
    if isinstance(module, Vector) and edit.hook is not None:
        layers = parse_layers(edit.layers).expand(engine.config.num_hidden_layers)
        return {(edit.hook, layer, phase): scale * float(module.tensor().norm()) for layer in layers}
    return {}
