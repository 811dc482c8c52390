"""The contract between captures and edits and the engine that runs the model, step by step.

An engine has one `StepHooks` per stream of steps. What a request captures and edits is its `Plan`; which rows of a step
belong to it is a `Span`. A step then is:

    hooks.begin(spans, num_rows)          before the forward pass; `num_rows` counts padding too
        x = hooks.site(layer, site, x)    at every hooked tensor [num_rows, ...], or hand `hooks.at(layer)` to the model
    hooks.end(drafted)                    after it: delivers captured rows
    hooks.settle(plan, stop)              for each plan in `drafted`, once it is known which draft tokens are kept
    hooks.fail()                          instead of `end`, if the forward pass raised
    hooks.finish(plan, reason, tokens)    when the request has ended for whatever reason

Before the first step of a request its engine calls `plan.open()` and `plan.reserve()`, and `plan.release()` while it is
preempted. Rows are identified by absolute position: tokens that are computed again deliver nothing twice, and edits
apply to them again. Only tensors and positions are exchanged here; no engine and no model is imported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from birkhoff.hooks.batch_tap import BatchTap, RowObserver, StepStaging, arm
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import NoTap, Tap

_NO_TAP = NoTap()
ALL = 1 << 62  # a position after all others


class StepHooks:
    """Captures and edits of the steps that one thread of an engine runs on `device`."""

    def __init__(self, device: torch.device | str = "cpu"):
        self._staging = StepStaging(device)
        self._tap: BatchTap | None = None
        self._spans: Sequence[Span] = ()
        self._delivered: list[tuple[Plan, int]] = []  # what had been delivered before the step
        self._copying: list[Plan] = []  # plans whose rows of the last step are being copied to the host

    def begin(self, spans: Sequence[Span], num_rows: int | None = None) -> BatchTap | None:
        """Start a step whose tensors have `num_rows` rows (None: unknown); returns its tap, None if nothing happens.

        Rows of draft tokens that were not settled are settled by where the request continues."""
        for span in spans:
            if span.plan.withheld is not None and span.plan not in self._copying:
                span.plan.settle(span.start)
        self._spans = [
            span for span in spans if not (span.plan.idle_after_prompt and span.start >= span.prompt_len)
        ]
        self._delivered = [(span.plan, span.plan.delivered_until) for span in self._spans]
        self._tap = arm(self._staging, self._spans, num_rows) if self._spans else None
        return self._tap

    @property
    def tap(self) -> Tap:
        """The tap of the running step, for a model that takes one."""
        return self._tap or _NO_TAP

    @property
    def idle(self) -> bool:
        """Whether the running step, if any, neither captures nor edits."""
        return self._tap is None

    def at(self, layer: int) -> Tap:
        return _NO_TAP if self._tap is None else self._tap.at(layer)

    def site(self, layer: int, site: Site, x: torch.Tensor) -> torch.Tensor:
        """Capture and edit the tensor of a site; returns `x` itself if nothing changes."""
        return x if self._tap is None else self._tap.at(layer)(site, x)

    def end(
        self, drafted: Collection[Plan] = (), observer: RowObserver | None = None, ahead: bool = False
    ) -> None:
        """Deliver the rows of the step, except those of `drafted` plans: some of their tokens may be rejected, as may
        all tokens of a step that runs `ahead` of what is known.

        `observer` is called with rows before their jobs are. Rows that a recorded step is still copying are delivered
        by the next `end`, after the next step was launched."""
        tap, spans = self._tap, self._spans
        self._clear()
        self.deliver_copied()
        for span in spans:
            if span.plan in drafted:
                span.plan.withheld = _until(span, tap, observer)
        if tap is not None and tap.is_pending:
            for request in tap.requests:
                plan = request.span.plan
                if plan not in drafted and plan not in self._copying:
                    rest = _until(request.span, tap, observer) if ahead else _all(plan, tap, observer)
                    plan.withheld = rest
                    self._copying.append(plan)
        elif tap is not None:
            tap.deliver(drafted, observer)

    def deliver_copied(self) -> None:
        """Deliver rows that were being copied; requests that ended since then have theirs already."""
        copying = self._copying
        self._copying = []
        for plan in copying:
            plan.settle(ALL)  # none of them had draft tokens

    def settle(self, plan: Plan, stop: int) -> None:
        """Deliver the withheld rows of a plan: tokens before position `stop` are kept, the others were rejected."""
        plan.settle(stop)

    def fail(self) -> None:
        """The step raised: nothing was delivered, and tokens that are computed again must deliver their rows."""
        for plan, position in self._delivered:
            plan.delivered_until = position
        self._clear()

    def finish(self, plan: Plan, reason: str, num_tokens: int) -> None:
        """The request has ended: deliver what waits, close its captures, release what it reserved."""
        plan.finish(reason, num_tokens)

    def _clear(self) -> None:
        self._tap, self._spans, self._delivered = None, (), []


def _all(plan: Plan, tap: BatchTap, observer: RowObserver | None) -> Callable[[int], None]:
    """Delivers all rows of a plan: its tokens were known when the step began."""
    return lambda stop: tap.deliver_plan(plan, None, observer)


def _until(span: Span, tap: BatchTap | None, observer: RowObserver | None) -> Callable[[int], None]:
    """Delivers the rows of a span before the position it is called with; the tokens from there on were rejected."""
    plan = span.plan

    def deliver(stop: int) -> None:
        if tap is not None:
            tap.deliver_plan(plan, stop, observer)
        plan.delivered_until = min(plan.delivered_until, stop)
        plan.steered.difference_update(range(stop, span.start + len(span.token_ids)))

    return deliver
