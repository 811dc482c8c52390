"""A worker of CPUs that runs the fixed operations of recorded graphs wherever all requests of a step fit them. There is
no graph: the operations are run one by one, by vLLM's own steps."""

from __future__ import annotations

from birkhoff.vllm.worker import HookedCpuWorker

ROWS = 64


class RecordedCpuWorker(HookedCpuWorker):
    recorded_steps = 0

    def _graph_rows(self):
        return ROWS

    def _arm(self):
        super()._arm()
        hooked = self.hooked
        hooked._in_graph = lambda: len(hooked) > 0 and hooked.recordable()
        stage = hooked.recorded.stage

        def counted(tap):
            self.recorded_steps += 1
            stage(tap)

        hooked.recorded.stage = counted
