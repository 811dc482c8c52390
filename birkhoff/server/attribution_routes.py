"""`POST /v1/attribute` and `POST /v1/circuit`: which parts of the model a prediction depends on.

The metric is given by tokens; functions are not accepted. Texts and the number of runs of the exact method are bounded,
since these passes run one at a time beside the engine's steps.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.analysis.attribution import Attribution
from birkhoff.server.api_errors import bad_request
from birkhoff.server.interp_routes import MAX_METRIC_TOKENS, AnalysisRoutes, PromptBody, TextBody, TokenMetric
from birkhoff.server.steering_routes import request_edits

MAX_NODES = 4096  # of the exact method, which runs the text once for each
MAX_STEPS = 64
Over = Annotated[str, Field(min_length=1, max_length=160)]


class AttributionBody(TextBody):
    metric: TokenMetric
    over: Over | Annotated[list[Over], Field(min_length=1, max_length=16)] = "sublayers"
    baseline: Literal["zero", "mean"] | PromptBody = "zero"
    method: Literal["gradient", "integrated", "inputs", "exact"] = "gradient"
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 16


class AttributeBody(AttributionBody):
    layers: Any = "all"
    top: Annotated[int, Field(ge=1, le=MAX_NODES)] = 64


class CircuitBody(AttributionBody):
    faithfulness: Annotated[float, Field(gt=0, le=1)] = 0.8
    svg: bool = False


class AttributionRoutes(AnalysisRoutes):
    async def attribute(self, http: HttpRequest) -> Response:
        """Scores of sublayers, streams, experts, features or any hook at every position, by gradients or exact
        patching."""
        body, _ = await self._context.read_body(http, AttributeBody)
        return await self.analysed(http, lambda: self._attribute(body))

    async def circuit(self, http: HttpRequest) -> Response:
        """The nodes that a prediction needs, verified by ablating all others, and edges through each stream."""
        body, _ = await self._context.read_body(http, CircuitBody)
        return await self.analysed(http, lambda: self._circuit(body))

    def _attribute(self, body: AttributeBody) -> dict[str, Any]:
        ids, common = self._common(body)
        result: Attribution = self._context.engine.attribute(
            ids, **common, layers=body.layers, max_exact_nodes=MAX_NODES
        )
        return result.to_json(body.top)

    def _circuit(self, body: CircuitBody) -> dict[str, Any]:
        ids, common = self._common(body)
        if body.method == "exact":
            raise bad_request(
                "method: circuits are ranked by gradients here, not by exact patching.", "method"
            )
        found = self._context.engine.circuit(ids, **common, faithfulness=body.faithfulness)
        return found.to_json() | ({"svg": found.svg()} if body.svg else {})

    def _common(self, body: AttributionBody) -> tuple[list[int], dict[str, Any]]:
        ids = self._interp.token_ids(body, MAX_METRIC_TOKENS)
        baseline: Any = body.baseline
        if isinstance(baseline, PromptBody):
            baseline = self._interp.token_ids(baseline, MAX_METRIC_TOKENS)
        return ids, {
            "metric": self.checked_metric(body.metric, ids),
            "over": body.over,
            "baseline": baseline,
            "method": body.method,
            "steps": body.steps,
            "steer": request_edits(body.steering_fields, self._context.engine),
        }
