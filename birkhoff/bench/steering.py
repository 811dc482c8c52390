"""What steering costs: decoding with nothing to change, with edits that wait, and with edits of every token.

    plain            the runner has no taps to arm: what the engine would be without this feature
    idle             every request holds rows of the tables, and none of its edits meets a token that is timed
    one vector       one vector for all requests, added to the streams entering one layer
    own vectors      another vector for every request, at the same place
    all layers       another vector for every request, at every layer
    features         sixteen features of a dictionary set at one site, for every request
    reconstruction   rows replaced by their reconstruction, beside the two products it cannot do without

Contenders take turns step by step, in an order drawn anew each time, so that whatever else the machine does meets all
of them and nobody finds the caches as he left them more often than others. A ratio is the median over turns of ratios
within a turn, of wall time and of the processor time of all threads: the second hardly notices a busy machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.bench.baselines import OurEngine, Tokens
from birkhoff.bench.interp import UntappedRunner
from birkhoff.bench.report import facts, summary
from birkhoff.convert.synth import synth
from birkhoff.engine.request import Request
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import OptionError
from birkhoff.hooks.edit import SiteContext
from birkhoff.hooks.plan import Plan
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_edits import SaeReconstruct, SaeSet
from birkhoff.sae.resolver import SaeResolver
from birkhoff.steering.resolver import SteeringResolver
from birkhoff.steering.vector_edits import Add

Row = dict[str, Any]
BARS = {"idle": 1.01, "one vector": 1.02, "own vectors": 1.05, "features": 1.05}  # times plain, at most
PRODUCTS_BAR = 1.5
FEATURES, SET = 3072, 16


@dataclass(frozen=True)
class SteeringSetting:
    """What is measured; every row repeats it."""

    prompt_tokens: int = 64
    steps: int = 150
    batch: int = 16
    threads: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise OptionError(f"{name} is {value}, expected a positive whole number.")


class Steered(OurEngine):
    """Our engine with requests that carry plans, or none."""

    def __init__(
        self,
        engine: birkhoff.Engine,
        setting: SteeringSetting,
        name: str,
        plan: Callable[[int, Tokens], Plan | None],
    ):
        super().__init__(engine.model, setting.batch, setting.prompt_tokens, setting.steps)
        self.name = name
        self._plan = plan
        if name == "plain":
            self.core.runner = UntappedRunner(engine.model, self.core.runner.state)

    def prefill(self, prompts: list[Tokens]) -> Tokens:
        options = SamplingParams(temperature=0, max_tokens=self.steps + 1, ignore_eos=True)
        self._requests = [
            Request(tuple(ids), options, options.max_tokens, seed=0, plan=self._plan(number, ids))
            for number, ids in enumerate(prompts)
        ]
        for request in self._requests:
            self.core.submit(request)
        return self.step([])


def bench_steering(model: str | Path | None = None, setting: SteeringSetting | None = None) -> Iterator[Row]:
    """Measure a checkpoint, or a random one of nano's size."""
    setting = setting or SteeringSetting()
    threads = torch.get_num_threads()
    torch.set_num_threads(setting.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="birkhoff-bench-") as folder:
            given = Path(folder) / "nano" if model is None else model
            if model is None:
                synth(given, "nano")
            with birkhoff.load(given, device="cpu", max_requests=1) as engine:
                common = {
                    "bench": "interp",
                    "model": "synth nano" if model is None else str(model),
                    "shape": {
                        "layers": engine.config.num_hidden_layers,
                        "hidden": engine.config.hidden_size,
                        "streams": engine.config.hc_mult,
                    },
                    "dtype": engine.settings["dtype"],
                    **vars(setting),
                    **facts(),
                }
                for row in (*_decoding(engine, setting), _reconstruction(engine, setting)):
                    yield common | row
    finally:
        torch.set_num_threads(threads)


def _decoding(engine: birkhoff.Engine, setting: SteeringSetting) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    shape = (setting.batch, setting.prompt_tokens)
    prompts = torch.randint(engine.config.vocab_size, shape, generator=generator).tolist()
    everybody = _contenders(engine, setting)
    seconds: dict[str, list[tuple[float, float]]] = {
        who.name: [] for who in everybody
    }  # of the wall, of processors
    try:
        for who in everybody:
            who.prefill(prompts)
        for _ in range(setting.steps):
            for place in torch.randperm(len(everybody), generator=generator).tolist():
                who = everybody[place]
                began, worked = time.perf_counter(), time.process_time()
                who.step([])
                seconds[who.name].append((time.perf_counter() - began, time.process_time() - worked))
    finally:
        for who in everybody:
            who.core.close()
    warm = min(5, setting.steps - 1)
    for name, own in seconds.items():
        wall, processors = (
            summary([one[clock] / other[clock] for one, other in zip(own[warm:], seconds["plain"][warm:])])
            for clock in (0, 1)
        )
        row: Row = {
            "kind": "steering",
            "phase": "decode",
            "contender": name,
            "ms": summary([1e3 * value for value, _ in own[warm:]]),
            "processor_ms": summary([1e3 * value for _, value in own[warm:]]),
            "times_plain": wall,
            "times_plain_processor": processors,
        }
        if name in BARS:
            row |= {"at_most": BARS[name], "passed": row["times_plain"]["median"] <= BARS[name]}
        yield row


def _contenders(engine: birkhoff.Engine, setting: SteeringSetting) -> list[Steered]:
    layers = engine.config.num_hidden_layers
    width = engine.schema["mhc_streams_pre_attn"].width
    hook, middle = "mhc_streams_pre_attn", layers // 2
    vectors = torch.randn(setting.batch, width, generator=torch.Generator().manual_seed(1)) * 0.01

    def adds(make: Callable[[int], Sequence[Add]]) -> Callable[[int, Tokens], Plan]:
        buffers = SteeringResolver(engine.schema, layers)

        def plan(number: int, ids: Tokens) -> Plan:
            edits = buffers.edits(list(make(number)), ids, setting.steps + 1)
            return Plan(edits=edits, table=buffers.table(edits))

        return plan

    saes = SaeResolver(engine.schema, layers, engine.model.embed.device)
    saes.attach("sae", _dictionary(engine), "delta", list(range(SET)))

    def features(number: int, ids: Tokens) -> Plan:
        edits = saes.edits([SaeSet("sae", dict.fromkeys(range(SET), 0.1))], ids, setting.steps + 1)
        return Plan(edits=edits, holdings=saes.holdings(edits))

    plans: dict[str, Callable[[int, Tokens], Plan | None]] = {
        "plain": lambda number, ids: None,
        "idle": adds(lambda n: [Add(vectors[n], hook, "all", phase="prefill")]),
        "one vector": adds(lambda n: [Add(vectors[0], hook, [middle])]),
        "own vectors": adds(lambda n: [Add(vectors[n], hook, [middle])]),
        "all layers": adds(lambda n: [Add(vectors[n], hook, "all")]),
        "features": features,
    }
    return [Steered(engine, setting, name, plan) for name, plan in plans.items()]


def _dictionary(engine: birkhoff.Engine) -> Sae:
    width = engine.config.hidden_size
    weights = torch.randn(2, FEATURES, width, generator=torch.Generator().manual_seed(2)) / width**0.5
    return Sae(
        weights[0],
        torch.full((FEATURES,), -1.0),
        weights[1],
        torch.zeros(width),
        hook="mlp_out",
        layer=engine.config.num_hidden_layers // 2,
    )


def _reconstruction(engine: birkhoff.Engine, setting: SteeringSetting) -> Row:
    """A site's reconstruction beside encoder and decoder products of the same rows, turn by turn."""
    saes = SaeResolver(engine.schema, engine.config.num_hidden_layers, engine.model.embed.device)
    sae = _dictionary(engine)
    saes.attach("full", sae, "full")
    (edit,) = saes.edits([SaeReconstruct("full")], [0] * 8, 2)
    (use,) = edit.sites.values()
    rows = setting.batch * setting.prompt_tokens  # as many as a step that reads all prompts has
    x = torch.randn(rows, engine.config.hidden_size, generator=torch.Generator().manual_seed(3))
    encoder = sae.encoder.t().contiguous()
    decoder = sae.decoder.contiguous()
    spliced, products = [], []
    with torch.inference_mode():
        for turn in range(20):
            began = time.perf_counter()
            use.host.run(x, [(use, list(range(rows)))], SiteContext())
            middle = time.perf_counter()
            (x @ encoder) @ decoder
            ended = time.perf_counter()
            if turn >= 3:
                spliced.append(middle - began)
                products.append(ended - middle)
    ratio = summary([one / other for one, other in zip(spliced, products)])
    return {
        "kind": "steering",
        "phase": "prefill",
        "contender": "reconstruction",
        "rows": rows,
        "features": FEATURES,
        "ms": summary([1e3 * value for value in spliced]),
        "products_ms": summary([1e3 * value for value in products]),
        "times_products": ratio,
        "at_most": PRODUCTS_BAR,
        "passed": ratio["median"] <= PRODUCTS_BAR,
    }
