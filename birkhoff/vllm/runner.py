"""The adapter of vLLM's V1 model runner: every step is announced to the hooks of the rank just before its forward pass.

`_model_forward` is the method that vLLM documents for this purpose. The order of the batch and the rows of each request
are final there, and not before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from birkhoff.vllm.model_state import V2Steps
from birkhoff.vllm.rank_requests import RankRequests, StepRows
from birkhoff.vllm.spec import RequestMark


class HookedRunner(GPUModelRunner):  # type: ignore[misc]
    """The V1 runner, hooked. It is armed once the model is loaded, before its first step."""

    hooked: RankRequests
    _drafts: Mapping[str, Sequence[int]] = {}  # draft tokens of the step, by request

    def arm(self, hooked: RankRequests) -> None:
        self.hooked = hooked

    def probe(self, num_rows: int, mode: Any = None, uniform: bool = False) -> Any:
        """A forward pass of `num_rows` dummy tokens; what the rank computes. `mode` None: as vLLM runs that many;
        `uniform`: of as many requests that decode."""
        options = {"cudagraph_runtime_mode": mode, "uniform_decode": uniform}
        return self._dummy_run(num_rows, force_attention=True, **options)[0]

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self.hooked.end(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            mark = None if params is None else RequestMark.of(params.extra_args)
            if mark is not None:
                self.hooked.start(new.req_id, mark.key)
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        return super().execute_model(scheduler_output, intermediate_tensors)

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        hooked = self.hooked
        if not hooked.running:
            if hooked.recorded is not None:
                hooked.skip()
            return super()._model_forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
            )
        assert positions is not None
        drafted = hooked.begin(self._step_rows(input_ids), len(positions))
        try:
            output = super()._model_forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, **model_kwargs
            )
        except BaseException:
            hooked.fail_step()
            raise
        hooked.end_step(drafted)
        return output

    def _step_rows(self, input_ids: torch.Tensor | None) -> Iterator[StepRows]:
        """The rows of the hooked requests of this step."""
        batch = self.input_batch
        starts = self.query_start_loc.np
        ids = self.input_ids.cpu if input_ids is None else input_ids
        hooked = self.hooked
        for index, request_id in enumerate(batch.req_ids):
            if request_id in hooked.running:
                first, stop = int(starts[index]), int(starts[index + 1])
                yield StepRows(
                    request_id,
                    first,
                    int(batch.num_computed_tokens_cpu[index]),
                    ids[first:stop].tolist(),
                    int(batch.num_prompt_tokens[index]),
                    bool(self._drafts.get(request_id)),
                )


class GraphRunner(HookedRunner):
    """The V1 runner, hooked, where vLLM records CUDA graphs."""

    def _determine_batch_execution_and_padding(
        self, *given: Any, force_eager: bool = False, **named: Any
    ) -> Any:
        """A step with a request that recorded graphs cannot run is run without one. All ranks decide alike."""
        force_eager = force_eager or not self.hooked.recordable()
        return super()._determine_batch_execution_and_padding(*given, force_eager=force_eager, **named)


class HookedCpuRunner(HookedRunner, CPUModelRunner):  # type: ignore[misc]
    """The V1 runner of CPUs, hooked."""


def make_v2_runner(config: Any, device: torch.device) -> Any:
    """The V2 runner of GPUs, hooked."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner

    class HookedV2Runner(V2Steps, V2Runner):  # type: ignore[misc]
        pass

    return HookedV2Runner(config, device)
