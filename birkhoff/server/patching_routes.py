"""`POST /v1/patch_sweep`: activation patching over layers and positions, streams or heads.

The source text is run once and its activations are stored under a name; then the target text is run with the source's
activation patched in, once per cell, many of them in one pass. Each cell is the metric of the target: a logit, the
difference of two, or a log-probability. `target` and `source` are the values of the unpatched texts. Patches of later
calls can name the stored run, `{"source": {"run": NAME}}`, until `DELETE /v1/patch_source/{run}`; of runs that the call
did not name the oldest makes room for the next one. Both routes need the steering key.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.patching import head_hook
from birkhoff.byte_size import format_bytes
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address, select
from birkhoff.server.api_errors import ApiError, bad_request, conflict
from birkhoff.server.body import StrictBody
from birkhoff.server.context import ServingContext
from birkhoff.server.fields import ModuleName
from birkhoff.server.interp_routes import (
    MAX_METRIC_TOKENS,
    AnalysisRoutes,
    InterpRoutes,
    Position,
    PromptBody,
    TokenMetric,
)
from birkhoff.server.reply import json_response
from birkhoff.server.steering_routes import check_steering_key
from birkhoff.trace import Trace

MAX_CELLS = 4096
MAX_CELL_TOKENS = 1 << 17  # tokens of all cells together
MAX_RUNS = 16
MAX_RUN_BYTES = 64 << 20  # of one stored run
Stream = Annotated[int, Field(ge=0, lt=64)]


class SweepBody(StrictBody):
    source: PromptBody
    target: PromptBody
    hook: Annotated[str, Field(min_length=1, max_length=64)]
    layers: Any = "all"
    positions: Literal["all"] | Annotated[list[Position], Field(min_length=1)] | None = None
    streams: Literal["each"] | Annotated[list[Stream], Field(min_length=1)] | None = None
    align: Literal["position", "tokens"] = "position"
    metric: TokenMetric
    run: ModuleName | None = None


class PatchingRoutes(AnalysisRoutes):
    def __init__(self, context: ServingContext, interp: InterpRoutes):
        super().__init__(context, interp)
        self._unnamed: deque[str] = deque()  # runs that no call named, oldest first

    async def sweep(self, http: HttpRequest) -> Response:
        """Patches activations of a source text into a target text, cell by cell over layers and positions (with
        `streams` also over streams; hook `heads`: over attention heads), and returns the metric of every cell. Needs
        the steering key."""
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
        self._check_name(body.run)
        heads = head_hook(engine) if body.hook == "heads" else None
        hook = body.hook if heads is None else heads[0]
        layers = list(select(hook, parse_layers(body.layers), engine.schema, engine.config.num_hidden_layers))
        positions = "each" if body.positions is None else None if body.positions == "all" else body.positions
        cells = len(layers) * (1 if heads is None else heads[1])
        if body.positions != "all":
            cells *= len(body.positions or target)
        if body.streams is not None:
            cells *= (engine.num_streams or 1) if body.streams == "each" else len(body.streams)
        most = min(MAX_CELLS, MAX_CELL_TOKENS // len(target))
        if cells > most:
            raise bad_request(
                f"these are {cells} cells of {len(target)} tokens, expected at most {most}. Choose fewer layers or "
                "positions.",
                "layers",
            )
        clean = engine.trace(source, {hook: layers})
        run = self._keep(body.run, clean)
        try:
            sweep = engine.patch_sweep(
                clean,
                target,
                metric,
                body.hook,
                layers=layers,
                positions=positions,
                streams=body.streams,
                align=body.align,
            )
        except BaseException:
            engine.runs.pop(run or "", None)
            raise
        return {
            "run": run,
            "hook": body.hook,
            "axes": list(sweep.axes),
            "layers": layers,
            "positions": sweep.labels.get("position"),
            **({"streams": sweep.labels["stream"]} if "stream" in sweep.labels else {}),
            **({"heads": sweep.labels["head"]} if "head" in sweep.labels else {}),
            "source": sweep.clean,
            "target": sweep.corrupt,
            "grid": sweep.values.tolist(),
        }

    def _check_name(self, name: str | None) -> None:
        """Refuse a name that is taken, and a named run if there is no room for one."""
        runs = self._context.engine.runs
        named = len(runs) - sum(each in runs for each in self._unnamed)
        if name is not None and (name in runs or named >= MAX_RUNS):
            raise conflict(
                f"a run of this name is kept, or {MAX_RUNS} are. Delete one first.", "run", "run-taken"
            )

    def _keep(self, name: str | None, clean: Trace) -> str | None:
        """Store the rows of the source for later calls; returns the name of the run. A run that the call did not name
        is not kept if it is too large or if there are too many named ones."""
        runs = self._context.engine.runs
        size = sum(tensor.nbytes for tensor in clean.values())
        if size > MAX_RUN_BYTES:
            if name is None:
                return None
            raise bad_request(
                f"the rows of the source are {format_bytes(size)}, and a run may have {format_bytes(MAX_RUN_BYTES)}. "
                "Choose fewer layers, or leave run out.",
                "run",
            )
        while len(runs) >= MAX_RUNS and self._unnamed:
            runs.pop(self._unnamed.popleft(), None)
        if len(runs) >= MAX_RUNS:
            return None
        if name is None:
            name = "run-" + secrets.token_hex(6)
            self._unnamed.append(name)
        positions, ids = tuple(range(len(clean.token_ids))), tuple(clean.token_ids)
        rows: dict[Address, SiteRows] = {
            (hook, layer): SiteRows(hook, layer, tensor.cpu(), positions, ids)
            for (hook, layer), tensor in clean.items()
        }
        runs[name] = rows
        return name
