"""Decoding with experts in host memory: checked, then timed beside what the bytes allow.

`bench_placement` yields rows. `same bits`: a few layers with everything on the device and with shares of it, experts
exchanged between steps; the logits must be equal. `bus`: how fast experts are copied. `placement`: tokens per second at
a share of hot experts, chosen at random and by counts, under skewed routing; `limit` is what the reads that were
counted would take at the measured speeds of device and bus, one after the other. `moving`: steps while experts are
exchanged. `chunk`: a chunk of a prompt, whose cold experts are staged. Everything runs on a CPU too, for the tests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from birkhoff.bench.decode import captured, device_facts, place, reading_speed, seconds
from birkhoff.bench.report import facts, significant, summary
from birkhoff.bench.synthetic import filled_state, random_placed, skew_routing
from birkhoff.byte_size import parse_bytes
from birkhoff.config import V4Config
from birkhoff.convert.presets import preset
from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.engine.memory_plan import default_cache_bytes, plan_budget, weight_bytes
from birkhoff.hooks.tap import NoTap
from birkhoff.kernels.select import Choice
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.expert_usage import ExpertUsage
from birkhoff.offload.placement import Placement

Row = dict[str, Any]
SKEW = 0.12  # of a score's unit per logarithm of rank; scores of random weights spread over about 0.25
LEAST_SHARE = 0.6  # of the limit
ROOM = 256  # steps that a state has room for


def share_of(wish: str, config: V4Config) -> float:
    """A share of hot experts as it stands ("0.925"), or what a GPU of that size has room for ("24GiB")."""
    try:
        return float(wish)
    except ValueError:
        memory = parse_bytes(wish)
        return plan_budget(config, memory, default_cache_bytes(config, memory)).share


def some_hot(layers: int, experts: int, share: float, seed: int = 0) -> torch.Tensor:
    """[layers, experts] bool: a share of all, at random."""
    order = torch.randperm(layers * experts, generator=torch.Generator().manual_seed(seed))
    chosen = order[: round(share * layers * experts)]
    return torch.zeros(layers * experts, dtype=torch.bool).index_fill_(0, chosen, True).view(layers, experts)


def hot_share(store: ExpertStore) -> float:
    return significant(float(store.resident().double().mean()))


def move_to(store: ExpertStore, wanted: torch.Tensor) -> tuple[int, float]:
    """Exchange homes until the hot ones are those of `wanted`, of which there are as many; exchanges and seconds."""
    began, moved = time.perf_counter(), 0
    while True:
        now = store.resident()
        arriving = (wanted & ~now).nonzero().tolist()
        leaving = (now & ~wanted).nonzero().tolist()
        if not arriving:
            return moved, time.perf_counter() - began
        for a, b in zip(arriving[: store.spare], leaving):
            store.swap((a[0], a[1]), (b[0], b[1]))
        moved += store.publish(wait=True)


def advance(decoder: Decoder, buffers: DecodeBuffers) -> None:
    """One step, then other tokens at the next position: all on the device, and never a cycle of few tokens."""
    decoder.step(buffers)
    buffers.token_ids.mul_(48271).add_(11).remainder_(decoder.config.vocab_size)
    buffers.positions.add_(1)


class PlacedSteps:
    """Steps of one desk: a captured graph on a GPU, plain launches elsewhere."""

    def __init__(self, decoder: Decoder, batch: int, context: int):
        self.decoder, self.buffers = decoder, decoder.buffers(batch, context + ROOM)
        self.cuda = decoder.state.device.type == "cuda"
        tokens = torch.randint(decoder.config.vocab_size, (batch,)).tolist()
        place(self.buffers, tokens, [context] * batch)
        self.one: Callable[[], None] = lambda: advance(decoder, self.buffers)
        if self.cuda:
            self.one = captured(decoder, self.buffers, advance).replay
        self.context = context
        place(self.buffers, tokens, [context] * batch)

    def _behind(self, count: int) -> None:
        """Stand behind `context` tokens again: there is room for so many steps only."""
        assert count <= ROOM
        self.buffers.positions.fill_(self.context)

    def milliseconds(self, count: int) -> list[float]:
        self._behind(count)
        if self.cuda:
            return [1e3 * span for span in seconds(self.one, count)]
        spans = []
        for _ in range(count):
            began = time.perf_counter()
            self.one()
            spans.append(1e3 * (time.perf_counter() - began))
        return spans

    def reads(self, count: int) -> torch.Tensor:
        """How often each expert was read in so many steps."""
        store = self.decoder.store
        assert store is not None
        before = store.read_counts.cpu().clone()
        for step in range(count):
            if step % ROOM == 0:
                self._behind(min(ROOM, count - step))
            self.one()
        return store.read_counts.cpu() - before


@torch.inference_mode()
def same_bits(config: V4Config, device: torch.device, shares: Sequence[float], steps: int) -> Row:
    """Logits of the kernels at each share, with exchanges between steps, against everything on the device."""
    found: dict[str, bool] = {}
    true: list[torch.Tensor] = []
    layers = config.num_hidden_layers
    experts = config.n_routed_experts
    for share in (1.0, *shares):
        model, store = random_placed(config, device, some_hot(layers, experts, share), spare=8, seed=1)
        state = filled_state(config, 2, 300, device)
        for layer in state.layers:  # the same past for everybody
            for tensor in (
                layer.keys.rows,
                *(ring.rows for ring in layer.raw.values()),
                *layer.pages.values(),
            ):
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
        decoder = Decoder(model, state)
        buffers = decoder.buffers(2, 512)
        made = []
        for step in range(steps):
            if 0 < share < 1:
                hot = store.resident()
                arriving = (~hot).nonzero()[step].tolist()
                leaving = hot.nonzero()[-1 - step].tolist()
                store.swap((arriving[0], arriving[1]), (leaving[0], leaving[1]))
                store.publish(wait=True)
            place(buffers, [5 + step, 9 + step], [300 + step] * 2)
            buffers.poison()
            made.append(decoder.step(buffers).clone())
        true = true or made
        found[f"{share:g}"] = all(torch.equal(a, b) for a, b in zip(made, true))
        del model, store, decoder, buffers, state
        clear(device)
    return {
        "kind": "same bits",
        "layers": layers,
        "steps": steps,
        "equal": found,
        "passed": all(found.values()),
    }


def bus_speed(store: ExpertStore, rounds: int = 3) -> float:
    """Bytes a second of copying cold experts to the device through all spare runs."""
    cold = (~store.resident()).nonzero().tolist()[: store.spare * rounds]
    rates = []
    for first in range(0, len(cold), store.spare):
        began = time.perf_counter()
        copies = [
            cached
            for layer, number in cold[first : first + store.spare]
            if (cached := store.acquire((layer, number)))
        ]
        store.publish(wait=True)
        rates.append(len(copies) * store.layout.nbytes / (time.perf_counter() - began))
        for cached in copies:
            store.release(cached)
    return max(rates)


def speed_row(steps: PlacedSteps, count: int, read: int, speeds: tuple[float, float]) -> Row:
    """Speed of one placement, and the limit that its own reads set."""
    store = steps.decoder.store
    assert store is not None
    reads, hot = steps.reads(count), store.resident()
    ms = steps.milliseconds(count)
    median = sorted(ms)[len(ms) // 2]
    inside, outside = (int(reads[where].sum()) / count * store.layout.nbytes for where in (hot, ~hot))
    limit = ((read + inside) / speeds[0] + outside / speeds[1]) * 1e3
    batch = steps.buffers.rows
    return {
        "batch": batch,
        "ms": summary(ms),
        "tokens_per_second": significant(batch / median * 1e3),
        "misses": significant(outside / max(inside + outside, 1)),
        "cold_experts_per_step": significant(outside / store.layout.nbytes),
        "limit_tokens_per_second": significant(batch / limit * 1e3),
        "share_of_limit": significant(limit / median),
        "passed": limit / median >= LEAST_SHARE,
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
    """Random placement, then by counts of as many steps as are timed; and the steps that run beside exchanges."""
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
            clear(device)


def moving_row(steps: PlacedSteps, count: int) -> Row:
    """Steps with and without exchanges under way, which begin after every fourth step whether they pay or not."""
    store = steps.decoder.store
    assert store is not None
    plain = steps.milliseconds(count)
    placement = Placement(
        store,
        _Restless(store.layers, store.experts),
        steps.decoder.model.hash_routing_tables(),
        interval=min(4, count),
    )
    spans = []
    for _ in range(count):
        placement.before_step([], chunk=False)
        spans += steps.milliseconds(1)
        placement.after_step()
    moved = placement.swapped + store.publish(wait=True)
    times = sorted(spans)[count // 2] / sorted(plain)[count // 2]
    return {
        "kind": "moving",
        "batch": steps.buffers.rows,
        "ms": summary(spans),
        "ms_at_rest": summary(plain),
        "exchanged": moved,
        "times_at_rest": significant(times),
    }


class _Restless(ExpertUsage):
    """Always wants to exchange: the coldest for the hottest."""

    def swaps(self, resident, limit):
        hot = resident.nonzero().tolist()
        cold = (~resident).nonzero().tolist()
        return [((a[0], a[1]), (b[0], b[1])) for a, b in zip(cold[:limit], hot[:limit])]


@torch.inference_mode()
def chunk_row(model: Transformer, store: ExpertStore, tokens: int, bus: float, rounds: int = 3) -> Row:
    """A chunk of a prompt: each cold expert it asks for comes over the bus once."""
    config, device = model.config, store.device
    state = filled_state(config, 1, tokens, device)
    chunk = torch.randint(config.vocab_size, (tokens,))
    spans = []
    before = store.read_counts.cpu().clone()
    for _ in range(rounds):
        _wait(device)
        began = time.perf_counter()
        model.run(Batch.of([SequenceChunk(0, 0, chunk)], device), state, NoTap())
        _wait(device)
        spans.append(1e3 * (time.perf_counter() - began))
    fresh = store.read_counts.cpu() - before
    cold = float(fresh[~store.resident()].sum()) / rounds * store.layout.nbytes
    median = sorted(spans)[rounds // 2]
    return {
        "kind": "chunk",
        "tokens": tokens,
        "ms": summary(spans),
        "tokens_per_second": significant(tokens / median * 1e3),
        "cold_bytes": int(cold),
        "bus_ms": significant(cold / bus * 1e3),
        "hot": hot_share(store),
    }


def bench_placement(
    wishes: Sequence[str] = ("0.925", "24GiB"),
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
    """All rows, at V4-Flash's width unless a `config` is given. `distinct` layers have experts of their own: host
    memory may be smaller than all of them. `count` steps are timed, `checked` steps compared."""
    config = config or preset("flash", layers, False)
    device = device or torch.device("cuda")
    on_gpu = device.type == "cuda"
    common = {"bench": "placement", **(device_facts(device) if on_gpu else facts())}
    few = config if not on_gpu else preset("flash", 4, False)
    yield common | same_bits(few, device, (0.5, 0.0), checked)
    own = min(distinct, config.num_hidden_layers)
    reading = reading_speed(device) if on_gpu else 1e10
    for wish in wishes:
        share = share_of(wish, config)
        model, store = random_placed(
            config,
            device,
            some_hot(own, config.n_routed_experts, share),
            spare=64 if on_gpu else 4,
            kernels=kernels,
        )
        skew_routing(model, SKEW)
        bus = bus_speed(store)
        about = common | {
            "wish": wish,
            "layers": config.num_hidden_layers,
            "layers_with_own_experts": own,
            "context": context,
            "skew": SKEW,
            "read_bytes_per_second": significant(reading),
            "bus_bytes_per_second": significant(bus),
        }
        yield about | {
            "kind": "bus",
            "host_bytes": store.host_slots.numel(),
            "device_bytes": store.slots.numel(),
        }
        for row in placement_rows(model, store, batches, context, count, (reading, bus)):
            yield about | row
        yield about | chunk_row(model, store, chunk, bus)
        del model, store
        clear(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
