"""The endpoint plugin of `vllm serve`: routes for modules, dictionaries and captures, beside its own.

Loaded by vLLM when `VLLM_PLUGINS` names `birkhoff`. Paths and answers are those of `birkhoff serve`. Changes need
the steering key (`BIRKHOFF_STEERING_API_KEY`), or a loopback address if none is set; all routes are behind vLLM's API
key, if that is set."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from birkhoff.capture.store.reader import read_request
from birkhoff.errors import BirkhoffError, CaptureFileError, RequestError, SteeringError, quoted
from birkhoff.hooks.field_paths import check_keys
from birkhoff.option_checks import is_loopback
from birkhoff.sae.sae_manifest import MODULE_KINDS
from birkhoff.steering.tiers import CLAMPS, VECTORS, SteeringModule
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_encoding import unpacked_vector
from birkhoff.steering.vector_file import SteeringVector
from birkhoff.vllm.http_front import HttpFront
from birkhoff.vllm.serve_command import STEERING_KEY

MAX_MODULES = 256
Handler = Callable[[HttpFront, Request], Awaitable[dict[str, Any]]]


class HookRoutes:
    """What vLLM asks of an endpoint plugin."""

    name = "birkhoff"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        for method, path, handler in (
            ("GET", "/v1/interp/schema", schema),
            ("GET", "/v1/interp/counts", counts),
            ("GET", "/v1/interp/captures/{tag}/{request_id}", capture),
            ("GET", "/v1/steering/modules", modules),
            ("POST", "/v1/steering/modules/register", register),
            ("POST", "/v1/steering/modules/unregister", unregister),
            ("GET", "/v1/saes", saes),
        ):
            app.add_api_route(path, _endpoint(handler), methods=[method], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is not None:
            state.birkhoff = HttpFront(engine_client, asyncio.get_running_loop())
            state.birkhoff_is_local = is_loopback(args.host or "")


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        front: HttpFront = request.app.state.birkhoff
        try:
            return JSONResponse(await handler(front, request))
        except _Refused as error:
            return _error(error.status, str(error), error.code)
        except CaptureFileError as error:
            return _error(404, str(error), error.code)
        except BirkhoffError as error:
            return _error(400, str(error), error.code)

    # FastAPI reads the annotation, which here would be a text.
    endpoint.__annotations__ = {"request": Request, "return": Response}
    return endpoint


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str):
        super().__init__(message)
        self.status = status
        self.code = code


def _error(status: int, message: str, code: str) -> Response:
    body = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return JSONResponse({"error": body}, status)


async def schema(front: HttpFront, request: Request) -> dict[str, Any]:
    """The armed hooks: shape and dtype of a row, and layers."""
    hooks = {name: {**row.to_json(), "layers": list(front.armed[name])} for name, row in front.schema.items()}
    return {"hooks": hooks, "num_layers": front.num_layers, "backend": "vllm"}


async def counts(front: HttpFront, request: Request) -> dict[str, Any]:
    """Counters of every rank."""
    return {"ranks": await front.counts()}


async def capture(front: HttpFront, request: Request) -> dict[str, Any]:
    """What a capture that the ranks wrote contains, read from its files."""
    roots = front.planner.captures.file_roots
    if "filesystem" not in roots:
        raise _Refused(404, "this server writes no captures. Start it with a capture root.", "capture-file")
    tag, request_id = request.path_params["tag"], request.path_params["request_id"]
    folder = _confined(roots["filesystem"], tag, request_id)

    def read() -> dict[str, Any]:
        entries = read_request(folder)
        listed = [
            {"hook": hook, "layer": layer, "rows": len(entry), "positions": entry.positions}
            for (hook, layer), entry in sorted(entries.items())
        ]
        return {"tag": tag, "request_id": request_id, "entries": listed}

    return await asyncio.to_thread(read)


def _confined(root: Path, tag: str, request_id: str) -> Path:
    folder = (root / tag / request_id).resolve()
    if not folder.is_relative_to(root.resolve()) or not folder.is_dir():
        raise _Refused(404, f"there is no capture {quoted(f'{tag}/{request_id}')}.", "capture-file")
    return folder


async def modules(front: HttpFront, request: Request) -> dict[str, Any]:
    named = front.planner.steering.modules
    listed = [{"name": name, "digest": named[name].digest} for name in sorted(named)]
    return {"modules": listed, "count": len(listed)}


async def saes(front: HttpFront, request: Request) -> dict[str, Any]:
    registry = front.planner.saes.registry
    return {"saes": [registry[name].describe() for name in registry]}


async def register(front: HttpFront, request: Request) -> dict[str, Any]:
    """Register a vector, tiers of vectors, or a dictionary by the path of its files on the server."""
    body = await _body(request)
    kind = body.get("kind", "additive")
    name = body.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"name is {quoted(name)}, expected the name of the module.")
    if kind in MODULE_KINDS:
        check_keys(body, ("name", "kind", "path", "replace"), "", SteeringError)
        path = body.get("path")
        if not isinstance(path, str):
            raise RequestError(f"path is {quoted(path)}, expected the path of an SAE's files on the server.")
        kind_name = MODULE_KINDS[kind]
        replace = bool(body.get("replace"))
        await asyncio.to_thread(front.planner.saes.attach, name, path, kind_name, None, replace)
        return {"status": "ok", "name": name, "kind": kind}
    if kind != "additive":
        raise RequestError(f"kind is {quoted(kind)}, expected additive, {', '.join(MODULE_KINDS)}.")
    check_keys(body, ("name", "kind", "vector", "replace", *VECTORS, *CLAMPS), "", SteeringError)
    named = front.planner.steering.modules
    tiers = {field: body[field] for field in (*VECTORS, *CLAMPS) if body.get(field) is not None}
    if name in named and not body.get("replace", bool(tiers)):
        raise _Refused(409, "a module of this name is registered. Say replace.", "module-taken")
    if name not in named and len(named) >= MAX_MODULES:
        raise RequestError(
            f"{MAX_MODULES} modules are registered, and no more are kept. Unregister one first."
        )
    named[name] = await asyncio.to_thread(_module, body, tiers)
    return {"status": "ok", "name": name, "digest": named[name].digest, "modules": sorted(named)}


def _module(body: Mapping[str, Any], tiers: Mapping[str, Any]) -> Any:
    vector = body.get("vector")
    if (vector is None) == (not tiers):
        raise RequestError("expected either vector or tiers such as vectors and decode_vectors.")
    if tiers:
        return SteeringModule.from_json(tiers)
    if isinstance(vector, Mapping):
        packed = "data" in vector or "dtype" in vector
        return unpacked_vector(vector, "vector") if packed else SteeringVector.from_json(vector)
    return Vector(vector, "vector")


async def unregister(front: HttpFront, request: Request) -> dict[str, Any]:
    """Remove a module; running requests keep what they resolved."""
    body = await _body(request)
    check_keys(body, ("name",), "", SteeringError)
    name = str(body.get("name"))
    if name in front.planner.steering.modules:
        del front.planner.steering.modules[name]
    elif name in front.planner.saes.registry:
        await asyncio.to_thread(front.planner.saes.detach, name, True)
    else:
        raise _Refused(404, f"there is no module named {quoted(name)}.", "module-unknown")
    return {"status": "ok", "name": name, "registered": False}


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request that changes something: the steering key is checked first."""
    keys = os.environ.get(STEERING_KEY, "").split()
    given = request.headers.get("x-steering-key", "").encode()
    if keys and not any(hmac.compare_digest(given, key.encode()) for key in keys):
        raise _Refused(401, "changes need the steering key. Send it as x-steering-key.", "steering-key")
    if not keys and not request.app.state.birkhoff_is_local:
        why = f"this server has no steering key, so nothing can be changed from here. Start it with {STEERING_KEY}"
        raise _Refused(401, f"{why} set, or on a loopback address.", "steering-key")
    try:
        body = json.loads(await request.body())
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RequestError("the body is no JSON object.")
    return body
