"""`POST /v1/patch_sweep`: activation patching over layers and positions.

The source text is run once and its activations are stored under a name; then the target text is run with the source's
activation patched in, once per layer and position, many of them in one pass. Each cell is the metric of the target, the
same as for `/v1/attribute`: a logit or the difference of two; `target` and `source` are the values of the unpatched
texts. Patches of later calls can name the stored run, `{"source": {"run": NAME}}`, until
`DELETE /v1/patch_source/{run}`. Both routes need the steering key.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.capture.spec.request import Capture
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.site_names import select
from birkhoff.server.api_errors import ApiError, bad_request, conflict
from birkhoff.server.body import StrictBody
from birkhoff.server.fields import ModuleName
from birkhoff.server.interp_routes import MAX_METRIC_TOKENS, AnalysisRoutes, Position, PromptBody, TokenMetric
from birkhoff.server.reply import json_response
from birkhoff.server.steering_routes import check_steering_key

MAX_CELLS = 512
MAX_RUNS = 16


class SweepBody(StrictBody):
    source: PromptBody
    target: PromptBody
    hook: Annotated[str, Field(min_length=1, max_length=64)]
    layers: Any = "all"
    positions: Annotated[list[Position], Field(min_length=1)] | None = None
    metric: TokenMetric
    run: ModuleName | None = None


class PatchingRoutes(AnalysisRoutes):
    async def sweep(self, http: HttpRequest) -> Response:
        """Patches activations of a source text into a target text, cell by cell over layers and positions, and returns
        the logit of a token or the difference of two. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        body, _ = await self._context.read_body(http, SweepBody)
        return await self.analysed(http, lambda: self._sweep(body))

    async def delete_run(self, http: HttpRequest, run: str) -> Response:
        """Deletes the activations stored by a patching sweep. Needs the steering key."""
        check_steering_key(http, self._context.settings)
        if self._context.engine.runs.pop(run, None) is None:
            raise ApiError(404, "there is no kept run of this name.", code="run-unknown")
        return json_response({"run": run, "kept": False})

    def _sweep(self, body: SweepBody) -> dict[str, Any]:
        engine = self._context.engine
        texts = (body.source, body.target)
        source, target = (self._interp.token_ids(each, MAX_METRIC_TOKENS) for each in texts)
        metric = self.checked_metric(body.metric, source, target)
        layers = list(
            select(body.hook, parse_layers(body.layers), engine.schema, engine.config.num_hidden_layers)
        )
        shared = min(len(source), len(target))
        positions = list(range(shared))
        if body.positions is not None:
            positions = [position + len(target) if position < 0 else position for position in body.positions]
        if not all(0 <= position < shared for position in positions):
            raise bad_request(
                f"positions: both texts have places 0..{shared - 1}, and only these.", "positions"
            )
        if len(layers) * len(positions) > MAX_CELLS:
            raise bad_request(
                f"{len(layers)} layers at {len(positions)} positions are too many, expected {MAX_CELLS} cells.",
                "layers",
            )
        name = body.run or "run-" + secrets.token_hex(6)
        if name in engine.runs or len(engine.runs) >= MAX_RUNS:
            raise conflict(
                f"a run of this name is kept, or {MAX_RUNS} are. Delete one first.", "run", "run-taken"
            )
        source_run = engine.submit_prompt(source, Capture({body.hook: layers}, "all_prompt"))
        engine.runs[name] = dict(engine.wait_for_acts(source_run))

        try:
            sweep = engine.patch_sweep(source, target, metric, body.hook, layers=layers, positions=positions)
        except BaseException:
            engine.runs.pop(name, None)
            raise
        return {
            "run": name,
            "hook": body.hook,
            "layers": layers,
            "positions": positions,
            "source": sweep.clean,
            "target": sweep.corrupt,
            "grid": sweep.values.tolist(),
        }
