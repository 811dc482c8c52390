"""The adapter of vLLM's V2 model runner, whose steps are announced through its `ModelState`.

It was not run: V2 needs Triton or a GPU, and an engine that would use it is refused at start (`compatibility.py`). What
it makes of a batch is tested with batches made by hand. Nothing of vLLM is imported here: a batch is any object with
the fields of V2's `InputBatch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from birkhoff.hooks.plan import Plan
from birkhoff.vllm.rank_requests import RankRequests, StepRows
from birkhoff.vllm.spec import RequestMark


def step_rows(batch: Any, hooked: RankRequests) -> Iterator[StepRows]:
    """The rows of the hooked requests of a V2 batch.

    The prompt length is that of the request: V2's `prefill_len` counts generated tokens too, once they are computed
    again after a preemption."""
    drafts = batch.num_draft_tokens_per_req
    for index, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        if request_id in hooked:
            first, stop = int(batch.query_start_loc_np[index]), int(batch.query_start_loc_np[index + 1])
            yield StepRows(
                request_id,
                first,
                int(batch.num_computed_tokens_np[index]),
                batch.input_ids[first:stop].tolist(),
                hooked.prompt_len(request_id),
                drafts is not None and bool(drafts[index]),
            )


class V2Steps:
    """Called from the methods of a `ModelState` that have these names."""

    def __init__(self, hooked: RankRequests):
        self._hooked = hooked
        self._drafted: list[Plan] | None = None

    def add_request(self, new: Any) -> None:
        params = new.sampling_params
        mark = None if params is None else RequestMark.of(params.extra_args)
        if mark is not None:
            self._hooked.start(new.req_id, mark.key)

    def remove_request(self, request_id: str) -> None:
        self._hooked.end(request_id)

    def prepare_inputs(self, batch: Any) -> None:
        """Before the forward pass, when the batch is final."""
        if self._hooked:
            self._drafted = self._hooked.begin(step_rows(batch, self._hooked), batch.num_tokens_after_padding)
        else:
            self._hooked.skip()

    def postprocess_state(self) -> None:
        """After the forward pass."""
        if self._drafted is not None:
            self._hooked.end_step(self._drafted)
            self._drafted = None
