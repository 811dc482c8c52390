"""`birkhoff capture DATA`: store activations of every text of a file; an interrupted run resumes.

Prints the output directory to stdout, or a report with --json. Captured rows do not depend on which texts are batched
together unless --no-batch-invariant is given. `--dtype` is the stored dtype; the compute dtype is `--compute-dtype`.
`birkhoff capture --repair DIR` finalizes the files an aborted run left and reports what it found.
"""

from __future__ import annotations

import itertools
import json as json_module
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.engine_io import open_engine
from birkhoff.cli.options import DATA_HELP, Json, shared_options, split_options
from birkhoff.cli.parsers import parse_hooks, parse_positions, parse_streams
from birkhoff.cli.terminal import print_status, progress_bar
from birkhoff.data.texts import open_texts
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.analysis.harvest import HarvestEstimate, HarvestReport
    from birkhoff.api.engine import Engine
    from birkhoff.capture.spec.request import Capture
    from birkhoff.data.texts import DatasetText

MAX_REQUESTS = 8


@shared_options("Model", without=("dtype",))
def capture(
    data: Annotated[str | None, typer.Argument(help=DATA_HELP)] = None,
    hooks: Annotated[
        str | None, typer.Option(help='Hooks and layers: "mlp_out=*;mhc_streams_pre_attn=4,6..8".')
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory.")] = None,
    positions: Annotated[
        str, typer.Option(help="all_prompt, last_prompt, or JSON: a list of positions or an object.")
    ] = "all_prompt",
    dtype: Annotated[str | None, typer.Option(help="Store rows as bf16, fp16, fp32 or fp8_e4m3.")] = None,
    compute_dtype: Annotated[str | None, typer.Option(help="Compute dtype: float32 or bfloat16.")] = None,
    streams: Annotated[str | None, typer.Option(help="Keep only these streams: 0,2.")] = None,
    reduce: Annotated[str | None, typer.Option(help="One row per text: mean, sum, last or max_norm.")] = None,
    layout: Annotated[str, typer.Option(help="sharded, packed or per_file.")] = "sharded",
    tag: Annotated[str, typer.Option(help="Subdirectory of --out.")] = "harvest",
    text_field: Annotated[str, typer.Option(help="Field or column that holds the text.")] = "text",
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="Read a .txt file as one text, not one per line.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Use only the first N texts.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip invalid texts and count them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--estimate", help="Count rows and bytes and exit.")
    ] = False,
    repair: Annotated[
        Path | None, typer.Option(help="Finalize the files an aborted run left in this directory and exit.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Run on a Ray cluster: auto, HOST:6379, ray://HOST:10001, or local.",
            metavar="ADDRESS",
            rich_help_panel="Ray",
        ),
    ] = None,
    ray_actors: Annotated[
        int | None,
        typer.Option(help="Number of engines. [default: one per GPU, or per machine]", rich_help_panel="Ray"),
    ] = None,
    ray_gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of an engine. [default: 1 if there are some]", rich_help_panel="Ray"),
    ] = None,
    ray_cpus: Annotated[float, typer.Option(help="CPUs of an engine.", rich_help_panel="Ray")] = 1,
    ray_part: Annotated[
        int, typer.Option(help="Texts that an engine gets at a time.", rich_help_panel="Ray")
    ] = 256,
    json: Json = False,
    **options: Any,
) -> None:
    """Store activations of every text of a data file; an interrupted run resumes."""
    if repair is not None:
        if data is not None or hooks is not None or out is not None:
            raise OptionError("--repair stands alone: birkhoff capture --repair DIR")
        _repair(repair, json)
        return
    if data is None or hooks is None or (out is None and not dry_run):
        raise OptionError('capture needs DATA, --hooks "mlp_out=*" and --out DIR (or --dry-run).')
    if limit is not None and limit < 1:
        raise OptionError(f"limit is {limit}, expected a positive whole number.")
    fields: dict[str, Any] = {"hooks": parse_hooks(hooks), "positions": parse_positions(positions)}
    fields |= {"dtype": dtype, "reduce": reduce, "layout": layout, "tag": tag}
    if streams is not None:
        fields["streams"] = parse_streams(streams)
    load_options, _ = split_options(
        {"batch_invariant": True, **options} | ({"dtype": compute_dtype} if compute_dtype else {})
    )

    from birkhoff.analysis.harvest import estimate_harvest, harvest
    from birkhoff.capture.spec.request import Capture

    spec = Capture.from_json({name: value for name, value in fields.items() if value is not None})
    texts = _Texts(data, text_field, whole_file, limit)
    if ray is not None:
        if dry_run:
            raise OptionError(
                "--dry-run counts without running anything, so it needs no --ray. Leave it out."
            )
        assert out is not None
        cluster = {"actors": ray_actors, "gpus": ray_gpus, "cpus": ray_cpus, "part_texts": ray_part}
        _print_report(_harvest_on_ray(ray, texts, spec, out, load_options, cluster, skip_bad), json)
    elif dry_run:
        with _opened(texts, load_options, "counting") as (engine, opened, _, progress):
            estimate = estimate_harvest(engine, opened, spec, skip_bad=skip_bad, progress=progress)
        _print_estimate(estimate, json)
    else:
        assert out is not None
        with _opened(texts, load_options, "harvesting") as (engine, opened, source, progress):
            report = harvest(engine, opened, spec, out, source=source, skip_bad=skip_bad, progress=progress)
        _print_report(report, json)


@dataclass(frozen=True)
class _Texts:
    """The texts of a run, as the command line names them."""

    data: str
    text_field: str
    whole_file: bool
    limit: int | None


@contextmanager
def _opened(
    texts: _Texts, load_options: Mapping[str, Any], verb: str
) -> Iterator[tuple[Engine, Iterable[DatasetText], Mapping[str, Any], Callable[[int], None]]]:
    """An engine, the texts, their description, and a progress bar to call with the number of texts done."""
    source = open_texts(texts.data, texts.text_field, texts.whole_file)
    description = source.describe()
    total = min((count for count in (texts.limit, description["texts"]) if count is not None), default=None)
    with open_engine(load_options, MAX_REQUESTS) as engine:
        if not load_options["batch_invariant"]:
            print_status(
                "texts may run together, so the last bits of a row can depend on its neighbours and on interruptions"
            )
        with progress_bar(verb, "texts") as advance:
            yield (
                engine,
                itertools.islice(source, texts.limit),
                description,
                lambda count: advance(count, total),
            )


def _harvest_on_ray(
    address: str,
    texts: _Texts,
    spec: Capture,
    out: Path,
    load_options: dict[str, Any],
    cluster: Mapping[str, Any],
    skip_bad: bool,
) -> HarvestReport:
    """Harvest with the engines that `cluster` describes."""
    from birkhoff.ray_capture import capture_on_ray

    with progress_bar("harvesting", "texts") as advance:
        return capture_on_ray(
            address,
            texts.data,
            spec,
            out,
            load_options,
            text_field=texts.text_field,
            whole_file=texts.whole_file,
            limit=texts.limit,
            skip_bad=skip_bad,
            progress=advance,
            **cluster,
        )


def _print_estimate(estimate: HarvestEstimate, json: bool) -> None:
    _print_skipped(estimate.skipped, estimate.bad_texts)
    size = f"{estimate.bytes / 1e9:.3f} GB" if estimate.bytes > 1e8 else f"{estimate.bytes} bytes"
    bound = "" if estimate.exact else "up to "
    line = f"{estimate.texts} texts, {estimate.tokens} tokens: {bound}{estimate.rows} rows, {size}"
    typer.echo(json_module.dumps(estimate.to_json()) if json else line)


def _print_report(report: HarvestReport, json: bool) -> None:
    for notice in report.notices:
        print_status(notice)
    _print_skipped(report.skipped, report.bad_texts)
    print_status(
        f"{report.texts} texts, {report.rows} rows, {report.bytes} bytes in {report.out}; this run added "
        f"{report.new_texts} texts and {report.new_rows} rows in {report.seconds:.1f} s"
    )
    typer.echo(json_module.dumps(report.to_json()) if json else report.out)


def _print_skipped(skipped: int, reasons: list[str]) -> None:
    for reason in reasons:
        print_status(f"skipped: {reason}")
    if skipped > len(reasons):
        print_status(f"and {skipped - len(reasons)} more")
    if skipped:
        print_status(f"{skipped} bad texts were skipped")


def _repair(root: Path, json: bool) -> None:
    from birkhoff.capture.store.repair import repair

    report = repair(root)
    for name, reason in report.failed.items():
        print_status(f"{name} could not be repaired: {reason}")
    print_status(
        f"sealed {len(report.sealed)} payloads with {report.kept_records} records, dropped {report.dropped_records} "
        f"records and {len(report.removed)} files, in {report.seconds:.2f} s"
    )
    typer.echo(json_module.dumps(vars(report)) if json else str(root))
    if report.failed:
        raise typer.Exit(1)
