"""Decode speed with experts in host memory, checked and compared with the limit set by bandwidth.

`bench_placement` yields rows. `same bits`: a few layers with all experts on the device and with fractions of them, with
experts exchanged between steps; the logits must be equal. `bus`: copy speed of experts. `placement`: tokens per second
at a fraction of hot experts, selected at random and by usage, with skewed routing; `limit` is the time of the counted
reads at the measured bandwidths of device and bus, one after the other. `moving`: steps while experts are exchanged.
`chunk`: a prefill chunk whose cold experts are staged. `rates` and `cpu experts`: the rates that `experts_on="auto"`
decides by, and the same steps with the cold experts computed on the CPU, compared with those of the GPU. Everything
also runs on a CPU, for the tests.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from birkhoff.bench.decode import TOLERANCE, device_facts, reading_speed, set_inputs
from birkhoff.bench.report import Row, facts, significant, summary
from birkhoff.bench.synthetic import cache_tensors, filled_state, random_placed, skew_routing
from birkhoff.bench.timing import (
    capture_graph,
    cuda_seconds,
    median,
    milliseconds,
    release_memory,
    synchronize,
)
from birkhoff.byte_size import parse_bytes
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.cache_plan import default_cache_bytes
from birkhoff.engine.memory_plan import plan_budget, weight_bytes
from birkhoff.hooks.tap import NoTap
from birkhoff.kernels.packed import native
from birkhoff.kernels.select import Choice
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import ExpertId
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertUsage
from birkhoff.offload.host_experts import bus_rate, measure_rates
from birkhoff.offload.placement import Placement

SKEW = 0.12  # of a score per logarithm of rank; the scores of random weights have a spread of about 0.25
MIN_SHARE_OF_LIMIT = 0.6  # tokens per second relative to the limit
MAX_STEPS = 256  # steps that fit a state
CPU_SHARES = (0.35, 0.5, 1.0)  # of the cold experts; the others are read over the bus at the same time


def hot_fraction(target: str, config: V4Config) -> float:
    """Fraction of hot experts: given as a number ("0.925"), or what fits a GPU of that size ("24GiB")."""
    try:
        return float(target)
    except ValueError:
        memory = parse_bytes(target)
        return plan_budget(config, memory, default_cache_bytes(config, memory)).share


def random_resident(layers: int, experts: int, share: float) -> torch.Tensor:
    """[layers, experts] bool: a random fraction `share` of all experts."""
    order = torch.randperm(layers * experts, generator=torch.Generator().manual_seed(0))
    chosen = order[: round(share * layers * experts)]
    return torch.zeros(layers * experts, dtype=torch.bool).index_fill_(0, chosen, True).view(layers, experts)


def hot_share(store: ExpertStore) -> float:
    return significant(float(store.resident().double().mean()))


def move_to(store: ExpertStore, target_resident: torch.Tensor) -> tuple[int, float]:
    """Exchange experts until the hot ones are those of `target_resident` (equally many); number of exchanges,
    seconds."""
    began, moved = time.perf_counter(), 0
    while True:
        resident = store.resident()
        arriving = (target_resident & ~resident).nonzero().tolist()
        leaving = (resident & ~target_resident).nonzero().tolist()
        if not arriving:
            return moved, time.perf_counter() - began
        for a, b in zip(arriving[: store.spare], leaving):
            store.swap((a[0], a[1]), (b[0], b[1]))
        moved += store.publish(wait=True)


def pseudo_random_step(decoder: Decoder, buffers: DecodeBuffers) -> None:
    """One step, then pseudo-random tokens at the next positions, all on the device and without short cycles."""
    decoder.step(buffers)
    buffers.token_ids.mul_(48271).add_(11).remainder_(decoder.config.vocab_size)
    buffers.positions.add_(1)


class PlacedSteps:
    """Decode steps of one batch: a CUDA graph on a GPU, plain launches elsewhere."""

    def __init__(self, decoder: Decoder, batch: int, context: int):
        self.decoder, self.buffers = decoder, decoder.buffers(batch, context + MAX_STEPS)
        self.cuda = decoder.state.device.type == "cuda"
        tokens = torch.randint(decoder.config.vocab_size, (batch,)).tolist()
        set_inputs(self.buffers, tokens, [context] * batch)
        self.run_step: Callable[[], None] = lambda: pseudo_random_step(decoder, self.buffers)
        if self.cuda:
            self.run_step = capture_graph(partial(pseudo_random_step, decoder, self.buffers), warm=2).replay
        self.context = context
        set_inputs(self.buffers, tokens, [context] * batch)

    def _reset_positions(self, count: int) -> None:
        """Go back to position `context`, since only MAX_STEPS steps fit."""
        assert count <= MAX_STEPS
        self.buffers.positions.fill_(self.context)

    def milliseconds(self, count: int) -> list[float]:
        self._reset_positions(count)
        if self.cuda:
            return [1e3 * span for span in cuda_seconds(self.run_step, count)]
        return milliseconds(self.run_step, torch.device("cpu"), count, warm=0)

    def reads(self, count: int) -> torch.Tensor:
        """How often each expert was read in `count` steps."""
        store = self.decoder.store
        assert store is not None
        before = store.read_counts.cpu().clone()
        for step in range(count):
            if step % MAX_STEPS == 0:
                self._reset_positions(min(MAX_STEPS, count - step))
            self.run_step()
        return store.read_counts.cpu() - before


@torch.inference_mode()
def same_bits(config: V4Config, device: torch.device, shares: Sequence[float], steps: int) -> Row:
    """Logits at each fraction of hot experts, with exchanges between steps, against all experts on the device."""
    equal: dict[str, bool] = {}
    expected: list[torch.Tensor] = []
    layers = config.num_hidden_layers
    experts = config.n_routed_experts
    for share in (1.0, *shares):
        model, store = random_placed(config, device, random_resident(layers, experts, share), spare=8, seed=1)
        state = filled_state(config, 2, 300, device)
        for layer in state.layers:  # the same cache in all cases
            for tensor in cache_tensors(layer):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
        decoder = Decoder(model, state)
        buffers = decoder.buffers(2, 512)
        logits = []
        for step in range(steps):
            if 0 < share < 1:
                hot = store.resident()
                arriving = (~hot).nonzero()[step].tolist()
                leaving = hot.nonzero()[-1 - step].tolist()
                store.swap((arriving[0], arriving[1]), (leaving[0], leaving[1]))
                store.publish(wait=True)
            set_inputs(buffers, [5 + step, 9 + step], [300 + step] * 2)
            buffers.poison()
            logits.append(decoder.step(buffers).clone())
        expected = expected or logits
        equal[f"{share:g}"] = all(torch.equal(a, b) for a, b in zip(logits, expected))
        del model, store, decoder, buffers, state
        release_memory()
    return {
        "kind": "same bits",
        "layers": layers,
        "steps": steps,
        "equal": equal,
        "passed": all(equal.values()),
    }


def speed_row(steps: PlacedSteps, count: int, read: int, speeds: tuple[float, float]) -> Row:
    """Speed of one placement, and the limit set by its reads."""
    store = steps.decoder.store
    assert store is not None
    reads, hot = steps.reads(count), store.resident()
    ms = steps.milliseconds(count)
    typical = median(ms)
    hot_bytes, cold_bytes = (int(reads[where].sum()) / count * store.slot_bytes for where in (hot, ~hot))
    limit = ((read + hot_bytes) / speeds[0] + cold_bytes / speeds[1]) * 1e3
    batch = steps.buffers.rows
    return {
        "batch": batch,
        "ms": summary(ms),
        "tokens_per_second": significant(batch / typical * 1e3),
        "misses": significant(cold_bytes / max(hot_bytes + cold_bytes, 1)),
        "cold_experts_per_step": significant(cold_bytes / store.slot_bytes),
        "limit_tokens_per_second": significant(batch / limit * 1e3),
        "share_of_limit": significant(limit / typical),
        "passed": limit / typical >= MIN_SHARE_OF_LIMIT,
    }


@torch.inference_mode()
def placement_rows(
    model: Transformer,
    store: ExpertStore,
    batches: Sequence[int],
    context: int,
    count: int,
    speeds: tuple[float, float],
) -> Iterator[Row]:
    """Random placement, then placement by usage; and steps concurrent with exchanges."""
    config, device = model.config, store.device
    read = weight_bytes(config).read
    for name in ("random", "counts"):
        for batch in batches:
            steps = PlacedSteps(Decoder(model, filled_state(config, batch, context, device)), batch, context)
            row: Row = {"kind": "placement", "placement": name, "hot": hot_share(store)}
            if name == "counts":
                usage = ExpertUsage(store.layers, store.experts)
                usage.add(steps.reads(4 * count), 4 * count)
                moved, took = move_to(store, usage.hottest(int(store.resident().sum())))
                row |= {
                    "exchanged": moved,
                    "exchanges_per_second": significant(moved / took) if moved else 0.0,
                }
            yield row | speed_row(steps, count, read, speeds)
            if name == "counts":
                yield moving_row(steps, count)
            del steps
            release_memory()


def moving_row(steps: PlacedSteps, count: int) -> Row:
    """Steps with and without concurrent exchanges, which start after every fourth step even if they do not pay."""
    store = steps.decoder.store
    assert store is not None
    plain = steps.milliseconds(count)
    placement = Placement(
        store,
        _AlwaysExchange(store.layers, store.experts),
        steps.decoder.model.hash_routing_tables(),
        interval=min(4, count),
    )
    spans = []
    for _ in range(count):
        placement.before_step([], chunk=False)
        spans += steps.milliseconds(1)
        placement.after_step()
    moved = placement.swapped + store.publish(wait=True)
    times = median(spans) / median(plain)
    return {
        "kind": "moving",
        "batch": steps.buffers.rows,
        "ms": summary(spans),
        "ms_at_rest": summary(plain),
        "exchanged": moved,
        "times_at_rest": significant(times),
    }


@torch.inference_mode()
def cpu_rows(
    model: Transformer, store: ExpertStore, batches: Sequence[int], context: int, count: int, reading: float
) -> Iterator[Row]:
    """Cold experts on the CPU: measured rates, then for shares of them a step of each batch size on both sides and its
    speed. The model's decode steps keep them there. The limit of a share is the slower of the two sides."""
    config, device, dtype = model.config, store.device, model.numerics.dtype
    types = model.stored_expert_types()
    rates = measure_rates(store, types, config.hidden_size, config.moe_intermediate_size)
    yield {
        "kind": "rates",
        "cpu_bytes_per_second": significant(rates.cpu),
        "bus_bytes_per_second": significant(rates.bus),
        "balanced_share": rates.balanced_share,
        "threads": torch.get_num_threads(),
    }
    states = {batch: filled_state(config, batch, context, device, dtype) for batch in batches}

    def one_step(batch: int) -> torch.Tensor:
        decoder = Decoder(model, states[batch])
        buffers = decoder.buffers(batch, context + 1)
        set_inputs(buffers, [5 + row for row in range(batch)], [context] * batch)
        return decoder.step(buffers).clone()

    on_gpu = {batch: one_step(batch) for batch in batches}
    for share, batch in itertools.product(CPU_SHARES, batches):
        if batch == batches[0] and not model.compute_cold_experts_on_host(share):
            yield {"kind": "cpu experts", "passed": False}
            return
        error = (one_step(batch) - on_gpu[batch]).norm() / on_gpu[batch].norm()
        steps = PlacedSteps(Decoder(model, states[batch]), batch, context)
        rate = rates.cpu if share == 1 else min(rates.cpu / share, rates.bus / (1 - share))
        row = speed_row(steps, count, weight_bytes(config).read, (reading, rate))
        yield row | {
            "kind": "cpu experts",
            "cpu_share": share,
            "hot": hot_share(store),
            "error": significant(float(error)),
            "passed": float(error) < TOLERANCE,
        }
        del steps


class _AlwaysExchange(ExpertUsage):
    """Always proposes exchanges of cold for hot experts."""

    def swaps(self, resident: torch.Tensor, limit: int) -> list[tuple[ExpertId, ExpertId]]:
        hot = resident.nonzero().tolist()
        cold = (~resident).nonzero().tolist()
        return [((a[0], a[1]), (b[0], b[1])) for a, b in zip(cold[:limit], hot[:limit])]


@torch.inference_mode()
def chunk_row(model: Transformer, store: ExpertStore, tokens: int, bus: float, rounds: int = 3) -> Row:
    """A prefill chunk: each cold expert that it uses is copied over the bus once."""
    config, device = model.config, store.device
    state = filled_state(config, 1, tokens, device)
    chunk = torch.randint(config.vocab_size, (tokens,))
    spans = []
    before = store.read_counts.cpu().clone()
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        model.run(Batch.of([SequenceChunk(0, 0, chunk)], device), state, NoTap())
        synchronize(device)
        spans.append(1e3 * (time.perf_counter() - began))
    fresh = store.read_counts.cpu() - before
    cold = float(fresh[~store.resident()].sum()) / rounds * store.slot_bytes
    typical = median(spans)
    return {
        "kind": "chunk",
        "tokens": tokens,
        "ms": summary(spans),
        "tokens_per_second": significant(tokens / typical * 1e3),
        "cold_bytes": int(cold),
        "bus_ms": significant(cold / bus * 1e3),
        "hot": hot_share(store),
    }


def bench_placement(
    targets: Sequence[str] = ("0.925", "24GiB"),
    batches: Sequence[int] = (1, 8),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 24,
    count: int = 60,
    config: V4Config | None = None,
    device: torch.device | None = None,
    kernels: Choice = "triton",
    chunk: int = 2048,
    checked: int = 3,
) -> Iterator[Row]:
    """All rows, at V4-Flash width unless `config` is given. `distinct` layers have their own experts, since host memory
    may not hold all of them. `count` steps are timed, `checked` steps compared."""
    config = config or preset("flash", layers, False)
    device = device or torch.device("cuda")
    on_gpu = device.type == "cuda"
    common = {"bench": "placement", **(device_facts(device) if on_gpu else facts())}
    check_config = config if not on_gpu else preset("flash", 4, False)
    yield common | same_bits(check_config, device, (0.5, 0.0), checked)
    own_layers = min(distinct, config.num_hidden_layers)
    reading = reading_speed(device) if on_gpu else 1e10
    for target in targets:
        share = hot_fraction(target, config)
        model, store = random_placed(
            config,
            device,
            random_resident(own_layers, config.n_routed_experts, share),
            spare=64 if on_gpu else 4,
            kernels=kernels,
        )
        skew_routing(model, SKEW)
        bus = bus_rate(store)
        common_row = common | {
            "wish": target,
            "layers": config.num_hidden_layers,
            "layers_with_own_experts": own_layers,
            "context": context,
            "skew": SKEW,
            "read_bytes_per_second": significant(reading),
            "bus_bytes_per_second": significant(bus),
        }
        yield common_row | {
            "kind": "bus",
            "host_bytes": store.host_slots.numel(),
            "device_bytes": store.slots.numel(),
        }
        for row in placement_rows(model, store, batches, context, count, (reading, bus)):
            yield common_row | row
        yield common_row | chunk_row(model, store, chunk, bus)
        if native.available():
            for row in cpu_rows(model, store, batches, context, count, reading):
                yield common_row | row
        del model, store
        release_memory()
