"""The page at `/`: static files of the package, under a policy that lets the browser run and load nothing else.

The files are listed when the server starts; a name that is not among them is not looked for. They carry their own
hash, so a browser asks again and is told when nothing has changed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.server.api_errors import ApiError

FOLDER = Path(__file__).parent.parent / "web"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageRoutes:
    def __init__(self, folder: Path = FOLDER):
        self._files = {
            file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix in KINDS
        }
        self._tags = {
            name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in self._files.items()
        }

    async def home(self, http: HttpRequest) -> Response:
        return self._answer(http, "index.html")

    async def icon(self, http: HttpRequest) -> Response:
        return self._answer(http, "icon.svg")

    async def asset(self, http: HttpRequest, name: str) -> Response:
        return self._answer(http, name)

    def _answer(self, http: HttpRequest, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "there is no such file of the page.", code="asset")
        kind = KINDS[Path(name).suffix]
        headers = {"content-security-policy": POLICY, "cache-control": "no-cache", "etag": self._tags[name]}
        if http.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(self._files[name], headers=headers, media_type=f"{kind}; charset=utf-8")
