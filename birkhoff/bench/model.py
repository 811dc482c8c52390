"""How fast the model reads and writes on this CPU, beside `transformers` in the same minutes.

`bench_model` yields rows: first whether the two compute the same model (`agreement`), then tokens per second of reading
a prompt (`prefill`) and of writing (`decode`) for the engine, the bare model and `transformers`, then where the time
of a decoding step goes (`shares`). Contenders take turns within every round, so that a change of the machine's mood
hits all of them; a ratio is the median over rounds of ratios within a round. `transformers` runs with whichever of its
experts implementations is the fastest for that very row, found by trial.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.bench.agreement import compare_logits, compare_tokens
from birkhoff.bench.baselines import Baseline, OurEngine, OurModel, Tokens, Transformers
from birkhoff.bench.report import facts, summary, version
from birkhoff.bench.time_shares import ClockTap, engine_shares, model_shares
from birkhoff.convert.synth import synth
from birkhoff.errors import OptionError
from birkhoff.model.transformer import Transformer
from birkhoff.weights.released import write_released

Row = dict[str, Any]
Speeds = dict[str, dict[str, list[float]]]  # contender -> phase -> tokens per second, one per round
Progress = Callable[[int, int], None]
PHASES = ("prefill", "decode")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRIAL_STEPS = 4


@dataclass(frozen=True)
class ModelSetting:
    """What is measured; every row repeats it."""

    prompt_tokens: int = 512
    steps: int = 64
    rounds: int = 5
    batches: tuple[int, ...] = (1, 8)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: int = 2

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "steps", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, expected a positive whole number.")
        if not self.batches or min(self.batches) < 1:
            raise OptionError(f"batches is {self.batches}, expected positive whole numbers.")
        for name in self.dtypes:
            if name not in DTYPES:
                raise OptionError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}.")


def bench_model(
    model: str | Path | None = None,
    setting: ModelSetting | None = None,
    *,
    alone: bool = False,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Measure a checkpoint, or a random one of nano's size; `alone` leaves `transformers` out."""
    setting = setting or ModelSetting()
    if not alone and version("transformers") is None:
        raise OptionError(
            "transformers is not installed, so there is nothing to compare with. Install it, or measure "
            "without it: --alone"
        )
    tell = _Teller(progress, setting, alone)
    with tempfile.TemporaryDirectory(prefix="birkhoff-bench-") as folder, _threads(setting.threads):
        given = Path(folder) / "nano" if model is None else model
        if model is None:
            synth(given, "nano")
        for dtype in setting.dtypes:
            with birkhoff.load(given, device="cpu", dtype=dtype, max_requests=1) as engine:
                network, config = engine.model, engine.config
                shape = {
                    "layers": config.num_hidden_layers,
                    "hidden": config.hidden_size,
                    "vocab": config.vocab_size,
                }
                common = {
                    "bench": "model",
                    "model": "synth nano" if model is None else str(model),
                    "shape": shape,
                    "dtype": dtype,
                    "prompt_tokens": setting.prompt_tokens,
                    "steps": setting.steps,
                    **facts(),
                }
                prompts = _prompts(config.vocab_size, max(setting.batches), setting.prompt_tokens)
                rival = None
                if not alone:
                    plain = Path(folder) / "plain"
                    if (
                        not plain.exists()
                    ):  # their reader wants numbers, not codes: the same weights in float32
                        pairs = ((d.name, d.tensor.detach()) for d in network.destinations())
                        write_released(plain, config, pairs, dense="f32", experts="f32")
                    rival = Transformers(plain, DTYPES[dtype])
                    yield common | _agreement(
                        engine, rival, prompts[0], setting.steps, exact=dtype == "float32"
                    )
                for batch in setting.batches:
                    rows = _speeds(network, rival, prompts[:batch], setting, tell)
                    yield from (common | row for row in rows)
                    yield common | _shares(network, prompts[:batch], setting)
                    tell()


def _prompts(vocabulary: int, count: int, length: int) -> list[Tokens]:
    drawn = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    return drawn.tolist()


def _agreement(engine: birkhoff.Engine, rival: Transformers, prompt: Tokens, steps: int, exact: bool) -> Row:
    """Only float32 is held to a tolerance; bfloat16 rows say how far two roundings are apart."""
    logits = compare_logits(engine.logits(prompt), rival.logits(prompt))
    ours = engine.generate(prompt, temperature=0, max_tokens=steps, ignore_eos=True).token_ids
    theirs = [rival.prefill([prompt])[0]]
    while len(theirs) < steps:
        theirs += rival.step(theirs[-1:])
    along = rival.logits(prompt + theirs[:-1])[len(prompt) - 1 :]
    tokens = compare_tokens(ours, theirs, along)
    passed = logits.pop("passed") & tokens.pop("passed")
    return {"kind": "agreement", "logits": logits, "tokens": tokens, "passed": passed if exact else None}


def _speeds(
    network: Transformer,
    rival: Transformers | None,
    prompts: list[Tokens],
    setting: ModelSetting,
    tell: Callable[[], None],
) -> list[Row]:
    size = (len(prompts), setting.prompt_tokens, setting.steps)
    contenders: list[Baseline] = [OurEngine(network, *size), OurModel(network, *size)]
    if rival is not None:
        rival.choose_fastest(prompts, TRIAL_STEPS)
        contenders.append(rival)
    speeds: Speeds = {who.name: {phase: [] for phase in PHASES} for who in contenders}
    for number in range(-1, setting.rounds):  # the first round only warms up
        for who in contenders if number % 2 else reversed(contenders):
            prefill, decode = _round(who, prompts, setting.steps if number >= 0 else TRIAL_STEPS)
            if number >= 0:
                speeds[who.name]["prefill"].append(prefill)
                speeds[who.name]["decode"].append(decode)
        tell()
    return [
        {
            "kind": "speed",
            "phase": phase,
            "batch": len(prompts),
            "contender": name,
            "rounds": setting.rounds,
            "tokens_per_second": summary(values[phase]),
            **_against(rival, speeds, values[phase], phase, name),
        }
        for phase in PHASES
        for name, values in speeds.items()
    ]


def _round(who: Baseline, prompts: list[Tokens], steps: int) -> tuple[float, float]:
    """Tokens per second of reading and of writing, once."""
    began = time.perf_counter()
    tokens = who.prefill(prompts)
    read = time.perf_counter()
    for _ in range(steps):
        tokens = who.step(tokens)
    written = time.perf_counter()
    return len(prompts) * len(prompts[0]) / (read - began), len(prompts) * steps / (written - read)


def _against(
    rival: Transformers | None, speeds: Speeds, values: Sequence[float], phase: str, name: str
) -> Row:
    """Times faster than `transformers`, and in which of its ways that ran."""
    if rival is None:
        return {}
    if name == rival.name:
        return {"experts_implementation": rival.ways[phase]}
    theirs = speeds[rival.name][phase]
    return {"times_transformers": summary([own / other for own, other in zip(values, theirs)])}


def _shares(network: Transformer, prompts: list[Tokens], setting: ModelSetting) -> Row:
    size = (len(prompts), setting.prompt_tokens, setting.steps)
    clock = ClockTap()
    inside = model_shares(OurModel(network, *size, tap=clock), clock, prompts, setting.steps)
    around = engine_shares(OurEngine(network, *size), prompts, setting.steps)
    return {
        "kind": "shares",
        "phase": "decode",
        "batch": len(prompts),
        "model_ms": inside,
        "engine_step_ms": around,
    }


class _Teller:
    """Counts rounds for a progress bar."""

    def __init__(self, progress: Progress | None, setting: ModelSetting, alone: bool):
        self._progress = progress
        self._done = 0
        self._total = len(setting.dtypes) * len(setting.batches) * (setting.rounds + 2)

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
