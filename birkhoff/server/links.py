"""Links that may be followed without showing a key: what a browser needs to save a large file by itself.

A link is asked for with the key and is good for one path, to read it, for a minute. It carries when that minute ends
and a keyed digest of both, so nothing is kept and nothing can be guessed; the digest's key is made with the process.
"""

from __future__ import annotations

import hmac
import secrets
import time
from urllib.parse import parse_qs, quote

from starlette.types import Scope

SECONDS = 60


class Links:
    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def made(self, path: str, seconds: int = SECONDS) -> str:
        """`path` with what lets a caller read it for a while."""
        until = int(time.time()) + seconds
        return f"{quote(path)}?until={until}&token={self._token(path, until)}"

    def admits(self, scope: Scope) -> bool:
        """Whether a call came by such a link, unchanged and in time."""
        query = scope["query_string"]
        if scope["method"] != "GET" or b"token=" not in query or len(query) > 256:
            return False
        fields = parse_qs(query.decode("latin-1"))
        until = fields.get("until", [""])[-1]
        token = fields.get("token", [""])[-1]
        if not (until.isascii() and until.isdecimal() and len(until) < 16 and token.isascii()):
            return False
        known = hmac.compare_digest(self._token(scope["path"], int(until)), token)
        return known and time.time() <= int(until)

    def _token(self, path: str, until: int) -> str:
        return hmac.digest(self._key, f"{until} {path}".encode(), "sha256").hex()
