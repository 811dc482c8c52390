"""`POST /v1/interp/contrast`: how well each layer and stream separates two sets of texts, and a vector from it.

The texts are run as ordinary engine requests, batched with other traffic. With `name`, the best direction, or that of
the given layer and column, is registered as a steering module, which needs the steering key.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.contrast import contrast_rows, vector_of
from birkhoff.errors import LogitsError
from birkhoff.server.api_errors import bad_request, to_api_error
from birkhoff.server.body import StrictBody
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import ModuleName
from birkhoff.server.reply import json_response
from birkhoff.server.steering_routes import check_steering_key, module_taken
from birkhoff.steering.extract import best

Texts = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=20_000)]], Field(min_length=2, max_length=512)
]
WHOLE_ROW = "whole row"


class ContrastBody(StrictBody):
    positive: Texts
    negative: Texts
    hook: Annotated[str, Field(min_length=1, max_length=64)]
    how: Literal["mean_diff", "pca"] = "mean_diff"
    name: ModuleName | None = None
    layer: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    column: Annotated[str, Field(max_length=64)] | None = None
    replace: bool = False


class ContrastRoutes:
    def __init__(self, context: ServingContext):
        self._context = context
        self._lock = asyncio.Lock()

    async def compare(self, http: HttpRequest) -> Response:
        """How well each layer and stream separates two sets of texts. With `name`, registers the direction."""
        body, _ = await self._context.read_body(http, ContrastBody)
        engine = self._context.engine
        if body.name is not None:
            check_steering_key(http, self._context.settings)
            if body.name in engine.modules and not body.replace:
                raise module_taken()
        async with self._lock:
            try:
                return json_response(await asyncio.to_thread(self._compare, body))
            except LogitsError as error:
                settings = engine.settings
                raise to_api_error(error, steered=bool(settings["steering"] or settings["saes"])) from None

    def _compare(self, body: ContrastBody) -> dict[str, Any]:
        engine = self._context.engine
        rows = contrast_rows(engine, body.positive, body.negative, body.hook)
        entries = rows.separation(body.how)
        streams = sorted({entry.stream for entry in entries if entry.stream is not None})
        columns = [WHOLE_ROW, *(f"stream {stream}" for stream in streams)]
        column_of = dict(zip([None, *streams], columns))
        cells = {(entry.layer, column_of[entry.stream]): entry for entry in entries}
        top = best(entries)
        response: dict[str, Any] = {
            "hook": body.hook,
            "layers": rows.layers,
            "columns": columns,
            "table": [[cells[layer, column].auc for column in columns] for layer in rows.layers],
            "d_prime": [[cells[layer, column].d_prime for column in columns] for layer in rows.layers],
            "best": {
                "layer": top.layer,
                "column": column_of[top.stream],
                "auc": top.auc,
                "d_prime": top.d_prime,
            },
        }
        if body.name is not None:
            layer = top.layer if body.layer is None else body.layer
            column = column_of[top.stream] if body.column is None else body.column
            if (layer, column) not in cells:
                raise bad_request(f"layer {layer}, {column!r} is not among what was compared.", "column")
            stream = cells[layer, column].stream
            vector = vector_of(engine, rows, [layer], body.how, None if stream is None else [stream])
            engine.modules[body.name] = vector
            response["saved"] = body.name
        return response
