"""The worker classes of vLLM with hooks: `--worker-cls birkhoff.vllm.worker.HookedCpuWorker` (or `HookedGpuWorker`).

After its weights are loaded, a worker arms the layers of its rank; before the first request it checks every armed site
(`self_check.py`). Methods named `birkhoff_*` are called by the front through vLLM's `collective_rpc`. With nothing
armed a worker builds vLLM's own runner and touches no layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from birkhoff.dtype_names import dtype_name
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.sae.files import load_named
from birkhoff.vllm.armed_layers import arm_ordinary
from birkhoff.vllm.armed_sites import V4, architecture_of, armed_schema
from birkhoff.vllm.armed_v4 import arm_v4
from birkhoff.vllm.compatibility import armed_of, check_config, check_layer, check_names, own_config
from birkhoff.vllm.rank_requests import RankRequests, armed_keys
from birkhoff.vllm.runner import HookedCpuRunner, HookedRunner
from birkhoff.vllm.self_check import check_sites
from birkhoff.vllm.site_op import CONTEXT, call_site


class HookedGpuWorker(Worker):  # type: ignore[misc]
    """The worker of GPUs, and what the one of CPUs has in common with it."""

    hooked: RankRequests | None = None

    @cached_property
    def armed(self) -> dict[str, tuple[int, ...]]:
        """Layers by armed hook, of the whole model."""
        return armed_of(self.vllm_config)

    def _make_model_runner(self) -> Any:
        if not self.armed:
            return super()._make_model_runner()
        check_config(self.vllm_config)
        return HookedRunner(self.vllm_config, self.device)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        if self.armed:
            self._arm()

    def _arm(self) -> None:
        check_names()
        check_config(self.vllm_config)
        model_config = self.vllm_config.model_config
        config = model_config.hf_text_config.to_dict()
        architecture = architecture_of(config)
        model = self.model_runner.get_model()
        stage = get_pp_group()
        layers = range(model.model.start_layer, model.model.end_layer)
        own = own_config(self.vllm_config)
        self._keys = armed_keys(self.armed, layers)
        self._schema = armed_schema(config, dtype_name(model_config.dtype), self.armed)
        writes = get_tensor_model_parallel_rank() == 0
        planner = RequestPlanner(
            self._schema,
            model_config.get_total_num_hidden_layers(),
            own.get("model", model_config.model),
            self.device,
            capture_root=own.get("capture_root") if writes else None,
            file_options={"pp_rank": stage.rank_in_group, "pp_size": stage.world_size},
            layers=layers,
            **own.get("capture_queues", {}),
        )
        self.hooked = RankRequests(planner, self.device, writes)
        self.model_runner.hooked = self.hooked
        self.vllm_config.compilation_config.static_forward_context[CONTEXT] = self.hooked
        if architecture == V4:
            arm_v4(model, self.armed, self.hooked.hooks.at)
        else:
            check_layer(model.model.layers[layers.start])
            arm_ordinary(model, architecture, self.armed, call_site)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self.hooked is not None:
            rows = min(len(self._keys), self.model_runner.max_num_tokens)
            config = self.vllm_config.model_config.hf_text_config.to_dict()
            stage = get_pp_group()
            check_sites(
                self.hooked.hooks,
                self._probe,
                self._keys,
                self._schema,
                self.vllm_config.model_config.get_total_num_hidden_layers(),
                rows,
                f"rank {self.rank} (stage {stage.rank_in_group} of {stage.world_size})",
                ("pre_attn",) if architecture_of(config) == V4 else (),
            )
        return times

    @torch.inference_mode()
    def _probe(self, num_rows: int) -> torch.Tensor:
        """A forward pass of `num_rows` dummy tokens; what the rank hands on."""
        seen: list[Any] = []
        handle = self.model_runner.get_model().register_forward_hook(lambda *_: seen.append(_[2]))
        try:
            self.model_runner._dummy_run(num_rows, force_attention=True)
        finally:
            handle.remove()
        output = seen[-1]
        if hasattr(output, "tensors"):  # an earlier stage of a pipeline
            output = sum(tensor.float().flatten(1) for tensor in output.tensors.values())
        rows: torch.Tensor = output
        return rows[:num_rows]

    def shutdown(self) -> None:
        if self.hooked is not None:
            self.hooked.close()
            self.hooked = None
        super().shutdown()

    # Called by the front. Tables that a step has made are inference tensors: they are written in that mode only.

    @torch.inference_mode()
    def birkhoff_vectors(self, added: Mapping[str, str], dropped: Sequence[str] = ()) -> None:
        if self.hooked is not None:
            self.hooked.add_vectors(added)
            self.hooked.drop_vectors(dropped)

    @torch.inference_mode()
    def birkhoff_prepare(self, texts: Sequence[str]) -> list[dict[str, str] | None]:
        return [None if self.hooked is None else self.hooked.prepare(text) for text in texts]

    @torch.inference_mode()
    def birkhoff_discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            if self.hooked is not None:
                self.hooked.discard(key)

    @torch.inference_mode()
    def birkhoff_finish(self, key: str, reason: str, num_tokens: int) -> dict[str, Any] | None:
        return None if self.hooked is None else self.hooked.finish(key, reason, num_tokens)

    @torch.inference_mode()
    def birkhoff_attach(self, name: str, paths: Sequence[str], kind: str) -> None:
        if self.hooked is not None:
            saes = self.hooked.planner.saes
            several = [sae for path in paths for sae in _as_list(load_named(path))]
            saes.attach(name, several, kind, replace=name in saes.registry)

    @torch.inference_mode()
    def birkhoff_detach(self, name: str) -> None:
        if self.hooked is not None and name in self.hooked.planner.saes.registry:
            self.hooked.planner.saes.detach(name, drain=True)

    def birkhoff_counts(self) -> dict[str, int]:
        return {} if self.hooked is None else {**self.hooked.counts(), "sites": len(self._keys)}


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value]


class HookedCpuWorker(HookedGpuWorker, CPUWorker):  # type: ignore[misc]
    """The worker of CPUs."""

    def init_device(self) -> None:
        super().init_device()
        if self.armed:
            check_config(self.vllm_config)
            # vLLM has no method to override here that makes the runner.
            self.model_runner = HookedCpuRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            # vLLM 0.32 allocates what a stage receives in a warm-up run; eager mode with a given cache size skips it.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        available: int = super().determine_available_memory()
        return available
