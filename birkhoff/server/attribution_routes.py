"""`POST /v1/attribute` and `POST /v1/circuit`: which parts of the model a prediction depends on.

`/v1/attribute` takes several texts of one length, too: lists in `prompt` or `token_ids`, and one `metric` and one
`baseline` for all of them or a list with one for each. The answer has the fields of one text, of the mean, and the
answer for every text in `texts`.

The metric is given by tokens; functions are not accepted. Texts and the number of runs of the exact method are bounded,
since these passes run one at a time beside the engine's steps.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from birkhoff.server.api_errors import bad_request
from birkhoff.server.fields import MessageList, SteeringFields, TokenId
from birkhoff.server.interp_routes import (
    MAX_METRIC_TOKENS,
    AnalysisRoutes,
    PromptBody,
    Several,
    TextBody,
    TokenMetric,
    one_for_each,
)
from birkhoff.server.steering_routes import request_edits

MAX_NODES = 4096  # of the exact method, which runs the text once for each
MAX_STEPS = 64
Over = Annotated[str, Field(min_length=1, max_length=160)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


class AttributionOptions(SteeringFields):
    """How nodes are scored."""

    over: Over | Annotated[list[Over], Field(min_length=1, max_length=16)] = "sublayers"
    method: Literal["gradient", "integrated", "inputs", "exact"] = "gradient"
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 16


class AttributeBody(AttributionOptions):
    """One text, or several in a list."""

    model: str | None = None
    token_ids: TokenIds | Several[TokenIds] | None = None
    prompt: str | Several[str] | None = None
    messages: MessageList | None = None
    metric: TokenMetric | Several[TokenMetric]
    baseline: Literal["zero", "mean"] | PromptBody | Several[PromptBody] = "zero"
    layers: Any = "all"
    top: Annotated[int, Field(ge=1, le=MAX_NODES)] = 64

    def texts(self) -> list[PromptBody] | None:
        """The texts of a call with several; None for one."""
        for name in ("token_ids", "prompt"):
            value: Any = getattr(self, name)
            if isinstance(value, list) and isinstance(value[0], (str, list)):
                others = [other for other in ("token_ids", "prompt", "messages") if other != name]
                if self.given(others):
                    raise bad_request("give the texts once: as token_ids or prompt.", name)
                return [PromptBody.model_validate({name: each}) for each in value]
        return None

    def one_text(self) -> PromptBody:
        return PromptBody.model_validate(self.given(("token_ids", "prompt", "messages")))


class CircuitBody(TextBody, AttributionOptions):
    metric: TokenMetric
    baseline: Literal["zero", "mean"] | PromptBody = "zero"
    faithfulness: Annotated[float, Field(gt=0, le=1)] = 0.8
    svg: bool = False


class AttributionRoutes(AnalysisRoutes):
    async def attribute(self, http: HttpRequest) -> Response:
        """Scores of sublayers, streams, experts, features or any hook at every position, by gradients or exact
        patching; of one text, or of several of one length with their mean."""
        body, _ = await self._context.read_body(http, AttributeBody)
        return await self.analysed(http, lambda: self._attribute(body))

    async def circuit(self, http: HttpRequest) -> Response:
        """The nodes that a prediction needs, verified by ablating all others, and edges through each stream."""
        body, _ = await self._context.read_body(http, CircuitBody)
        return await self.analysed(http, lambda: self._circuit(body))

    def _attribute(self, body: AttributeBody) -> dict[str, Any]:
        several = body.texts()
        count = None if several is None else len(several)
        texts = [self._ids(each) for each in several or [body.one_text()]]
        metrics = [
            self.checked_metric(metric, ids)
            for metric, ids in zip(one_for_each(body.metric, count, "metric"), texts, strict=True)
        ]
        baseline: Any = body.baseline
        given: list[str | PromptBody] = one_for_each(baseline, count, "baseline")
        baselines = [self._baseline(each) for each in given]
        by_words = isinstance(body.baseline, str)
        result = self._context.engine.attribute(
            texts if several else texts[0],
            metrics if several else metrics[0],
            baseline=baselines if several and not by_words else baselines[0],
            layers=body.layers,
            max_exact_nodes=MAX_NODES // len(texts),
            **self._options(body),
        )
        return result.to_json(body.top)

    def _circuit(self, body: CircuitBody) -> dict[str, Any]:
        if body.method == "exact":
            raise bad_request(
                "method: circuits are ranked by gradients here, not by exact patching.", "method"
            )
        ids = self._ids(body)
        found = self._context.engine.circuit(
            ids,
            self.checked_metric(body.metric, ids),
            baseline=self._baseline(body.baseline),
            faithfulness=body.faithfulness,
            **self._options(body),
        )
        return found.to_json() | ({"svg": found.svg()} if body.svg else {})

    def _ids(self, body: PromptBody) -> list[int]:
        return self._interp.token_ids(body, MAX_METRIC_TOKENS)

    def _baseline(self, baseline: str | PromptBody) -> Any:
        return self._ids(baseline) if isinstance(baseline, PromptBody) else baseline

    def _options(self, body: AttributionOptions) -> dict[str, Any]:
        return {
            "over": body.over,
            "method": body.method,
            "steps": body.steps,
            "steer": request_edits(body.steering_fields, self._context.engine),
        }
