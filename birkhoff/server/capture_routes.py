"""Captures after their answer: what became of them, which rows they hold, and the rows themselves.

    GET /v1/interp/captures             those of this server, the newest first
    GET /v1/interp/captures/{id}        state and entries; `?wait=S` waits for the disk; with `Range` or
                                        `Accept: application/octet-stream`, the bytes
    GET /v1/interp/captures/{id}/data   one safetensors file, with ranges
    POST /v1/interp/captures/{id}/link  where a browser finds that file for a minute, without showing a key
    GET /v1/interp/captures/{id}/slice  rows of one hook and layer as numbers, for pictures

The safetensors file is made once, from files whose checksums are compared on the way, and kept for a while.
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
from birkhoff.capture.store.reader import CaptureEntry, read_request, read_sharded
from birkhoff.server.api_errors import ApiError, bad
from birkhoff.server.context import ServingContext
from birkhoff.server.links import SECONDS, Links
from birkhoff.server.reply import json_response

MOST_WAIT = 60.0
MOST_FILES = 16
MOST_ROWS = 256
MOST_COLUMNS = 512
Entries = dict[tuple[int, str], CaptureEntry]


class CaptureRoutes:
    def __init__(self, context: ServingContext, links: Links):
        self._context = context
        self._links = links
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._made: OrderedDict[str, tuple[Path, str]] = OrderedDict()
        self._one = asyncio.Lock()

    async def listed(self) -> Response:
        shelf = self._context.shelf
        return json_response(
            {"captures": await asyncio.to_thread(lambda: [shelf.told(each) for each in shelf.ids()])}
        )

    async def one(self, http: HttpRequest, capture_id: str) -> Response:
        if "range" in http.headers or "application/octet-stream" in http.headers.get("accept", ""):
            return await self.data(capture_id)
        wait = _seconds(http.query_params.get("wait", "0"))
        found = await asyncio.to_thread(self._context.shelf.told, capture_id, wait)
        if found["status"] in ("ok", "partial_error") and found["paths"]:
            entries = await asyncio.to_thread(self._entries, capture_id)
            found["entries"] = [_described(entry) for entry in entries.values()]
        return json_response(found)

    async def data(self, capture_id: str) -> Response:
        async with self._one:
            path, digest = await asyncio.to_thread(self._file, capture_id)
        headers = {"etag": f'"{digest}"', "cache-control": "private, max-age=3600"}
        return FileResponse(
            path, headers=headers, media_type="application/octet-stream", filename=f"{capture_id}.safetensors"
        )

    async def link(self, capture_id: str) -> Response:
        await asyncio.to_thread(self._context.shelf.told, capture_id)  # a 404 if there is none
        made = self._links.made(f"/v1/interp/captures/{capture_id}/data")
        return json_response({"url": made, "expires_in": SECONDS})

    async def slice(self, http: HttpRequest, capture_id: str) -> Response:
        hook = http.query_params.get("hook", "")
        layer = http.query_params.get("layer", "")
        if not layer.isdecimal() or len(layer) > 6:
            raise bad("layer: expected the number of a layer.", "layer")
        entries = await asyncio.to_thread(self._entries, capture_id)
        entry = entries.get((int(layer), hook))
        if entry is None:
            raise ApiError(404, "this capture holds no rows of that hook and layer.", code="entry-unknown")
        rows = entry.values()[:MOST_ROWS]
        flat = rows.reshape(rows.shape[0], -1)
        columns = np.unique(np.linspace(0, flat.shape[1] - 1, min(MOST_COLUMNS, flat.shape[1])).astype(int))
        positions = (entry.positions or list(range(len(flat))))[:MOST_ROWS]
        return json_response(
            {"rows": positions, "columns": columns.tolist(), "values": flat[:, columns].tolist()}
        )

    def _entries(self, capture_id: str) -> Entries:
        folder = self._context.shelf.directory(capture_id)
        result = self._context.shelf.result(capture_id)
        if Path(result.paths[0]).name.startswith("shard-"):
            return read_sharded(folder).get(result.id, {})
        return read_request(folder)

    def _file(self, capture_id: str) -> tuple[Path, str]:
        found = self._made.get(capture_id)
        if found is not None and found[0].exists():
            self._made.move_to_end(capture_id)
            return found
        entries = self._entries(capture_id)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="birkhoff-", ignore_cleanup_errors=True)
        path = Path(self._folder.name) / f"{capture_id}.safetensors"
        to_safetensors(path, entries)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._made[capture_id] = path, digest
        if len(self._made) > MOST_FILES:
            self._made.popitem(last=False)[1][0].unlink(missing_ok=True)
        return path, digest


def _described(entry: CaptureEntry) -> dict[str, Any]:
    return {
        "hook": entry.hook,
        "layer": entry.layer,
        "shape": list(entry.array.shape),
        "dtype": entry.dtype,
        "positions": entry.positions,
        "token_ids": entry.token_ids,
        "axes": entry.axes,
    }


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST_WAIT:
        raise bad(f"wait: expected seconds from 0 to {MOST_WAIT:g}.", "wait")
    return value
