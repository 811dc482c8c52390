"""ASGI middleware around all routes: request ids, header checks, Host and Origin rules, API keys, logging.

In order: assign a request id; check the header fields; check `Host`, against DNS rebinding; check `Origin`, so that
pages of other sites cannot call; check the API key. Only the paths in `PUBLIC_PATHS` and below `PUBLIC_PREFIX` need no
key. Responses carry the request id and security headers. Each request is logged once under its id; unexpected
exceptions are logged with their traceback, which clients never see.

Starlette's TrustedHostMiddleware and CORSMiddleware do not implement these rules: the first accepts a second Host
header, cannot match the loopback range and answers in plain text; the second serves requests of foreign origins without
CORS headers instead of refusing them.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from birkhoff.errors import quoted
from birkhoff.option_checks import is_loopback
from birkhoff.server.access_log import AccessLog, Generated
from birkhoff.server.api_errors import ApiError, to_api_error
from birkhoff.server.links import SignedLinks
from birkhoff.server.metrics import Metrics
from birkhoff.server.server_settings import ServerSettings

PUBLIC_PATHS = frozenset({"/", "/favicon.ico", "/health", "/v1/health", "/ready", "/version"})
PUBLIC_PREFIX = "/assets/"
STALLED = "stalled"  # note of a request whose client stopped reading
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
FAILURES_PER_MINUTE = 20
ALLOWED_HEADERS = "authorization, content-type, range, x-api-key, x-steering-key, x-request-id, x-strict"
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Middleware:
    """Wraps `app` with the checks of this module."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        metrics: Metrics,
        access_log: AccessLog,
        links: SignedLinks,
    ):
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._access_log = access_log
        self._links = links
        self._keys = [key.encode() for key in settings.api_key]
        self._hosts = {host.lower() for host in settings.allowed_host}
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _SAFE_ID.match(client_id) else "req-" + secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"], state["caller"] = request_id, (scope.get("client") or ("",))[0]
        start_time = time.perf_counter()
        status = 0
        response_started = False
        extra_headers = dict(SECURITY_HEADERS)

        async def send_with_headers(message: Message) -> None:
            nonlocal status, response_started
            if message["type"] == "http.response.start":
                status, response_started = message["status"], True
                fields = MutableHeaders(raw=message.setdefault("headers", []))
                fields["x-request-id"] = request_id
                for name, value in extra_headers.items():
                    fields.setdefault(name, value)
            await send(message)

        note = ""
        try:
            self._check_headers(scope, headers)
            extra_headers |= self._check_origin(headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response(status_code=204)(scope, receive, send_with_headers)
            else:
                await self._check_key(scope, headers, state)
                await self._app(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server stops and does not wait for this request any longer
            note = "cancelled"
            if response_started:
                raise
            stopped = ApiError(
                503, "the server stopped before this call was done. Send it again.", code="draining"
            )
            await stopped.response(scope["path"], request_id)(scope, receive, send_with_headers)
        except Exception as error:
            api_error = to_api_error(error, prompt_field=state.get("prompt_field"))
            if api_error.status >= 500:
                self._access_log.log_exception(request_id, error)
            if not response_started:
                await api_error.response(scope["path"], request_id)(scope, receive, send_with_headers)
        finally:
            note = note or state.get("note", "")
            if note == STALLED:
                self._metrics.cancelled.labels(STALLED).inc()
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(route, str(status)).inc()
            self._access_log.log_request(
                request_id,
                scope["method"],
                scope["path"],
                status,
                time.perf_counter() - start_time,
                note,
                client=state["caller"],
                generated=Generated.of(state.get("requests", ()), state.get("first_choices", ())),
            )

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        if len(scope["headers"]) > self._settings.max_header_fields:
            raise ApiError(
                431,
                f"the call has more than {self._settings.max_header_fields} header fields.",
                code="headers",
            )
        if "content-length" in headers and "transfer-encoding" in headers:  # request smuggling
            raise ApiError(
                400,
                "content-length and transfer-encoding exclude each other.",
                code="two-lengths",
                headers={"Connection": "close"},
            )
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            raise ApiError(
                403,
                f"the host {quoted(hosts[0] if hosts else '')} is not this server's. Call it by its own name, or "
                "allow this one with --allowed-host.",
                code="host",
            )

    def _is_own_host(self, value: str) -> bool:
        try:
            host = urlsplit("//" + value).hostname or ""
        except ValueError:
            return False
        if host in self._hosts or is_loopback(host) or host == self._settings.host.lower():
            return True
        # On a public address without a list of hosts, the key protects: a rebound page does not have it.
        return not is_loopback(self._settings.host) and not self._hosts and bool(self._keys)

    def _check_origin(self, headers: Headers) -> dict[str, str]:
        """CORS headers for an allowed origin; none for a request without an Origin header. Else raises 403."""
        origin = headers.get("origin")
        if origin is None:
            return {}
        try:
            parts = urlsplit(origin)
            plain = parts.scheme in ("http", "https") and f"{parts.scheme}://{parts.netloc}" == origin
            local = plain and "@" not in parts.netloc and is_loopback(parts.hostname or "")
            parts.port  # noqa: B018  raises ValueError if invalid
        except ValueError:
            local = False
        # `_check_headers` has accepted the host, so an origin with the same host is the server's own page.
        same_host = origin in (f"http://{headers['host']}", f"https://{headers['host']}")
        if not local and not same_host and origin not in self._settings.allowed_origin:
            raise ApiError(
                403, "pages of this origin may not call. Allow it with --allowed-origin.", code="origin"
            )
        return {
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, PUT, DELETE",
            "access-control-allow-headers": ALLOWED_HEADERS,
            "access-control-expose-headers": "x-request-id, retry-after, content-range, etag",
            "vary": "origin",
        }

    async def _check_key(self, scope: Scope, headers: Headers, state: dict[str, Any]) -> None:
        path = scope["path"]
        if (
            not self._keys
            or path in PUBLIC_PATHS
            or path.startswith(PUBLIC_PREFIX)
            or self._links.allows(scope)
        ):
            return
        credentials = [*headers.getlist("authorization"), *headers.getlist("x-api-key")]
        key = _presented_key(headers)
        if len(credentials) == 1 and key is not None:
            index = find_key(self._keys, key)
            if index is not None:
                state["caller"] = f"key-{index}"
                return
        self._count_failure(state["caller"])
        await asyncio.sleep(0.05)  # the same delay for every wrong key
        raise ApiError(
            401,
            "the key is missing or wrong. Send it as Authorization: Bearer KEY, or as x-api-key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _count_failure(self, client: str) -> None:
        """Count a wrong key; raises 429 after `FAILURES_PER_MINUTE` of them."""
        now = time.monotonic()
        recent = [when for when in self._failures.pop(client, []) if now - when < 60]
        self._failures[client] = [*recent, now]
        if len(self._failures) > 1024:
            self._failures.popitem(last=False)
        if len(recent) >= FAILURES_PER_MINUTE:
            raise ApiError(
                429,
                "too many wrong keys. Try again in a minute.",
                code="key-failures",
                headers={"Retry-After": "60"},
            )


def find_key(keys: list[bytes], presented: str) -> int | None:
    """Index of the key that equals `presented`, or None. Compares with every key, in constant time."""
    match = None
    for index, key in enumerate(keys):
        if secrets.compare_digest(key, presented.encode()):
            match = index
    return match


def _presented_key(headers: Headers) -> str | None:
    if "x-api-key" in headers:
        return headers["x-api-key"]
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None
