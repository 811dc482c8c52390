"""Signed links: URLs that work without an API key, so that a browser can download a large file by itself.

A link allows GET on one path until it expires. It carries the expiry time and an HMAC of both, so the server keeps no
state and links cannot be forged. The HMAC key is random and lives as long as the process.
"""

from __future__ import annotations

import hmac
import secrets
import time
from urllib.parse import parse_qs, quote

from starlette.types import Scope

LIFETIME_SECONDS = 60


class SignedLinks:
    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def create(self, path: str, seconds: int = LIFETIME_SECONDS) -> str:
        """`path` with a query string that allows GET on it for `seconds`."""
        until = int(time.time()) + seconds
        return f"{quote(path)}?until={until}&token={self._token(path, until)}"

    def allows(self, scope: Scope) -> bool:
        """Whether a request uses a valid link that has not expired."""
        query = scope["query_string"]
        if scope["method"] != "GET" or b"token=" not in query or len(query) > 256:
            return False
        fields = parse_qs(query.decode("latin-1"))
        until = fields.get("until", [""])[-1]
        token = fields.get("token", [""])[-1]
        if not (until.isascii() and until.isdecimal() and len(until) < 16 and token.isascii()):
            return False
        valid = hmac.compare_digest(self._token(scope["path"], int(until)), token)
        return valid and time.time() <= int(until)

    def _token(self, path: str, until: int) -> str:
        return hmac.digest(self._key, f"{until} {path}".encode(), "sha256").hex()
