"""The worker classes of vLLM with hooks: `--worker-cls birkhoff.vllm.worker.HookedCpuWorker` (or `HookedGpuWorker`).

After its weights are loaded, a worker arms the layers of its rank; before the first request it checks every armed site
(`self_check.py`). Methods named `birkhoff_*` are called by the front through vLLM's `collective_rpc`. With nothing
armed a worker builds vLLM's own runner and touches no layer."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from birkhoff.dtype_names import dtype_name
from birkhoff.hooks.vector_table import Tables
from birkhoff.planning.request_planner import RequestPlanner
from birkhoff.sae.files import load_named
from birkhoff.vllm.armed_layers import arm_ordinary
from birkhoff.vllm.armed_sites import V4, architecture_of, armed_schema
from birkhoff.vllm.armed_v4 import arm_v4
from birkhoff.vllm.compatibility import armed_of, check_config, check_layer, check_names, own_config
from birkhoff.vllm.rank_requests import RankRequests, armed_keys
from birkhoff.vllm.recorded_sites import RecordedSites, RecordedSteps
from birkhoff.vllm.runner import GraphRunner, HookedCpuRunner, HookedRunner, make_v2_runner
from birkhoff.vllm.self_check import check_recorded, check_sites
from birkhoff.vllm.site_op import CONTEXT, in_graph, site_call
from birkhoff.vllm.switched_model import arm_model


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
        if self.use_v2_model_runner:
            return make_v2_runner(self.vllm_config, self.device)
        make = GraphRunner if self._graph_rows() else HookedRunner
        return make(self.vllm_config, self.device)

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
        graph_rows = self._graph_rows()
        tables = Tables(self.device, fixed=bool(graph_rows))
        recorded = None
        if graph_rows:
            recorded = RecordedSites(self._keys, self._schema, tables, graph_rows, self.device)
        planner = RequestPlanner(
            self._schema,
            model_config.get_total_num_hidden_layers(),
            own.get("model", model_config.model),
            self.device,
            capture_root=own.get("capture_root") if writes else None,
            file_options={"pp_rank": stage.rank_in_group, "pp_size": stage.world_size},
            layers=layers,
            tables=tables,
            **own.get("capture_queues", {}),
        )
        self.hooked = RankRequests(planner, self.device, writes, recorded, in_graph)
        self.model_runner.arm(self.hooked)
        self.vllm_config.compilation_config.static_forward_context[CONTEXT] = self.hooked
        if architecture == V4:
            arm = partial(arm_v4, armed=self.armed, tap_at=self.hooked.at)
        else:
            check_layer(model.model.layers[layers.start])
            call = site_call(self.hooked)
            arm = partial(arm_ordinary, architecture=architecture, armed=self.armed, call=call)
        arm_model(model, arm, self.hooked.idle, self._compile_copy)

    def _compile_copy(self, armed: Any) -> bool:
        """Have the armed copy of the decoder compiled by itself, if vLLM compiles decoders."""
        if getattr(armed, "do_not_compile", True):
            return False
        config = copy.copy(self.vllm_config)
        # Part of the key of compiled graphs that are kept on disk.
        config.additional_config = {**config.additional_config, "birkhoff_armed": True}
        with set_current_vllm_config(config):
            TorchCompileWithNoGuardsWrapper.__init__(armed, compile_prefix=CONTEXT)
        return True

    def _graph_rows(self) -> int:
        """The most rows of a CUDA graph; 0 if vLLM records none."""
        compilation = self.vllm_config.compilation_config
        if self.device.type == "cpu" or compilation.cudagraph_mode == CUDAGraphMode.NONE:
            return 0
        return int(compilation.max_cudagraph_capture_size or 0)

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        if self.hooked is not None:
            self._check_sites(self.hooked)
        return times

    @torch.inference_mode()
    def _check_sites(self, hooked: RankRequests) -> None:
        """The check at start, without a graph and, where there are graphs, of their replays."""
        model_config = self.vllm_config.model_config
        is_v4 = architecture_of(model_config.hf_text_config.to_dict()) == V4
        stage = get_pp_group()
        rank = f"rank {self.rank} (stage {stage.rank_in_group} of {stage.world_size})"
        num_layers = model_config.get_total_num_hidden_layers()
        rows = min(len(self._keys), self.model_runner.max_num_tokens)
        eager = partial(self._probe, mode=CUDAGraphMode.NONE)
        hidden = ("pre_attn",) if is_v4 else ()
        check_sites(hooked.hooks, eager, self._keys, self._schema, num_layers, rows, rank, hidden)
        recorded = hooked.recorded
        if recorded is None:
            return
        for uniform, limit in self._recorded_kinds():
            check_recorded(
                hooked.hooks,
                eager,
                RecordedSteps(hooked.hooks, recorded),
                partial(self._probe, uniform=uniform),
                recorded.tables,
                self._keys,
                self._schema,
                num_layers,
                min(rows, limit),
                rank,
            )

    def _recorded_kinds(self) -> Iterator[tuple[bool, int]]:
        """The kinds of CUDA graphs: whether they are for one token of each request, and their most rows."""
        mode = self.vllm_config.compilation_config.cudagraph_mode
        rows = self._graph_rows()
        if rows and mode.mixed_mode() != CUDAGraphMode.NONE:
            yield False, rows
        if rows and mode.decode_mode() == CUDAGraphMode.FULL and mode.separate_routine():
            yield True, min(rows, self.vllm_config.scheduler_config.max_num_seqs)

    def _probe(self, num_rows: int, **options: Any) -> torch.Tensor:
        """What the rank hands on after a forward pass of `num_rows` dummy tokens."""
        output = self.model_runner.probe(num_rows, **options)
        if hasattr(output, "tensors"):  # an earlier stage of a pipeline
            output = sum(tensor.float().flatten(1) for tensor in output.tensors.values())
        rows: torch.Tensor = output[:num_rows]
        return rows

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
        if self.hooked is None:
            return {}
        return {**self.hooked.counts(), "sites": len(self._keys), "pid": os.getpid()}


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
