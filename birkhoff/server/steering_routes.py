"""Steering on the wire: the fields of one call, the tier that every answer gets, and named modules.

Fields of a call are read by `steering/steering_fields.py` into the same edits Python has, so that HTTP and Python cannot differ.
Changes of the global tier and of modules need the steering key, when there is one, beside the server's own; they are
checked whole and then made, or not at all. Running answers keep what they began with.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.errors import quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.server.api_errors import ApiError, bad
from birkhoff.server.body import RequestBody
from birkhoff.server.fields import InterpFields
from birkhoff.server.middleware import matching
from birkhoff.server.reply import json_response
from birkhoff.server.server_settings import ServerSettings, is_loopback
from birkhoff.steering.steering_fields import intervention, parse_steering
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_encoding import unpacked_vector
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.server.context import ServingContext


def edits_of(fields: dict[str, Any], engine: Engine) -> list[Any] | None:
    """The edits that the steering fields of a body come to."""
    if not fields:
        return None
    return engine.edits_from_json(fields)


def request_edits(fields: dict[str, Any], engine: Engine) -> list[Any] | None:
    """The edits of a request's steering fields, unchecked: the request resolves and checks them, once."""
    return engine.request_edits_from_json(fields) if fields else None


class ModuleBody(RequestBody):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    vector: dict[str, Any] | Annotated[list[float], Field(max_length=1 << 20)] | None = None
    vectors: dict[str, Any] | None = None
    replace: bool = False


class UnregisterBody(RequestBody):
    name: Annotated[str, Field(min_length=1, max_length=256)]


class SetBody(InterpFields):
    """The steering fields of a call, for every call from now on."""

    replace: bool = True


class SteeringRoutes:
    def __init__(self, context: ServingContext):
        self._context = context
        self._lock = threading.Lock()
        self._edits: list[Any] = []
        self._open: AbstractContextManager[None] | None = None

    async def status(self) -> Response:
        """The global tier: its edits, and how strong they are at each hook."""
        norms: dict[str, dict[str, float]] = {}
        for edit in self._edits:
            for (hook, layer), norm in _norms(edit, self._context.engine).items():
                norms.setdefault(hook, {})[str(layer)] = norms.get(hook, {}).get(str(layer), 0.0) + norm
        return json_response(
            {
                "interventions": [intervention(edit) for edit in self._edits],
                "norms": norms,
                "digest": self._context.engine.settings["steering"],
            }
        )

    async def layers(self) -> Response:
        engine = self._context.engine
        steerable = [name for name, row in engine.schema.items() if row.steerable]
        last = engine.config.num_hidden_layers - 1
        each = {
            str(layer): [name for name in steerable if not engine.schema[name].once or layer == last]
            for layer in range(last + 1)
        }
        return json_response({"layers": each})

    async def set(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, SetBody, self._context.settings.max_upload_bytes)
        check_steering_key(http, self._context.settings)
        edits = edits_of(body.steers, self._context.engine) or []
        if not edits:
            raise bad("nothing to set: give steering fields, or call /v1/steering/clear.", "interventions")
        self._change(edits if body.replace else [*self._edits, *edits])
        return await self.status()

    async def clear(self, http: HttpRequest) -> Response:
        check_steering_key(http, self._context.settings)
        self._change([])
        return await self.status()

    def _change(self, edits: list[Any]) -> None:
        """Open the new tier, then close the old one: no answer begins without either."""
        with self._lock:
            tier = self._context.engine.steering(*edits) if edits else None
            if tier is not None:
                tier.__enter__()
            if self._open is not None:
                self._open.__exit__(None, None, None)
            self._open = tier
            self._edits = edits

    # Modules

    async def modules(self) -> Response:
        engine = self._context.engine
        return json_response(
            {"modules": [described(name, engine.modules[name]) for name in sorted(engine.modules)]}
        )

    async def register(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, ModuleBody, self._context.settings.max_upload_bytes)
        check_steering_key(http, self._context.settings)
        engine = self._context.engine
        if body.name in engine.modules and not body.replace:
            raise ApiError(
                409,
                "a module of this name is registered. Say replace, or choose another.",
                code="module-taken",
                param="name",
                headers={"x-should-retry": "false"},
            )
        engine.modules[body.name] = module_of(body, engine.config.num_hidden_layers)
        return json_response(described(body.name, engine.modules[body.name]))

    async def unregister(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, UnregisterBody)
        check_steering_key(http, self._context.settings)
        engine = self._context.engine
        if body.name not in engine.modules:
            raise ApiError(
                404, f"there is no module named {quoted(body.name)}.", code="module-unknown", param="name"
            )
        used = [edit for edit in self._edits if getattr(edit, "vector", None) == body.name]
        if used:
            raise ApiError(
                409,
                "the global tier uses this module. Clear it first.",
                code="module-used",
                param="name",
                headers={"x-should-retry": "false"},
            )
        del engine.modules[body.name]  # running answers keep the numbers they resolved
        return json_response({"name": body.name, "registered": False})


def check_steering_key(http: HttpRequest, settings: ServerSettings) -> None:
    """Changes need the second key when there is one, and beyond loopback there has to be one."""
    keys = [key.encode() for key in settings.steering_api_key]
    shown = http.headers.get("x-steering-key") or http.headers.get("x-steering-api-key") or ""
    if keys:
        if matching(keys, shown) is None:
            raise ApiError(
                401, "changes need the steering key. Send it as x-steering-key.", code="steering-key"
            )
    elif not is_loopback(settings.host):
        raise ApiError(
            401,
            "this server has no steering key, so nothing can be changed from here. Start it with "
            "--steering-api-key.",
            code="steering-key",
        )


def module_of(body: ModuleBody, num_layers: int) -> Any:
    """A vector that says where it belongs, a bare row of numbers, or packed rows by hook and layer."""
    if (body.vector is None) == (body.vectors is None):
        raise bad("give either vector or vectors.", "vector")
    if body.vectors is not None:
        edits = [found.edit for found in parse_steering({"steering_vectors": body.vectors}, {})]
        if len(edits) != 1:
            raise bad(
                "vectors: a module has one hook and one strength. Register one module for each.", "vectors"
            )
        edit = edits[0]
        if isinstance(edit.vector, SteeringVector):
            return edit.vector
        return SteeringVector(
            dict.fromkeys(edit.layers.expand(num_layers), edit.vector), "add", edit.hook, scale=edit.scale
        )
    assert body.vector is not None
    if isinstance(body.vector, list):
        return Vector(body.vector, body.name)
    if "data" in body.vector or "dtype" in body.vector:
        return unpacked_vector(body.vector, "vector")
    return SteeringVector.from_json(body.vector)


def described(name: str, module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "kind": "additive", "width": len(module), "digest": module.digest}
    if isinstance(module, SteeringVector):
        found |= {
            "op": module.op,
            "hook": module.hook,
            "layers": list(module.layers),
            "streams": module.streams,
            "scale_unit": module.scale_unit,
            "recommended_strength": module.scale,
            "method": module.method,
            "note": module.note,
            "norms": {str(layer): float(row.tensor().norm()) for layer, row in module.rows.items()},
        }
    return found


def _norms(edit: Any, engine: Engine) -> dict[tuple[str, int], float]:
    """How long the vector is that an edit brings, by site; edits without one say nothing."""
    vector = getattr(edit, "vector", None)
    module = engine.modules[vector] if isinstance(vector, str) else vector
    if isinstance(module, SteeringVector):
        return {
            (module.hook, layer): edit.scale * float(row.tensor().norm())
            for layer, row in module.rows.items()
        }
    if isinstance(module, Vector) and edit.hook is not None:
        layers = parse_layers(edit.layers).expand(engine.config.num_hidden_layers)
        return {(edit.hook, layer): edit.scale * float(module.tensor().norm()) for layer in layers}
    return {}
