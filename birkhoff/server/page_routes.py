"""The web page at `/`: static files of the package, with a content security policy that allows nothing else.

The files are read when the server starts; other names are never looked up on disk. Responses carry an ETag, so browsers
revalidate and get 304 if nothing has changed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.report.standalone import FOLDER, standalone_html
from birkhoff.server.api_errors import ApiError

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageRoutes:
    def __init__(self, folder: Path = FOLDER):
        self._files = {
            file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.suffix in MEDIA_TYPES
        }
        self._files["standalone.html"] = standalone_html().encode()  # a view without data, for saved files
        self._etags = {
            name: f'"{hashlib.sha256(data).hexdigest()[:32]}"' for name, data in self._files.items()
        }

    async def home(self, http: HttpRequest) -> Response:
        """The HTML of the web page."""
        return self._file_response(http, "index.html")

    async def icon(self, http: HttpRequest) -> Response:
        """The icon of the web page."""
        return self._file_response(http, "icon.svg")

    async def asset(self, http: HttpRequest, name: str) -> Response:
        """A script, style sheet or image of the web page."""
        return self._file_response(http, name)

    def _file_response(self, http: HttpRequest, name: str) -> Response:
        if name not in self._files:
            raise ApiError(404, "there is no such file of the page.", code="asset")
        media_type = MEDIA_TYPES[Path(name).suffix]
        headers = {
            "content-security-policy": CONTENT_SECURITY_POLICY,
            "cache-control": "no-cache",
            "etag": self._etags[name],
        }
        if http.headers.get("if-none-match") == self._etags[name]:
            return Response(status_code=304, headers=headers)
        return Response(self._files[name], headers=headers, media_type=f"{media_type}; charset=utf-8")
