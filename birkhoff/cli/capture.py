"""`birkhoff capture DATA`: activations of every text of a file, into capture files; killed at any time, it goes on.

The directory goes to stdout, or a report with --json. Rows do not depend on which texts ran together unless that is
switched off with --no-batch-invariant. `--dtype` is what rows are stored as; what the model computes in is
`--compute-dtype` here. `birkhoff capture --repair DIR` only seals what a crash left and says what was found.
"""

from __future__ import annotations

import itertools
import json as json_module
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.answer import open_engine
from birkhoff.cli.options import divide, takes
from birkhoff.cli.talk import bar, say
from birkhoff.errors import OptionError, quoted

if TYPE_CHECKING:
    from birkhoff.analysis.dataset import DatasetText

MOST_AT_ONCE = 8
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
_NUMBER = re.compile(r"-?\d+")


@takes("Model", without=("dtype",))
def capture(
    data: Annotated[
        Path | None, typer.Argument(help="A .jsonl, .txt or .parquet file.", show_default=False)
    ] = None,
    hooks: Annotated[
        str | None,
        typer.Option(help='What to keep: "mlp_out=*;mhc_streams_pre_attn=4,6..8".', show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory of the captures.", show_default=False)] = None,
    positions: Annotated[
        str, typer.Option(help="all_prompt, last_prompt, or JSON: a list of places or an object.")
    ] = "all_prompt",
    dtype: Annotated[
        str | None, typer.Option(help="Store rows as bf16, fp16, fp32 or fp8_e4m3.", show_default=False)
    ] = None,
    compute_dtype: Annotated[
        str | None, typer.Option(help="What the model computes in: float32 or bfloat16.", show_default=False)
    ] = None,
    streams: Annotated[
        str | None, typer.Option(help="Keep only these streams: 0,2.", show_default=False)
    ] = None,
    reduce: Annotated[
        str | None, typer.Option(help="One row per text: mean, sum, last or max_norm.", show_default=False)
    ] = None,
    layout: Annotated[str, typer.Option(help="sharded, packed or per_file.")] = "sharded",
    tag: Annotated[str, typer.Option(help="Directory inside the directory.")] = "harvest",
    text_field: Annotated[str, typer.Option(help="Field of an object that holds its text.")] = "text",
    whole_file: Annotated[
        bool, typer.Option("--whole-file", help="A .txt file is one text, not lines.")
    ] = False,
    limit: Annotated[int | None, typer.Option(help="Only the first texts.", show_default=False)] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad texts out and count them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "--estimate", help="Count rows and bytes, and stop.")
    ] = False,
    repair: Annotated[
        Path | None,
        typer.Option(help="Seal what a crash left in this directory, and stop.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    **options: Any,
) -> None:
    """Keep activations of every text of a file; a run that was killed goes on where it was."""
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
        fields["streams"] = _numbers("streams", streams)
    loading, _ = divide(
        {"batch_invariant": True, **options} | ({"dtype": compute_dtype} if compute_dtype else {})
    )

    from birkhoff.analysis.harvest import estimate_harvest, harvest
    from birkhoff.capture.spec.request import Capture
    from birkhoff.cli.data import open_data

    wish = Capture.from_json({name: value for name, value in fields.items() if value is not None})
    source = open_data(data, text_field, whole_file)
    known = source.describe()
    total = known["texts"] if limit is None else min(limit, known["texts"])
    texts: Iterable[DatasetText] = itertools.islice(source, limit)
    with open_engine(loading, MOST_AT_ONCE) as engine:
        if not loading["batch_invariant"]:
            say(
                "texts may run together, so the last bits of a row can depend on its neighbours and on interruptions"
            )
        with bar("counting" if dry_run else "harvesting", "texts") as advance:
            if dry_run:
                found = estimate_harvest(
                    engine, texts, wish, skip_bad=skip_bad, tell=lambda n: advance(n, total)
                )
            else:
                assert out is not None
                report = harvest(
                    engine,
                    texts,
                    wish,
                    out,
                    source=known,
                    skip_bad=skip_bad,
                    tell=lambda n: advance(n, total),
                )
    if dry_run:
        _say_bad(found.skipped, found.bad_texts)
        size = f"{found.bytes / 1e9:.3f} GB" if found.bytes > 1e8 else f"{found.bytes} bytes"
        line = f"{found.texts} texts, {found.tokens} tokens: {'' if found.exact else 'up to '}{found.rows} rows, {size}"
        typer.echo(json_module.dumps(found.to_json()) if json else line)
        return
    for notice in report.notices:
        say(notice)
    _say_bad(report.skipped, report.bad_texts)
    say(
        f"{report.texts} texts, {report.rows} rows, {report.bytes} bytes in {report.out}; this run added "
        f"{report.new_texts} texts and {report.new_rows} rows in {report.seconds:.1f} s"
    )
    typer.echo(json_module.dumps(report.to_json()) if json else report.out)


def parse_hooks(text: str) -> dict[str, Any]:
    """`HOOK=LAYERS;…` with layers like `4`, `4,6`, `4..8`, `-1` or `*`; a hook alone means all layers."""
    found: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        hook, _, layers = (piece.strip() for piece in part.partition("="))
        if not hook or hook in found or ("=" in part and not layers):
            raise OptionError(
                f"hooks has {quoted(part)}, expected HOOK=LAYERS with each hook once, such as mlp_out=4,6..8."
            )
        found[hook] = _layers(layers, part)
    if not found:
        raise OptionError(
            f"hooks is {quoted(text)}, expected HOOK=LAYERS parts joined by ';', such as mlp_out=*."
        )
    return found


def _layers(text: str, part: str) -> Any:
    if text in ("", "*"):
        return "all"
    layers: list[int] = []
    ranges: list[list[int]] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if _NUMBER.fullmatch(piece):
            layers.append(int(piece))
        elif match := _RANGE.fullmatch(piece):
            ranges.append([int(match[1]), int(match[2])])
        else:
            raise OptionError(
                f"hooks has {quoted(part)}: {quoted(piece)} is no layer. Layers: 4 or 4,6 or 4..8 or *."
            )
    return layers if not ranges else {"ranges": ranges} | ({"layers": layers} if layers else {})


def parse_positions(text: str) -> Any:
    """A word, or JSON when it looks like it."""
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return json_module.loads(text)
    except ValueError as error:
        raise OptionError(f"positions is {quoted(text)}, which is not JSON ({error}).") from None


def _numbers(name: str, text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(_NUMBER.fullmatch(piece) for piece in pieces):
        raise OptionError(f"{name} is {quoted(text)}, expected whole numbers joined by commas.")
    return [int(piece) for piece in pieces]


def _say_bad(skipped: int, some: list[str]) -> None:
    for reason in some:
        say(f"skipped: {reason}")
    if skipped > len(some):
        say(f"and {skipped - len(some)} more")
    if skipped:
        say(f"{skipped} bad texts were skipped")


def _repair(root: Path, json: bool) -> None:
    from birkhoff.capture.store.repair import repair

    found = repair(root)
    for name, reason in found.failed.items():
        say(f"{name} could not be repaired: {reason}")
    say(
        f"sealed {len(found.sealed)} payloads with {found.kept_records} records, dropped {found.dropped_records} "
        f"records and {len(found.removed)} files, in {found.seconds:.2f} s"
    )
    typer.echo(json_module.dumps(vars(found)) if json else str(root))
    if found.failed:
        raise typer.Exit(1)
