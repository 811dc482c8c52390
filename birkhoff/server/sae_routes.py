"""Dictionaries of features over HTTP: which are attached, which features fire on a text, and clamps for every answer.

Features of single calls come in the calls themselves. Dictionaries are attached when the server starts, or in Python;
a call cannot bring one. The routes that change what every answer gets need the steering key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.sae_features import FILE
from birkhoff.api.engine import Engine
from birkhoff.embedded import shipped_dictionary
from birkhoff.errors import quoted
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.sae_fields import parse_global_specs
from birkhoff.server.api_errors import ApiError, bad
from birkhoff.server.body import RequestBody
from birkhoff.server.context import ServingContext
from birkhoff.server.interp_routes import InterpRoutes, TextBody
from birkhoff.server.reply import json_response
from birkhoff.server.server_settings import ServerSettings
from birkhoff.server.steering_routes import check_steering_key, request_edits

LIKELIEST = 10
MOST_BOOK_BYTES = 64 << 20


def dictionaries(settings: ServerSettings, model: str) -> dict[str, Path]:
    """What is attached at the start, by name: the model's own, when it ships with one, and those that were named."""
    own = shipped_dictionary(model)
    given = (text.partition("=") for text in (*settings.sae, *settings.sae_full))
    named = {name: Path(path) for name, _, path in given}
    return named if own is None else {model: own, **named}


def attach(settings: ServerSettings, engine: Engine) -> None:
    """Attach them all; those of `sae_full` whole, the others to change features with."""
    full = {text.partition("=")[0] for text in settings.sae_full}
    for name, path in dictionaries(settings, engine.name).items():
        engine.attach(name, path, "full" if name in full else "delta")


def read_book(folder: Path) -> dict[str, Any]:
    """What `features.json` beside a dictionary says of its features; nothing when there is none that can be read."""
    path = folder / FILE
    try:
        if path.stat().st_size > MOST_BOOK_BYTES:
            return {}
        found = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class FeaturesBody(TextBody):
    sae: Annotated[str, Field(min_length=1, max_length=256)]
    k: Annotated[int, Field(ge=1, le=64)] = 8
    hook: Annotated[str, Field(max_length=64)] | None = None
    layer: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class GlobalBody(RequestBody):
    prefill_specs: list[Any] | None = None
    decode_specs: list[Any] | None = None
    replace: bool = True


class SaeRoutes:
    def __init__(self, context: ServingContext, looking: InterpRoutes):
        self._context = context
        self._looking = looking
        self._books: dict[str, dict[str, Any]] = {}

    async def attached(self) -> Response:
        """One entry per dictionary: a module with several sites has several."""
        registry = self._context.engine.saes.registry
        found = []
        for name in registry:
            for (hook, layer), sae in registry[name].saes.items():
                told = registry[name].describe()
                found.append(
                    {
                        **told,
                        "hook": hook,
                        "layer": layer,
                        "view": sae.view,
                        "d_sae": sae.d_sae,
                        "labels": len(sae.labels),
                    }
                )
        return json_response({"saes": found})

    async def features(self, http: HttpRequest) -> Response:
        """The strongest features of every token of a text."""
        body, _ = await self._context.read(http, FeaturesBody)
        self._known(body.sae)
        if (body.hook is None) != (body.layer is None):
            raise bad("hook and layer name a site together. Give both or neither.", "hook")
        at = None if body.hook is None or body.layer is None else (body.hook, body.layer)
        ids = self._looking.ids(body, self._context.settings.lens_max_tokens)
        steer = request_edits(body.steers, self._context.engine)
        rows = await self._looking.beside(
            http, lambda: self._context.engine.features(ids, body.sae, body.k, at, steer)
        )
        tokens = [
            {
                "position": place,
                "token_id": token,
                "text": self._text(token),
                "features": [each.to_json() for each in row],
            }
            for place, (token, row) in enumerate(zip(ids, rows))
        ]
        return json_response({"sae": body.sae, "tokens": tokens})

    async def feature(self, sae: str, feature: str) -> Response:
        """What is known of one feature, and which tokens its direction makes likelier."""
        module = self._known(sae)
        (hook, layer), found = next(iter(module.saes.items()))
        index = (
            int(feature) if feature.isascii() and feature.isdecimal() and len(feature) < 10 else found.d_sae
        )
        if index >= found.d_sae:
            raise ApiError(404, f"this dictionary has features 0..{found.d_sae - 1}.", code="feature-unknown")
        told: dict[str, Any] = {
            "sae": sae,
            "feature": index,
            "hook": hook,
            "layer": layer,
            "label": found.labels.get(index),
        }
        if found.x_max is not None:
            told["x_max"] = float(found.x_max[index])
        told |= await asyncio.to_thread(self._logits, found, index)
        told |= await asyncio.to_thread(self._known_contexts, sae, index)
        return json_response(told)

    def _known_contexts(self, sae: str, index: int) -> dict[str, Any]:
        """How often the feature fires and where it fired most, from the book beside its dictionary."""
        if sae not in self._books:
            folder = dictionaries(self._context.settings, self._context.engine.name).get(sae)
            self._books[sae] = {} if folder is None else read_book(folder)
        entry = self._books[sae].get(str(index))
        if not isinstance(entry, dict):
            return {}
        kept = {"label": "label", "density": "density", "largest": "x_max", "contexts": "contexts"}
        return {name: entry[key] for key, name in kept.items() if entry.get(key) is not None}

    async def status(self) -> Response:
        return json_response(self._context.engine.saes.status())

    async def set(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, GlobalBody, self._context.settings.max_upload_bytes)
        check_steering_key(http, self._context.settings)
        edits = parse_global_specs({"prefill_specs": body.prefill_specs, "decode_specs": body.decode_specs})
        if not edits:
            raise bad(
                "nothing to set: give prefill_specs or decode_specs, or call /v1/steering/sae/clear.",
                "prefill_specs",
            )
        self._context.engine.saes.set_for_all(edits, body.replace)
        return await self.status()

    async def clear(self, http: HttpRequest) -> Response:
        check_steering_key(http, self._context.settings)
        self._context.engine.saes.clear_for_all()
        return await self.status()

    def _known(self, name: str) -> Any:
        registry = self._context.engine.saes.registry
        if name not in registry:
            known = ", ".join(registry) or "none"
            raise ApiError(
                404,
                f"no dictionary is attached as {quoted(name)}; attached: {known}.",
                code="sae-unknown",
                param="sae",
            )
        return registry[name]

    def _logits(self, sae: Sae, index: int) -> dict[str, Any]:
        """What the decoder row says through the final norm and the head; only where it is as wide as one stream."""
        model = self._context.engine.model
        row = sae.decoder[index].float()
        width = self._context.engine.config.hidden_size
        if row.numel() % width:
            return {}
        with torch.no_grad():
            direction = row.view(-1, width).mean(0).to(model.embed.device, model.numerics.dtype)
            logits = model.head(model.norm(direction[None]))[0].float()
        up, down = logits.topk(LIKELIEST), (-logits).topk(LIKELIEST)
        return {
            "top_logits": self._named(up.indices, up.values),
            "bottom_logits": self._named(down.indices, -down.values),
        }

    def _named(self, ids: torch.Tensor, values: torch.Tensor) -> list[dict[str, Any]]:
        return [
            {"token_id": i, "text": self._text(i), "logit": v} for i, v in zip(ids.tolist(), values.tolist())
        ]

    def _text(self, token: int) -> str:
        tokenizer = self._context.engine.tokenizer
        return tokenizer.marker(token) or tokenizer.piece(token).decode("utf-8", "replace")
