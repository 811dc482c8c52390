"""`POST /v1/patch_sweep`: where in the model, and at which token, does one text's inside decide another's answer?

The source is run once and its rows are kept under a name; then the target is run once for every layer and position with
the source's row put there. Each cell says how far one token is ahead of another at the target's end, between the value
of the target alone (`target`) and of the source alone (`source`). The kept run can be named by patches of later calls,
`{"source": {"run": NAME}}`, until `DELETE /v1/patch_source/{run}`. Both need the steering key.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.capture.spec.request import Capture
from birkhoff.hooks.layers import parse_layers
from birkhoff.server.api_errors import ApiError, bad
from birkhoff.server.body import StrictBody
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import TokenId
from birkhoff.server.interp_routes import InterpRoutes, TextBody
from birkhoff.server.reply import json_response
from birkhoff.server.steering_routes import check_steering_key

MOST_CELLS = 512
MOST_RUNS = 16
MOST_TOKENS = 256
Position = Annotated[int, Field(ge=-MOST_TOKENS, lt=MOST_TOKENS)]


class LogitDifference(StrictBody):
    """How much likelier `token` is than `other`, as a difference of logits."""

    token: TokenId
    other: TokenId


class SweepBody(StrictBody):
    source: TextBody
    target: TextBody
    hook: Annotated[str, Field(min_length=1, max_length=64)]
    layers: Any = "all"
    positions: (
        Annotated[list[Annotated[int, Field(ge=-MOST_TOKENS, lt=MOST_TOKENS)]], Field(min_length=1)] | None
    ) = None
    metric: LogitDifference
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")] | None = None


class PatchRoutes:
    def __init__(self, context: ServingContext, looking: InterpRoutes):
        self._context = context
        self._looking = looking

    async def sweep(self, http: HttpRequest) -> Response:
        body, _ = await self._context.read(http, SweepBody)
        check_steering_key(http, self._context.settings)
        return json_response(await self._looking.beside(http, lambda: self._sweep(body)))

    async def forget(self, http: HttpRequest, run: str) -> Response:
        check_steering_key(http, self._context.settings)
        if self._context.engine.runs.pop(run, None) is None:
            raise ApiError(404, "there is no kept run of this name.", code="run-unknown")
        return json_response({"run": run, "kept": False})

    def _sweep(self, body: SweepBody) -> dict[str, Any]:
        engine = self._context.engine
        source, target = (self._looking.ids(each, MOST_TOKENS) for each in (body.source, body.target))
        last = engine.config.vocab_size - 1
        if max(body.metric.token, body.metric.other) > last:
            raise bad(f"metric: this model has ids 0..{last}.", "metric")
        once = body.hook in engine.schema and engine.schema[body.hook].once
        count = engine.config.num_hidden_layers
        layers = [count - 1] if once else list(parse_layers(body.layers).expand(count))
        shared = min(len(source), len(target))
        asked = body.positions
        positions = list(range(shared)) if asked is None else [p + len(target) if p < 0 else p for p in asked]
        if not all(0 <= place < shared for place in positions):
            raise bad(f"positions: both texts have places 0..{shared - 1}, and only these.", "positions")
        if len(layers) * len(positions) > MOST_CELLS:
            raise bad(
                f"{len(layers)} layers at {len(positions)} positions are too many, expected {MOST_CELLS} cells.",
                "layers",
            )
        name = body.run or "run-" + secrets.token_hex(6)
        if name in engine.runs or len(engine.runs) >= MOST_RUNS:
            raise ApiError(
                409,
                f"a run of this name is kept, or {MOST_RUNS} are. Delete one first.",
                code="run-taken",
                param="run",
                headers={"x-should-retry": "false"},
            )
        kept = engine.submit_prompt(source, Capture({body.hook: layers}, "all_prompt"))
        engine.runs[name] = dict(engine.wait_for_acts(kept))

        def ahead(ids: list[int], edits: Any = None) -> float:
            logits = engine.logits(ids, edits)[-1]
            return float(logits[body.metric.token] - logits[body.metric.other])

        def patched(layer: int, position: int) -> list[Any]:
            edit: dict[str, Any] = {"op": "patch", "at": {"hook": body.hook, "layers": [layer]}}
            edit |= {"source": {"run": name, "layer": layer}, "where": {"prompt": [position]}}
            return engine.edits_from_json({"interventions": [edit]})

        try:
            grid = [[ahead(target, patched(layer, place)) for place in positions] for layer in layers]
        except BaseException:
            engine.runs.pop(name, None)
            raise
        return {
            "run": name,
            "hook": body.hook,
            "layers": layers,
            "positions": positions,
            "source": ahead(source),
            "target": ahead(target),
            "grid": grid,
        }
