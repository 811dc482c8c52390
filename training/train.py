"""Train `nano` from a folder of text.

    python -m training.train --data DIR --out DIR --minutes 13             a full run
    python -m training.train --data DIR --out DIR --steps 5000             the same, reproducible
    python -m training.train ... --probe "base: ; slow: mhc_rate=2e-4"     compare settings, continue with the best

`--work` holds the log, the resume state (repeat the command to resume) and the compile cache; `--out` receives the
checkpoint, its tokenizer, `training.json` with all measurements, and samples. See README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from birkhoff.config import V4Config
from birkhoff.errors import BirkhoffError, OptionError
from training.card import model_card
from training.corpus import read_corpus
from training.data import Markers
from training.export import export, load_named
from training.feed import Feed
from training.forward import Forward
from training.loop import Bench, Log, Outcome, Run, Stop, probe
from training.measure import held_out, measure, report
from training.parameters import Store
from training.preflight import check_compiled, check_kernels
from training.sampling import CHAT, Ask, generate
from training.settings import NANO, Settings
from training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer, training_texts

# For trying the code on a CPU: every mechanism, shapes divisible by FP8 tiles, about a million parameters.
SMOKE = replace(
    NANO,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    qk_rope_head_dim=16,
    q_lora_rank=128,
    o_groups=1,
    sliding_window=32,
    compress_ratios=(0, 4, 128, 4),
    index_head_dim=16,
    index_topk=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    num_hash_layers=1,
)
CONFIGS = {"nano": NANO, "smoke": SMOKE}


def build_bench(
    config: V4Config,
    settings: Settings,
    data: Path,
    tokenizer: Path,
    work: Path,
    device: str,
    compiled: bool,
    workers: int,
) -> Bench:
    """Build what runs share; row generation starts before the device is used."""
    feed = Feed(data, tokenizer, settings.length, settings.seed, settings.corpus_share, workers)
    loaded = load_tokenizer(tokenizer)
    corpus = read_corpus(data)
    if loaded.get_vocab_size() != config.vocab_size:
        raise OptionError(
            f"the tokenizer in {tokenizer} has {loaded.get_vocab_size()} ids, the config {config.vocab_size}."
        )
    if settings.length % config.sliding_window or settings.length % 4:
        raise OptionError(
            f"length is {settings.length}, expected a multiple of the window ({config.sliding_window}) and of 4."
        )
    parts = [held_out(name, records, loaded, settings.length) for name, records in corpus.held_out.items()]
    forward = Forward(config, settings.length, device, compiled)
    return Bench(forward, feed, parts, Markers.of(loaded).pad, Log(work / "log.jsonl"), work)


def finish(bench: Bench, outcome: Outcome, out: Path, tokenizer: Path) -> dict:
    """Write the checkpoint, read it back, and evaluate what is on disk; return the record of the run."""
    config = bench.forward.config
    files = export(out, config, outcome.tensors, tokenizer)
    read_config, tensors = load_named(out)
    store = Store(read_config, bench.forward.device)
    store.load(tensors)
    dtype = torch.bfloat16 if bench.forward.device.type == "cuda" else torch.float32
    stream_dtype = torch.float32 if outcome.settings.stream_float32 else dtype
    weights = store.named(store.leaves(dtype))
    batch = outcome.settings.batch

    def scores(weights: dict[str, torch.Tensor]) -> dict:
        common = (bench.pad, batch, stream_dtype)
        return report(
            bench.held_out, [measure(bench.forward, weights, part.rows, *common) for part in bench.held_out]
        )

    stored = scores(weights)
    masters = Store(config, bench.forward.device)
    masters.load(outcome.tensors)
    loaded = load_tokenizer(tokenizer)
    asks = [
        *CHAT,
        *(Ask(part_prompt, 0.8, seed) for seed, part_prompt in enumerate(_requests(bench, loaded))),
    ]
    longest = 200 if bench.forward.device.type == "cuda" else 12
    samples = generate(bench.forward, weights, loaded, asks, batch, stream_dtype, longest)
    record: dict[str, Any] = {
        "settings": asdict(outcome.settings),
        "steps": outcome.steps,
        "seconds": round(outcome.seconds, 1),
        "tokens_per_second": round(outcome.tokens_per_second),
        "device": _device_name(bench.forward.device),
        "torch": torch.__version__,
        "best": outcome.measured,
        "stored": stored,
        "unrounded": scores(masters.named(masters.leaves(dtype))),
        "alive": outcome.alive,
        "samples": samples,
        "bytes": {file.name: file.stat().st_size for file in files},
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    parameters = sum(math.prod(parameter.shape) for parameter in store.parameters)
    (out / "MODEL_CARD.md").write_text(model_card(record, parameters), encoding="utf-8")
    bench.log.write("unrounded", **record["unrounded"])
    bench.log.write("stored", **record["stored"], bytes=sum(record["bytes"].values()))
    return record


def _requests(bench: Bench, tokenizer: Tokenizer) -> list[str]:
    """Return ten requests from the held-out files, evenly spread."""
    markers, out = Markers.of(tokenizer), list[str]()
    for part in bench.held_out:
        for row in range(0, len(part.rows.ids), max(1, len(part.rows.ids) // 5)):
            ids = part.rows.ids[row].tolist()
            if len(out) < 10 and markers.user in ids and markers.assistant in ids:
                out.append(tokenizer.decode(ids[ids.index(markers.user) + 1 : ids.index(markers.assistant)]))
    return out


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _load_cache(path: Path | None, log: Log) -> None:
    if path is None or not path.is_file():
        return
    began = time.monotonic()
    artifacts = torch.compiler.load_cache_artifacts(path.read_bytes())
    log.write("cache", loaded=artifacts is not None, seconds=round(time.monotonic() - began, 1))


def _save_cache(path: Path, log: Log) -> None:
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        path.write_bytes(artifacts[0])
        log.write("cache", saved_bytes=len(artifacts[0]))


def parse_probe(text: str, base: Settings) -> dict[str, Settings]:
    """Parse `"name: a=1,b=2; other: c=3"` into settings by name."""
    out = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        name, colon, changes = entry.partition(":")
        if not colon:
            raise OptionError(f"probe {entry!r} has no name, expected 'name: setting=value,...'.")
        out[name.strip()] = Settings.parse(changes, base)
        if (out[name.strip()].batch, out[name.strip()].length) != (base.batch, base.length):
            raise OptionError(
                f"probe {name.strip()} changes batch or length, which the compiled graphs have built in."
            )
    return out


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        _run(options)
    except BirkhoffError as error:
        print(f"{error.code}  {error}", file=sys.stderr)
        return 1
    return 0


def _run(options: argparse.Namespace) -> None:
    began = time.monotonic()
    base = Settings.parse(options.set)
    choices = parse_probe(options.probe, base)
    work, out = Path(options.work), Path(options.out)
    if out.is_dir() and any(out.glob("*.safetensors")):
        raise OptionError(f"--out {out} already holds a checkpoint. Choose another folder or remove it.")
    work.mkdir(parents=True, exist_ok=True)
    (work / "pid").write_text(str(os.getpid()), encoding="utf-8")
    log = Log(work / "log.jsonl")
    tokenizer = Path(options.tokenizer) if options.tokenizer else work / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        save_tokenizer(
            train_tokenizer(training_texts(read_corpus(options.data)), options.vocab_size), tokenizer
        )
        log.write("tokenizer", folder=str(tokenizer))
    config = replace(CONFIGS[options.config], vocab_size=load_tokenizer(tokenizer).get_vocab_size())
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32: inputs are bf16 already, sums stay float32
    compiled = options.compile if options.compile is not None else device.startswith("cuda")
    log.write(
        "begin",
        config=options.config,
        device=device,
        compiled=compiled,
        workers=options.workers,
        settings=asdict(base),
    )
    bench = build_bench(config, base, Path(options.data), tokenizer, work, device, compiled, options.workers)
    try:
        log.write("kernels", worst_error=check_kernels(bench.forward.device))
        _load_cache(Path(options.cache) if options.cache else None, log)
        if compiled:
            log.write("compiled", **check_compiled(bench, base), seconds=round(time.monotonic() - began, 1))
        settings = base
        if choices:
            outcomes = probe(bench, choices, options.probe_steps)
            if not outcomes:
                raise OptionError("every probe ran into numbers that are not finite. Lower the rates.")
            settings = outcomes[0].settings
            summary = [
                asdict(o.settings) | {"held_out": o.measured["both"], "alive": o.alive} for o in outcomes
            ]
            (work / "probes.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            bench.feed.rewind()
            log.write("chosen", settings=asdict(settings))
        if compiled:
            _save_cache(work / "compile-cache.bin", log)
        if options.minutes or options.steps:
            run = Run(bench, settings, Stop(options.steps, options.minutes * 60 if options.minutes else None))
            if (work / "state.pt").is_file():
                run.resume(work / "state.pt")
            outcome = run.train(options.marks)
            finish(bench, outcome, out, tokenizer)
            (work / "state.pt").unlink(missing_ok=True)
            if compiled and not (work / "compile-cache.bin").is_file():
                _save_cache(work / "compile-cache.bin", log)
        memory = torch.cuda.max_memory_allocated() >> 20 if device.startswith("cuda") else None
        log.write("done", seconds=round(time.monotonic() - began, 1), peak_mib=memory)
    finally:
        bench.feed.close()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data", help="folder of the corpus")
    parser.add_argument("--out", required=True, help="folder for the finished checkpoint")
    parser.add_argument("--work", default="scratch/work", help="folder for log, state and compile cache")
    parser.add_argument("--tokenizer", help="folder of a frozen tokenizer; trained on the data by default")
    parser.add_argument("--vocab-size", type=int, default=NANO.vocab_size, help="of a tokenizer trained here")
    parser.add_argument("--config", choices=sorted(CONFIGS), default="nano")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="training time, without compilation")
    length.add_argument("--steps", type=int)
    parser.add_argument("--set", default="", metavar="NAME=VALUE,...", help="changes to the settings")
    parser.add_argument(
        "--probe", default="", metavar="NAME: NAME=VALUE,...; ...", help="settings to compare first"
    )
    parser.add_argument("--probe-steps", type=int, default=600)
    parser.add_argument("--marks", type=int, default=10, help="number of evaluations")
    parser.add_argument(
        "--workers", type=int, default=max(0, (os.cpu_count() or 1) - 3), help="processes that generate rows"
    )
    parser.add_argument("--device")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--cache", help="compile cache of an earlier run on the same kind of machine")
    options = parser.parse_args(arguments)
    if not (options.minutes or options.steps or options.probe):
        parser.error("give --minutes or --steps, or --probe to compare settings only")
    return options


if __name__ == "__main__":
    sys.exit(main())
