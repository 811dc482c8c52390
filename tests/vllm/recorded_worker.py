"""A worker of CPUs that runs the fixed operations of recorded graphs wherever all requests of a step fit them. There is
no graph: the operations are run one by one, by vLLM's own steps."""

from __future__ import annotations

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from birkhoff.vllm.runner import GraphRunner
from birkhoff.vllm.worker import HookedCpuWorker

ROWS = 64


class CountingRunner(CPUModelRunner):
    forced = 0  # steps that were to run without a graph

    def _determine_batch_execution_and_padding(self, *given, force_eager=False, **named):
        self.forced += force_eager
        return super()._determine_batch_execution_and_padding(*given, force_eager=force_eager, **named)


class RecordedCpuRunner(GraphRunner, CountingRunner):
    pass


class RecordedCpuWorker(HookedCpuWorker):
    recorded_steps = 0

    def init_device(self):
        super().init_device()
        self.model_runner = RecordedCpuRunner(self.vllm_config, self.device)

    def _graph_rows(self):
        return ROWS

    def _arm(self):
        super()._arm()
        hooked = self.hooked
        hooked._in_graph = lambda: bool(hooked.running) and hooked.recordable()
        stage = hooked.recorded.stage

        def counted(tap):
            self.recorded_steps += 1
            stage(tap)

        hooked.recorded.stage = counted
