"""`birkhoff inspect MODEL`: report the contents of a checkpoint from its headers. Exit status 1 if it has problems.

For a plan (`--gpu`) the config is enough: a config.json, a directory that contains only that, or a release name.
"""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from birkhoff.byte_size import format_bytes
from birkhoff.cli.options import Json, PlanContext, PlanGpuMemory, PlanRam, PlanRequests
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from birkhoff.weights.inspect import Inspection

_CLASS_TEXT = {
    "experts": "routed experts",
    "dense": "attention projections, shared experts",
    "vocabulary": "embedding and head",
    "compressor": "compressors and indexers",
    "router": "router weights, biases, token tables",
    "mhc": "stream mixers (mHC)",
    "norms": "norms and sinks",
    "mtp": "multi-token prediction",
    "other": "not recognised",
}


def inspect(
    model: Annotated[
        Path,
        typer.Argument(
            help="nano, a checkpoint directory, a GGUF file or org/name in the hub cache; for --gpu also a "
            "config.json, flash or pro."
        ),
    ],
    gpu_memory: PlanGpuMemory = None,
    ram: PlanRam = None,
    context: PlanContext = None,
    requests: PlanRequests = 1,
    gpu_speed: Annotated[str, typer.Option(help="GPU memory bandwidth per second for --gpu.")] = "4.3TB",
    bus_speed: Annotated[str, typer.Option(help="Host-to-GPU bandwidth per second for --gpu.")] = "55GB",
    json: Json = False,
) -> None:
    """Show layers, bytes by tensor class, what fits where, and all problems; reads only file headers."""
    from rich.console import Console

    from birkhoff.byte_size import parse_bytes
    from birkhoff.cli.gpu_plan import (
        device_plan,
        find_config,
        host_lines,
        host_plan,
        plan_lines,
        plan_or_refusal,
    )
    from birkhoff.hf.checkpoint import read_config, runs_here
    from birkhoff.weights.inspect import inspect_checkpoint
    from birkhoff.weights.locate import locate

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())  # do not wrap lines on a pipe
    if requests < 1 or (context is not None and context < 1):
        raise OptionError(
            f"requests {requests} and context {context} are no plan, expected positive numbers."
        )
    device_bytes = parse_bytes(gpu_memory) if gpu_memory is not None else None
    speeds = float(parse_bytes(gpu_speed)), float(parse_bytes(bus_speed))
    host_bytes = parse_bytes(ram) if ram is not None else None
    on_cpu = host_bytes is not None and device_bytes is None
    config = find_config(model)
    if config is not None:
        if device_bytes is None and host_bytes is None:
            raise OptionError(
                f"{model} is a config without tensors, there is nothing to inspect. Plan: --gpu 24GiB or --ram 64GiB"
            )
        if device_bytes is None:
            assert host_bytes is not None
            forecast = host_plan(config, host_bytes, context, requests)
        else:
            forecast = plan_or_refusal(config, device_bytes, context, requests, speeds, host_bytes) or {}
        lines = host_lines(forecast) if on_cpu else plan_lines(forecast)
        typer.echo(json_module.dumps(forecast)) if json else console.print("\n".join(lines))
        if "refused" in forecast:
            raise typer.Exit(1)
        return
    path = locate(model)
    if (path / "config.json").is_file() and runs_here(read_config(path)):
        if device_bytes is not None or on_cpu:
            raise OptionError(
                "plans are for DeepSeek-V4, and this is another model. Leave the plan's options out."
            )
        _inspect_foreign(path, console, json)
        return
    report = inspect_checkpoint(path)
    plan = device_plan(report, device_bytes, context, requests, speeds, host_bytes)
    host = {}
    if on_cpu and not report.problems:
        assert host_bytes is not None
        host = host_plan(path, host_bytes, context, requests)
    if json:
        extra = plan.to_dict() | ({"host": host} if host else {})
        typer.echo(json_module.dumps({**json_module.loads(report.to_json()), **extra}, ensure_ascii=False))
    else:
        print_report(report, console)
        for line in [*plan.lines(), *(host_lines(host) if host else [])]:
            console.print(line)
    if report.problems or plan.refused or "refused" in host:
        raise typer.Exit(1)


def _inspect_foreign(path: Path, console: Console, json: bool) -> None:
    """Report a model that runs through Transformers."""
    from birkhoff.hf.inspect_model import inspect_model

    report = inspect_model(path)
    if json:
        typer.echo(json_module.dumps(report, ensure_ascii=False))
    else:
        experts = f", {report['experts']} experts" if report["experts"] else ""
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in report["dtypes"].items())
        chat = "with a chat template" if report["chat_template"] else "no chat template"
        chat += f", tools ({report['tools']})" if report["tools"] else ""
        chat += ", reasoning" if report["reasoning"] else ""
        console.print(
            f"{path}: {report['title']} ({report['architecture']}), backend transformers", markup=False
        )
        console.print(
            f"  {report['layers']} layers, hidden size {report['hidden_size']}, vocabulary {report['vocab_size']}"
            f"{experts}, context {report['max_context']}, {chat}"
        )
        console.print(f"  {report['tensors']} tensors, {format_bytes(report['bytes'])}: {dtypes}")
        console.print(f"  hooks: {', '.join(report['hooks'])}")
        for problem in report["problems"]:
            console.print(f"  problem: {problem}", markup=False)
    if report["problems"]:
        raise typer.Exit(1)


def print_report(report: Inspection, console: Console) -> None:
    """Print what a checkpoint holds, what fits where, and its problems."""
    from rich.markup import escape
    from rich.table import Table

    from birkhoff.weights.inspect import device_memory

    console.print(
        f"[bold]{escape(report.path)}[/]  {report.dialect or 'no readable config'}, {report.tensors} tensors "
        f"in {report.files} files, {format_bytes(report.file_bytes)}"
    )
    table = Table("class", "", "bytes", "share")
    for kind, size in report.bytes_by_class.items():
        table.add_row(
            kind, _CLASS_TEXT[kind], format_bytes(size), f"{100 * size / max(report.file_bytes, 1):.1f} %"
        )
    console.print(table)
    console.print(
        "types       "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in report.bytes_by_type.items())
    )
    if report.config:
        layers = ", ".join(f"{len(indices)} {kind}" for kind, indices in report.layers.items() if indices)
        console.print(f"layers      {layers}, {report.mtp_blocks} mtp")
        active = f", {_count(report.parameters_active)} active per token" if report.parameters_active else ""
        console.print(
            f"parameters  {_count(report.parameters)}{active}, {_count(report.parameters_mtp)} in mtp"
        )
        console.print(
            f"cache       {report.cache_bytes_per_token:g} B per token and "
            f"{format_bytes(report.cache_bytes_per_sequence or 0)} per sequence, as bfloat16"
        )
        console.print("config      " + ", ".join(f"{name} {value}" for name, value in report.config.items()))
    sizes = ", ".join(f"{form} {format_bytes(size)}" for form, size in report.weight_bytes.items())
    console.print(f"weights     {sizes}")
    capacities = device_memory() if report.file_bytes else {}
    for place, forms in report.fits(capacities).items():
        fitting = ", ".join(forms) or "no form"
        console.print(f"fits        {place} ({format_bytes(capacities[place])}): {fitting}")
    for notice in report.notices:
        console.print(f"[yellow]notice[/]      {escape(notice)}")
    for problem in report.problems:
        console.print(f"[red]{problem['code']}[/]  {escape(problem['message'])}")
    if not report.problems:
        console.print("[green]no problems found[/]")


def _count(number: int) -> str:
    """Format a parameter count with a unit, such as 1.60 T."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
