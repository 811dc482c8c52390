"""Steering over HTTP: fields of a call, the global tier that applies to every request, and named modules.

Fields of a call are parsed by `steering/steering_fields.py` into the same edits that Python uses. Changes of the global
tier and of modules need the steering key in addition to the API key; they are validated completely before any is
applied. Running requests keep the edits they started with.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.errors import quoted
from birkhoff.option_checks import is_loopback
from birkhoff.sae.sae_manifest import MODULE_KINDS
from birkhoff.server.api_errors import ApiError, bad_request, conflict
from birkhoff.server.body import StrictBody
from birkhoff.server.fields import ModuleName, Name
from birkhoff.server.global_steering import GlobalSteering, GlobalSteeringBody, TargetBody, TierFields
from birkhoff.server.middleware import find_key
from birkhoff.server.reply import json_response
from birkhoff.server.sae_modules import SaeFields, read_saes
from birkhoff.server.server_settings import ServerSettings
from birkhoff.steering.tiers import SteeringModule
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_encoding import unpacked_vector
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.server.context import ServingContext


def request_edits(fields: dict[str, Any], engine: Engine) -> list[Any] | None:
    """Parse the steering fields of a request without checking them; the request resolves and checks its edits."""
    return engine.request_edits_from_json(fields) if fields else None


MAX_MODULES = 256
MAX_SAES = 64


class ModuleBody(TierFields, SaeFields):
    """A module to register: one `vector`, tiers of any hooks, layers, phases and scales, or an SAE.

    A name that is taken needs `replace` beside `vector`. Tiers replace it, as on vLLM steering servers, unless
    `replace` is false."""

    name: ModuleName
    kind: Literal["additive", "sae_delta", "sae_full_reconstruction"] = "additive"
    vector: dict[str, Any] | Annotated[list[float], Field(max_length=1 << 20)] | None = None
    replace: bool | None = None


class UnregisterBody(StrictBody):
    name: Name


class SteeringRoutes:
    def __init__(self, context: ServingContext):
        self._context = context
        self._global = GlobalSteering()

    async def status(self) -> Response:
        """Edits that apply to every request."""
        return json_response(self._global.status(self._context.engine))

    async def layers(self) -> Response:
        """Hooks that can be steered, by layer."""
        engine = self._context.engine
        steerable = [name for name, row in engine.schema.items() if row.steerable]
        last = engine.config.num_hidden_layers - 1
        each = {
            str(layer): {
                "hook_points": [name for name in steerable if not engine.schema[name].once or layer == last]
            }
            for layer in range(last + 1)
        }
        return json_response({"layers": each})

    async def set(self, http: HttpRequest) -> Response:
        """Sets the edits of every later request, in the fields of a call or as `vectors`, `prefill_vectors` and
        `decode_vectors` by hook and layer. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        context = self._context
        body, _ = await context.read_body(http, GlobalSteeringBody, context.settings.max_upload_bytes)
        reply = await context.build(http, body, lambda: self._global.set(body, context.engine))
        return json_response({**reply, **self._global.status(context.engine)})

    async def clear(self, http: HttpRequest) -> Response:
        """Removes the edits that apply to every request. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        body, _ = await self._context.read_body(http, TargetBody, optional=True)
        body.check_target()
        self._global.clear(self._context.engine)
        return json_response({"status": "ok", **self._global.status(self._context.engine)})

    # Modules

    async def modules(self) -> Response:
        """Registered vectors."""
        engine = self._context.engine
        listed = [_module_json(name, engine.modules[name], engine) for name in sorted(engine.modules)]
        return json_response({"modules": listed, "count": len(listed)})

    async def register(self, http: HttpRequest) -> Response:
        """Registers a vector, or vectors by tier, hook and layer, under a name that calls can use. Needs the steering
        key."""
        check_steering_key(http, self._context.settings)
        body, _ = await self._context.read_body(http, ModuleBody, self._context.settings.max_upload_bytes)
        engine = self._context.engine
        if body.kind != "additive":
            return json_response(await asyncio.to_thread(self._register_sae, body))
        if body.sae_manifest is not None or body.sae_weights is not None:
            given = "sae_weights" if body.sae_manifest is None else "sae_manifest"
            raise bad_request(f"{given} is for the kinds sae_delta and sae_full_reconstruction.", given)
        may_replace = bool(body.tiers) if body.replace is None else body.replace
        if body.name in engine.modules and not may_replace:
            raise module_taken()
        if body.name not in engine.modules and len(engine.modules) >= MAX_MODULES:
            raise bad_request(
                f"{MAX_MODULES} modules are registered, and no more are kept. Unregister one first.", "name"
            )

        def parse_and_register() -> None:
            engine.modules[body.name] = _parse_module(body, engine)

        await self._context.build(http, body, parse_and_register)
        reply = _module_json(body.name, engine.modules[body.name], engine)
        spelling = "tiers" if body.tiers else "vector"
        return json_response(
            {"status": "ok", "spelling": spelling, **reply, "modules": sorted(engine.modules)}
        )

    def _register_sae(self, body: ModuleBody) -> dict[str, Any]:
        engine = self._context.engine
        if body.tiers or body.vector is not None:
            given = next(iter(body.tiers), "vector")
            raise bad_request(f"{given} is for the kind additive.", given)
        if body.name in engine.modules:
            raise ApiError(409, "a vector has this name.", code="module-taken", param="name")
        if body.name not in engine.saes.registry and len(list(engine.saes.registry)) >= MAX_SAES:
            raise bad_request(
                f"{MAX_SAES} SAEs are attached, and no more are kept. Detach one first.", "name"
            )
        saes, features = read_saes(body, self._context.settings.sae_root)
        replace = body.name in engine.saes.registry and body.replace is not False
        engine.attach(body.name, saes, MODULE_KINDS[body.kind], features, replace)
        module = engine.saes.registry[body.name].describe()
        return {
            "status": "ok",
            **module,
            "name": body.name,
            "kind": body.kind,
            "modules": sorted([*engine.modules, *engine.saes.registry]),
        }

    async def unregister(self, http: HttpRequest) -> Response:
        """Removes a registered vector. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        body, _ = await self._context.read_body(http, UnregisterBody)
        engine = self._context.engine
        if body.name in engine.saes.registry and body.name not in engine.modules:
            engine.detach(body.name, drain=True)  # running requests keep it
            return json_response({"status": "ok", "name": body.name, "registered": False})
        if body.name not in engine.modules:
            raise ApiError(
                404, f"there is no module named {quoted(body.name)}.", code="module-unknown", param="name"
            )
        if self._global.uses(body.name):
            raise conflict("the global tier uses this module. Clear it first.", "name", "module-used")
        del engine.modules[body.name]  # running requests keep the vectors they resolved
        return json_response(
            {"status": "ok", "name": body.name, "registered": False, "modules": sorted(engine.modules)}
        )


def check_steering_key(http: HttpRequest, settings: ServerSettings) -> None:
    """Raise 401 unless the steering key is presented. On loopback no key is needed if none is set."""
    keys = [key.encode() for key in settings.steering_api_key]
    presented = http.headers.get("x-steering-key") or http.headers.get("x-steering-api-key")
    if not presented:  # vLLM steering servers take it as the bearer token
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        presented = token if scheme.lower() == "bearer" else None
    if keys:
        if find_key(keys, presented or "") is None:
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


def module_taken() -> ApiError:
    return conflict(
        "a module of this name is registered. Say replace, or choose another.", "name", "module-taken"
    )


def _parse_module(body: ModuleBody, engine: Engine) -> Any:
    """Parse a module: tiers, a steering vector with its hook, a packed row, or a plain list of numbers."""
    if (body.vector is None) == (not body.tiers):
        raise bad_request("give either vector or vectors, prefill_vectors, decode_vectors.", "vector")
    if body.tiers:
        module = SteeringModule.from_json(body.tiers)
        return module.as_vector(engine.config.num_hidden_layers) or module
    assert body.vector is not None
    if isinstance(body.vector, list):
        return Vector(body.vector, body.name)
    if "data" in body.vector or "dtype" in body.vector:
        return unpacked_vector(body.vector, "vector")
    return SteeringVector.from_json(body.vector)


def _module_json(name: str, module: Any, engine: Engine) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": name, "kind": "additive", "digest": module.digest}
    if isinstance(module, SteeringModule):
        sites = module.sites(engine.config.num_hidden_layers)
        return fields | {
            "hook": ", ".join(sorted({hook for hook, _ in sites})),
            "layers": sorted({layer for _, layer in sites}),
            "sites": [f"{hook}[{layer}]" for hook, layer in sites],
            "phases": sorted({part.phase for part in module.parts}),
        }
    fields["width"] = len(module)
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
