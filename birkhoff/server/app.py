"""The application: every route, what it takes, and the page that says so.

Routes read their bodies themselves (`body.py`); FastAPI keeps the table and writes `/openapi.json` from the same models
that do the checking. Everything passes the gate first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import PurePath
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from birkhoff import __version__
from birkhoff.errors import BirkhoffError
from birkhoff.server.access_log import AccessLog
from birkhoff.server.api_errors import ApiError, problem_of
from birkhoff.server.async_engine import AsyncEngine
from birkhoff.server.body import RequestBody
from birkhoff.server.capture_routes import CaptureRoutes
from birkhoff.server.chat_routes import ChatBody, ChatRoutes
from birkhoff.server.completion_routes import CompletionBody, CompletionRoutes
from birkhoff.server.context import ServingContext
from birkhoff.server.contrast_routes import ContrastBody, ContrastRoutes
from birkhoff.server.interp_routes import AttentionBody, EstimateBody, InterpRoutes, LensBody
from birkhoff.server.links import Links
from birkhoff.server.message_routes import CountBody, MessageRoutes, MessagesBody
from birkhoff.server.metrics import Metrics
from birkhoff.server.middleware import Middleware
from birkhoff.server.page_routes import PageRoutes
from birkhoff.server.patching_routes import PatchRoutes, SweepBody
from birkhoff.server.response_routes import ResponseRoutes, ResponsesBody
from birkhoff.server.sae_routes import FeaturesBody, GlobalBody, SaeRoutes
from birkhoff.server.server_settings import ServerSettings
from birkhoff.server.service_routes import ServiceRoutes
from birkhoff.server.steering_routes import ModuleBody, SetBody, SteeringRoutes, UnregisterBody
from birkhoff.server.token_routes import DetokenizeBody, TemplateBody, TokenizeBody, TokenRoutes

Handler = Callable[..., Awaitable[Response]]
REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "request_id": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def build_app(
    settings: ServerSettings,
    hub: AsyncEngine,
    metrics: Metrics,
    journal: AccessLog,
    loading: Mapping[str, Any],
) -> ASGIApp:
    name = settings.served_name or PurePath(str(loading.get("model", "nano"))).name
    context = ServingContext(settings, hub, journal, name)
    app = FastAPI(
        title="Birkhoff", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    table = RouteTable(app)
    service = ServiceRoutes(context, metrics)
    chats = ChatRoutes(context)
    completions = CompletionRoutes(context)
    tokens = TokenRoutes(context)
    responses = ResponseRoutes(context)
    messages = MessageRoutes(context)
    links = Links()
    looking = InterpRoutes(context)
    captures = CaptureRoutes(context, links)
    steering = SteeringRoutes(context)
    saes = SaeRoutes(context, looking)
    patching = PatchRoutes(context, looking)
    page = PageRoutes()
    table.get("/", page.home, "The page", "text/html")
    table.get("/favicon.ico", page.icon, "Its picture", "image/svg+xml")
    table.get("/assets/{name}", page.asset, "The page's files", "text/javascript")
    for path in ("/health", "/v1/health"):
        table.get(path, service.health, "Whether the server is up")
    table.get("/ready", service.ready, "Whether a call would be let in")
    table.get("/version", service.version, "The version")
    table.get("/props", service.props, "What is served: the model, its hooks, limits, defaults")
    table.get("/slots", service.slots, "What is running")
    table.get("/v1/models", service.models, "The models")
    table.get("/v1/models/{model:path}", service.model, "One model")
    if settings.metrics:
        table.get("/metrics", service.numbers, "Numbers for Prometheus", "text/plain")
    table.post("/v1/requests/{request_id}/cancel", service.cancel, None, "End a running call")
    table.post("/v1/chat/completions", chats.answer, ChatBody, "An answer in a conversation")
    table.post(
        "/v1/chat/completions/input_tokens", tokens.input_tokens, TemplateBody, "How long a prompt would be"
    )
    table.post("/v1/completions", completions.answer, CompletionBody, "Text on from a prompt")
    table.post("/v1/responses", responses.answer, ResponsesBody, "An answer, in items")
    table.post("/v1/messages", messages.answer, MessagesBody, "An answer, in blocks")
    table.post("/v1/messages/count_tokens", messages.count, CountBody, "How long a prompt would be")
    table.post("/v1/embeddings", service.no_embeddings, None, "Not served")
    table.post("/tokenize", tokens.tokenize, TokenizeBody, "Text to token ids")
    table.post("/detokenize", tokens.detokenize, DetokenizeBody, "Token ids to text")
    table.post("/apply-template", tokens.template, TemplateBody, "A conversation as the model reads it")
    table.get("/v1/interp/schema", looking.schema, "The hooks of the model")
    table.post("/v1/interp/estimate", looking.estimate, EstimateBody, "What a capture would cost")
    table.post("/v1/interp/attention", looking.attention, AttentionBody, "Where attention goes")
    table.post("/v1/lens", looking.lens, LensBody, "What every stream would predict at every depth")
    table.get("/v1/interp/captures", captures.listed, "Captures of this server")
    table.get("/v1/interp/captures/{capture_id}", captures.one, "One capture")
    table.get("/v1/interp/captures/{capture_id}/data", captures.data, "Its rows", "application/octet-stream")
    table.post(
        "/v1/interp/captures/{capture_id}/link", captures.link, None, "Where to find them for a minute"
    )
    table.get("/v1/interp/captures/{capture_id}/slice", captures.slice, "Some of its rows as numbers")
    table.post(
        "/v1/interp/contrast",
        ContrastRoutes(context).compare,
        ContrastBody,
        "Two sets of texts, and where they differ",
    )
    table.get("/v1/saes", saes.attached, "Dictionaries of features")
    table.post("/v1/interp/features", saes.features, FeaturesBody, "Features that fire on a text")
    table.get("/v1/interp/features/{sae}/{feature}", saes.feature, "What is known of one feature")
    table.get("/v1/steering/sae", saes.status, "Features every answer has set")
    table.post("/v1/steering/sae/set", saes.set, GlobalBody, "Set features in every answer")
    table.post("/v1/steering/sae/clear", saes.clear, None, "Take them away")
    table.post(
        "/v1/patch_sweep", patching.sweep, SweepBody, "One text's inside in another's place, cell by cell"
    )
    table.delete("/v1/patch_source/{run}", patching.forget, "Forget a kept run")
    table.get("/v1/steering", steering.status, "The edits every answer gets")
    table.get("/v1/steering/layers", steering.layers, "Which hooks can be steered at each layer")
    table.post("/v1/steering/set", steering.set, SetBody, "Set the edits every answer gets")
    table.post("/v1/steering/clear", steering.clear, None, "Take them away")
    table.get("/v1/steering/modules", steering.modules, "Named vectors")
    table.post("/v1/steering/modules/register", steering.register, ModuleBody, "Name a vector")
    table.post("/v1/steering/modules/unregister", steering.unregister, UnregisterBody, "Forget a name")
    table.finish()
    return Middleware(app, settings, metrics, journal, links)


class RouteTable:
    """Routes with the models of their bodies."""

    def __init__(self, app: FastAPI):
        self._app = app
        self._models = list[type[RequestBody]]()
        for kind in (ApiError, BirkhoffError, Exception):
            app.add_exception_handler(kind, _problem)
        app.add_exception_handler(HTTPException, _http_problem)

    def get(self, path: str, handler: Handler, summary: str, kind: str = "application/json") -> None:
        self._add(path, handler, "GET", None, summary, kind)

    def delete(self, path: str, handler: Handler, summary: str) -> None:
        self._add(path, handler, "DELETE", None, summary)

    def post(self, path: str, handler: Handler, body: type[RequestBody] | None, summary: str) -> None:
        self._add(path, handler, "POST", body, summary)

    def _add(
        self,
        path: str,
        handler: Handler,
        method: str,
        body: type[RequestBody] | None,
        summary: str,
        kind: str = "application/json",
    ) -> None:
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        failure = {
            "description": "refused",
            "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model=error)}}},
        }
        extra: dict[str, Any] = {
            "responses": {
                "200": {"description": "done", "content": {kind: {}}},
                "4XX": failure,
                "5XX": failure,
            }
        }
        if body is not None:
            self._models.append(body)
            schema = {"$ref": REFERENCE.format(model=body.__name__)}
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        self._app.add_api_route(
            path,
            handler,
            methods=[method],
            summary=summary,
            response_model=None,
            response_class=Response,
            openapi_extra=extra,
            operation_id=f"{method.lower()}{path}",
        )

    def finish(self) -> None:
        """Put the bodies' models on the page."""
        page = self._app.openapi()
        for path in page["paths"].values():
            for operation in path.values():
                operation["responses"] = {
                    code: each for code, each in operation["responses"].items() if code != "422"
                }
        _, models = models_json_schema(
            [(model, "validation") for model in self._models], ref_template=REFERENCE
        )
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        schemas |= {**models.get("$defs", {}), "Error": ERROR, "MessagesError": MESSAGES_ERROR}


async def _problem(http: HttpRequest, error: Exception) -> Response:
    return problem_of(error).response(http.url.path, http.state.request_id)


async def _http_problem(http: HttpRequest, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    said = {
        404: "there is no such route. /openapi.json lists those there are.",
        405: "this route takes another method.",
    }
    problem = ApiError(
        error.status_code,
        said.get(error.status_code, "the call was refused."),
        code="route",
        headers=dict(error.headers or {}),
    )
    return problem.response(http.url.path, http.state.request_id)
