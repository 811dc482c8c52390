"""The adapter of vLLM's V2 model runner, whose steps are announced through its `ModelState`.

It was not run: V2 needs Triton and a GPU. What it makes of a batch is tested with batches made by hand. V2 chooses a
CUDA graph before its model state is asked, so a step could not refuse one: `compatibility.py` takes V2 without graphs
only. Nothing of vLLM is imported here: a batch is any object with the fields of V2's `InputBatch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from birkhoff.hooks.plan import Plan
from birkhoff.vllm.rank_requests import RankRequests, StepRows
from birkhoff.vllm.spec import RequestMark


def step_rows(batch: Any, hooked: RankRequests) -> Iterator[StepRows]:
    """The rows of the hooked requests of a V2 batch.

    The prompt length is that of the request: V2's `prefill_len` counts generated tokens too, once they are computed
    again after a preemption."""
    drafts = batch.num_draft_tokens_per_req
    for index, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        if request_id in hooked.running:
            first, stop = int(batch.query_start_loc_np[index]), int(batch.query_start_loc_np[index + 1])
            yield StepRows(
                request_id,
                first,
                int(batch.num_computed_tokens_np[index]),
                batch.input_ids[first:stop].tolist(),
                hooked.prompt_len(request_id),
                drafts is not None and bool(drafts[index]),
            )


class HookedModelState:
    """A `ModelState` of vLLM that tells the hooks of the rank which requests come and go, and of every batch."""

    def __init__(self, state: Any, hooked: RankRequests):
        self._state = state
        self._hooked = hooked
        self._drafted: list[Plan] | None = None  # None outside of a step with hooked requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """A request, or one that continues after a preemption."""
        self._state.add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        mark = None if params is None else RequestMark.of(params.extra_args)
        if mark is not None:
            self._hooked.start(new_req_data.req_id, mark.key)

    def remove_request(self, req_id: str) -> None:
        """The request has ended, or was preempted."""
        self._state.remove_request(req_id)
        self._hooked.end(req_id)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        """Before the forward pass, when the batch is final."""
        inputs = self._state.prepare_inputs(input_batch, req_states)
        if self._hooked.running:
            rows = step_rows(input_batch, self._hooked)
            self._drafted = self._hooked.begin(rows, input_batch.num_tokens_after_padding)
        else:
            self._hooked.skip()
        return inputs

    def end(self, failed: bool) -> None:
        """After the forward pass."""
        drafted, self._drafted = self._drafted, None
        if drafted is not None and failed:
            self._hooked.fail_step()
        elif drafted is not None:
            self._hooked.end_step(drafted)


class V2Steps:
    """What a V2 runner with hooks has besides vLLM's. `model_state` is None until the weights are loaded."""

    model_state: Any
    _handed_on: Any = None  # what the last step gave the next stage of a pipeline

    def arm(self, hooked: RankRequests) -> None:
        self.model_state = HookedModelState(self.model_state, hooked)

    @torch.inference_mode()
    def execute_model(self, *given: Any, **named: Any) -> Any:
        failed = True
        try:
            self._handed_on = super().execute_model(*given, **named)  # type: ignore[misc]
            failed = False
        finally:
            if isinstance(self.model_state, HookedModelState):
                self.model_state.end(failed)
        return self._handed_on

    def probe(self, num_rows: int, mode: Any = None, uniform: bool = False) -> Any:
        """A forward pass of `num_rows` dummy tokens without a graph; what the rank computes."""
        rows, _ = self._dummy_run(num_rows, is_profile=True)  # type: ignore[attr-defined]
        return self._handed_on if rows is None else rows
