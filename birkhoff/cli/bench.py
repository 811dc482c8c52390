"""`birkhoff bench …`: speed measurements as JSON lines, or as a table on a terminal without --json.

Every measurement takes --json, so that a script can always pass it; those without a table print JSON lines anyway."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from birkhoff.byte_size import format_bytes
from birkhoff.cli.bench_tables import (
    Row,
    cost_cells,
    machine_line,
    print_attribution,
    print_model,
    reuse_line,
)
from birkhoff.cli.command_group import CommandGroup
from birkhoff.cli.parsers import parse_token_count
from birkhoff.cli.terminal import progress_bar
from birkhoff.errors import OptionError
from birkhoff.option_checks import check_choice

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}
)

JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON lines on a terminal too.")]
OnlyJsonLines = Annotated[
    bool, typer.Option("--json", help="Print JSON lines, the only output of this measurement.")
]
Model = Annotated[
    str | None, typer.Option(help="Checkpoint to measure; default: random weights of nano's size.")
]
Threads = Annotated[int, typer.Option(help="PyTorch threads.")]
PromptTokens = Annotated[int, typer.Option(help="Prompt length in tokens.")]
Steps = Annotated[int, typer.Option(help="Tokens generated per prompt.")]
Rounds = Annotated[int, typer.Option(help="Rounds.")]
BatchSize = Annotated[int, typer.Option(help="Batch size.")]
BatchSizes = Annotated[list[int] | None, typer.Option(help="Batch size; repeatable.")]
Layers = Annotated[int, typer.Option(help="Number of layers, at V4-Flash width.")]
DistinctLayers = Annotated[
    int, typer.Option(help="Layers with their own expert weights, as many as fit the GPU; the rest share.")
]
BaselineLayers = Annotated[int, typer.Option(help="Layers of the comparison with transformers; 0 skips it.")]

Numerics = Annotated[
    str, typer.Option(help="plain, or released: round activations as the released model does.")
]


@app.callback()
def bench() -> None:
    """Measure speed; JSON lines, or a table on a terminal."""


@app.command()
def model(
    model: Model = None,
    threads: Threads = 2,
    prompt_tokens: PromptTokens = 512,
    steps: Steps = 64,
    rounds: Rounds = 5,
    batch: Annotated[list[int], typer.Option(help="Batch size; repeatable.")] = [1, 8],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="float32 or bfloat16; repeatable.")] = [  # noqa: B006
        "float32",
        "bfloat16",
    ],
    alone: Annotated[bool, typer.Option("--alone", help="Do not run transformers.")] = False,
    llama: Annotated[
        str | None,
        typer.Option(help="GGUF file to run with llama.cpp (llama-cpp-python) in turns with ours."),
    ] = None,
    weights: Annotated[str, typer.Option(help="auto, packed or dense.")] = "auto",
    json: JsonLines = False,
) -> None:
    """Prefill and decode tokens per second, with transformers in the same run; fails if the outputs disagree."""
    from birkhoff.bench.model import ModelSetting, bench_model

    setting = ModelSetting(prompt_tokens, steps, rounds, tuple(batch), tuple(dtype), threads, weights)
    rows: list[Row] = []
    as_lines = _prints_lines(json)
    with progress_bar("measuring", "rounds") as advance:
        for row in bench_model(model, setting, alone=alone, llama=llama, progress=advance):
            rows.append(row)
            if as_lines:
                typer.echo(json_module.dumps(row))
    if not as_lines:
        print_model(rows, _console())
    if any(row.get("passed") is False for row in rows):
        raise typer.Exit(1)


@app.command()
def packed(
    experts: Annotated[
        str, typer.Option(help="Type of the routed experts, such as MXFP4 or Q2_K.")
    ] = "MXFP4",
    dense: Annotated[str, typer.Option(help="Type of the other projections.")] = "Q8_0",
    layers: Annotated[int, typer.Option(help="Number of layers, at V4-Flash width.")] = 2,
    threads: Threads = 2,
    steps: Steps = 8,
    rounds: Rounds = 5,
    json: OnlyJsonLines = False,
) -> None:
    """Decoding at full V4-Flash width on this CPU from packed weights, beside its memory bandwidth; JSON lines."""
    from birkhoff.bench.packed import PackedSetting, bench_packed

    setting = PackedSetting(experts, dense, layers, steps=steps, rounds=rounds, threads=threads)
    _print_lines(bench_packed(setting))


@app.command()
def kernels(json: OnlyJsonLines = False) -> None:
    """Decode kernels on a GPU, checked against and timed beside PyTorch; JSON lines."""
    _require_cuda()
    from birkhoff.bench.kernels import bench_kernels

    _print_lines(bench_kernels())


@app.command()
def decode(
    batch: BatchSizes = None,
    context: Annotated[
        str, typer.Option(help="Context length of each sequence in tokens, such as 4096 or 128k.")
    ] = "4096",
    layers: Layers = 43,
    distinct: DistinctLayers = 38,
    rival_layers: BaselineLayers = 6,
    placement: Annotated[
        list[str] | None,
        typer.Option(
            help="Offload experts to host memory: the share on the GPU (0.925) or GPU memory (24GiB); repeatable."
        ),
    ] = None,
    speculate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Decode with MTP drafts of which this share is accepted, next to plain decoding; 0 to 1.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="EXPERTS+DENSE",
            help="Compare stored types with the released FP4+FP8: MXFP4+Q8_0, Q2_K+Q8_0, IQ2_XXS/Q2_K+Q8_0 (experts' "
            "gate and up/down+projections); repeatable.",
        ),
    ] = None,
    depth: Annotated[int, typer.Option(help="Draft tokens per step with --speculate, 1 to 3.")] = 1,
    steps: Annotated[int, typer.Option(help="Tokens generated per request with --speculate.")] = 256,
    json: OnlyJsonLines = False,
) -> None:
    """Decoding at full V4-Flash width on a GPU with random weights: checked, timed, profiled; JSON lines."""
    tokens = parse_token_count(context)
    if speculate is not None and not 0 <= speculate <= 1:
        raise OptionError(f"--speculate is {speculate:g}, expected an acceptance rate of 0 to 1.")
    if depth not in (1, 2, 3):
        raise OptionError(f"--depth is {depth}, expected 1, 2 or 3.")
    if sum((speculate is not None, bool(placement), bool(formats))) > 1:
        raise OptionError(
            "two of --speculate, --placement and --format were given. Use one of them at a time."
        )
    from birkhoff.bench.formats import bench_formats, parse_format

    for text in formats or ():
        parse_format(text)
    _require_cuda()
    from birkhoff.bench.decode import bench_decode
    from birkhoff.bench.placement import bench_placement
    from birkhoff.bench.speculation import bench_speculation

    if speculate is not None:
        _print_checked(
            bench_speculation(batch or (1, 4, 8), tokens, layers, distinct, speculate, depth, steps)
        )
        return
    if formats:
        rows = bench_formats(formats, batch or (1, 8), tokens, layers, distinct)
    elif placement:
        rows = bench_placement(placement, batch or (1, 8), tokens, layers, min(distinct, 24))
    else:
        rows = bench_decode(batch or (1, 8, 32, 64), tokens, layers, distinct, baseline_layers=rival_layers)
    if any(row["kind"] in ("agreement", "same bits") for row in _print_lines(rows)):
        raise typer.Exit(1)


@app.command()
def prefill(
    chunk: Annotated[list[int] | None, typer.Option(help="Tokens per prefill chunk; repeatable.")] = None,
    behind: Annotated[list[int] | None, typer.Option(help="Tokens already in the cache; repeatable.")] = None,
    layers: Layers = 43,
    distinct: DistinctLayers = 38,
    rival_layers: BaselineLayers = 6,
    numerics: Numerics = "plain",
    json: OnlyJsonLines = False,
) -> None:
    """Prefill at full V4-Flash width on a GPU: checked at every site, timed, profiled; JSON lines."""
    _require_cuda()
    from birkhoff.bench.prefill import bench_prefill
    from birkhoff.bench.prefill_kernels import CHUNKS

    check_choice("numerics", numerics, ("plain", "released"))
    rows = bench_prefill(
        chunk or CHUNKS, behind or (0, 32768), layers, distinct, rival_layers, released=numerics == "released"
    )
    _print_checked(rows)


@app.command()
def goodput(
    model: Model = None,
    layers: Layers = 43,
    distinct: DistinctLayers = 36,
    requests: Annotated[int, typer.Option(help="Requests of each run.")] = 64,
    slots: Annotated[int, typer.Option(help="Requests that run at the same time.")] = 64,
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, help="Run only arrivals at this share of what the kernels sustain; repeatable."
        ),
    ] = None,
    json: OnlyJsonLines = False,
) -> None:
    """Arriving requests on a GPU engine, beside the time its kernels need for the same work; JSON lines.

    Random weights of full V4-Flash width, or a checkpoint with --model."""
    _require_cuda()
    from birkhoff.bench.goodput import GoodputSetting, bench_goodput, measure

    setting = GoodputSetting(requests)
    if model is None:
        _print_lines(bench_goodput(layers, distinct, setting, slots, rates=rate or ()))
        return
    from birkhoff.api.load import load
    from birkhoff.engine.engine import EngineCore

    engine = load(model, device="cuda", max_requests=slots, max_batch_tokens=4096, max_context=8192)
    with engine:
        core = engine._core
        assert isinstance(core, EngineCore), "device is cuda, so the backend is birkhoff"
        _print_lines(measure(core, setting, rate or ()))


@app.command()
def harvest(
    model: Model = None,
    device: Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")] = "cuda",
    layers: Layers = 4,
    texts: Annotated[int, typer.Option(help="Prompts of each measurement.")] = 256,
    tokens: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1024,
    batch_rows: Annotated[int, typer.Option(help="Rows of a batch.")] = 4096,
    shuffle_rows: Annotated[int, typer.Option(help="Rows that are shuffled together.")] = 65_536,
    file_texts: Annotated[int, typer.Option(help="Prompts whose rows go to files.")] = 32,
    disk: Annotated[
        str | None, typer.Option(help="Directory for capture files; default: a temporary directory.")
    ] = None,
    json: OnlyJsonLines = False,
) -> None:
    """Rows per second to the device, to the host and to files, beside prompts alone, bus and disk; JSON lines.

    Random weights of full V4-Flash width, or a checkpoint with --model."""
    if model is None or device != "cpu":
        _require_cuda("bench harvest --device cpu --model nano --texts 32 --tokens 256")
    from birkhoff.bench.harvest import HarvestSetting, bench_harvest

    setting = HarvestSetting(texts, tokens, batch_rows, shuffle_rows, file_texts)
    _print_lines(bench_harvest(model, device, setting, layers=layers, disk=disk))


@app.command()
def sae(
    device: Annotated[str, typer.Option(help="Device to train on: cpu or cuda.")] = "cuda",
    features: Annotated[int, typer.Option(help="Number of features.")] = 65_536,
    width: Annotated[int, typer.Option(help="Numbers of a row.")] = 16_384,
    k: Annotated[int, typer.Option(help="Active features per row.")] = 32,
    batch_rows: Annotated[int, typer.Option(help="Rows of a step.")] = 4096,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 10,
    products: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of dictionary; repeatable. [default: all]")
    ] = None,
    json: OnlyJsonLines = False,
) -> None:
    """Training of dictionaries, beside a plain PyTorch loop and the encoder's product alone; JSON lines."""
    if device != "cpu":
        _require_cuda("bench sae --device cpu --features 4096 --width 1024 --products float32")
    from birkhoff.bench.sae import SaeSetting, bench_sae
    from birkhoff.sae.train import KINDS

    for name in kind or ():
        check_choice("kind", name, KINDS)
    check_choice("products", products, ("bfloat16", "float32"))
    setting = SaeSetting(features, width, k, batch_rows, steps, products=products)
    _print_lines(bench_sae(device, setting, kind or KINDS))


@app.command("load")
def load_command(
    model: Annotated[str, typer.Option(help="Checkpoint to load.")] = "nano",
    device: Annotated[str, typer.Option(help="Device to load it to: cpu or cuda.")] = "cpu",
    rounds: Rounds = 2,
    json: OnlyJsonLines = False,
) -> None:
    """Bytes per second of reading a checkpoint with 1, 4 and 16 threads, and of loading it; JSON lines."""
    if device.startswith("cuda"):
        _require_cuda("bench load --device cpu")
    from birkhoff.bench.loading import bench_load

    _print_lines(bench_load(model, device, rounds))


@app.command()
def sites(numerics: Numerics = "plain", json: OnlyJsonLines = False) -> None:
    """Check every hook site of two full-width layers on a GPU against the reference path; JSON lines."""
    _require_cuda()
    import torch

    from birkhoff.bench.prefill import site_rows

    check_choice("numerics", numerics, ("plain", "released"))
    _print_checked(site_rows(torch.device("cuda"), numerics == "released"))


@app.command()
def taps(
    batch: BatchSizes = None,
    context: Annotated[int, typer.Option(help="Context length of each sequence in tokens.")] = 4096,
    layers: Layers = 43,
    distinct: DistinctLayers = 38,
    json: OnlyJsonLines = False,
) -> None:
    """Cost of capture and steering in CUDA-graph decode steps; JSON lines."""
    _require_cuda()
    from birkhoff.bench.taps import bench_taps

    _print_checked(bench_taps(batch or (1, 16), context, layers, distinct))


@app.command()
def interp(
    model: Model = None,
    threads: Threads = 2,
    prompt_tokens: PromptTokens = 256,
    steps: Steps = 64,
    rounds: Rounds = 5,
    batch: BatchSize = 4,
    disk: Annotated[
        str | None, typer.Option(help="Directory for capture files; default: a temporary directory.")
    ] = None,
    json: JsonLines = False,
) -> None:
    """Cost of capture: off, idle, one hook, all streams to memory and to files, in the same run."""
    from birkhoff.bench.interp import InterpSetting, bench_interp

    setting = InterpSetting(prompt_tokens, steps, rounds, batch, threads)
    with progress_bar("measuring", "rounds") as advance:
        rows = list(bench_interp(model, setting, disk=disk, progress=advance))
    if _prints_lines(json):
        _print_lines(rows)
        return
    from rich.table import Table

    table = Table("phase", "contender", "ms", "p10 to p90", "times plain")
    for row in rows:
        if row["kind"] == "cost":
            table.add_row(*cost_cells(row, row["times_plain"]))
    console = _console()
    console.print(machine_line(rows[0]), table)
    last = rows[-1]
    console.print(
        f"{last['stored_bytes']} bytes to files: {last['stored_mb_per_s']['median']:g} MB/s, from first step to "
        f"durable; this disk alone: {last['disk_mb_per_s']['median']:g} MB/s"
    )


@app.command()
def attribution(
    model: Annotated[str, typer.Option(help="Checkpoint whose text is English.")] = "nano",
    texts: Annotated[int, typer.Option(help="Pairs of texts, up to 8.")] = 4,
    steps: Annotated[int, typer.Option(help="Points at which gradients are integrated.")] = 8,
    threads: Threads = 2,
    json: JsonLines = False,
) -> None:
    """Attribution by gradients beside exact patching: rank correlation and overlap of the 20 largest, by method."""
    from birkhoff.bench.attribution import AttributionSetting, bench_attribution

    rows = []
    with progress_bar("patching", "texts") as advance:
        rows = list(bench_attribution(model, AttributionSetting(texts, steps, threads), progress=advance))
    if _prints_lines(json):
        _print_lines(rows)
    else:
        print_attribution(rows, _console())


@app.command()
def steering(
    model: Model = None,
    threads: Threads = 2,
    prompt_tokens: PromptTokens = 64,
    steps: Steps = 150,
    batch: BatchSize = 16,
    json: JsonLines = False,
) -> None:
    """Cost of steering: idle, one shared vector, one vector per request, SAE features, in the same run."""
    from birkhoff.bench.steering import SteeringSetting, bench_steering

    rows = list(bench_steering(model, SteeringSetting(prompt_tokens, steps, batch, threads)))
    if _prints_lines(json):
        _print_lines(rows)
        return
    from rich.table import Table

    table = Table("phase", "contender", "ms", "p10 to p90", "times", "at most")
    for row in rows:
        limit = f"{row['at_most']:g}" if "at_most" in row else ""
        table.add_row(*cost_cells(row, row.get("times_plain") or row["times_products"]), limit)
    _console().print(machine_line(rows[0]), table)


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Checkpoint to serve.")] = "nano",
    seconds: Annotated[float, typer.Option(help="Duration of the load in seconds.")] = 60.0,
    streams: Annotated[int, typer.Option(help="Concurrent clients, and concurrent requests.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 128,
    threads: Annotated[
        int, typer.Option(help="PyTorch threads of the server and of the engine-only run.")
    ] = 1,
    cache_bytes: Annotated[
        int, typer.Option(help="Cache size in bytes; a small one causes preemption. 0: the default.")
    ] = 0,
    hostile: Annotated[
        bool,
        typer.Option("--hostile", help="Then send hostile bodies for as long, beside one honest client."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Serve mixed traffic on this device, such as cuda: plain, steered and captured answers."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            help="With --device cuda: random weights with this many layers at V4-Flash width, not --model."
        ),
    ] = None,
    steered: Annotated[float, typer.Option(help="With --device: share of steered requests.")] = 0.3,
    captured: Annotated[float, typer.Option(help="With --device: share of captured requests.")] = 0.1,
    json: JsonLines = False,
) -> None:
    """A server under load and under overload, compared with the engine alone; fails if a request did not end.

    With --device, mixed traffic instead: streams of which some are steered and some captured."""
    if device is not None:
        _serve_mixed(
            device, model if layers is None else None, layers, seconds, streams, tokens, steered, captured
        )
        return
    if layers is not None:
        raise OptionError("--layers makes random weights on a GPU: give --device cuda as well.")
    from birkhoff.bench.serve import ServeSetting, bench_serve

    with progress_bar("measuring", "seconds") as advance:
        rows = list(
            bench_serve(model, ServeSetting(seconds, streams, tokens, threads, cache_bytes, hostile), advance)
        )
    load, overload = rows[1:3]
    if _prints_lines(json):
        _print_lines(rows)
    else:
        first = load["first_token_ms"]
        between = load["between_tokens_ms"]
        typer.echo(
            f"{load['tokens_per_s']:g} tokens/s in {streams} streams, {load['share_of_engine']:.2f} of the engine's; "
            f"first token p50 {first['p50']:g} ms, p95 {first['p95']:g}; "
            f"between tokens p50 {between['p50']:g} ms, p95 {between['p95']:g}\n"
            f"{overload['callers']} callers at once: {overload['statuses']}, recovered: {overload['recovered']}"
        )
        for row in rows[3:]:
            resident = row["resident_bytes"]
            typer.echo(
                f"{row['requests']} hostile requests: {row['statuses']}, slowest refusal {row['slowest_refusal_ms']:g} "
                f"ms; resident {format_bytes(resident['before'])} before, {format_bytes(resident['after'])} after"
            )
    broken = any(int(status) >= 500 or row["honest_failed"] for row in rows[3:] for status in row["statuses"])
    if (
        broken
        or load["failed"]
        or not load["everything_ended"]
        or overload["failed"]
        or not overload["recovered"]
    ):
        raise typer.Exit(1)


def _serve_mixed(
    device: str,
    model: str | None,
    layers: int | None,
    seconds: float,
    streams: int,
    tokens: int,
    steered: float,
    captured: float,
) -> None:
    if not (0 <= steered <= 1 and 0 <= captured <= 1 and steered + captured <= 1):
        raise OptionError(
            f"--steered is {steered:g} and --captured {captured:g}, expected shares that sum to at most 1."
        )
    if device.startswith("cuda"):
        _require_cuda("bench serve --device cpu")
    elif layers is not None:
        raise OptionError("--layers makes random weights on a GPU: give --device cuda, or --model.")
    from birkhoff.bench.serve_mixed import MixedSetting, bench_mixed

    setting = MixedSetting(
        model=model,
        device=device,
        layers=layers or 0,
        seconds=seconds,
        streams=streams,
        tokens=tokens,
        steered=steered,
        captured=captured,
    )
    rows = []
    for row in bench_mixed(setting):
        typer.echo(json_module.dumps(row))
        rows.append(row)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


@app.command()
def reuse(
    model: Annotated[
        str, typer.Option(help="Checkpoint to measure; it needs a tokenizer and an MTP block.")
    ] = "nano",
    threads: Threads = 2,
    shared_tokens: Annotated[int, typer.Option(help="Shared prefix of two prompts in tokens.")] = 900,
    turns: Annotated[int, typer.Option(help="Turns of the conversation.")] = 8,
    answer_tokens: Annotated[int, typer.Option(help="Tokens per answer in the conversation.")] = 96,
    steps: Annotated[int, typer.Option(help="Tokens generated with and without speculation.")] = 128,
    rounds: Rounds = 5,
    json: JsonLines = False,
) -> None:
    """Gain of the prefix cache, of multi-turn reuse and of speculation, in the same run; fails if outputs differ."""
    from birkhoff.bench.reuse import ReuseSetting, bench_reuse

    setting = ReuseSetting(shared_tokens, turns, answer_tokens, steps, rounds, threads)
    with progress_bar("measuring", "rounds") as advance:
        rows = list(bench_reuse(model, setting, progress=advance))
    for row in rows:
        typer.echo(json_module.dumps(row) if _prints_lines(json) else reuse_line(row, turns))
    if not all(row["same_tokens"] for row in rows):
        raise typer.Exit(1)


def _require_cuda(instead: str = "bench model") -> None:
    import torch

    if not torch.cuda.is_available():
        raise OptionError(
            f"this measures a CUDA device, and PyTorch sees none here. Measure the CPU: {instead}"
        )


def _prints_lines(json: bool) -> bool:
    return json or not sys.stdout.isatty()


def _print_lines(rows: Iterable[Row]) -> list[Row]:
    """Print rows as JSON lines and return those that did not pass."""
    failed = []
    for row in rows:
        typer.echo(json_module.dumps(row))
        if row.get("passed") is False:
            failed.append(row)
    return failed


def _print_checked(rows: Iterable[Row]) -> None:
    """Print rows as JSON lines; exit with status 1 if one did not pass."""
    if _print_lines(rows):
        raise typer.Exit(1)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
