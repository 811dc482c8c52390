"""The ranks as the front sees them: plans are prepared on all of them, and what they captured is collected.

Calls are synchronous; `vllm serve`, which is not, makes them from other threads than its event loop's."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from birkhoff.errors import BirkhoffError
from birkhoff.vllm.front_planner import Call, RemotePlan
from birkhoff.vllm.spec import RankReport, join_reports, unpack_rows
from birkhoff.vllm.vectors_on_ranks import VectorsOnRanks


class Ranks:
    """`call` runs a method of all workers and returns one result per rank."""

    def __init__(self, call: Call):
        self.call = call
        self._vectors = VectorsOnRanks()
        self._lock = threading.Lock()  # vectors are sent in the order in which they are counted

    def prepare(self, plans: Sequence[RemotePlan], hold: Sequence[bool]) -> None:
        """Send plans to the ranks; raises the error of a rank that refuses one, and then none is kept.

        `hold`: whether the answer may end at a stop string, which the ranks do not see."""
        specs = []
        with self._lock:
            for plan, held in zip(plans, hold):
                assert plan.spec is not None
                missing, dropped = self._vectors.use(plan.vectors)
                if missing or dropped:
                    self.call("birkhoff_vectors", missing, dropped)
                specs.append(replace(plan.spec, hold=held))
        if not specs:
            return
        answers = self.call("birkhoff_prepare", [spec.to_text() for spec in specs])
        refused = next((error for answer in answers for error in answer if error is not None), None)
        if refused is not None:
            for plan in plans:
                self.discard(plan)
            raise error_of(refused)
        for plan in plans:
            plan.collect = _Collector(self, plan)

    def discard(self, plan: RemotePlan) -> None:
        """Forget a prepared plan whose request is not going to run."""
        assert plan.spec is not None
        plan.collect = None
        self.release(plan)
        self.call("birkhoff_discard", [plan.spec.key])

    def release(self, plan: RemotePlan) -> None:
        with self._lock:
            self._vectors.release(plan.vectors)


class _Collector:
    """Brings what the ranks captured and steered into a plan, once."""

    def __init__(self, ranks: Ranks, plan: RemotePlan):
        self._ranks = ranks
        self._plan = plan

    def __call__(self, reason: str, num_tokens: int) -> None:
        plan = self._plan
        assert plan.spec is not None
        self._ranks.release(plan)
        reports = [
            RankReport(**raw)
            for raw in self._ranks.call("birkhoff_finish", plan.spec.key, reason, num_tokens)
        ]
        steered, files = join_reports(reports)
        plan.steered |= steered
        for report in reports:
            for job, packed in zip(plan.received, report.rows):
                for rows in unpack_rows(packed):
                    if len(rows):
                        job.deliver(rows)
        failed = next((error for report in reports for error in report.errors), None)
        for job in plan.received:
            job.error = job.error or failed
        if plan.written is not None and files is not None:
            plan.written.finished = files


def error_of(refused: Mapping[str, str]) -> BirkhoffError:
    """The error that a rank reported, as its own class where that is known here."""
    kinds: list[type[BirkhoffError]] = [BirkhoffError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    kind = next((kind for kind in kinds if kind.code == refused["code"]), BirkhoffError)
    return kind(refused["message"])
