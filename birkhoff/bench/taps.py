"""Cost of capture and steering in CUDA-graph decode steps: the GPU counterpart of `bench interp`.

    off             the graph of a step without taps; its number of kernels compared with the bare decoder
    idle            requests whose edits do not apply to generated tokens
    vectors         a distinct stream vector for every row, added at one layer
    outputs         the outputs of both sublayers of every layer, captured for every row
    four layers     the streams entering four layers, captured for one request
    features        sixteen clamped features of a dictionary for every row
    mixer           one residual mixer set to identity, for every row
    experts         one expert of one layer forced, for every row
    gated           a distinct vector for every row, where a probe of the row fires
    head            one head of one layer taken out, for every row
    key mask        two tokens without attention in one layer, for every row
    sink            half of the sink in one layer, for every row
    blocks          a block forbidden in one layer with an indexer, for every row; not if no layer has one
    entries         a compressed entry removed in one layer, for every row; not if no layer has entries
    all masks       two tokens without attention in all layers, for every row
    reconstruction  rows replaced by the reconstruction of a dictionary, compared with its two matrix products

Steps are timed on the host as a server runs them: arm, launch, deliver the rows captured by the previous step, read the
greedy tokens. Reconstruction is timed on the device alone, if there is one. `sites.py` checks the captured rows.
Everything but the kernel count also runs on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from birkhoff.bench.report import Row, significant, summary
from birkhoff.bench.sites import CaptureAll
from birkhoff.bench.synthetic import random_dictionary
from birkhoff.bench.timing import kernel_times, milliseconds
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.hooks.batch_tap import BatchTap, StepStaging, arm
from birkhoff.hooks.plan import Plan, Span
from birkhoff.hooks.schema import schema_of
from birkhoff.hooks.sites import ENTRY_TOKENS, INDEX_BLOCKS
from birkhoff.hooks.vector_table import Tables
from birkhoff.model.transformer import Transformer
from birkhoff.sae.encode import DeviceSae
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.resolver import SaeResolver
from birkhoff.steering.attention_edits import AttentionEdit
from birkhoff.steering.expert_edits import ExpertSet
from birkhoff.steering.gated_edits import Gate
from birkhoff.steering.request_edit import RequestEdit
from birkhoff.steering.resolver import SteeringResolver
from birkhoff.steering.vector_edits import Add, Patch

HOOK, OUT = "mhc_streams_pre_attn", "mlp_out"
SET = 16
EDITS = ("mixer", "experts", "gated", "head", "key mask", "sink", "blocks", "entries", "all masks")
LIMITS = {"idle": 1.0, "vectors": 1.02, "outputs": 1.05, "four layers": 1.05, "features": 1.02}
LIMITS |= dict.fromkeys(EDITS, 1.03)
NAMES = (*LIMITS, "reconstruction")
NOISE = 0.005  # of a ratio: two runs of the same graph differ by as much
PRODUCTS_LIMIT = 1.3


class TapPlans:
    """Capture and edit plans for every row of a step, by name."""

    def __init__(self, model: Transformer, batch: int, features: int):
        c, device = model.config, model.embed.device
        self.schema = schema_of(c, dtype_name(model.numerics.dtype))
        self.layers = c.num_hidden_layers
        self.middle = c.num_hidden_layers // 2
        self.indexed = self._first_with(INDEX_BLOCKS.name)
        self.compressed = self._first_with(ENTRY_TOKENS.name) if self.indexed is None else self.indexed
        self.batch = batch
        self.tables = Tables(device)
        self.steering = SteeringResolver(self.schema, self.layers, tables=self.tables)
        self.saes = SaeResolver(self.schema, self.layers, device)
        g = torch.Generator().manual_seed(1)
        self.vectors = torch.randn(batch, self.schema[HOOK].width, generator=g) * 0.01
        sae = random_dictionary(features, c.hidden_size, OUT, self.middle)
        self.saes.attach("some", sae, "delta", list(range(SET)))
        self.device_sae = self.saes.attach("full", sae, "full").module.hosts[OUT, self.middle].weights

    def _first_with(self, hook: str) -> int | None:
        layers = self.schema[hook].layers if hook in self.schema else ()
        return next(iter(range(self.layers) if layers is None else layers), None)

    def lacks(self, name: str) -> bool:
        """Whether the model has no layer for plans of this name."""
        return {"blocks": self.indexed, "entries": self.compressed}.get(name, 0) is None

    def plans(self, name: str, max_tokens: int) -> list[Plan] | None:
        """One plan per row, or None for steps without taps."""
        builders: dict[str, Callable[[int], Plan]] = {
            "idle": lambda n: self._adds([Add(self.vectors[n], HOOK, "all", phase="prefill")], max_tokens),
            "vectors": lambda n: self._adds([Add(self.vectors[n], HOOK, [self.middle])], max_tokens),
            "outputs": lambda n: Plan(
                jobs=(
                    CaptureAll(
                        [(hook, layer) for layer in range(self.layers) for hook in ("post_attn", OUT)]
                    ),
                )
            ),
            "four layers": lambda n: Plan(jobs=(CaptureAll(self._four_layers()),)) if n == 0 else Plan(),
            "features": lambda n: self._features(
                [SaeSet("some", dict.fromkeys(range(SET), 0.1))], max_tokens
            ),
            "mixer": lambda n: self._adds([Patch("identity", "mhc_attn_res_mix", [self.middle])], max_tokens),
            "experts": lambda n: self._adds([ExpertSet([self.middle], force=[n])], max_tokens),
            "gated": lambda n: self._adds([self._gated(n)], max_tokens),
            "head": lambda n: self._adds([AttentionEdit([self.middle], heads=[n % 4])], max_tokens),
            "key mask": lambda n: self._adds([AttentionEdit([self.middle], mask=[n, n + 1])], max_tokens),
            "sink": lambda n: self._adds([AttentionEdit([self.middle], sink=0.5)], max_tokens),
            "blocks": lambda n: self._adds(
                [AttentionEdit([self.indexed], blocks={"force": [n], "forbid": [n + 1]})], max_tokens
            ),
            "entries": lambda n: self._adds([AttentionEdit([self.compressed], entries=[n])], max_tokens),
            "all masks": lambda n: self._adds([AttentionEdit("all", mask=[n, n + 1])], max_tokens),
            "reconstruction": lambda n: self._features([SaeReconstruct("full", error="drop")], max_tokens),
        }
        return [builders[name](row) for row in range(self.batch)] if name in builders else None

    def _four_layers(self) -> list[tuple[str, int]]:
        step = max(1, self.layers // 4)
        return [(HOOK, layer) for layer in range(0, self.layers, step)][:4]

    def _gated(self, row: int) -> Add:
        gate = Gate(self.vectors[0], HOOK, self.middle, above=0.0)
        return Add(self.vectors[row], HOOK, [self.middle], when=gate)

    def _adds(self, edits: Sequence[RequestEdit], max_tokens: int) -> Plan:
        resolved = self.steering.edits(list(edits), [0] * (self.batch + 2), max_tokens)
        return self._reserved(Plan(edits=resolved, table=self.steering.table(resolved)))

    def _features(self, edits: Sequence[Any], max_tokens: int) -> Plan:
        resolved = self.saes.edits(list(edits), [0], max_tokens)
        return self._reserved(Plan(edits=resolved, reservations=self.saes.reservations(resolved)))

    def _reserved(self, plan: Plan) -> Plan:
        assert plan.reserve(), "no other reservation exists"
        return plan


class TappedSteps:
    """Steps of a batch as `engine.runner` runs them, with its state between steps. `plans`: one per row."""

    def __init__(self, graphs: CudaGraphs, plans: list[Plan] | None, batch: int):
        self.graphs = graphs
        self.plans = plans
        self.batch = batch
        self.device = graphs.decoder.state.device
        self.all_replayed = True
        self._staging = StepStaging(self.device)
        self._tokens = [1 + row for row in range(batch)]
        self._pending: BatchTap | None = None

    def step(self, position: int) -> float:
        """Milliseconds of a step with all tokens at `position`."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        tap = None
        if self.plans is not None:
            spans = [
                Span(p, row, position, [self._tokens[row]], 1)
                for row, p in enumerate(self.plans)
                if not p.idle_after_prompt
            ]
            tap = arm(self._staging, spans, self.batch) if spans else None
        graph_plan = None if tap is None else self.graphs.plan(tap)
        self.all_replayed &= tap is None or graph_plan is not None
        logits, _ = self.graphs.step(
            self._tokens, [position] * self.batch, list(range(self.batch)), tap, graph_plan
        )
        self.deliver_pending()
        self._pending = tap
        self._tokens = logits.argmax(-1).tolist()
        return (time.perf_counter() - began) * 1e3

    def deliver_pending(self) -> None:
        """Deliver the rows captured by the last step."""
        if self._pending is not None:
            self._pending.deliver()
        self._pending = None


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
    """One row per kind of plan that the model has layers for, alternating with steps without taps."""
    tap_plans = TapPlans(graphs.decoder.model, batch, features)
    untapped = TappedSteps(graphs, None, batch)
    for step in range(warm):
        untapped.step(start + step)
    for name in names:
        if tap_plans.lacks(name):
            continue
        plans = tap_plans.plans(name, start + 2 * steps + warm)
        tapped = TappedSteps(graphs, plans, batch)
        for step in range(warm):  # launched eagerly, then captured
            tapped.step(start + step)
        tapped_ms, untapped_ms = [], []
        for position in range(start + warm, start + warm + steps):
            untapped_ms.append(untapped.step(position))
            tapped_ms.append(tapped.step(position))
        tapped.deliver_pending()
        ratio = summary([tap_ms / plain_ms for tap_ms, plain_ms in zip(tapped_ms, untapped_ms)])
        row: Row = {
            "kind": "taps",
            "contender": name,
            "batch": batch,
            "ms": summary(tapped_ms),
            "ms_off": summary(untapped_ms),
            "times_off": ratio,
            "replayed": tapped.all_replayed,
        }
        if name in LIMITS:
            row |= {
                "at_most": LIMITS[name],
                "passed": tapped.all_replayed and ratio["median"] <= LIMITS[name] + NOISE,
            }
        else:
            row |= reconstruction(tap_plans.device_sae, graphs, batch, start + warm + steps, row)
        yield row
        for plan in plans or ():
            plan.release()


def reconstruction(sae: DeviceSae, graphs: CudaGraphs, rows: int, length: int, row: Row) -> Row:
    """Time of the two products alone, and the extra time of a step with reconstruction relative to it."""
    device = graphs.decoder.state.device
    x = torch.randn(rows, sae.encoder.shape[1], device=device)
    products = summary(milliseconds(lambda: torch.mm(torch.mm(x, sae.encoder.T), sae.decoder), device))
    tapped_ms, untapped_ms = row["ms"], row["ms_off"]
    last_tapped = graphs.last_tapped
    (_, graph) = graphs._find_plain(rows, length)
    if last_tapped is not None and last_tapped.graph is not None and graph is not None:
        tapped_ms, untapped_ms = (
            summary(milliseconds(step_graph.replay, device)) for step_graph in (last_tapped.graph, graph)
        )
    times = (tapped_ms["median"] - untapped_ms["median"]) / products["median"]
    return {
        "features": len(sae.encoder),
        "products_ms": products,
        "device_ms": tapped_ms,
        "device_ms_off": untapped_ms,
        "times_products": significant(times),
        "at_most": PRODUCTS_LIMIT,
        "passed": row["replayed"] and times <= PRODUCTS_LIMIT,
    }


def kernel_row(graphs: CudaGraphs, batch: int, start: int) -> Row:
    """Number of kernels of a replayed step without taps, and of the bare decoder."""
    buffers, graph = graphs._find_plain(batch, start + 1)
    assert graph is not None, "kernels are counted on a GPU"

    replayed = len(kernel_times(graph.replay))
    bare = len(kernel_times(lambda: graphs.decoder.step(buffers)))
    return {
        "kind": "taps",
        "contender": "off",
        "batch": batch,
        "kernels": replayed,
        "kernels_bare": bare,
        "passed": replayed == bare,
    }


def bench_taps(
    batches: Sequence[int] = (1, 16),
    context: int = 4096,
    layers: int = 43,
    distinct: int = 38,
    steps: int = 60,
    features: int = 65536,
) -> Iterator[Row]:
    """All rows, at V4-Flash width with random weights."""
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
