"""SAE routes: attached SAEs, features that are active on a text, and global clamps.

Clamps of a single call are fields of that call. SAEs are attached when the server starts or from Python; a call cannot
upload one. The routes that change global clamps need the steering key.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.api.engine import Engine
from birkhoff.embedded import dictionary_path, shipped_dictionary
from birkhoff.errors import SaeError, quoted
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_probe import Feature
from birkhoff.sae.files import check_named
from birkhoff.sae.sae_fields import parse_global_specs
from birkhoff.server.api_errors import ApiError, bad_request
from birkhoff.server.body import EmptyBody, StrictBody, read_query
from birkhoff.server.interp_routes import AnalysisRoutes, TextBody
from birkhoff.server.reply import json_response
from birkhoff.server.server_settings import ServerSettings
from birkhoff.server.steering_routes import check_steering_key, request_edits

TOP_LOGITS = 10
MAX_FOUND, MAX_QUERY = 200, 200


def sae_paths(settings: ServerSettings, model: str) -> dict[str, Path]:
    """Paths of the SAEs to attach at start, by name: the one shipped with the model and those of the settings."""
    shipped = shipped_dictionary(model)
    configured = _configured_paths(settings)
    return configured if shipped is None else {model: shipped, **configured}


def check_saes(settings: ServerSettings) -> None:
    """Refuse SAEs of the settings whose files are not there; none is read."""
    for path in _configured_paths(settings).values():
        check_named(path)


def _configured_paths(settings: ServerSettings) -> dict[str, Path]:
    pairs = (text.partition("=") for text in (*settings.sae, *settings.sae_full))
    return {name: dictionary_path(path) for name, _, path in pairs}


def attach_saes(settings: ServerSettings, engine: Engine) -> None:
    """Attach all SAEs; those of `sae_full` in mode `full`, the others in mode `delta`."""
    full = {text.partition("=")[0] for text in settings.sae_full}
    for name, path in sae_paths(settings, engine.name).items():
        engine.attach(name, path, "full" if name in full else "delta")


class FeaturesBody(TextBody):
    sae: Annotated[str, Field(min_length=1, max_length=256)]
    k: Annotated[int, Field(ge=1, le=64)] = 8
    hook: Annotated[str, Field(max_length=64)] | None = None
    layer: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    order: Literal["specific", "strength"] | None = None


class GlobalClampsBody(StrictBody):
    prefill_specs: list[Any] | None = None
    decode_specs: list[Any] | None = None
    replace: bool = True


class SaeRoutes(AnalysisRoutes):
    async def list_saes(self) -> Response:
        """Attached sparse autoencoders with hook and layer."""
        registry = self._context.engine.saes.registry
        entries = []
        for name in registry:
            for (hook, layer), sae in registry[name].saes.items():
                entries.append(
                    {
                        **registry[name].describe(),
                        "hook": hook,
                        "layer": layer,
                        "view": sae.view,
                        "d_sae": sae.total_features,
                        "stored_features": sae.d_sae,
                        "labels": len(sae.labels),
                        "described": len(sae.descriptions),
                    }
                )
        return json_response({"saes": entries})

    async def features(self, http: HttpRequest) -> Response:
        """The most active features of an SAE at every token of a text."""
        body, _ = await self._context.read_body(http, FeaturesBody)
        self._module(body.sae)
        if (body.hook is None) != (body.layer is None):
            raise bad_request("hook and layer name a site together. Give both or neither.", "hook")
        site = None if body.hook is None or body.layer is None else (body.hook, body.layer)
        ids, steer = await self._context.build(
            http,
            body,
            lambda: (
                self._interp.token_ids(body, self._context.settings.lens_max_tokens),
                request_edits(body.steering_fields, self._context.engine),
            ),
        )
        rows = await self._interp.run_exclusive(
            http, lambda: self._context.engine.features(ids, body.sae, body.k, site, steer, body.order)
        )
        described = self._context.engine.saes.descriptions(body.sae)

        def feature_json(feature: Feature) -> dict[str, Any]:
            entry = described.get(feature.feature)
            known = {} if entry is None else {"density": entry.density, "score": entry.score}
            return known | feature.to_json()

        tokens = [
            {
                "position": position,
                "token_id": token,
                "text": self._context.token_text(token),
                "features": [feature_json(feature) for feature in row],
            }
            for position, (token, row) in enumerate(zip(ids, rows))
        ]
        return json_response({"sae": body.sae, "tokens": tokens})

    async def search(self, http: HttpRequest, sae: str) -> Response:
        """Features with the words `q` in their label, tokens or contexts, best first; at most `limit` (20)."""
        self._module(sae)
        words, text = read_query(http, q="", limit="20")
        if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_FOUND:
            raise bad_request(f"limit: expected a number from 1 to {MAX_FOUND}.", "limit")
        if not words.strip() or len(words) > MAX_QUERY:
            raise bad_request(f"q: expected words to search for, at most {MAX_QUERY} characters.", "q")
        described = self._context.engine.saes.descriptions(sae)
        found = await asyncio.to_thread(described.search, words, int(text))
        return json_response(
            {"sae": sae, "described": len(described), "features": [match.to_json() for match in found]}
        )

    async def feature(self, sae: str, feature: str) -> Response:
        """Label with how it was made and its held-out score, density, contexts, examples and decoder logits of one
        feature."""
        (hook, layer), dictionary = next(iter(self._module(sae).saes.items()))
        is_number = feature.isascii() and feature.isdecimal() and len(feature) < 10
        number = int(feature) if is_number else dictionary.total_features
        try:
            index = dictionary.feature(number)
        except SaeError as error:
            raise ApiError(404, str(error), code="feature-unknown") from None
        fields: dict[str, Any] = {
            "sae": sae,
            "feature": number,
            "hook": hook,
            "layer": layer,
            "label": dictionary.label(index),
        }
        if dictionary.x_max is not None:
            fields["x_max"] = float(dictionary.x_max[index])
        fields |= await asyncio.to_thread(self._decoder_logits, dictionary, index)
        entry = dictionary.descriptions.get(number)
        if entry is not None:
            summary = entry.to_json()
            if entry.cofires:
                known = dictionary.descriptions
                summary["cofires"] = [
                    {**one, "label": known[one["feature"]].label if one["feature"] in known else None}
                    for one in entry.cofires
                ]
            fields |= {"x_max": summary.pop("largest")} | summary
        return json_response(fields)

    async def status(self) -> Response:
        """SAE clamps that apply to every request."""
        return json_response(self._context.engine.saes.status())

    async def set(self, http: HttpRequest) -> Response:
        """Sets SAE clamps for every later request. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        body, _ = await self._context.read_body(
            http, GlobalClampsBody, self._context.settings.max_upload_bytes
        )
        edits = parse_global_specs({"prefill_specs": body.prefill_specs, "decode_specs": body.decode_specs})
        if not edits:
            raise bad_request(
                "nothing to set: give prefill_specs or decode_specs, or call /v1/steering/sae/clear.",
                "prefill_specs",
            )
        self._context.engine.saes.set_for_all(edits, body.replace)
        return await self.status()

    async def clear(self, http: HttpRequest) -> Response:
        """Removes the SAE clamps that apply to every request. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        await self._context.read_body(http, EmptyBody, optional=True)
        self._context.engine.saes.clear_for_all()
        return await self.status()

    def _module(self, name: str) -> Any:
        registry = self._context.engine.saes.registry
        if name not in registry:
            attached = ", ".join(registry) or "none"
            raise ApiError(
                404,
                f"no dictionary is attached as {quoted(name)}; attached: {attached}.",
                code="sae-unknown",
                param="sae",
            )
        return registry[name]

    def _decoder_logits(self, sae: Sae, index: int) -> dict[str, Any]:
        """Top and bottom logits of a feature's decoder row, through the final norm and the head.

        Empty unless the row's width is a multiple of the hidden size; rows over several streams are averaged."""
        model = self._context.engine.model
        row = sae.decoder[index].float()
        width = self._context.engine.config.hidden_size
        if row.numel() % width:
            return {}
        with torch.no_grad():
            direction = row.view(-1, width).mean(0).to(model.device, model.dtype)
            logits = model.logits(model.norm(direction[None]))[0].float()
        up, down = logits.topk(TOP_LOGITS), (-logits).topk(TOP_LOGITS)
        return {
            "top_logits": self._logits_json(up.indices, up.values),
            "bottom_logits": self._logits_json(down.indices, -down.values),
        }

    def _logits_json(self, ids: torch.Tensor, values: torch.Tensor) -> list[dict[str, Any]]:
        return [
            {"token_id": i, "text": self._context.token_text(i), "logit": v}
            for i, v in zip(ids.tolist(), values.tolist())
        ]
