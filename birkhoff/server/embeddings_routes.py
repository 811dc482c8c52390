"""`POST /v1/embeddings`: vectors of texts, taken from one hook of the model.

The model was not trained to embed. A vector is the mean of a hook's rows over all tokens of a text (`pooling` "mean",
the default) or the row of its last token ("last"); the hook is `final_hidden`, the merged streams before the final
norm, unless `hook` names another one with a single vector per token, at its last layer or at `layer`.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.server.api_errors import bad_request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import ModelName, Name, TokenId
from birkhoff.server.generation import GenerationCall, raise_on_failure

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
MAX_INPUTS = 8
WAIT_SECONDS = 30.0


class EmbeddingsBody(RequestBody):
    without_effect = frozenset({"user"})
    refused: ClassVar[Mapping[str, str]] = {"dimensions": "the width of a vector is the model's"}

    input: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
    )
    model: ModelName | None = None
    encoding_format: Literal["float", "base64"] = "float"
    pooling: Literal["mean", "last"] = "mean"
    hook: Name = "final_hidden"
    layer: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class EmbeddingsRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """Mean or last row of `final_hidden`, or of another hook with one vector per token. The model was not
        trained to embed."""
        body, warnings = await self._context.read_body(http, EmbeddingsBody)
        model = self._context.check_model(body.model)
        generations = await self._context.build(http, body, lambda: self._generations(body, warnings))
        formatter = EmbeddingsFormatter(self._context, body, model)
        return await self._context.run(http, generations, formatter, stream=False)

    def _generations(self, body: EmbeddingsBody, warnings: list[str]) -> list[GenerationCall]:
        engine, given = self._context.engine, body.input
        several = isinstance(given, list) and isinstance(given[0], (str, list))
        texts: list[Any] = list(given) if several else [given]
        schema = engine.schema.get(body.hook)
        if schema is None or len(schema.logical_shape) != 1:
            known = [name for name, row in engine.schema.items() if len(row.logical_shape) == 1]
            raise bad_request(f"hook is {body.hook!a}, expected one of {', '.join(known)}.", "hook")
        layer = engine.config.num_hidden_layers - 1 if body.layer is None else body.layer
        positions = "last_prompt" if body.pooling == "last" else "all_prompt"
        spec = {"hooks": {body.hook: [layer]}, "positions": positions, "reduce": "mean", "dtype": "fp32"}
        return [
            GenerationCall(
                engine.prompt_ids(text), {}, capture={"memory": spec}, prompt_only=True, warnings=warnings
            )
            for text in texts
        ]


class EmbeddingsFormatter:
    """Renders the captured rows of the requests as embeddings."""

    def __init__(self, context: ServingContext, body: EmbeddingsBody, model: str):
        self._context = context
        self._body = body
        self._model = model

    def full_response(self, call: ActiveCall) -> dict[str, Any]:
        data = []
        for index, request in enumerate(call.requests):
            raise_on_failure(request)
            (capture,) = request.results.captures
            capture.result(WAIT_SECONDS)
            (rows,) = capture.rows().values()
            vector = rows.tensor.detach().cpu().float().reshape(-1).numpy()
            shown: Any = vector.tolist()
            if self._body.encoding_format == "base64":
                shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": shown})
        tokens = sum(len(request.prompt_ids) for request in call.requests)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": self._model, "usage": usage}

    async def stream(self, call: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        raise AssertionError("embeddings are not streamed")
        yield b""
