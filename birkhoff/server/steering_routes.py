"""Steering over HTTP: fields of a call, the global tier that applies to every request, and named modules.

Fields of a call are parsed by `steering/steering_fields.py` into the same edits that Python uses. Changes of the global
tier and of modules need the steering key in addition to the API key; they are validated completely before any is
applied. Running requests keep the edits they started with.
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
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.body import RequestBody
from birkhoff.server.fields import InterpFields, ModuleName, Name
from birkhoff.server.middleware import find_key
from birkhoff.server.reply import json_response
from birkhoff.server.server_settings import ServerSettings, is_loopback
from birkhoff.steering.steering_fields import intervention, parse_steering
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_encoding import unpacked_vector
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.server.context import ServingContext


def parse_edits(fields: dict[str, Any], engine: Engine) -> list[Any] | None:
    """Parse the steering fields of a body into edits; None if there are none."""
    return engine.edits_from_json(fields) if fields else None


def request_edits(fields: dict[str, Any], engine: Engine) -> list[Any] | None:
    """Parse the steering fields of a request without checking them; the request resolves and checks its edits."""
    return engine.request_edits_from_json(fields) if fields else None


class ModuleBody(RequestBody):
    name: ModuleName
    vector: dict[str, Any] | Annotated[list[float], Field(max_length=1 << 20)] | None = None
    vectors: dict[str, Any] | None = None
    replace: bool = False


class UnregisterBody(RequestBody):
    name: Name


class GlobalSteeringBody(InterpFields):
    """The steering fields of a call, applied to every later request."""

    replace: bool = True


class SteeringRoutes:
    def __init__(self, context: ServingContext):
        self._context = context
        self._lock = threading.Lock()
        self._edits: list[Any] = []
        self._tier: AbstractContextManager[None] | None = None

    async def status(self) -> Response:
        """The edits of the global tier, and the summed vector norms by hook and layer."""
        norms: dict[str, dict[str, float]] = {}
        for edit in self._edits:
            for (hook, layer), norm in _vector_norms(edit, self._context.engine).items():
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
        body, _ = await self._context.read_body(
            http, GlobalSteeringBody, self._context.settings.max_upload_bytes
        )
        check_steering_key(http, self._context.settings)
        edits = parse_edits(body.steering_fields, self._context.engine) or []
        if not edits:
            raise bad_request(
                "nothing to set: give steering fields, or call /v1/steering/clear.", "interventions"
            )
        self._change(edits if body.replace else [*self._edits, *edits])
        return await self.status()

    async def clear(self, http: HttpRequest) -> Response:
        check_steering_key(http, self._context.settings)
        self._change([])
        return await self.status()

    def _change(self, edits: list[Any]) -> None:
        """Enter the new tier before leaving the old one, so that no request starts without either."""
        with self._lock:
            tier = self._context.engine.steering(*edits) if edits else None
            if tier is not None:
                tier.__enter__()
            if self._tier is not None:
                self._tier.__exit__(None, None, None)
            self._tier = tier
            self._edits = edits

    # Modules

    async def modules(self) -> Response:
        engine = self._context.engine
        return json_response(
            {"modules": [_module_json(name, engine.modules[name]) for name in sorted(engine.modules)]}
        )

    async def register(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read_body(http, ModuleBody, self._context.settings.max_upload_bytes)
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
        engine.modules[body.name] = _parse_module(body, engine.config.num_hidden_layers)
        return json_response(_module_json(body.name, engine.modules[body.name]))

    async def unregister(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read_body(http, UnregisterBody)
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
        del engine.modules[body.name]  # running requests keep the vectors they resolved
        return json_response({"name": body.name, "registered": False})


def check_steering_key(http: HttpRequest, settings: ServerSettings) -> None:
    """Raise 401 unless the steering key is presented. On loopback no key is needed if none is set."""
    keys = [key.encode() for key in settings.steering_api_key]
    presented = http.headers.get("x-steering-key") or http.headers.get("x-steering-api-key") or ""
    if keys:
        if find_key(keys, presented) is None:
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


def _parse_module(body: ModuleBody, num_layers: int) -> Any:
    """Parse a module: a steering vector with its hook, a plain list of numbers, or packed rows by hook and layer."""
    if (body.vector is None) == (body.vectors is None):
        raise bad_request("give either vector or vectors.", "vector")
    if body.vectors is not None:
        edits = [parsed.edit for parsed in parse_steering({"steering_vectors": body.vectors}, {})]
        if len(edits) != 1:
            raise bad_request(
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


def _module_json(name: str, module: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": name, "kind": "additive", "width": len(module), "digest": module.digest}
    if isinstance(module, SteeringVector):
        fields |= {
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
    return fields


def _vector_norms(edit: Any, engine: Engine) -> dict[tuple[str, int], float]:
    """Scaled norm of an edit's vector, by hook and layer; empty for edits without a vector."""
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
