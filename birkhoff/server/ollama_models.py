"""Ollama's routes about models: `/api/tags`, `/api/show`, `/api/ps` and `/api/version`.

One model is served, and it stays in memory: it is listed once under each of its names, in `/api/ps` with an expiry in
the far future, as Ollama lists a model that is kept forever. `model_info` uses the keys of GGUF files. The context a
call may fill is `num_ctx` under `parameters`; `context_length` of `model_info` is what the model was made for.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff import __version__
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.server.api_errors import bad_request
from birkhoff.server.body import RequestBody
from birkhoff.server.context import Routes, ServingContext
from birkhoff.server.fields import ModelName
from birkhoff.server.model_files import ModelFiles, describe_files
from birkhoff.server.reply import json_response
from birkhoff.server.service_routes import expert_counts

Json = dict[str, Any]
FOREVER = datetime.timedelta(microseconds=(2**63 - 1) // 1000)  # Ollama's: the most nanoseconds it can count


class OllamaShowBody(RequestBody):
    without_effect = frozenset({"verbose", "system", "template", "options"})

    model: ModelName | None = None
    name: ModelName | None = None  # what older clients send


class OllamaModelRoutes(Routes):
    def __init__(self, context: ServingContext, find_files: Callable[[], Path]):
        """`find_files` returns the path of the served checkpoint."""
        super().__init__(context)
        self._find_files = find_files
        self._files: ModelFiles | None = None
        self._host_bytes: int | None = None

    async def tags(self) -> Response:
        """The served names in Ollama's format, with the size of the model's files and their digest."""
        files = await self._read_files()
        return json_response(
            {
                "models": [
                    {**self._entry(name, files), "modified_at": timestamp(files.modified), "size": files.size}
                    for name in self._context.model_names
                ]
            }
        )

    async def show(self, http: HttpRequest) -> Response:
        """Details of a served model in Ollama's format; 404 for another name."""
        body, _ = await self._context.read_body(http, OllamaShowBody)
        requested = body.model or body.name
        if not requested:
            raise bad_request(
                "model is missing; expected the name of a model. GET /api/tags lists them.", "model"
            )
        name = self._context.check_model(requested)
        files = await self._read_files()
        parameters = self._parameters()
        return json_response(
            {
                "modelfile": "\n".join([f"FROM {name}", *(f"PARAMETER {line}" for line in parameters), ""]),
                "parameters": "\n".join(parameters),
                "template": "",  # the chat format is code of the server, no template of Ollama's
                "details": self._details(files),
                "model_info": self._model_info(files),
                "capabilities": self._capabilities(),
                "modified_at": timestamp(files.modified),
            }
        )

    async def running(self) -> Response:
        """The model in memory in Ollama's format: `size` bytes of it, of which `size_vram` are on a GPU."""
        files = await self._read_files()
        engine = self._context.engine
        if self._host_bytes is None:
            self._host_bytes = await asyncio.to_thread(_host_weight_bytes, engine.model)
        device = engine.model.device
        on_gpu = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        memory = {
            "size": self._host_bytes + on_gpu,
            "size_vram": on_gpu,
            "expires_at": timestamp(datetime.datetime.now(datetime.UTC) + FOREVER),
            "context_length": engine.max_context,
        }
        return json_response(
            {"models": [{**self._entry(name, files), **memory} for name in self._context.model_names]}
        )

    async def version(self) -> Response:
        """The version of this server."""
        return json_response({"version": __version__})

    async def _read_files(self) -> ModelFiles:
        """Describe the files when first asked for, once the model is loaded."""
        self._context.engine  # noqa: B018  raises 503 while it is being loaded
        if self._files is None:
            self._files = await asyncio.to_thread(lambda: describe_files(self._find_files()))
        return self._files

    @property
    def _family(self) -> str:
        """The architecture under its name in GGUF files and in Transformers; V4's config has no `model_type`."""
        return str(getattr(self._context.engine.config, "model_type", "deepseek4"))

    def _entry(self, name: str, files: ModelFiles) -> Json:
        return {"name": name, "model": name, "digest": files.digest, "details": self._details(files)}

    def _details(self, files: ModelFiles) -> Json:
        return {
            "parent_model": "",
            "format": files.format,
            "family": self._family,
            "families": [self._family],
            "parameter_size": _short_count(files.parameters),
            "quantization_level": files.quantization,
        }

    def _parameters(self) -> list[str]:
        """Defaults of a call that says nothing else, and the context it may fill; one line each."""
        defaults = {
            "num_ctx": self._context.engine.max_context,
            "temperature": SamplingParams.temperature,
            "top_p": SamplingParams.top_p,
        }
        return [f"{name:<30} {value}" for name, value in defaults.items()]

    def _model_info(self, files: ModelFiles) -> Json:
        engine, family = self._context.engine, self._family
        config, experts = engine.config, expert_counts(engine.schema)
        fields = {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "vocab_size": config.vocab_size,
            "attention.head_count": getattr(config, "num_attention_heads", None),
            "expert_count": experts["experts"],
            "expert_used_count": experts["experts_per_token"],
        }
        return {
            "general.architecture": family,
            "general.parameter_count": files.parameters,
            **{f"{family}.{key}": value for key, value in fields.items() if value is not None},
        }

    def _capabilities(self) -> list[str]:
        abilities = self._context.engine.chat_abilities
        optional = {"tools": abilities["tools"], "thinking": abilities["reasoning"]}
        return ["completion", *(name for name, present in optional.items() if present)]


def timestamp(moment: datetime.datetime) -> str:
    """A time in UTC as Ollama's API writes it."""
    return moment.isoformat().replace("+00:00", "Z")


def _host_weight_bytes(model: Any) -> int:
    """Bytes of the weights in host memory; those that share memory count once."""
    weights = {
        tensor.data_ptr(): tensor.nbytes for _, tensor in model.named_weights() if tensor.device.type == "cpu"
    }
    return sum(weights.values())


def _short_count(number: int) -> str:
    """A parameter count as Ollama writes it: 33.65M, 284.3B."""
    for unit, size, digits in (("T", 10**12, 1), ("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 2)):
        if number >= size:
            return f"{number / size:.{digits}f}{unit}"
    return str(number)
