"""`birkhoff bench …`: measurements as JSON lines; a table when a person is watching and did not ask for JSON."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.talk import bar

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def bench() -> None:
    """Measure speed; JSON lines, or a table on a terminal."""


@app.command()
def model(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint to measure; a random one of nano's size without.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(help="PyTorch threads for everybody.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 512,
    steps: Annotated[int, typer.Option(help="Tokens written after each prompt.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often everybody has a turn.")] = 5,
    batch: Annotated[
        list[int], typer.Option(help="How many prompts at once; may be given several times.")
    ] = [1, 8],  # noqa: B006
    dtype: Annotated[list[str], typer.Option(help="float32 or bfloat16; may be given several times.")] = [  # noqa: B006
        "float32",
        "bfloat16",
    ],
    alone: Annotated[bool, typer.Option("--alone", help="Leave transformers out.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
) -> None:
    """Tokens per second of reading and writing, beside transformers in the same run; fails if the two disagree."""
    from birkhoff.bench.model import ModelSetting, bench_model

    setting = ModelSetting(prompt_tokens, steps, rounds, tuple(batch), tuple(dtype), threads)
    rows: list[dict[str, Any]] = []
    with bar("measuring", "rounds") as advance:
        for row in bench_model(model, setting, alone=alone, progress=advance):
            rows.append(row)
            if json or not sys.stdout.isatty():
                typer.echo(json_module.dumps(row))
    if sys.stdout.isatty() and not json:
        from rich.console import Console

        _print(rows, Console(highlight=False))
    if any(row.get("passed") is False for row in rows):
        raise typer.Exit(1)


@app.command()
def kernels() -> None:
    """Kernels of a decoding step on a GPU, checked and timed beside PyTorch; JSON lines."""
    _on_a_gpu()
    from birkhoff.bench.kernels import bench_kernels

    for row in bench_kernels():
        typer.echo(json_module.dumps(row))


@app.command()
def decode(
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences at once; may be given several times.")
    ] = None,
    context: Annotated[str, typer.Option(help="Tokens behind each sequence, such as 4096 or 128k.")] = "4096",
    layers: Annotated[int, typer.Option(help="Layers of V4-Flash's width.")] = 43,
    distinct: Annotated[
        int, typer.Option(help="Layers with experts of their own, as many as fit the device.")
    ] = 38,
    rival_layers: Annotated[
        int, typer.Option(help="Layers to compare with transformers; 0: not at all.")
    ] = 6,
    placement: Annotated[
        list[str] | None,
        typer.Option(
            help="Experts in host memory instead: a share on the GPU (0.925) or a GPU's size (24GiB); several times.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Decoding at full V4-Flash width on a GPU with random weights, checked, timed and profiled; JSON lines."""
    tokens = _tokens(context)
    _on_a_gpu()
    from birkhoff.bench.decode import bench_decode
    from birkhoff.bench.placement import bench_placement

    if placement:
        rows = bench_placement(placement, batch or (1, 8), tokens, layers, min(distinct, 24))
    else:
        rows = bench_decode(batch or (1, 8, 32, 64), tokens, layers, distinct, rival_layers=rival_layers)
    failed = False
    for row in rows:
        typer.echo(json_module.dumps(row))
        failed |= row["kind"] in ("agreement", "same bits") and not row["passed"]
    if failed:
        raise typer.Exit(1)


def _tokens(text: str) -> int:
    """`4096`, `128k` (times 1,024) or `1M`."""
    from birkhoff.errors import OptionError, quoted

    number = text[:-1]
    unit = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 0)
    digits = number if unit else text
    if not digits.isascii() or not digits.isdigit() or not 1 <= int(digits) * (unit or 1) <= 2**24:
        raise OptionError(f"context is {quoted(text)}, expected a number of tokens such as 4096, 128k or 1M.")
    return int(digits) * (unit or 1)


@app.command()
def prefill(
    chunk: Annotated[
        list[int] | None, typer.Option(help="Tokens read at once; may be given several times.")
    ] = None,
    behind: Annotated[
        list[int] | None, typer.Option(help="Tokens read before; may be given several times.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of V4-Flash's width.")] = 43,
    distinct: Annotated[
        int, typer.Option(help="Layers with experts of their own, as many as fit the device.")
    ] = 38,
    rival_layers: Annotated[
        int, typer.Option(help="Layers to compare with transformers; 0: not at all.")
    ] = 6,
) -> None:
    """Reading prompts at full V4-Flash width on a GPU, checked at every site, timed and profiled; JSON lines."""
    _on_a_gpu()
    from birkhoff.bench.prefill import CHUNKS, bench_prefill

    _print_lines(bench_prefill(chunk or CHUNKS, behind or (0, 32768), layers, distinct, rival_layers))


@app.command()
def sites() -> None:
    """Every hook site of two full-width layers on a GPU against the plain path; JSON lines, fails if one is off."""
    _on_a_gpu()
    import torch

    from birkhoff.bench.prefill import site_rows

    _print_lines(site_rows(torch.device("cuda")))


@app.command()
def taps(
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences at once; may be given several times.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens behind each sequence.")] = 4096,
    layers: Annotated[int, typer.Option(help="Layers of V4-Flash's width.")] = 43,
    distinct: Annotated[
        int, typer.Option(help="Layers with experts of their own, as many as fit the device.")
    ] = 38,
) -> None:
    """What capturing and steering cost where steps are replayed as graphs, on a GPU; JSON lines."""
    _on_a_gpu()
    from birkhoff.bench.taps import bench_taps

    _print_lines(bench_taps(batch or (1, 16), context, layers, distinct))


def _print_lines(rows: Iterable[dict[str, Any]]) -> None:
    """Rows as they come; fails in the end if one of them did not pass."""
    failed = False
    for row in rows:
        typer.echo(json_module.dumps(row))
        failed |= row.get("passed") is False
    if failed:
        raise typer.Exit(1)


def _on_a_gpu() -> None:
    import torch

    from birkhoff.errors import OptionError

    if not torch.cuda.is_available():
        raise OptionError(
            "this measures a CUDA device, and PyTorch sees none here. Measure the CPU: bench model"
        )


@app.command()
def interp(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint to measure; a random one of nano's size without.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 256,
    steps: Annotated[int, typer.Option(help="Tokens written after each prompt.")] = 64,
    rounds: Annotated[int, typer.Option(help="How often everybody has a turn.")] = 5,
    batch: Annotated[int, typer.Option(help="How many prompts at once.")] = 4,
    disk: Annotated[
        str | None,
        typer.Option(help="Directory for the files; a temporary place without.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
) -> None:
    """What looking costs: plain, idle, one hook, all streams to memory and to files, in the same run."""
    from birkhoff.bench.interp import InterpSetting, bench_interp

    setting = InterpSetting(prompt_tokens, steps, rounds, batch, threads)
    with bar("measuring", "rounds") as advance:
        rows = list(bench_interp(model, setting, disk=disk, progress=advance))
    if json or not sys.stdout.isatty():
        for row in rows:
            typer.echo(json_module.dumps(row))
        return
    from rich.console import Console
    from rich.table import Table

    first = rows[0]
    table = Table("phase", "contender", "ms", "p10 to p90", "times plain")
    for row in rows:
        if row["kind"] == "cost":
            ms, times = row["ms"], row["times_plain"]
            spread = f"{ms['p10']:g} to {ms['p90']:g}"
            table.add_row(
                row["phase"], row["contender"], f"{ms['median']:g}", spread, f"{times['median']:.3f}"
            )
    console = Console(highlight=False)
    console.print(
        f"{first['machine']['cpu']}, load {first['machine']['load']}; commit {first['commit']}", table
    )
    last = rows[-1]
    console.print(
        f"{last['stored_bytes']} bytes to files: {last['stored_mb_per_s']['median']:g} MB/s, from first step to "
        f"durable; this disk alone: {last['disk_mb_per_s']['median']:g} MB/s"
    )


@app.command()
def steering(
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint to measure; a random one of nano's size without.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompts.")] = 64,
    steps: Annotated[int, typer.Option(help="Tokens written after each prompt.")] = 150,
    batch: Annotated[int, typer.Option(help="How many prompts at once.")] = 16,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
) -> None:
    """What steering costs: idle, one vector for all, one for each, features of a dictionary, in the same run."""
    from birkhoff.bench.steering import SteeringSetting, bench_steering

    rows = list(bench_steering(model, SteeringSetting(prompt_tokens, steps, batch, threads)))
    if json or not sys.stdout.isatty():
        for row in rows:
            typer.echo(json_module.dumps(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("phase", "contender", "ms", "p10 to p90", "times", "at most")
    for row in rows:
        ms = row["ms"]
        times = row.get("times_plain") or row["times_products"]
        spread = f"{ms['p10']:g} to {ms['p90']:g}"
        bar_ = f"{row['at_most']:g}" if "at_most" in row else ""
        table.add_row(
            row["phase"], row["contender"], f"{ms['median']:g}", spread, f"{times['median']:.3f}", bar_
        )
    first = rows[0]
    Console(highlight=False).print(
        f"{first['machine']['cpu']}, load {first['machine']['load']}; commit {first['commit']}", table
    )


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Checkpoint to serve.")] = "nano",
    seconds: Annotated[float, typer.Option(help="How long clients keep asking.")] = 60.0,
    streams: Annotated[int, typer.Option(help="Clients at a time, and slots.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 128,
    threads: Annotated[int, typer.Option(help="PyTorch threads of the server and of the engine alone.")] = 1,
    cache_bytes: Annotated[
        int, typer.Option(help="Bytes of caches; a small one is soon full. 0: the default.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
) -> None:
    """A real server under streams and under overload, beside the engine's own rate; fails if a request did not end."""
    from birkhoff.bench.serve import ServeSetting, bench_serve

    with bar("measuring", "seconds") as advance:
        rows = list(bench_serve(model, ServeSetting(seconds, streams, tokens, threads, cache_bytes), advance))
    for row in rows:
        if json or not sys.stdout.isatty():
            typer.echo(json_module.dumps(row))
    _, held, over = rows
    if sys.stdout.isatty() and not json:
        first = held["first_token_ms"]
        between = held["between_tokens_ms"]
        typer.echo(
            f"{held['tokens_per_s']:g} tokens/s in {streams} streams, {held['share_of_engine']:.2f} of the engine's; "
            f"first token p50 {first['p50']:g} ms, p95 {first['p95']:g}; "
            f"between tokens p50 {between['p50']:g} ms, p95 {between['p95']:g}\n"
            f"{over['callers']} callers at once: {over['statuses']}, recovered: {over['recovered']}"
        )
    if held["failed"] or not held["everything_ended"] or over["failed"] or not over["recovered"]:
        raise typer.Exit(1)


@app.command()
def reuse(
    model: Annotated[
        str, typer.Option(help="Checkpoint to measure; it needs a tokenizer and an MTP block.")
    ] = "nano",
    threads: Annotated[int, typer.Option(help="PyTorch threads.")] = 2,
    shared_tokens: Annotated[int, typer.Option(help="How many tokens two prompts share.")] = 900,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 8,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of each answer in it.")] = 96,
    steps: Annotated[int, typer.Option(help="Tokens written with guesses and without.")] = 128,
    rounds: Annotated[int, typer.Option(help="How often everybody has a turn.")] = 5,
    json: Annotated[bool, typer.Option("--json", help="JSON lines on a terminal too.")] = False,
) -> None:
    """What a known prompt, a conversation and guesses save, in the same run; fails if answers differ."""
    from birkhoff.bench.reuse import ReuseSetting, bench_reuse

    setting = ReuseSetting(shared_tokens, turns, answer_tokens, steps, rounds, threads)
    with bar("measuring", "rounds") as advance:
        rows = list(bench_reuse(model, setting, progress=advance))
    for row in rows:
        if json or not sys.stdout.isatty():
            typer.echo(json_module.dumps(row))
        elif row["kind"] == "prefix":
            typer.echo(
                f"{row['cached_tokens']} tokens known: first token {row['times_sooner']['median']:g} times sooner, "
                f"{row['times_sooner_from_disk']['median']:g} from disk"
            )
        elif row["kind"] == "turns":
            typer.echo(
                f"{turns} turns: {row['share_of_recomputation']['median']:g} of reading everything again"
            )
        elif row["kind"] == "rows":
            typer.echo(
                ", ".join(f"{name.replace('_', ' ')}: {ms:g} ms" for name, ms in row["step_ms"].items())
            )
        else:
            typer.echo(
                f"{row['contender']}: {row['tokens_per_second']['median']:g} tokens/s, "
                f"{row['times_plain']['median']:g} times plain ({row['times_plain_by_processor']['median']:g} by the "
                f"processor's time), accepted {row['accepted']} of {row['drafted']}"
            )
    if not all(row["same_tokens"] for row in rows):
        raise typer.Exit(1)


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    from rich.table import Table

    first = rows[0]
    machine = f"{first['machine']['cpu']}, {first['threads']} threads, load {first['machine']['load']}"
    console.print(
        f"{machine}; commit {first['commit']}; {first['model']}, prompts of {first['prompt_tokens']} tokens"
    )
    table = Table("dtype", "phase", "batch", "contender", "tokens/s", "p10 to p90", "times transformers")
    for row in rows:
        if row["kind"] == "speed":
            speed = row["tokens_per_second"]
            times = row.get("times_transformers")
            who = row["contender"] + (
                f" ({row['experts_implementation']})" if "experts_implementation" in row else ""
            )
            table.add_row(
                row["dtype"],
                row["phase"],
                str(row["batch"]),
                who,
                f"{speed['median']:g}",
                f"{speed['p10']:g} to {speed['p90']:g}",
                f"{times['median']:.2f}" if times else "",
            )
    console.print(table)
    for row in rows:
        if row["kind"] == "shares":
            parts = ", ".join(f"{part} {ms:g}" for part, ms in row["model_ms"].items())
            around = ", ".join(f"{part} {ms:g}" for part, ms in row["engine_step_ms"].items())
            console.print(
                f"{row['dtype']} decode of {row['batch']}: ms in the model: {parts}; in a step: {around}"
            )
        elif row["kind"] == "agreement":
            verdict = {True: "[green]same model[/]", False: "[red]not the same model[/]", None: "not judged"}
            console.print(
                f"{row['dtype']} against transformers: {verdict[row['passed']]}, {row['logits']}, {row['tokens']}"
            )
