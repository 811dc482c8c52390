"""`POST /v1/patch_sweep`: activation patching over layers and positions, streams or heads.

The source text is run once and its activations are stored under a name; then the target text is run with the source's
activation patched in, once per cell, many of them in one pass. Each cell is the metric of the target: a logit, the
difference of two, or a log-probability. `target` and `source` are the values of the unpatched texts. Patches of later
calls can name the stored run, `{"source": {"run": NAME}}`, until `DELETE /v1/patch_source/{run}`; of runs that the call
did not name the oldest makes room for the next one. Both routes need the steering key.

`source` and `target` may be lists of as many texts, and `metric` a list with one for each pair. The answer then has the
fields of one pair, of the mean, and `source`, `target` and `grid` of every pair in `pairs`; no run is stored.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.patching import PatchSweep, head_hook
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
    Several,
    TokenMetric,
    one_for_each,
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
    source: PromptBody | Several[PromptBody]
    target: PromptBody | Several[PromptBody]
    hook: Annotated[str, Field(min_length=1, max_length=64)]
    layers: Any = "all"
    positions: Literal["all"] | Annotated[list[Position], Field(min_length=1)] | None = None
    streams: Literal["each"] | Annotated[list[Stream], Field(min_length=1)] | None = None
    align: Literal["position", "tokens"] = "position"
    metric: TokenMetric | Several[TokenMetric]
    run: ModuleName | None = None


class PatchingRoutes(AnalysisRoutes):
    def __init__(self, context: ServingContext, interp: InterpRoutes):
        super().__init__(context, interp)
        self._unnamed: deque[str] = deque()  # runs that no call named, oldest first

    async def sweep(self, http: HttpRequest) -> Response:
        """Patches activations of a source text into a target text, cell by cell over layers and positions (with
        `streams` also over streams; hook `heads`: over attention heads), and returns the metric of every cell. Lists of
        sources and targets give every pair and their mean. Needs the steering key."""
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
        sources, targets = self._pairs(body)
        count = len(targets) if isinstance(body.target, list) else None
        metrics = [
            self.checked_metric(metric, source, target)
            for metric, source, target in zip(
                one_for_each(body.metric, count, "metric"), sources, targets, strict=True
            )
        ]
        heads = head_hook(engine) if body.hook == "heads" else None
        hook = body.hook if heads is None else heads[0]
        layers = list(select(hook, parse_layers(body.layers), engine.schema, engine.config.num_hidden_layers))
        self._check_cells(body, targets, len(layers) * (1 if heads is None else heads[1]))
        options: dict[str, Any] = {
            "over": body.hook,
            "layers": layers,
            "positions": "each"
            if body.positions is None
            else None
            if body.positions == "all"
            else body.positions,
            "streams": body.streams,
            "align": body.align,
        }
        if count is not None:
            batch = engine.patch_sweep(sources, targets, metrics, **options)
            pairs = [{key: _fields(sweep)[key] for key in ("source", "target", "grid")} for sweep in batch]
            return {"run": None, "hook": body.hook, **_fields(batch.mean), "pairs": pairs}
        self._check_name(body.run)
        clean = engine.trace(sources[0], {hook: layers})
        run = self._keep(body.run, clean)
        try:
            sweep = engine.patch_sweep(clean, targets[0], metrics[0], **options)
        except BaseException:
            engine.runs.pop(run or "", None)
            raise
        return {"run": run, "hook": body.hook, **_fields(sweep)}

    def _pairs(self, body: SweepBody) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of the sources and targets, one or several of each."""
        if isinstance(body.source, list) != isinstance(body.target, list):
            raise bad_request("source and target are one text each, or two lists of as many.", "target")
        sources, targets = (
            [
                self._interp.token_ids(each, MAX_METRIC_TOKENS)
                for each in (texts if isinstance(texts, list) else [texts])
            ]
            for texts in (body.source, body.target)
        )
        if len(sources) != len(targets):
            raise bad_request(
                f"source has {len(sources)} texts and target {len(targets)}; each target has its own source. "
                "Give two lists of equal length.",
                "target",
            )
        if body.run is not None and isinstance(body.source, list):
            raise bad_request("run names the rows of one source. Leave it out for several pairs.", "run")
        return sources, targets

    def _check_cells(self, body: SweepBody, targets: list[list[int]], cells: int) -> None:
        """Refuse sweeps of too many cells; `cells` are those at one position of one stream."""
        if body.streams is not None:
            cells *= (self._context.engine.num_streams or 1) if body.streams == "each" else len(body.streams)
        longest = max(map(len, targets))
        if body.positions != "all":
            cells *= len(body.positions or range(longest))
        cells *= len(targets)
        most = min(MAX_CELLS, MAX_CELL_TOKENS // longest)
        if cells > most:
            raise bad_request(
                f"these are {cells} cells of {longest} tokens, expected at most {most}. Choose fewer layers, positions "
                "or pairs.",
                "layers",
            )

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


def _fields(sweep: PatchSweep) -> dict[str, Any]:
    """The fields of one sweep in an answer."""
    return {
        "axes": list(sweep.axes),
        "layers": sweep.labels["layer"],
        "positions": sweep.labels.get("position"),
        **({"streams": sweep.labels["stream"]} if "stream" in sweep.labels else {}),
        **({"heads": sweep.labels["head"]} if "head" in sweep.labels else {}),
        "source": sweep.clean,
        "target": sweep.corrupt,
        "grid": sweep.values.tolist(),
    }
