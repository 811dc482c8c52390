"""Prefill and decode speed on this CPU, next to `transformers` in the same run.

`bench_model` yields rows: first whether both compute the same model (`agreement`), then tokens per second of `prefill`
and of `decode` for the engine, the bare model and `transformers`, then the breakdown of a decode step (`shares`). The
contenders alternate within every round, so that changes of the machine's speed affect all of them; a ratio is the
median over rounds of ratios within a round. `transformers` runs with the fastest of its implementations of experts
for each row, found by trial.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import birkhoff
from birkhoff.bench.agreement import compare_logits, compare_tokens
from birkhoff.bench.baselines import Baseline, OurEngine, OurModel, Tokens, Transformers
from birkhoff.bench.llama_baseline import LlamaProcess
from birkhoff.bench.report import Progress, Row, check_positive, checkpoint, facts, summary, version
from birkhoff.bench.time_shares import ClockTap, engine_shares, model_shares
from birkhoff.bench.timing import generation_seconds, torch_threads
from birkhoff.convert.convert import convert
from birkhoff.errors import OptionError
from birkhoff.model.transformer import Transformer

Speeds = dict[str, dict[str, list[float]]]  # contender -> phase -> tokens per second by round
PHASES = ("prefill", "decode")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TRIAL_STEPS = 4


@dataclass(frozen=True)
class ModelSetting:
    """Parameters, repeated in every row."""

    prompt_tokens: int = 512
    steps: int = 64
    rounds: int = 5
    batches: tuple[int, ...] = (1, 8)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    threads: int = 2
    weights: str = "auto"

    def __post_init__(self) -> None:
        check_positive(self, "prompt_tokens", "steps", "rounds", "threads")
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
    llama: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Measure a checkpoint; by default random weights of nano's size. `alone` skips `transformers`. `llama` is a GGUF
    file that llama.cpp runs in turns with ours; it is also the default of `model`."""
    setting = setting or ModelSetting()
    if model is None and llama is not None:
        model = llama
    if not alone and version("transformers") is None:
        raise OptionError(
            "transformers is not installed, so there is nothing to compare with. Install it, or measure "
            "without it: --alone"
        )
    report = _BenchProgress(progress, setting, alone)
    with tempfile.TemporaryDirectory(prefix="birkhoff-bench-") as folder, torch_threads(setting.threads):
        path, model_name = checkpoint(model, folder)
        for dtype in setting.dtypes:
            with birkhoff.load(
                path, device="cpu", dtype=dtype, max_requests=1, weights=setting.weights
            ) as engine:
                network, config = engine.v4_model, engine.v4_model.config
                shape = {
                    "layers": config.num_hidden_layers,
                    "hidden": config.hidden_size,
                    "vocab": config.vocab_size,
                }
                common = {
                    "bench": "model",
                    "model": model_name,
                    "shape": shape,
                    "dtype": dtype,
                    "prompt_tokens": setting.prompt_tokens,
                    "steps": setting.steps,
                    **facts(),
                }
                prompts = _prompts(config.vocab_size, max(setting.batches), setting.prompt_tokens)
                baseline = None
                if not alone:
                    dense = Path(folder) / "plain"
                    if not dense.exists():  # transformers cannot read packed weights: the same in float32
                        convert(path, dense, to="safetensors", dense="f32", experts="f32")
                    baseline = Transformers(dense, DTYPES[dtype])
                    yield common | _agreement(
                        engine, baseline, prompts[0], setting.steps, exact=dtype == "float32"
                    )
                for batch in setting.batches:
                    rows = _speeds(network, baseline, llama, prompts[:batch], setting, report)
                    yield from (common | row for row in rows)
                    yield common | _shares(network, prompts[:batch], setting)
                    report()


def _prompts(vocabulary: int, count: int, length: int) -> list[Tokens]:
    prompts = torch.randint(vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    return prompts.tolist()


def _agreement(
    engine: birkhoff.Engine, baseline: Transformers, prompt: Tokens, steps: int, exact: bool
) -> Row:
    """Only float32 has a tolerance; bfloat16 rows report the difference of two roundings."""
    logits = compare_logits(engine.logits(prompt), baseline.logits(prompt))
    ours = engine.generate(prompt, temperature=0, max_tokens=steps, ignore_eos=True).token_ids
    theirs = [baseline.prefill([prompt])[0]]
    while len(theirs) < steps:
        theirs += baseline.step(theirs[-1:])
    their_logits = baseline.logits(prompt + theirs[:-1])[len(prompt) - 1 :]
    tokens = compare_tokens(ours, theirs, their_logits)
    passed = logits.pop("passed") & tokens.pop("passed")
    return {"kind": "agreement", "logits": logits, "tokens": tokens, "passed": passed if exact else None}


def _speeds(
    network: Transformer,
    baseline: Transformers | None,
    llama: str | Path | None,
    prompts: list[Tokens],
    setting: ModelSetting,
    report: Callable[[], None],
) -> list[Row]:
    size = (len(prompts), setting.prompt_tokens, setting.steps)
    contenders: list[Baseline | LlamaProcess] = [OurEngine(network, *size), OurModel(network, *size)]
    if baseline is not None:
        baseline.choose_fastest(prompts, TRIAL_STEPS)
        contenders.append(baseline)
    rival = None
    if llama is not None:
        rival = LlamaProcess(Path(llama), *size, threads=setting.threads)
        contenders.append(rival)
    speeds: Speeds = {contender.name: {phase: [] for phase in PHASES} for contender in contenders}
    for round_index in range(-1, setting.rounds):  # the first round is a warm-up
        for contender in contenders if round_index % 2 else reversed(contenders):
            prefill, decode = _tokens_per_second(
                contender, prompts, setting.steps if round_index >= 0 else TRIAL_STEPS
            )
            if round_index >= 0:
                speeds[contender.name]["prefill"].append(prefill)
                speeds[contender.name]["decode"].append(decode)
        report()
    if rival is not None:
        rival.close()
    return [
        {
            "kind": "speed",
            "phase": phase,
            "batch": len(prompts),
            "contender": name,
            "rounds": setting.rounds,
            "tokens_per_second": summary(values[phase]),
            **_against(baseline, speeds, values[phase], phase, name),
            **_against_llama(rival, speeds, values[phase], phase, name),
        }
        for phase in PHASES
        for name, values in speeds.items()
    ]


def _tokens_per_second(
    contender: Baseline | LlamaProcess, prompts: list[Tokens], steps: int
) -> tuple[float, float]:
    """Tokens per second of prefill and of decode in one round."""
    if isinstance(contender, LlamaProcess):
        prefill, decode = contender.seconds(prompts, steps)
    else:
        prefill, decode = generation_seconds(contender, prompts, steps)
    return len(prompts) * len(prompts[0]) / prefill, len(prompts) * steps / decode


def _against(
    baseline: Transformers | None, speeds: Speeds, values: Sequence[float], phase: str, name: str
) -> Row:
    """Speed relative to `transformers`, or which of its implementations ran."""
    if baseline is None:
        return {}
    if name == baseline.name:
        return {"experts_implementation": baseline.variants[phase]}
    theirs = speeds[baseline.name][phase]
    return {"times_transformers": summary([own / other for own, other in zip(values, theirs)])}


def _against_llama(
    rival: LlamaProcess | None, speeds: Speeds, values: Sequence[float], phase: str, name: str
) -> Row:
    """Speed relative to llama.cpp, or its version."""
    if rival is None:
        return {}
    if name == rival.name:
        return {"llama_cpp_python": rival.version, "llama_cpp_built_with": rival.instructions}
    theirs = speeds[rival.name][phase]
    return {"times_llama": summary([own / other for own, other in zip(values, theirs)])}


def _shares(network: Transformer, prompts: list[Tokens], setting: ModelSetting) -> Row:
    size = (len(prompts), setting.prompt_tokens, setting.steps)
    clock = ClockTap()
    model_ms = model_shares(OurModel(network, *size, tap=clock), clock, prompts, setting.steps)
    engine_ms = engine_shares(OurEngine(network, *size), prompts, setting.steps)
    return {
        "kind": "shares",
        "phase": "decode",
        "batch": len(prompts),
        "model_ms": model_ms,
        "engine_step_ms": engine_ms,
    }


class _BenchProgress:
    """Reports rounds to a progress callback."""

    def __init__(self, progress: Progress | None, setting: ModelSetting, alone: bool):
        self._progress = progress
        self._done = 0
        self._total = len(setting.dtypes) * len(setting.batches) * (setting.rounds + 2)

    def __call__(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
