"""Cold experts of decode steps computed on the CPU, beside the GPU that computes the hot ones.

Reading an expert over the bus is as slow as the bus; the CPU reads it at the speed of host memory. Per layer of a step:
inputs, routing weights and the ids of the experts that are left to the host are copied to page-locked memory on a
stream of its own, a host function computes them with the native kernels, and the result is copied back and added to the
output of the shared expert. The order is one of streams, and the host function is C without Python, so a step can be
recorded as a CUDA graph. Which experts are left to the host is data on the device (`ExpertStore.on_host`).

Bus and CPU may work at the same time, on a share of the cold experts each. `measure_rates` says which share takes both
equally long.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from birkhoff.errors import CapacityError
from birkhoff.kernels.packed import PackedType
from birkhoff.kernels.packed.native import ExpertJob, HostedExperts
from birkhoff.offload.expert_layout import ExpertId, matrices_of
from birkhoff.offload.expert_store import ExpertStore

MEASURED_EXPERTS = 8  # per round, on the CPU
ROUNDS = 3
# Decode steps reached this part of the CPU's measured rate on a machine with 16 cores and an H200: copies and host
# functions of every layer take the rest. Kernels that read over the bus reached all of its rate.
PART_OF_CPU_RATE = 0.65


@dataclass(frozen=True)
class Rates:
    """Bytes of experts per second: computed by the CPU, and copied over the bus."""

    cpu: float
    bus: float

    @property
    def balanced_share(self) -> float:
        """Share of the cold experts with which the CPU takes as long as the bus for the others, in steps of 0.05."""
        cpu = self.cpu * PART_OF_CPU_RATE
        return round(20 * cpu / (cpu + self.bus)) / 20 if cpu else 0.0

    def __str__(self) -> str:
        return f"the CPU reads experts at {self.cpu / 1e9:.1f} GB/s, the bus at {self.bus / 1e9:.1f} GB/s"


class _Staging:
    """Host and device memory of one step size, used by one layer after the other."""

    def __init__(self, rows: int, hidden: int, topk: int, dtype: torch.dtype, device: torch.device):
        pinned = device.type == "cuda"

        def host(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, width, dtype=dtype, pin_memory=pinned)

        self.x, self.out = host(hidden, dtype), host(hidden, torch.float32)
        self.ids, self.weights = host(topk, torch.int32), host(topk, torch.float32)
        self.result = torch.empty(rows, hidden, device=device)
        self.jobs: dict[int, ExpertJob] = {}
        self.own: torch.Tensor | None = None


class HostExperts:
    """Computes what decode steps leave to the host: a `share` of the cold experts. `types` are those of gate and up,
    and of down, by layer of the store; `limit` clamps SwiGLU."""

    def __init__(
        self,
        store: ExpertStore,
        types: Sequence[tuple[PackedType, PackedType]],
        hidden: int,
        inner: int,
        limit: float,
        share: float = 1.0,
    ):
        self.store, self.types, self.hidden, self.inner, self.limit = store, list(types), hidden, inner, limit
        self.share = share
        self._hosted = [HostedExperts(store.experts, hidden, inner, kinds) for kinds in self.types]
        self._staging: dict[tuple[int, torch.dtype], _Staging] = {}
        self._calls = _StreamCalls(store.device) if store.device.type == "cuda" else _DirectCalls()
        store.compute_on_host(self._moved, share)

    def begin(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Begin the experts of a layer that are left to the host: x [n, d], ids and weights [n, k] of the router."""
        staging = self._staging_for(x, ids.shape[1])
        own = torch.where(self.store.on_host[layer][ids.long()], ids.int(), -1)
        if layer not in staging.jobs:
            job = (staging.x, staging.ids, staging.weights, staging.out, self.limit)
            staging.jobs[layer] = ExpertJob(self._hosted[layer], *job)
        staging.own = own  # until `end`: its memory must not be reused while it is copied
        copies = ((staging.x, x), (staging.ids, own), (staging.weights, weights))
        self._calls.begin(copies, staging.jobs[layer], (staging.result, staging.out))

    def end(self, layer: int, x: torch.Tensor, ids: torch.Tensor, expert_out: torch.Tensor) -> None:
        """Wait for `begin` and add its result to `expert_out` [n, k + 1, d], whose rows of these experts are void."""
        staging = self._staging_for(x, ids.shape[1])
        self._calls.join()
        left_out = self.store.on_host[layer][ids.long()]
        expert_out[:, :-1].masked_fill_(left_out.unsqueeze(-1), 0.0)
        expert_out[:, -1].add_(staging.result)

    @torch.inference_mode()
    def works(self, dtype: torch.dtype) -> bool:
        """Whether copies and host functions give what a direct call gives, also recorded as a CUDA graph. Called before
        the first step; nothing is kept of it."""
        if not bool(self.store.on_host.any()):
            return True
        layer = int(self.store.on_host.sum(1).argmax())
        ids = self.store.on_host[layer].nonzero().view(1, -1)[:, :8].int()
        x = torch.linspace(-0.05, 0.05, self.hidden, device=self.store.device).to(dtype).view(1, -1)
        weights = torch.ones(ids.shape, device=self.store.device)
        expected = torch.empty(1, self.hidden)
        ExpertJob(self._hosted[layer], x.cpu(), ids.cpu(), weights.cpu(), expected, self.limit)()

        def agrees(run: Callable[[], object]) -> bool:
            out.fill_(torch.nan)
            out[:, -1] = 0
            run()
            return torch.equal(out.sum(1).cpu(), expected)

        def step() -> None:
            self.begin(layer, x, ids, weights)
            self.end(layer, x, ids, out)

        out = torch.empty(1, ids.shape[1] + 1, self.hidden, device=self.store.device)
        try:
            good = agrees(step)
            if good and self.store.device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                good = agrees(graph.replay)
        except RuntimeError:  # of the driver
            good = False
        self._staging.clear()
        return good

    def _staging_for(self, x: torch.Tensor, topk: int) -> _Staging:
        key = (len(x), x.dtype)
        if key not in self._staging:
            self._staging[key] = _Staging(len(x), self.hidden, topk, x.dtype, self.store.device)
        return self._staging[key]

    def _moved(self, experts: Iterable[ExpertId]) -> None:
        """Note where cold experts are. An expert that became hot keeps its old place, which steps in progress may still
        read."""
        for layer, expert in experts:
            if self.store.is_cold((layer, expert)):
                parts = self.store.home_parts((layer, expert))
                self._hosted[layer].set(
                    expert, matrices_of(parts, self.types[layer], self.hidden, self.inner)
                )


_Copy = tuple[torch.Tensor, torch.Tensor]  # target, source


class _DirectCalls:
    """On a CPU: everything at once."""

    def begin(self, copies: Iterable[_Copy], job: ExpertJob, result: _Copy) -> None:
        for target, source in copies:
            target.copy_(source)
        job()
        result[0].copy_(result[1])

    def join(self) -> None:
        pass


class _StreamCalls(_DirectCalls):
    """On a GPU: copies and host functions on a stream that forks from the current one and joins it again."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3

    def begin(self, copies: Iterable[_Copy], job: ExpertJob, result: _Copy) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            function = ctypes.cast(job.function, ctypes.c_void_p)
            status = self._driver.cuLaunchHostFunc(self.stream.cuda_stream, function, job.data)
            if status:
                raise CapacityError(
                    f"the driver refused a host function (CUDA error {status}). Use experts_on='gpu'."
                )
            result[0].copy_(result[1], non_blocking=True)

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


def measure_rates(
    store: ExpertStore, types: Sequence[tuple[PackedType, PackedType]], hidden: int, inner: int
) -> Rates:
    """How fast the CPU computes cold experts of one token, and how fast they are copied over the bus: the best of a few
    rounds with different experts. The store must hold weights, and have cold experts and spare slots."""
    by_layer = [
        [index for index in range(store.experts) if store.is_cold((layer, index))]
        for layer in range(store.layers)
    ]
    rounds = sorted(range(store.layers), key=lambda layer: -len(by_layer[layer]))[:ROUNDS]
    cpu = []
    for layer in rounds:
        cold = by_layer[layer][:MEASURED_EXPERTS]
        if not cold:
            break
        hosted = HostedExperts(store.experts, hidden, inner, types[layer])
        for index in cold:
            hosted.set(index, matrices_of(store.home_parts((layer, index)), types[layer], hidden, inner))
        x, out, weights = torch.full((1, hidden), 0.01), torch.empty(1, hidden), torch.ones(1, len(cold))
        job = ExpertJob(hosted, x, torch.tensor([cold], dtype=torch.int32), weights, out, 1.0)
        began = time.perf_counter()
        job()
        cpu.append(len(cold) * store.layouts[layer].nbytes / (time.perf_counter() - began))
    return Rates(max(cpu, default=0.0), bus_rate(store))


def bus_rate(store: ExpertStore, rounds: int = ROUNDS) -> float:
    """Bytes per second of copying cold experts to the device, all spare slots at a time: the best of a few rounds."""
    cold = (~store.resident()).nonzero().tolist()[: store.spare * rounds]
    rates = [0.0]
    for first in range(0, len(cold), store.spare):
        experts = [(layer, index) for layer, index in cold[first : first + store.spare]]
        began = time.perf_counter()
        copies = [copy for expert in experts if (copy := store.acquire(expert)) is not None]
        store.publish(wait=True)
        rates.append(len(copies) * store.slot_bytes / (time.perf_counter() - began))
        for copy in copies:
            store.release(copy)
    return max(rates)
