"""Cost of steering: decode steps without edits, with idle edits, and with edits of every token.

    plain            the runner has no taps: the engine without this feature
    idle             every request has vectors in the tables, but no edit applies to a timed token
    one vector       one vector for all requests, added to the streams entering one layer
    own vectors      a different vector for every request, at the same layer
    all layers       a different vector for every request, at every layer
    features         sixteen features of a dictionary set at one site, for every request
    mixer            one residual mixer set to identity, for every request
    experts          one expert of one layer forced, for every request
    gated            a vector added at one layer where a probe of the same row fires
    function         a Python function that adds a constant at one layer, for every request
    head             one head of one layer taken out, for every request
    key mask         two tokens without attention in all layers, for every request
    sink             half of the sink in all layers, for every request
    blocks           a block forbidden in all layers with an indexer, for every request
    entries          a compressed entry removed in all layers that have them, for every request
    reconstruction   rows replaced by their reconstruction, compared with its two matrix products

The contenders alternate step by step in random order, so that the state of the machine and of its caches affects all of
them alike. A ratio is the median over rounds of ratios within a round, of wall time and of the CPU time of all threads;
the latter is hardly affected by other load.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import birkhoff
from birkhoff.bench.baselines import OurEngine, Tokens
from birkhoff.bench.interp import UntappedRunner
from birkhoff.bench.report import Row, check_positive, checkpoint, facts, stream_shape, summary
from birkhoff.bench.synthetic import random_dictionary
from birkhoff.bench.timing import torch_threads
from birkhoff.hooks.edit import SiteContext
from birkhoff.hooks.plan import Plan
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.resolver import SaeResolver
from birkhoff.steering.attention_edits import AttentionEdit
from birkhoff.steering.call import Call
from birkhoff.steering.expert_edits import ExpertSet
from birkhoff.steering.gated_edits import Gate
from birkhoff.steering.request_edit import RequestEdit
from birkhoff.steering.resolver import SteeringResolver
from birkhoff.steering.vector_edits import Add, Patch

# Of the ratio to plain.
LIMITS = {
    "idle": 1.01,
    "one vector": 1.02,
    "own vectors": 1.05,
    "features": 1.05,
    "mixer": 1.1,
    "experts": 1.1,
    "gated": 1.1,
    "head": 1.1,
    "key mask": 1.1,
    "sink": 1.1,
    "blocks": 1.1,
    "entries": 1.1,
}
PRODUCTS_LIMIT = 1.5
FEATURES, SET = 3072, 16


@dataclass(frozen=True)
class SteeringSetting:
    """Parameters, repeated in every row."""

    prompt_tokens: int = 64
    steps: int = 150
    batch: int = 16
    threads: int = 2

    def __post_init__(self) -> None:
        check_positive(self)


class SteeredEngine(OurEngine):
    """The engine with edit plans."""

    def __init__(
        self,
        engine: birkhoff.Engine,
        setting: SteeringSetting,
        name: str,
        plan: Callable[[int, Tokens], Plan | None],
    ):
        super().__init__(engine.v4_model, setting.batch, setting.prompt_tokens, setting.steps)
        self.name = name
        self._make_plan = plan
        if name == "plain":
            self.core.runner = UntappedRunner(engine.v4_model, self.core.runner.state)

    def _plan(self, index: int, ids: Tokens) -> Plan | None:
        return self._make_plan(index, ids)


def bench_steering(model: str | Path | None = None, setting: SteeringSetting | None = None) -> Iterator[Row]:
    """Measure a checkpoint; by default random weights of nano's size."""
    setting = setting or SteeringSetting()
    with torch_threads(setting.threads), tempfile.TemporaryDirectory(prefix="birkhoff-bench-") as folder:
        path, name = checkpoint(model, folder)
        with birkhoff.load(path, device="cpu", max_requests=1) as engine:
            common = {
                "bench": "interp",
                "model": name,
                "shape": stream_shape(engine.v4_model.config),
                "dtype": engine.settings["dtype"],
                **vars(setting),
                **facts(),
            }
            for row in (*_decoding(engine, setting), _reconstruction(engine, setting)):
                yield common | row


def _decoding(engine: birkhoff.Engine, setting: SteeringSetting) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    shape = (setting.batch, setting.prompt_tokens)
    prompts = torch.randint(engine.config.vocab_size, shape, generator=generator).tolist()
    contenders = _contenders(engine, setting)
    # wall seconds, CPU seconds
    seconds: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    try:
        for contender in contenders:
            contender.prefill(prompts)
        for _ in range(setting.steps):
            for index in torch.randperm(len(contenders), generator=generator).tolist():
                contender = contenders[index]
                began, cpu_began = time.perf_counter(), time.process_time()
                contender.step([])
                seconds[contender.name].append((time.perf_counter() - began, time.process_time() - cpu_began))
    finally:
        for contender in contenders:
            contender.core.close()
    warmup = min(5, setting.steps - 1)
    for name, own in seconds.items():
        wall_ratio, cpu_ratio = (
            summary(
                [
                    own_step[clock] / plain_step[clock]
                    for own_step, plain_step in zip(own[warmup:], seconds["plain"][warmup:])
                ]
            )
            for clock in (0, 1)
        )
        row: Row = {
            "kind": "steering",
            "phase": "decode",
            "contender": name,
            "ms": summary([1e3 * value for value, _ in own[warmup:]]),
            "processor_ms": summary([1e3 * value for _, value in own[warmup:]]),
            "times_plain": wall_ratio,
            "times_plain_processor": cpu_ratio,
        }
        if name in LIMITS:
            row |= {"at_most": LIMITS[name], "passed": row["times_plain"]["median"] <= LIMITS[name]}
        yield row


def _contenders(engine: birkhoff.Engine, setting: SteeringSetting) -> list[SteeredEngine]:
    layers = engine.config.num_hidden_layers
    width = engine.schema["mhc_streams_pre_attn"].width
    hook, middle = "mhc_streams_pre_attn", layers // 2
    ratios = engine.v4_model.config.compress_ratios[:layers]
    indexed = [layer for layer, ratio in enumerate(ratios) if ratio == 4]
    compressed = [layer for layer, ratio in enumerate(ratios) if ratio]
    vectors = torch.randn(setting.batch, width, generator=torch.Generator().manual_seed(1)) * 0.01

    def adds(make: Callable[[int], Sequence[RequestEdit]]) -> Callable[[int, Tokens], Plan]:
        buffers = SteeringResolver(engine.schema, layers)

        def plan(index: int, ids: Tokens) -> Plan:
            edits = buffers.edits(list(make(index)), ids, setting.steps + 1)
            return Plan(edits=edits, table=buffers.table(edits))

        return plan

    saes = SaeResolver(engine.schema, layers, engine.v4_model.embed.device)
    saes.attach("sae", _dictionary(engine), "delta", list(range(SET)))

    def features(index: int, ids: Tokens) -> Plan:
        edits = saes.edits([SaeSet("sae", dict.fromkeys(range(SET), 0.1))], ids, setting.steps + 1)
        return Plan(edits=edits, reservations=saes.reservations(edits))

    def call(index: int, ids: Tokens) -> Plan:
        function = Call(lambda rows: rows + 0.01, hook, [middle])
        return Plan(edits=(function.resolve(engine.schema, layers, ids, setting.steps + 1),))

    plans: dict[str, Callable[[int, Tokens], Plan | None]] = {
        "plain": lambda index, ids: None,
        "idle": adds(lambda n: [Add(vectors[n], hook, "all", phase="prefill")]),
        "one vector": adds(lambda n: [Add(vectors[0], hook, [middle])]),
        "own vectors": adds(lambda n: [Add(vectors[n], hook, [middle])]),
        "all layers": adds(lambda n: [Add(vectors[n], hook, "all")]),
        "features": features,
        "mixer": adds(lambda n: [Patch("identity", "mhc_attn_res_mix", [middle])]),
        "experts": adds(lambda n: [ExpertSet([middle], force=[n % 4])]),
        "gated": adds(
            lambda n: [Add(vectors[n], hook, [middle], when=Gate(vectors[0], hook, middle, above=0.0))]
        ),
        "function": call,
        "head": adds(lambda n: [AttentionEdit([middle], heads=[n % 2])]),
        "key mask": adds(lambda n: [AttentionEdit("all", mask=[n, n + 1])]),
        "sink": adds(lambda n: [AttentionEdit("all", sink=0.5)]),
        "blocks": adds(lambda n: [AttentionEdit(indexed, blocks={"forbid": [0]})]),
        "entries": adds(lambda n: [AttentionEdit(compressed, entries=[1])]),
    }
    return [SteeredEngine(engine, setting, name, plan) for name, plan in plans.items()]


def _dictionary(engine: birkhoff.Engine) -> Sae:
    middle = engine.config.num_hidden_layers // 2
    return random_dictionary(FEATURES, engine.config.hidden_size, "mlp_out", middle)


def _reconstruction(engine: birkhoff.Engine, setting: SteeringSetting) -> Row:
    """Reconstruction at a site compared with the encoder and decoder products of the same rows, alternating."""
    saes = SaeResolver(engine.schema, engine.config.num_hidden_layers, engine.v4_model.embed.device)
    sae = _dictionary(engine)
    saes.attach("full", sae, "full")
    (edit,) = saes.edits([SaeReconstruct("full")], [0] * 8, 2)
    (use,) = edit.sites.values()
    rows = setting.batch * setting.prompt_tokens  # as many as in a step that prefills all prompts
    x = torch.randn(rows, engine.config.hidden_size, generator=torch.Generator().manual_seed(3))
    encoder = sae.encoder.t().contiguous()
    decoder = sae.decoder.contiguous()
    reconstruction_seconds, product_seconds = [], []
    with torch.inference_mode():
        for round_index in range(20):
            began = time.perf_counter()
            use.host.run(x, [(use, list(range(rows)))], SiteContext())
            middle = time.perf_counter()
            (x @ encoder) @ decoder
            products_done = time.perf_counter()
            if round_index >= 3:
                reconstruction_seconds.append(middle - began)
                product_seconds.append(products_done - middle)
    ratio = summary(
        [own_step / plain_step for own_step, plain_step in zip(reconstruction_seconds, product_seconds)]
    )
    return {
        "kind": "steering",
        "phase": "prefill",
        "contender": "reconstruction",
        "rows": rows,
        "features": FEATURES,
        "ms": summary([1e3 * value for value in reconstruction_seconds]),
        "products_ms": summary([1e3 * value for value in product_seconds]),
        "times_products": ratio,
        "at_most": PRODUCTS_LIMIT,
        "passed": ratio["median"] <= PRODUCTS_LIMIT,
    }
