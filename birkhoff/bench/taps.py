"""What looking and steering cost where decoding steps are replayed as graphs: the GPU's side of `bench interp`.

    off             the graph of a step without taps, and how many kernels it has beside those of a bare decoder
    idle            requests that want nothing of generated tokens
    vectors         as many distinct stream vectors as rows, added at one layer
    outputs         both sublayers' outputs of every layer, captured for every row
    four layers     the streams entering four layers, captured for one request
    features        sixteen clamped features of a dictionary for every row
    reconstruction  rows replaced by what a dictionary makes of them, beside the two products that takes

Steps are timed from the host, as a server runs them: arming, launching, handing out the rows that the step before has
captured, reading the greedy choice. Reconstruction is timed on the device alone, where there is one. `sites.py` asks
whether the rows are right. All but the count of kernels runs on a CPU too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from birkhoff.bench.report import significant, summary
from birkhoff.bench.sites import Taken
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.hooks.batch_tap import BatchTap, StepStaging, arm
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.schema import build_hook_schema
from birkhoff.hooks.vector_table import Tables
from birkhoff.model.transformer import Transformer
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.encode import DeviceSae
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.resolver import SaeResolver
from birkhoff.steering.resolver import SteeringResolver
from birkhoff.steering.vector_edits import Add

Row = dict[str, Any]
HOOK, OUT = "mhc_streams_pre_attn", "mlp_out"
SET = 16
BARS = {"idle": 1.0, "vectors": 1.02, "outputs": 1.05, "four layers": 1.05, "features": 1.02}
NAMES = (*BARS, "reconstruction")
NOISE = 0.005  # of a ratio: two runs of the same graph differ by as much
PRODUCTS_BAR = 1.3


class TapBaselines:
    """Plans for every row of a step, by name."""

    def __init__(self, model: Transformer, batch: int, features: int):
        c, device = model.config, model.embed.device
        dtype = dtype_name(model.numerics.dtype)
        self.schema = build_hook_schema(
            c.hidden_size, dtype, c.hc_mult, c.n_routed_experts, c.num_experts_per_tok
        )
        self.layers = c.num_hidden_layers
        self.middle = c.num_hidden_layers // 2
        self.batch = batch
        self.tables = Tables(device)
        self.steering = SteeringResolver(self.schema, self.layers, tables=self.tables)
        self.saes = SaeResolver(self.schema, self.layers, device)
        g = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(batch, self.schema[HOOK].width, generator=g) * 0.01
        weights = torch.randn(2, features, c.hidden_size, generator=g) / c.hidden_size**0.5
        sae = Sae(
            weights[0],
            torch.full((features,), -1.0),
            weights[1],
            torch.zeros(c.hidden_size),
            hook=OUT,
            layer=self.middle,
        )
        self.saes.attach("some", sae, "delta", list(range(SET)))
        self.held = self.saes.attach("full", sae, "full").module.hosts[OUT, self.middle].weights

    def plans(self, name: str, room: int) -> list[Plan] | None:
        """One for each row; None for nobody's."""
        made: dict[str, Callable[[int], Plan]] = {
            "idle": lambda n: self._adds([Add(self.vectors[n], HOOK, "all", phase="prefill")], room),
            "vectors": lambda n: self._adds([Add(self.vectors[n], HOOK, [self.middle])], room),
            "outputs": lambda n: Plan(
                jobs=(Taken([(hook, layer) for layer in range(self.layers) for hook in ("post_attn", OUT)]),)
            ),
            "four layers": lambda n: Plan(jobs=(Taken(self._four()),)) if n == 0 else Plan(),
            "features": lambda n: self._features([SaeSet("some", dict.fromkeys(range(SET), 0.1))], room),
            "reconstruction": lambda n: self._features([SaeReconstruct("full", error="drop")], room),
        }
        return [made[name](row) for row in range(self.batch)] if name in made else None

    def _four(self) -> list[tuple[str, int]]:
        step = max(1, self.layers // 4)
        return [(HOOK, layer) for layer in range(0, self.layers, step)][:4]

    def _adds(self, edits: Sequence[Add], room: int) -> Plan:
        resolved = self.steering.edits(list(edits), [0], room)
        return self._reserved(Plan(edits=resolved, table=self.steering.table(resolved)))

    def _features(self, edits: Sequence[Any], room: int) -> Plan:
        resolved = self.saes.edits(list(edits), [0], room)
        return self._reserved(Plan(edits=resolved, holdings=self.saes.holdings(resolved)))

    def _reserved(self, plan: Plan) -> Plan:
        assert plan.reserve(), "nobody else holds anything"
        return plan


class TappedSteps:
    """Steps of a batch as `engine.runner` runs them, with what it keeps between them. `plans`: one for each row."""

    def __init__(self, graphs: CudaGraphs, plans: list[Plan] | None, batch: int):
        self.graphs = graphs
        self.plans = plans
        self.batch = batch
        self.device = graphs.decoder.state.device
        self.all_replayed = True
        self._staging = StepStaging(self.device)
        self._tokens = [1 + row for row in range(batch)]
        self._owed: BatchTap | None = None

    def step(self, at: int) -> float:
        """Milliseconds of a step whose tokens stand at position `at`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        tap = None
        if self.plans is not None:
            spans = [
                Span(p, row, at, [self._tokens[row]], 1) for row, p in enumerate(self.plans) if not p.rests
            ]
            tap = arm(self._staging, spans, self.batch) if spans else None
        wishes = None if tap is None else self.graphs.plan(tap)
        self.all_replayed &= tap is None or wishes is not None
        logits, _ = self.graphs.step(self._tokens, [at] * self.batch, list(range(self.batch)), tap, wishes)
        self.hand_over()
        self._owed = tap
        self._tokens = logits.argmax(-1).tolist()
        return (time.perf_counter() - began) * 1e3

    def hand_over(self) -> None:
        """What is still owed of the last step."""
        if self._owed is not None:
            self._owed.deliver()
        self._owed = None


@torch.inference_mode()
def cost_rows(
    graphs: CudaGraphs,
    batch: int,
    start: int,
    steps: int,
    features: int,
    warm: int = 4,
    names: Sequence[str] = NAMES,
) -> Iterator[Row]:
    """One row a contender, in turns with the step that nobody looks at."""
    contenders = TapBaselines(graphs.decoder.model, batch, features)
    bare = TappedSteps(graphs, None, batch)
    for step in range(warm):
        bare.step(start + step)
    for name in names:
        plans = contenders.plans(name, start + 2 * steps + warm)
        watched = TappedSteps(graphs, plans, batch)
        for step in range(warm):  # launched, then recorded
            watched.step(start + step)
        own, off = [], []
        for turn in range(start + warm, start + warm + steps):
            off.append(bare.step(turn))
            own.append(watched.step(turn))
        watched.hand_over()
        ratio = summary([one / other for one, other in zip(own, off)])
        row: Row = {
            "kind": "taps",
            "contender": name,
            "batch": batch,
            "ms": summary(own),
            "ms_off": summary(off),
            "times_off": ratio,
            "replayed": watched.all_replayed,
        }
        if name in BARS:
            row |= {
                "at_most": BARS[name],
                "passed": watched.all_replayed and ratio["median"] <= BARS[name] + NOISE,
            }
        else:
            row |= reconstruction(contenders.held, graphs, batch, start + warm + steps, row)
        yield row
        for plan in plans or ():
            plan.release()


def reconstruction(held: DeviceSae, graphs: CudaGraphs, rows: int, length: int, row: Row) -> Row:
    """The two products alone, and how many times their time the spliced step takes beyond the bare one."""
    device = graphs.decoder.state.device
    x = torch.randn(rows, held.encoder.shape[1], device=device)
    products = summary(milliseconds(lambda: torch.mm(torch.mm(x, held.encoder.T), held.decoder), device))
    own, off = row["ms"], row["ms_off"]
    last = graphs.last_tapped
    (_, graph) = graphs._find_plain(rows, length)
    if last is not None and last.graph is not None and graph is not None:
        own, off = (summary(milliseconds(one.replay, device)) for one in (last.graph, graph))
    times = (own["median"] - off["median"]) / products["median"]
    return {
        "features": len(held.encoder),
        "products_ms": products,
        "device_ms": own,
        "device_ms_off": off,
        "times_products": significant(times),
        "at_most": PRODUCTS_BAR,
        "passed": row["replayed"] and times <= PRODUCTS_BAR,
    }


def milliseconds(
    call: Callable[[], Any], device: torch.device, count: int = 20, warm: int = 4
) -> list[float]:
    """Of each of many calls one after the other: on a GPU by its own clock, so that what the host does is hidden."""
    spent = []
    if device.type != "cuda":
        for _ in range(warm + count):
            began = time.perf_counter()
            call()
            spent.append((time.perf_counter() - began) * 1e3)
        return spent[warm:]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(warm + count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in zip(marks[warm:], marks[warm + 1 :])]


def kernel_row(graphs: CudaGraphs, batch: int, start: int) -> Row:
    """Kernels of a replayed step that nobody looks at, and of the bare decoder's launches."""
    from torch.profiler import ProfilerActivity, profile

    buffers, graph = graphs._find_plain(batch, start + 1)
    assert graph is not None, "kernels are counted on a GPU"

    def launched(call: Callable[[], Any]) -> int:
        with profile(activities=[ProfilerActivity.CUDA]) as log:
            call()
            torch.cuda.synchronize()
        return sum(event.device_type.name == "CUDA" for event in log.events())

    off = launched(graph.replay)
    bare = launched(lambda: graphs.decoder.step(buffers))
    return {
        "kind": "taps",
        "contender": "off",
        "batch": batch,
        "kernels": off,
        "kernels_bare": bare,
        "passed": off == bare,
    }


def bench_taps(
    batches: Sequence[int] = (1, 16),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 38,
    steps: int = 60,
    features: int = 65536,
) -> Iterator[Row]:
    """All rows, at V4-Flash's width with random weights."""
    from birkhoff.bench.decode import device_facts
    from birkhoff.bench.synthetic import filled_state, random_on_device
    from birkhoff.convert.presets import preset
    from birkhoff.decode.gpu import Decoder

    device = torch.device("cuda")
    common = {"bench": "interp", "model": "synth flash", "context": context, **device_facts(device)}
    config = preset("flash", layers, False)
    model = random_on_device(config, device, distinct=distinct, kernels="triton")
    for batch in batches:
        decoder = Decoder(model, filled_state(config, batch + 1, context, device))
        graphs = CudaGraphs(decoder, batch, context + 256)
        yield common | kernel_row(graphs, batch, context)
        for row in cost_rows(graphs, batch, context, steps, features):
            yield common | row
