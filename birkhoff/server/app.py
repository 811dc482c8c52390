"""The ASGI application: all routes with their OpenAPI documentation, wrapped in the middleware.

Routes read their bodies themselves (`body.py`). FastAPI does the routing and writes `/openapi.json` from the models
that also validate the bodies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from birkhoff import __version__
from birkhoff.errors import BirkhoffError, quoted
from birkhoff.server.access_log import AccessLog
from birkhoff.server.api_errors import ApiError, to_api_error
from birkhoff.server.async_engine import AsyncEngine
from birkhoff.server.attribution_routes import AttributeBody, AttributionRoutes, CircuitBody
from birkhoff.server.body import RequestBody
from birkhoff.server.capture_routes import CaptureRoutes
from birkhoff.server.chat_routes import ChatBody, ChatRoutes
from birkhoff.server.completion_routes import CompletionBody, CompletionRoutes
from birkhoff.server.context import ServingContext
from birkhoff.server.contrast_routes import ContrastBody, ContrastRoutes
from birkhoff.server.docs_page import DocsPage
from birkhoff.server.embeddings_routes import EmbeddingsBody, EmbeddingsRoutes
from birkhoff.server.global_steering import GlobalSteeringBody
from birkhoff.server.interp_routes import (
    AttentionBody,
    EstimateBody,
    InterpRoutes,
    LensBody,
    LogitAttributionBody,
)
from birkhoff.server.links import SignedLinks
from birkhoff.server.llamacpp_routes import LlamaCompletionBody, LlamaCompletionRoutes
from birkhoff.server.message_routes import CountTokensBody, MessageRoutes, MessagesBody
from birkhoff.server.metrics import Metrics
from birkhoff.server.middleware import Middleware
from birkhoff.server.ollama_embeddings import OllamaEmbedBody, OllamaEmbeddingRoutes, OllamaEmbeddingsBody
from birkhoff.server.ollama_models import OllamaModelRoutes, OllamaShowBody
from birkhoff.server.ollama_routes import OllamaChatBody, OllamaGenerateBody, OllamaRoutes
from birkhoff.server.page_routes import PageRoutes
from birkhoff.server.patching_routes import PatchingRoutes, SweepBody
from birkhoff.server.response_routes import ResponseRoutes, ResponsesBody
from birkhoff.server.route_examples import EXAMPLES
from birkhoff.server.sae_routes import FeaturesBody, GlobalClampsBody, SaeRoutes
from birkhoff.server.server_settings import ServerSettings
from birkhoff.server.service_routes import ServiceRoutes
from birkhoff.server.steering_routes import ModuleBody, SteeringRoutes, UnregisterBody
from birkhoff.server.token_routes import DetokenizeBody, TemplateBody, TokenizeBody, TokenRoutes
from birkhoff.weights.locate import locate

Handler = Callable[..., Awaitable[Response]]
SCHEMA_REF = "#/components/schemas/{model}"
ERROR_SCHEMA = {
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
OLLAMA_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
MESSAGES_ERROR_SCHEMA = {
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
    async_engine: AsyncEngine,
    metrics: Metrics,
    access_log: AccessLog,
    load_options: Mapping[str, Any],
) -> ASGIApp:
    """Build the application. `load_options` are the options the engine is loaded with; they name the model."""
    app, links = _routed_app(settings, async_engine, metrics, access_log, load_options)
    return Middleware(app, settings, metrics, access_log, links)


def openapi_document() -> dict[str, Any]:
    """The document of `/openapi.json` with default settings; no model is loaded."""
    settings, metrics = ServerSettings(), Metrics()
    engine = AsyncEngine(settings, metrics)
    return _routed_app(settings, engine, metrics, AccessLog(settings.log), {})[0].openapi()


def _routed_app(
    settings: ServerSettings,
    async_engine: AsyncEngine,
    metrics: Metrics,
    access_log: AccessLog,
    load_options: Mapping[str, Any],
) -> tuple[FastAPI, SignedLinks]:
    """The application with all its routes, without the middleware."""
    names = settings.model_names or [PurePath(str(load_options.get("model", "nano"))).name]
    context = ServingContext(settings, async_engine, access_log, tuple(names))
    app = FastAPI(
        title="Birkhoff", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    links = SignedLinks()
    routes = RouteRegistry(app)
    _add_service_routes(routes, context, metrics)
    _add_generation_routes(routes, context)
    _add_ollama_model_routes(routes, context, load_options)
    _add_interp_routes(routes, context, links)
    docs = DocsPage(app.openapi)
    routes.get("/docs", docs.page, "API page", "text/html")
    routes.finish()
    return app, links


def _add_service_routes(routes: RouteRegistry, context: ServingContext, metrics: Metrics) -> None:
    page = PageRoutes()
    service = ServiceRoutes(context, metrics)
    routes.get("/", page.home, "Web page", "text/html")
    routes.get("/favicon.ico", page.icon, "Favicon", "image/svg+xml")
    routes.get("/assets/{name}", page.asset, "Web page asset", "text/javascript")
    for path in ("/health", "/v1/health"):
        routes.get(path, service.health, "Health check")
    routes.get("/ready", service.ready, "Readiness check")
    routes.get("/version", service.version, "Version")
    routes.get("/props", service.props, "Model and server properties")
    routes.get("/slots", service.slots, "Active requests")
    routes.get("/v1/models", service.models, "List models")
    routes.get("/v1/models/{model:path}", service.model, "Get a model")
    if context.settings.metrics:
        routes.get("/metrics", service.metrics, "Prometheus metrics", "text/plain")
    routes.post("/v1/requests/{request_id}/cancel", service.cancel, None, "Cancel a request")


def _add_generation_routes(routes: RouteRegistry, context: ServingContext) -> None:
    tokens = TokenRoutes(context)
    messages = MessageRoutes(context)
    routes.post("/v1/chat/completions", ChatRoutes(context).create, ChatBody, "Chat completion")
    routes.post(
        "/v1/chat/completions/input_tokens", tokens.input_tokens, TemplateBody, "Count chat prompt tokens"
    )
    routes.post("/v1/completions", CompletionRoutes(context).create, CompletionBody, "Text completion")
    routes.post("/v1/responses", ResponseRoutes(context).create, ResponsesBody, "Create a response")
    routes.post("/v1/messages", messages.create, MessagesBody, "Create a message")
    routes.post("/v1/messages/count_tokens", messages.count_tokens, CountTokensBody, "Count message tokens")
    routes.post("/v1/embeddings", EmbeddingsRoutes(context).create, EmbeddingsBody, "Embeddings")
    routes.post(
        "/completion", LlamaCompletionRoutes(context).create, LlamaCompletionBody, "llama.cpp completion"
    )
    ollama = OllamaRoutes(context)
    routes.post("/api/chat", ollama.chat, OllamaChatBody, "Ollama chat")
    routes.post("/api/generate", ollama.generate, OllamaGenerateBody, "Ollama generate")
    vectors = OllamaEmbeddingRoutes(context)
    routes.post("/api/embed", vectors.embed, OllamaEmbedBody, "Ollama embed")
    routes.post("/api/embeddings", vectors.embeddings, OllamaEmbeddingsBody, "Ollama embeddings")
    routes.post("/tokenize", tokens.tokenize, TokenizeBody, "Tokenize")
    routes.post("/detokenize", tokens.detokenize, DetokenizeBody, "Detokenize")
    routes.post("/apply-template", tokens.template, TemplateBody, "Apply the chat template")


def _add_ollama_model_routes(
    routes: RouteRegistry, context: ServingContext, load_options: Mapping[str, Any]
) -> None:
    def find_files() -> Path:
        return locate(load_options.get("model", "nano"), load_options.get("revision"))

    models = OllamaModelRoutes(context, find_files)
    routes.get("/api/tags", models.tags, "Ollama models")
    routes.post("/api/show", models.show, OllamaShowBody, "Ollama model details")
    routes.get("/api/ps", models.running, "Ollama models in memory")
    routes.get("/api/version", models.version, "Ollama version")


def _add_interp_routes(routes: RouteRegistry, context: ServingContext, links: SignedLinks) -> None:
    interp = InterpRoutes(context)
    captures = CaptureRoutes(context, links)
    steering = SteeringRoutes(context)
    saes = SaeRoutes(context, interp)
    patching = PatchingRoutes(context, interp)
    attribution = AttributionRoutes(context, interp)
    routes.get("/v1/interp/schema", interp.schema, "Hook schema")
    routes.post("/v1/interp/estimate", interp.estimate, EstimateBody, "Estimate a capture")
    routes.post("/v1/interp/attention", interp.attention, AttentionBody, "Attention weights")
    routes.post("/v1/lens", interp.lens, LensBody, "Logit lens")
    routes.post("/v1/logit_attribution", interp.logit_attribution, LogitAttributionBody, "Attribute a logit")
    routes.post("/v1/attribute", attribution.attribute, AttributeBody, "Attribute a prediction")
    routes.post("/v1/circuit", attribution.circuit, CircuitBody, "Find a circuit")
    routes.get("/v1/interp/captures", captures.list_captures, "List captures")
    routes.get("/v1/interp/captures/{capture_id}", captures.get_capture, "Get a capture")
    routes.get(
        "/v1/interp/captures/{capture_id}/data",
        captures.data,
        "Download a capture",
        "application/octet-stream",
    )
    routes.post("/v1/interp/captures/{capture_id}/link", captures.link, None, "Create a download link")
    routes.get("/v1/interp/captures/{capture_id}/slice", captures.slice, "Slice of a capture")
    routes.post(
        "/v1/interp/contrast", ContrastRoutes(context).compare, ContrastBody, "Contrast two sets of texts"
    )
    routes.get("/v1/saes", saes.list_saes, "List SAEs")
    routes.post("/v1/interp/features", saes.features, FeaturesBody, "Active SAE features")
    routes.get("/v1/interp/features/{sae}", saes.search, "Search SAE features")
    routes.get("/v1/interp/features/{sae}/{feature}", saes.feature, "Get an SAE feature")
    routes.get("/v1/steering/sae", saes.status, "Get global clamps")
    routes.post("/v1/steering/sae/set", saes.set, GlobalClampsBody, "Set global clamps")
    routes.post("/v1/steering/sae/clear", saes.clear, None, "Clear global clamps")
    routes.post("/v1/patch_sweep", patching.sweep, SweepBody, "Activation-patching sweep")
    routes.delete("/v1/patch_source/{run}", patching.delete_run, "Delete a stored run")
    routes.get("/v1/steering", steering.status, "Get global steering")
    routes.get("/v1/steering/layers", steering.layers, "Steerable layers")
    routes.post("/v1/steering/set", steering.set, GlobalSteeringBody, "Set global steering")
    routes.post("/v1/steering/clear", steering.clear, None, "Clear global steering")
    routes.get("/v1/steering/modules", steering.modules, "List steering modules")
    routes.post("/v1/steering/modules/register", steering.register, ModuleBody, "Register a steering module")
    routes.post(
        "/v1/steering/modules/unregister", steering.unregister, UnregisterBody, "Unregister a steering module"
    )


class RouteRegistry:
    """Adds routes to a FastAPI application, with their body models in the OpenAPI document.

    A route is described by the docstring of its handler."""

    def __init__(self, app: FastAPI):
        self._app = app
        self._models = list[type[RequestBody]]()
        for error_type in (ApiError, BirkhoffError, Exception):
            app.add_exception_handler(error_type, _error_response)
        app.add_exception_handler(HTTPException, _routing_error_response)

    def get(self, path: str, handler: Handler, summary: str, media_type: str = "application/json") -> None:
        self._add(path, handler, "GET", None, summary, media_type)

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
        media_type: str = "application/json",
    ) -> None:
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        error = "OllamaError" if path.startswith("/api/") else error
        error_response = {
            "description": "Error",
            "content": {"application/json": {"schema": {"$ref": SCHEMA_REF.format(model=error)}}},
        }
        extra: dict[str, Any] = {
            "responses": {
                "200": {"description": "Success", "content": {media_type: {}}},
                "4XX": error_response,
                "5XX": error_response,
            }
        }
        if body is not None:
            self._models.append(body)
            schema = {"$ref": SCHEMA_REF.format(model=body.__name__)}
            content = {"schema": schema, "example": EXAMPLES[path]}
            extra["requestBody"] = {"required": True, "content": {"application/json": content}}
        self._app.add_api_route(
            path,
            handler,
            methods=[method],
            summary=summary,
            description=" ".join((handler.__doc__ or "").split()),
            response_model=None,
            response_class=Response,
            openapi_extra=extra,
            operation_id=f"{method.lower()}{path}",
        )
        if method == "GET":  # what monitors send; uvicorn leaves the body out
            self._app.add_api_route(
                path, handler, methods=["HEAD"], response_class=Response, include_in_schema=False
            )

    def finish(self) -> None:
        """Complete the OpenAPI document: add the body models, remove FastAPI's validation errors."""
        document = self._app.openapi()
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        _, models = models_json_schema(
            [(model, "validation") for model in self._models], ref_template=SCHEMA_REF
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        schemas |= models.get("$defs", {})
        schemas |= {
            "Error": ERROR_SCHEMA,
            "MessagesError": MESSAGES_ERROR_SCHEMA,
            "OllamaError": OLLAMA_ERROR_SCHEMA,
        }


async def _error_response(http: HttpRequest, error: Exception) -> Response:
    prompt_field = getattr(http.state, "prompt_field", None)
    return to_api_error(error, prompt_field=prompt_field).response(http.url.path, http.state.request_id)


async def _routing_error_response(http: HttpRequest, error: Exception) -> Response:
    """Errors of the router itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path, headers = http.url.path, dict(error.headers or {})
    messages = {
        404: f"there is no route {quoted(path)}.{_similar_route(http, path)} /openapi.json lists all routes.",
        405: f"{http.method} is not served at {quoted(path)}, which takes {headers.get('Allow', 'other methods')}.",
    }
    api_error = ApiError(
        error.status_code,
        messages.get(error.status_code, "the call was refused."),
        code="route",
        headers=headers,
    )
    return api_error.response(path, http.state.request_id)


def _similar_route(http: HttpRequest, path: str) -> str:
    """What to call instead of an unknown path: one under /v1, which base URLs often lack or repeat, or a near one."""
    routes = {route.path for route in http.app.routes if isinstance(route, Route)}
    plain = path.rstrip("/")
    if f"/v1{plain}" in routes:
        return f" There is {f'/v1{plain}'!r}: with OpenAI's client, base_url ends in /v1."
    if plain.replace("/v1", "", 1) in routes:
        return (
            f" There is {plain.replace('/v1', '', 1)!r}: with this client, the base URL does not end in /v1."
        )
    close = get_close_matches(path[:128], routes, 1, cutoff=0.85)  # routes are long and alike
    return f" Did you mean {close[0]!r}?" if close else ""
