"""`POST /v1/embeddings`: vectors of texts, taken from one hook of the model.

The model was not trained to embed. A vector is the mean of a hook's rows over all tokens of a text (`pooling` "mean",
the default) or the row of its last token ("last"); the hook is `final_hidden`, the merged streams before the final
norm, unless `hook` names another one with a single vector per token, at its last layer or at `layer`.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.engine.request import Request
from birkhoff.server.api_errors import bad_request
from birkhoff.server.async_engine import ActiveCall
from birkhoff.server.body import RequestBody
from birkhoff.server.context import Routes
from birkhoff.server.fields import ModelName, Name, TokenId
from birkhoff.server.generation import GenerationCall, raise_on_failure

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TokenIds = Annotated[list[TokenId], Field(min_length=1)]
MAX_INPUTS = 8
WAIT_SECONDS = 30.0
HOOK = "final_hidden"
Json = dict[str, Any]


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
    hook: Name = HOOK
    layer: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class EmbeddingsRoutes(Routes):
    async def create(self, http: HttpRequest) -> Response:
        """Mean or last row of `final_hidden`, or of another hook with one vector per token. The model was not
        trained to embed."""
        body, warnings = await self._context.read_body(http, EmbeddingsBody)
        model = self._context.check_model(body.model)
        generations = await self._context.build(http, body, lambda: self._generations(body, warnings))

        def answer(requests: Sequence[Request]) -> Json:
            data = [
                {"object": "embedding", "index": index, "embedding": _encoded(vector_of(request), body)}
                for index, request in enumerate(requests)
            ]
            tokens = sum(len(request.prompt_ids) for request in requests)
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return {"object": "list", "data": data, "model": model, "usage": usage}

        return await self._context.run(http, generations, VectorFormatter(answer), stream=False)

    def _generations(self, body: EmbeddingsBody, warnings: list[str]) -> list[GenerationCall]:
        engine, given = self._context.engine, body.input
        several = isinstance(given, list) and isinstance(given[0], (str, list))
        texts: list[Any] = list(given) if several else [given]
        return [
            embedding_call(engine, engine.prompt_ids(text), warnings, body.hook, body.layer, body.pooling)
            for text in texts
        ]


def embedding_call(
    engine: Engine,
    ids: list[int],
    warnings: list[str],
    hook: str = HOOK,
    layer: int | None = None,
    pooling: Literal["mean", "last"] = "mean",
) -> GenerationCall:
    """The call that computes a text and keeps the mean of a hook's rows, or its last row, at a layer or the last."""
    schema = engine.schema.get(hook)
    if schema is None or len(schema.logical_shape) != 1:
        known = [name for name, row in engine.schema.items() if len(row.logical_shape) == 1]
        raise bad_request(f"hook is {hook!a}, expected one of {', '.join(known)}.", "hook")
    layer = engine.config.num_hidden_layers - 1 if layer is None else layer
    positions = "last_prompt" if pooling == "last" else "all_prompt"
    spec = {"hooks": {hook: [layer]}, "positions": positions, "reduce": "mean", "dtype": "fp32"}
    return GenerationCall(ids, {}, capture={"memory": spec}, prompt_only=True, warnings=warnings)


def vector_of(request: Request) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The vector of a finished `embedding_call`."""
    (capture,) = request.results.captures
    capture.result(WAIT_SECONDS)
    (rows,) = capture.rows().values()
    vector: np.ndarray[Any, np.dtype[np.float32]] = rows.tensor.detach().cpu().float().reshape(-1).numpy()
    return vector


def _encoded(vector: np.ndarray[Any, np.dtype[np.float32]], body: EmbeddingsBody) -> Any:
    if body.encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


class VectorFormatter:
    """Renders the finished requests of `embedding_call`s with `answer`."""

    def __init__(self, answer: Callable[[Sequence[Request]], Json]):
        self._answer = answer

    def full_response(self, call: ActiveCall) -> Json:
        for request in call.requests:
            raise_on_failure(request)
        return self._answer(call.requests)

    async def stream(self, call: ActiveCall, ping_seconds: float) -> AsyncIterator[bytes]:
        raise AssertionError("embeddings are not streamed")
        yield b""
