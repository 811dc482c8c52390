"""Routes for captures after the response that made them.

    GET /v1/interp/captures             captures of this server, newest first
    GET /v1/interp/captures/{id}        state and entries; `?wait=S` waits for the files; with `Range` or
                                        `Accept: application/octet-stream`, the data instead
    GET /v1/interp/captures/{id}/data   all rows as one safetensors file; supports ranges
    POST /v1/interp/captures/{id}/link  a URL of that file that works for a minute without a key
    GET /v1/interp/captures/{id}/slice  rows of one hook and layer as numbers, for plots

The safetensors file is exported once, from capture files whose checksums are verified while reading, and cached.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from birkhoff.capture.store.export import to_safetensors
from birkhoff.capture.store.reader import CaptureEntries, CaptureEntry, read_request, read_sharded
from birkhoff.errors import quoted
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.body import EmptyBody, read_query
from birkhoff.server.context import ServingContext
from birkhoff.server.links import LIFETIME_SECONDS, SignedLinks
from birkhoff.server.reply import json_response

MAX_WAIT_SECONDS = 60.0
MAX_EXPORTS = 16
MAX_SLICE_ROWS = 256
MAX_SLICE_COLUMNS = 512
MAX_LISTED = 8  # entries in a message


class CaptureRoutes:
    def __init__(self, context: ServingContext, links: SignedLinks):
        self._context = context
        self._links = links
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._exports: OrderedDict[str, tuple[Path, str]] = OrderedDict()  # file and SHA-256 by capture id
        self._export_lock = asyncio.Lock()

    async def list_captures(self) -> Response:
        """File captures, newest first."""
        index = self._context.capture_index
        captures = await asyncio.to_thread(lambda: [index.describe(each) for each in index.ids()])
        return json_response({"captures": captures})

    async def get_capture(self, http: HttpRequest, capture_id: str) -> Response:
        """State and entries of a capture. `wait=S` waits up to S seconds for its files."""
        if "range" in http.headers or "application/octet-stream" in http.headers.get("accept", ""):
            return await self.data(capture_id)
        (text,) = read_query(http, wait="0")
        wait = _parse_wait(text)
        capture = await asyncio.to_thread(self._context.capture_index.describe, capture_id, wait)
        if capture["status"] in ("ok", "partial_error") and capture["paths"]:
            entries = await asyncio.to_thread(self._entries, capture_id)
            capture["entries"] = [_entry_json(entry) for entry in entries.values()]
        return json_response(capture)

    async def data(self, capture_id: str) -> Response:
        """All rows as one safetensors file. Supports range requests."""
        async with self._export_lock:
            path, digest = await asyncio.to_thread(self._export, capture_id)
        headers = {"etag": f'"{digest}"', "cache-control": "private, max-age=3600"}
        return FileResponse(
            path, headers=headers, media_type="application/octet-stream", filename=f"{capture_id}.safetensors"
        )

    async def link(self, http: HttpRequest, capture_id: str) -> Response:
        """A URL of the capture's data that works for one minute without a key."""
        await self._context.read_body(http, EmptyBody, optional=True)
        await asyncio.to_thread(self._context.capture_index.describe, capture_id)  # raises 404 if unknown
        url = self._links.create(f"/v1/interp/captures/{capture_id}/data")
        return json_response({"url": url, "expires_in": LIFETIME_SECONDS})

    async def slice(self, http: HttpRequest, capture_id: str) -> Response:
        """Rows of one hook and layer as numbers, subsampled to at most 256 rows and 512 columns."""
        hook, layer = read_query(http, hook="", layer="")
        if not layer.isascii() or not layer.isdecimal() or len(layer) > 6:
            raise bad_request("layer: expected the number of a layer.", "layer")
        entries = await asyncio.to_thread(self._entries, capture_id)
        entry = entries.get((hook, int(layer)))
        if entry is None:
            some = ", ".join(f"{each} {index}" for each, index in list(entries)[:MAX_LISTED])
            raise ApiError(
                404,
                f"this capture holds no rows of {quoted(hook)} in layer {layer}. It holds {some or 'none'}"
                f"{', …' if len(entries) > MAX_LISTED else ''}.",
                code="entry-unknown",
            )
        rows = entry.values()[:MAX_SLICE_ROWS]
        flat = rows.reshape(rows.shape[0], -1)
        width = flat.shape[1]
        columns = np.unique(np.linspace(0, width - 1, min(MAX_SLICE_COLUMNS, width)).astype(int))
        positions = (entry.positions or list(range(len(flat))))[:MAX_SLICE_ROWS]
        return json_response(
            {"rows": positions, "columns": columns.tolist(), "values": flat[:, columns].tolist()}
        )

    def _entries(self, capture_id: str) -> CaptureEntries:
        folder = self._context.capture_index.directory(capture_id)
        result = self._context.capture_index.result(capture_id)
        if Path(result.paths[0]).name.startswith("shard-"):
            return read_sharded(folder).get(result.id, CaptureEntries())
        return read_request(folder)

    def _export(self, capture_id: str) -> tuple[Path, str]:
        """The safetensors file of a capture and its SHA-256, written on the first call."""
        cached = self._exports.get(capture_id)
        if cached is not None and cached[0].exists():
            self._exports.move_to_end(capture_id)
            return cached
        entries = self._entries(capture_id)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="birkhoff-", ignore_cleanup_errors=True)
        path = Path(self._folder.name) / f"{capture_id}.safetensors"
        to_safetensors(path, entries)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._exports[capture_id] = path, digest
        if len(self._exports) > MAX_EXPORTS:
            self._exports.popitem(last=False)[1][0].unlink(missing_ok=True)
        return path, digest


def _entry_json(entry: CaptureEntry) -> dict[str, Any]:
    return {
        "hook": entry.hook,
        "layer": entry.layer,
        "shape": list(entry.array.shape),
        "dtype": entry.dtype,
        "positions": entry.positions,
        "token_ids": entry.token_ids,
        "axes": entry.axes,
    }


def _parse_wait(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_WAIT_SECONDS:
        raise bad_request(f"wait: expected seconds from 0 to {MAX_WAIT_SECONDS:g}.", "wait")
    return seconds
