"""Routes about the server itself: health, models, properties, slots, metrics, cancellation.

`/health` never waits for the engine. `/props` describes the model for clients: layers, hooks with shapes, limits and
defaults. `/slots` lists active requests with their progress; it shows prompts only with `debug_prompts`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff import __version__
from birkhoff.engine.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.signals import NAMES as SIGNALS
from birkhoff.hooks.sites import SITES
from birkhoff.server.api_errors import ApiError
from birkhoff.server.body import EmptyBody
from birkhoff.server.context import ServingContext
from birkhoff.server.metrics import Metrics
from birkhoff.server.reply import json_response

LIMITS = (
    "max_queue max_connections max_choices max_body_bytes max_upload_bytes max_depth "
    "capture_max_request_bytes capture_inline_max_bytes lens_max_tokens"
).split()


class ServiceRoutes:
    def __init__(self, context: ServingContext, metrics: Metrics):
        self._context = context
        self._metrics = metrics
        self._created = int(time.time())

    async def health(self) -> Response:
        """200 once the model is loaded and the engine is alive, else 503. Never waits for the engine."""
        async_engine = self._context.async_engine
        if not async_engine.healthy:
            raise ApiError(503, "the engine has stopped. Start the server again.", code="engine-stopped")
        if not async_engine.loaded:
            raise ApiError(
                503, "the model is still being loaded.", code="loading", headers={"Retry-After": "2"}
            )
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """200 if a request would be admitted now; 503 while loading or draining and when the queue is full."""
        if not self._context.async_engine.ready:
            raise ApiError(
                503, "a call would not be let in now.", code="not-ready", headers={"Retry-After": "2"}
            )
        return json_response({"status": "ready"})

    async def version(self) -> Response:
        """The version of the server."""
        return json_response({"version": __version__})

    async def models(self) -> Response:
        """The model that is served, once under each of its names."""
        return json_response(
            {"object": "list", "data": [self._model_card(name) for name in self._context.model_names]}
        )

    async def model(self, model: str) -> Response:
        """The served model; 404 for another name."""
        return json_response(self._model_card(self._context.check_model(model)))

    def _model_card(self, name: str) -> dict[str, Any]:
        engine = self._context.engine
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "birkhoff",
            "max_model_len": engine.max_context,
            "meta": {"vocab_size": engine.config.vocab_size, **engine.settings},
        }

    async def props(self) -> Response:
        """Model dimensions, hooks with their shapes, sampling defaults and limits."""
        context, engine = self._context, self._context.engine
        config, settings = engine.config, context.settings
        defaults = {
            each.name: each.default
            for each in fields(SamplingParams)
            if each.name not in ("logit_bias", "stop", "context")
        }
        steerable = {site.name for site in SITES if site.edit}
        return json_response(
            {
                "model": context.model_name,
                "version": __version__,
                "max_context": engine.max_context,
                "slots": engine.max_requests,
                "layers": config.num_hidden_layers,
                "hidden_size": config.hidden_size,
                "streams": engine.num_streams,
                "vocab_size": config.vocab_size,
                **expert_counts(engine.schema),
                "compress_ratios": list(getattr(config, "compress_ratios", ())),
                "settings": engine.settings,
                "hooks": {
                    name: {
                        "shape": list(row.logical_shape),
                        "width": row.width,
                        "dtype": row.dtype,
                        "steerable": name in steerable,
                    }
                    for name, row in engine.schema.items()
                },
                "signals": [] if engine.num_streams is None else [*SIGNALS, "cosine:NAME"],
                "modules": sorted(engine.modules),
                "thinks": context.thinks_by_default,
                "defaults": defaults | {"max_tokens": DEFAULT_MAX_TOKENS},
                "limits": {name: getattr(settings, name) for name in LIMITS},
                "captures": {"memory": True, "filesystem": bool(settings.capture_root)},
                "steering_key": bool(settings.steering_api_key),
                "chat": {**engine.chat_abilities, "system": True},
            }
        )

    async def slots(self, http: HttpRequest) -> Response:
        """Running and waiting requests with their progress. With `fail_on_no_slot=1`, 503 if no slot is free."""
        context, async_engine = self._context, self._context.async_engine
        active = async_engine.active_requests
        in_slots = [request for request in active if request.slot is not None]
        free = context.engine.max_requests - len(in_slots)
        if free <= 0 and http.query_params.get("fail_on_no_slot") == "1":
            raise ApiError(503, "no slot is free.", code="no-slot")
        rows = []
        for request in active:
            if request.slot is None:
                state = "waiting"
            else:
                state = "decode" if request.output_ids else "prefill"
            row: dict[str, Any] = {
                "id": async_engine.call_id(request),
                "slot": request.slot,
                "state": state,
                "prompt_tokens": len(request.prompt_ids),
                "computed": request.num_computed_tokens,
                "output_tokens": len(request.output_ids),
                "max_tokens": request.max_tokens,
                "steered": bool(request.plan and request.plan.edits),
                "captures": bool(request.results.captures),
            }
            if context.settings.debug_prompts:
                row["prompt"] = context.engine.tokenizer.decode(request.prompt_ids[:64])
            rows.append(row)
        return json_response({"slots": context.engine.max_requests, "free": free, "requests": rows})

    async def metrics(self) -> Response:
        """Metrics in the Prometheus text format."""
        active = self._context.async_engine.active_requests
        running = sum(request.slot is not None for request in active)
        self._metrics.running.set(running)
        self._metrics.waiting.set(len(active) - running)
        if self._context.async_engine.loaded:
            self._metrics.slots_free.set(self._context.engine.max_requests - running)
            self._metrics.record_prefix_cache(self._context.engine.reuse["prefix"])
            self._metrics.record_captures(self._context.engine.capture_counters)
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def cancel(self, http: HttpRequest, request_id: str) -> Response:
        """Cancels the request with this id. Idempotent: an unknown or finished id is not an error."""
        await self._context.read_body(http, EmptyBody, optional=True)
        cancelled = self._context.async_engine.cancel_call(request_id)
        return json_response({"id": request_id[:128], "cancelled": cancelled})


def expert_counts(schema: Mapping[str, HookSchema]) -> dict[str, int | None]:
    """Routed experts of the model; None where it has none."""
    logits, chosen = schema.get("moe_router_logits"), schema.get("moe_topk")
    return {
        "experts": None if logits is None else logits.width,
        "experts_per_token": None if chosen is None else chosen.logical_shape[0],
        "hash_layers": 0 if chosen is None else len(chosen.hash_routed),
    }
