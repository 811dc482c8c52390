"""Errors as clients see them: one JSON shape per API, few statuses, and a next step in every message.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}                    OpenAI's clients
    {"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}           Anthropic's
    {"error": ...}                                                                         Ollama's

`ApiError` can be raised anywhere below a route; `to_api_error` converts any other exception. Birkhoff's own refusals
keep their message and code, which are written for callers. All other exceptions are reported without detail: a response
never contains a path, traceback or address of the server, and echoes only short parts of the input.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from starlette.responses import Response

from birkhoff.errors import (
    BirkhoffError,
    CapacityError,
    CaptureError,
    CaptureExists,
    ContextError,
    EngineClosed,
    LogitsError,
    PromptError,
    RequestError,
    TextUnavailable,
    UnsupportedModel,
)
from birkhoff.free_memory import is_out_of_memory

TYPES = {  # other statuses: invalid_request_error below 500, server_error from there on
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    499: "cancelled",
    501: "not_implemented_error",
    503: "overloaded_error",
    507: "insufficient_storage",
}
_ANTHROPIC = {413: "request_too_large", 500: "api_error"}
MAX_MESSAGE_CHARS = 1000
# What messages written for Python callers suggest, and the same over HTTP.
HTTP_CALLS = {
    "engine.modules[name] = vector": "POST /v1/steering/modules/register",
    "raise max_context": "start the server with a larger --max-context",
    "load with a larger max_context": "start the server with a larger --max-context",
    "Give hook= and layers=": 'Give "at": {"hook": …, "layers": …}',
    "engine.attach(name, sae)": "birkhoff serve --sae NAME=PATH",
}
_FIELD = re.compile(r"([a-z][a-z_]*(?:\.[a-z_]+|\[\d+\])*)(?: is |: )")


class ApiError(Exception):
    """An error with its HTTP status, code, parameter and headers. Long messages are truncated."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = headers or {}
        self.message = (
            message if len(message) <= MAX_MESSAGE_CHARS else message[: MAX_MESSAGE_CHARS - 1] + "…"
        )

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def as_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def as_anthropic(self, request_id: str) -> dict[str, Any]:
        kind = _ANTHROPIC.get(self.status, self.type)
        return {"type": "error", "error": {"type": kind, "message": self.message}, "request_id": request_id}

    def response(self, path: str, request_id: str) -> Response:
        """The response in the error format of the API that `path` belongs to."""
        body = self.as_json()
        if path.startswith("/v1/messages"):
            body = self.as_anthropic(request_id)
        elif path.startswith("/api/"):
            body = {"error": self.message}
        headers = dict(self.headers)
        if self.status in (500, 501):
            headers.setdefault("x-should-retry", "false")  # a retry would fail the same way
        return Response(orjson.dumps(body), self.status, headers, "application/json")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 error."""
    return ApiError(400, message, param=param, code=code)


def conflict(message: str, param: str, code: str) -> ApiError:
    """A 409 error about a name that is taken or in use; a retry would fail the same way."""
    return ApiError(409, message, code=code, param=param, headers={"x-should-retry": "false"})


def to_api_error(error: BaseException, steered: bool = False, prompt_field: str | None = None) -> ApiError:
    """Convert any exception. `steered`: the request edited activations, so invalid logits are the caller's error.
    `prompt_field`: the field of the body that holds the text, which is what an error about the text is about."""
    if isinstance(error, ApiError):
        return error
    message = _with_http_calls(str(error))
    if isinstance(error, ContextError):
        return bad_request(message, prompt_field, "context_length_exceeded")
    if isinstance(error, RequestError):
        path = getattr(error, "path", "") or _leading_field(message)
        if path is None and isinstance(error, PromptError):
            path = prompt_field
        return bad_request(message, path, error.code)
    if isinstance(error, (CapacityError, TextUnavailable, UnsupportedModel)):
        return bad_request(message, None, error.code)
    if isinstance(error, LogitsError):
        return ApiError(400 if steered else 500, message, code=error.code)
    if isinstance(error, EngineClosed):
        return ApiError(
            503, "the server is stopping. Try again later.", code=error.code, headers={"Retry-After": "5"}
        )
    if isinstance(error, CaptureExists):
        return ApiError(
            409, "this request_id already has files under its tag. Choose another.", code=error.code
        )
    if isinstance(error, CaptureError):
        return ApiError(
            507, "the capture could not be written or read. Ask again without it.", code=error.code
        )
    if is_out_of_memory(error):
        message = (
            "there was too little memory for this request; others are not affected. Shorten it or try again."
        )
        return ApiError(503, message, code="out-of-memory", headers={"Retry-After": "2"})
    if isinstance(error, BirkhoffError):
        return ApiError(500, "the server could not do this, by no fault of the request.", code=error.code)
    return ApiError(
        500,
        "this is a defect of the server; its log has the details, under this request's id.",
        code="defect",
    )


def _with_http_calls(message: str) -> str:
    """The message with the HTTP call in place of a Python call it suggests."""
    for python, http in HTTP_CALLS.items():
        message = message.replace(python, http)
    return message


def _leading_field(message: str) -> str | None:
    """The field a message starts with, as in `top_p is 2, expected …`."""
    match = _FIELD.match(message)
    return match[1] if match else None
