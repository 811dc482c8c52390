"""The door of the server: every call passes here first, and every answer last.

In order: an id for the call, the shape of its head, `Host` (a foreign name may be a rebound one), `Origin` (a page of a
foreign site may not call), the key. What is open without a key is a list; everything else is closed. Answers carry the
id and headers that keep browsers from guessing. One line is logged per call, under the same id, and a defect is logged
with its stack, which no client ever sees.
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
from birkhoff.server.access_log import AccessLog
from birkhoff.server.api_errors import ApiError, problem_of
from birkhoff.server.links import Links
from birkhoff.server.metrics import Metrics
from birkhoff.server.server_settings import ServerSettings, is_loopback

OPEN = frozenset({"/", "/favicon.ico", "/health", "/v1/health", "/ready", "/version"})
OPEN_UNDER = "/assets/"
STALLED = "stalled"  # the note of a call whose reader took nothing for too long
_SAFE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
FAILURES_PER_MINUTE = 20
ALLOWED_HEADERS = "authorization, content-type, range, x-api-key, x-steering-key, x-request-id, x-strict"
SECURITY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


class Middleware:
    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, journal: AccessLog, links: Links
    ):
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._journal = journal
        self._links = links
        self._keys = [key.encode() for key in settings.api_key]
        self._hosts = {host.lower() for host in settings.allowed_host}
        self._failures: OrderedDict[str, list[float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _SAFE_ID.match(given) else "req-" + secrets.token_hex(12)
        state = scope.setdefault("state", {})
        state["request_id"], state["caller"] = request_id, (scope.get("client") or ("",))[0]
        began = time.perf_counter()
        status = 0
        started = False
        extra = dict(SECURITY)

        async def answer(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                fields = MutableHeaders(raw=message.setdefault("headers", []))
                fields["x-request-id"] = request_id
                for name, value in extra.items():
                    fields.setdefault(name, value)
            await send(message)

        note = ""
        try:
            self._check_head(scope, headers)
            extra |= self._check_origin(headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await Response(status_code=204)(scope, receive, answer)
            else:
                await self._check_key(scope, headers, state)
                await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            note = "cancelled"
            raise
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= 500:
                self._journal.defect(request_id, error)
            if not started:
                await problem.response(scope["path"], request_id)(scope, receive, answer)
        finally:
            note = note or state.get("note", "")
            if note == STALLED:
                self._metrics.cancelled.labels(STALLED).inc()
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.calls.labels(route, str(status)).inc()
            self._journal.call(
                request_id, scope["method"], scope["path"], status, time.perf_counter() - began, note
            )

    def _check_head(self, scope: Scope, headers: Headers) -> None:
        if len(scope["headers"]) > self._settings.max_header_fields:
            raise ApiError(
                431,
                f"the call has more than {self._settings.max_header_fields} header fields.",
                code="headers",
            )
        if "content-length" in headers and "transfer-encoding" in headers:  # two lengths are two readings
            raise ApiError(
                400,
                "content-length and transfer-encoding exclude each other.",
                code="two-lengths",
                headers={"Connection": "close"},
            )
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._host_is_ours(hosts[0]):
            raise ApiError(
                403,
                f"the host {quoted(hosts[0] if hosts else '')} is not this server's. Call it by its own name, or "
                "allow this one with --allowed-host.",
                code="host",
            )

    def _host_is_ours(self, value: str) -> bool:
        try:
            host = urlsplit("//" + value).hostname or ""
        except ValueError:
            return False
        if host in self._hosts or is_loopback(host) or host == self._settings.host.lower():
            return True
        # Beyond loopback there is a key to show, which a rebound page does not have.
        return not is_loopback(self._settings.host) and not self._hosts and bool(self._keys)

    def _check_origin(self, headers: Headers) -> dict[str, str]:
        """The headers an allowed foreign origin gets; none for a call without one."""
        origin = headers.get("origin")
        if origin is None:
            return {}
        try:
            parts = urlsplit(origin)
            plain = parts.scheme in ("http", "https") and f"{parts.scheme}://{parts.netloc}" == origin
            local = plain and "@" not in parts.netloc and is_loopback(parts.hostname or "")
            parts.port  # noqa: B018  raises when it is none
        except ValueError:
            local = False
        own = origin in (
            f"http://{headers['host']}",
            f"https://{headers['host']}",
        )  # our own page; the host is ours
        if not local and not own and origin not in self._settings.allowed_origin:
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
        if not self._keys or path in OPEN or path.startswith(OPEN_UNDER) or self._links.admits(scope):
            return
        shown = [*headers.getlist("authorization"), *headers.getlist("x-api-key")]
        key = _shown_key(headers)
        if len(shown) == 1 and key is not None:
            found = matching(self._keys, key)
            if found is not None:
                state["caller"] = f"key-{found}"
                return
        self._count_failure(state["caller"])
        await asyncio.sleep(0.05)  # the same for every wrong key
        raise ApiError(
            401,
            "the key is missing or wrong. Send it as Authorization: Bearer KEY, or as x-api-key.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _count_failure(self, client: str) -> None:
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


def matching(keys: list[bytes], shown: str) -> int | None:
    """Which key was shown. Every key is compared, and in constant time."""
    found = None
    for place, key in enumerate(keys):
        if secrets.compare_digest(key, shown.encode()):
            found = place
    return found


def _shown_key(headers: Headers) -> str | None:
    if "x-api-key" in headers:
        return headers["x-api-key"]
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else None
