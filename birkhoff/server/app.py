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
from birkhoff.server.body import Wire
from birkhoff.server.chat import ChatBody, Chats
from birkhoff.server.desk import Desk
from birkhoff.server.gate import Gate
from birkhoff.server.hub import Hub
from birkhoff.server.journal import Journal
from birkhoff.server.metrics import Metrics
from birkhoff.server.page import Page
from birkhoff.server.problems import Problem
from birkhoff.server.service import Service
from birkhoff.server.settings import ServerSettings

Handler = Callable[..., Awaitable[Response]]
REFERENCE = "#/components/schemas/{model}"
ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"},
        "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
    }}},
}  # fmt: skip
MESSAGES_ERROR = {
    "type": "object", "required": ["type", "error", "request_id"],
    "properties": {"type": {"const": "error"}, "request_id": {"type": "string"}, "error": {
        "type": "object", "required": ["type", "message"],
        "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
    }},
}  # fmt: skip


def build_app(
    settings: ServerSettings, hub: Hub, metrics: Metrics, journal: Journal, loading: Mapping[str, Any]
) -> ASGIApp:
    name = settings.served_name or PurePath(str(loading.get("model", "nano"))).name
    desk = Desk(settings, hub, journal, name)
    app = FastAPI(title="Birkhoff", version=__version__, docs_url=None, redoc_url=None)
    table = Table(app)
    service, chats = Service(desk, metrics), Chats(desk)
    page = Page()
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
    table.finish()
    return Gate(app, settings, metrics, journal)


class Table:
    """Routes with the models of their bodies."""

    def __init__(self, app: FastAPI):
        self._app, self._models = app, list[type[Wire]]()
        app.add_exception_handler(Problem, _problem)
        app.add_exception_handler(HTTPException, _http_problem)

    def get(self, path: str, handler: Handler, summary: str, kind: str = "application/json") -> None:
        self._add(path, handler, "GET", None, summary, kind)

    def delete(self, path: str, handler: Handler, summary: str) -> None:
        self._add(path, handler, "DELETE", None, summary)

    def post(self, path: str, handler: Handler, body: type[Wire] | None, summary: str) -> None:
        self._add(path, handler, "POST", body, summary)

    def _add(
        self,
        path: str,
        handler: Handler,
        method: str,
        body: type[Wire] | None,
        summary: str,
        kind: str = "application/json",
    ) -> None:
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        failure = {
            "description": "refused",
            "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model=error)}}},
        }
        extra: dict[str, Any] = {
            "responses": {"200": {"description": "done", "content": {kind: {}}}, "4XX": failure, "5XX": failure}
        }
        if body is not None:
            self._models.append(body)
            schema = {"$ref": REFERENCE.format(model=body.__name__)}
            extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        self._app.add_api_route(
            path, handler, methods=[method], summary=summary, response_model=None, response_class=Response,
            openapi_extra=extra, operation_id=f"{method.lower()}{path}",
        )  # fmt: skip

    def finish(self) -> None:
        """Put the bodies' models on the page."""
        page = self._app.openapi()
        for path in page["paths"].values():
            for operation in path.values():
                operation["responses"] = {code: each for code, each in operation["responses"].items() if code != "422"}
        _, models = models_json_schema([(model, "validation") for model in self._models], ref_template=REFERENCE)
        schemas = page.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        schemas |= {**models.get("$defs", {}), "Error": ERROR, "MessagesError": MESSAGES_ERROR}


async def _problem(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response(http.url.path, http.state.request_id)


async def _http_problem(http: HttpRequest, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    said = {
        404: "there is no such route. /openapi.json lists those there are.",
        405: "this route takes another method.",
    }
    problem = Problem(
        error.status_code,
        said.get(error.status_code, "the call was refused."),
        code="route",
        headers=dict(error.headers or {}),
    )
    return problem.response(http.url.path, http.state.request_id)
