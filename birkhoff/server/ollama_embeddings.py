"""Ollama's `/api/embed` and its older form `/api/embeddings`: vectors of texts, as `/v1/embeddings` makes them.

The model was not trained to embed: a vector is the mean of `final_hidden` over the tokens of a text. As in Ollama,
those of `/api/embed` have length 1 and those of `/api/embeddings` are as they come; a text that is longer than the
context is cut unless `truncate` is false; without a text the call only asks whether the model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.engine.request import Request
from birkhoff.server.body import RequestBody
from birkhoff.server.context import Routes
from birkhoff.server.embeddings_routes import MAX_INPUTS, VectorFormatter, embedding_call, vector_of
from birkhoff.server.fields import ModelName
from birkhoff.server.generation import GenerationCall
from birkhoff.server.reply import json_response

Json = dict[str, Any]


class OllamaEmbedBody(RequestBody):
    without_effect = frozenset({"keep_alive", "options"})
    refused: ClassVar[Mapping[str, str]] = {"dimensions": "the width of a vector is the model's"}

    model: ModelName | None = None
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)] | None = None
    truncate: bool | None = None


class OllamaEmbeddingsBody(RequestBody):
    without_effect = frozenset({"keep_alive", "options"})

    model: ModelName | None = None
    prompt: str | None = None


class OllamaEmbeddingRoutes(Routes):
    async def embed(self, http: HttpRequest) -> Response:
        """Ollama's embed API: the mean row of `final_hidden` of each text, scaled to length 1. The model was not
        trained to embed."""
        started = time.monotonic()
        body, warnings = await self._context.read_body(http, OllamaEmbedBody)
        model = self._context.check_model(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input or []

        def answer(requests: Sequence[Request]) -> Json:
            vectors = [vector_of(request) for request in requests]
            return {
                "model": model,
                "embeddings": [(each / (np.linalg.norm(each) or 1.0)).tolist() for each in vectors],
                "total_duration": round((time.monotonic() - started) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": sum(len(request.prompt_ids) for request in requests),
            }

        return await self._run(http, body, texts, body.truncate is not False, warnings, answer)

    async def embeddings(self, http: HttpRequest) -> Response:
        """Ollama's older embeddings API: the mean row of `final_hidden` of one text. The model was not trained to
        embed."""
        body, warnings = await self._context.read_body(http, OllamaEmbeddingsBody)

        def answer(requests: Sequence[Request]) -> Json:
            return {"embedding": [value for request in requests for value in vector_of(request).tolist()]}

        return await self._run(http, body, [body.prompt] if body.prompt else [], True, warnings, answer)

    async def _run(
        self,
        http: HttpRequest,
        body: RequestBody,
        texts: list[str],
        truncate: bool,
        warnings: list[str],
        answer: Callable[[Sequence[Request]], Json],
    ) -> Response:
        """Run the texts and render their requests with `answer`; without a text nothing runs."""
        engine = self._context.engine  # raises while the model is being loaded

        def render(requests: Sequence[Request]) -> Json:
            return answer(requests) | ({"warnings": warnings} if warnings else {})

        if not texts:
            return json_response(render(()))

        def ids_of(index: int, text: str) -> list[int]:
            if not truncate or not text:
                return engine.prompt_ids(text)
            begin = [] if engine.config.bos_token_id is None else [engine.config.bos_token_id]
            ids = begin + engine.tokenizer.encode(text)
            if len(ids) > engine.max_context:
                warnings.append(f"text {index} has {len(ids)} tokens and was cut to {engine.max_context}.")
            return ids[: engine.max_context]

        def calls() -> list[GenerationCall]:
            return [embedding_call(engine, ids_of(index, text), warnings) for index, text in enumerate(texts)]

        generations = await self._context.build(http, body, calls)
        return await self._context.run(http, generations, VectorFormatter(render), stream=False)
