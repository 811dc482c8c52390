"""`birkhoff inspect MODEL`: report the contents of a checkpoint from its headers. Exit status 1 if it has problems.

For a plan (`--gpu`) the config is enough: a config.json, a directory that contains only that, or a release name.
"""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.byte_size import format_bytes
from birkhoff.cli.options import Json, PlanContext, PlanGpuMemory, PlanRam, PlanRequests
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console

    from birkhoff.config import V4Config
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
    from birkhoff.cli.gpu_plan import find_config
    from birkhoff.hf.checkpoint import read_config, runs_here
    from birkhoff.weights.locate import locate

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())  # do not wrap lines on a pipe
    if requests < 1 or (context is not None and context < 1):
        raise OptionError(
            f"requests {requests} and context {context} are no plan, expected positive numbers."
        )
    machine = _Machine(
        parse_bytes(gpu_memory) if gpu_memory is not None else None,
        parse_bytes(ram) if ram is not None else None,
        (float(parse_bytes(gpu_speed)), float(parse_bytes(bus_speed))),
        context,
        requests,
    )
    config = find_config(model)
    if config is not None:
        if machine.device_bytes is None and machine.host_bytes is None:
            raise OptionError(
                f"{model} is a config without tensors, there is nothing to inspect. Plan: --gpu 24GiB or --ram 64GiB"
            )
        _plan_config(config, machine, console, json)
        return
    path = locate(model)
    if (path / "config.json").is_file() and runs_here(read_config(path)):
        if machine.device_bytes is not None or machine.host_bytes is not None:
            raise OptionError(
                "plans are for DeepSeek-V4, and this is another model. Leave the plan's options out."
            )
        _inspect_foreign(path, console, json)
        return
    _inspect_checkpoint(path, machine, console, json)


@dataclass(frozen=True)
class _Machine:
    """What a plan is for: memory of the GPU and the host, bytes per second of GPU and bus, context and requests."""

    device_bytes: int | None
    host_bytes: int | None
    speeds: tuple[float, float]
    context: int | None
    requests: int

    def host_plan(self, source: V4Config | Path) -> dict[str, Any] | None:
        """The plan for a CPU with this memory; None if the plan is for a GPU, or there is none."""
        from birkhoff.cli.gpu_plan import host_plan

        if self.host_bytes is None or self.device_bytes is not None:
            return None
        return host_plan(source, self.host_bytes, self.context, self.requests)


def _plan_config(config: V4Config, machine: _Machine, console: Console, json: bool) -> None:
    """Print the plan of a model that has no files."""
    from birkhoff.cli.gpu_plan import host_lines, plan_lines, plan_or_refusal

    forecast = machine.host_plan(config)
    if forecast is not None:
        lines = host_lines(forecast)
    else:
        assert machine.device_bytes is not None
        limits = (machine.device_bytes, machine.context, machine.requests, machine.speeds, machine.host_bytes)
        forecast = plan_or_refusal(config, *limits) or {}
        lines = plan_lines(forecast)
    typer.echo(json_module.dumps(forecast)) if json else console.print("\n".join(lines))
    if "refused" in forecast:
        raise typer.Exit(1)


def _inspect_checkpoint(path: Path, machine: _Machine, console: Console, json: bool) -> None:
    """Print the report of a V4 checkpoint or GGUF file, with the plan if there is one."""
    from birkhoff.cli.gpu_plan import device_plan, host_lines
    from birkhoff.weights.inspect import inspect_checkpoint

    report = inspect_checkpoint(path)
    limits = (machine.device_bytes, machine.context, machine.requests, machine.speeds, machine.host_bytes)
    plan = device_plan(report, *limits)
    host = {} if report.problems else machine.host_plan(path) or {}
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
    for device, forms in report.fits(capacities).items():
        fitting = ", ".join(forms) or "no form"
        console.print(f"fits        {device} ({format_bytes(capacities[device])}): {fitting}")
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
