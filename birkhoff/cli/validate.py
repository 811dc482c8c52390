"""`birkhoff validate A [B]`: compare a checkpoint with a reference. Exit status 0 if they agree, 1 if not."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.options import Json
from birkhoff.cli.terminal import print_status
from birkhoff.errors import DataError, OptionError
from birkhoff.small_file import MANIFEST_BYTES, read_json, read_text

if TYPE_CHECKING:
    from birkhoff.validate.greedy import GreedyResult


def validate(
    a: Annotated[str, typer.Argument(help="nano, a checkpoint directory or a GGUF file.")],
    b: Annotated[str | None, typer.Argument(help="Checkpoint to compare with.")] = None,
    oracle: Annotated[
        str | None, typer.Option(help="transformers: compare with A's weights run by transformers.")
    ] = None,
    goldens: Annotated[Path | None, typer.Option(help="Directory of golden values to compare with.")] = None,
    save_goldens: Annotated[
        Path | None, typer.Option(help="Write the values A computes as goldens to this directory.")
    ] = None,
    goldens_form: Annotated[
        str, typer.Option(help="Form of saved goldens: safetensors, or npy with one file for each array.")
    ] = "safetensors",
    engine: Annotated[
        bool,
        typer.Option(
            help="Compare A's engine, as this machine runs it, with the reference kernels, alone and in batches."
        ),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --engine: cpu or cuda; default: as the engine selects.")
    ] = None,
    kernels: Annotated[
        str | None, typer.Option(help="With --engine: kernels of the engine; default: as it selects.")
    ] = None,
    official: Annotated[
        Path | None, typer.Option(help="official.vec file; its prompts are read from the same directory.")
    ] = None,
    answers: Annotated[
        int, typer.Option(help="Also compare greedy answers of this many tokens (with B).")
    ] = 0,
    tokens: Annotated[Path | None, typer.Option(help="JSON file with the list of token ids to run.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file to run, up to --length tokens of it, instead of random tokens."),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of random tokens, or of --text; default: 194, or up to 512 to make the indexer choose."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random tokens, without --tokens.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute dtype of A: float32 or bfloat16; default: float32, with --engine as it selects."
        ),
    ] = None,
    against_dtype: Annotated[str | None, typer.Option(help="Compute dtype of B.")] = None,
    numerics: Annotated[
        str | None, typer.Option(help="plain or released; default: plain, with --engine as it selects.")
    ] = None,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Tolerances: float32, engine, bfloat16, trained, f16, q8_0, q5_0, q4_0 or released; default: from "
            "the formats."
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option(help="On a difference, test for known implementation errors.")
    ] = True,
    html: Annotated[Path | None, typer.Option(help="Write the report as an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Compare a checkpoint site by site with another, with transformers, or with goldens; or its engine with the
    reference kernels."""
    from birkhoff.validate.report import lines, to_html
    from birkhoff.validate.validate import validate as run_validation

    if engine:
        others = {
            "B": b,
            "--oracle": oracle,
            "--goldens": goldens,
            "--save-goldens": save_goldens,
            "--official": official,
            "--answers": answers or None,
            "--against-dtype": against_dtype,
            "--gate": gate,
            "--html": html,
        }
        if given := [name for name, value in others.items() if value is not None]:
            raise OptionError(
                f"--engine compares A with the reference kernels; leave {', '.join(given)} away."
            )
        chosen = {"device": device, "kernels": kernels, "dtype": dtype, "numerics": numerics}
        _check_engine(a, _read_tokens(tokens), _read_text(text), length, seed, chosen, json)
        return
    if device is not None or kernels is not None:
        raise OptionError("--device and --kernels are those of the engine: give --engine as well.")
    if answers and b is None:
        raise OptionError("answers are compared between two checkpoints: give B.")
    report: dict[str, Any] = {}
    ok = True
    if b is not None or oracle is not None or goldens is not None or save_goldens is not None:
        result = run_validation(
            a,
            b,
            oracle=oracle,
            goldens=goldens,
            save=save_goldens,
            save_form=goldens_form,
            tokens=_read_tokens(tokens),
            text=_read_text(text),
            length=length,
            seed=seed,
            dtype=dtype or "float32",
            against_dtype=against_dtype,
            numerics=numerics or "plain",
            gate=gate,
            explanations=explain,
        )
        if result is None:
            print_status(f"goldens written to {save_goldens}")
        else:
            report, ok = result.to_dict(), result.ok
            if html is not None:
                html.write_text(to_html(result), encoding="utf-8")
                print_status(f"report written to {html}")
            if not json:
                for line in lines(result):
                    typer.echo(line)
    elif official is None:
        raise OptionError(
            "give B, --oracle, --goldens, --save-goldens, --engine or --official: A alone says nothing."
        )
    if answers and b is not None:
        rows = _compare_answers(a, b, answers)
        report["answers"] = [vars(row) for row in rows]
        ok = ok and all(row.ok for row in rows)
        if not json:
            _print_answers(rows)
    if official is not None:
        steps = _check_official(a, official)
        report["official"] = steps
        ok = ok and all(row["ok"] for row in steps if row["judged"])
        if not json:
            _print_official(steps)
    if json:
        typer.echo(json_module.dumps({"ok": ok, **report}))
    if not ok:
        raise typer.Exit(1)


def _check_engine(
    a: str,
    tokens: list[int] | None,
    text: str | None,
    length: int | None,
    seed: int,
    options: dict[str, str | None],
    json: bool,
) -> None:
    from birkhoff.validate.engine_check import validate_engine

    chosen: Any = {name: value for name, value in options.items() if value is not None}
    result = validate_engine(a, tokens=tokens, text=text, length=length, seed=seed, **chosen)
    typer.echo(json_module.dumps(result.to_dict()) if json else "\n".join(result.lines()))
    if not result.ok:
        raise typer.Exit(1)


def _read_tokens(path: Path | None) -> list[int] | None:
    if path is None:
        return None
    try:
        ids = read_json(path, MANIFEST_BYTES)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON list of token ids ({error}).") from None
    if not isinstance(ids, list):
        raise DataError(f"{path} holds a {type(ids).__name__}, expected a list of token ids.")
    return ids


def _read_text(path: Path | None) -> str | None:
    try:
        return None if path is None else read_text(path, MANIFEST_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text ({error}).") from None


def _compare_answers(a: str, b: str, count: int) -> list[GreedyResult]:
    from birkhoff.api.load import load
    from birkhoff.validate.greedy import compare_greedy

    if count < 1:
        raise OptionError(f"answers is {count}, expected a positive number of tokens.")
    with load(a, kernels="reference") as first, load(b, kernels="reference") as second:
        return compare_greedy(first, second, max_tokens=count)


def _check_official(a: str, path: Path) -> list[dict[str, Any]]:
    from birkhoff.api.load import load
    from birkhoff.validate.official import check_vectors, read_vectors

    cases = read_vectors(path)
    prompts = path.parent / "prompts"
    with load(a) as engine:
        steps = check_vectors(engine, cases, prompts if prompts.is_dir() else path.parent)
    return [{**vars(row), "ok": row.ok, "judged": row.judged} for row in steps]


def _print_answers(rows: list[GreedyResult]) -> None:
    for row in rows:
        gap = "" if row.gap is None else f", where the two best are {row.gap:.2g} apart"
        typer.echo(f"{row.prompt!r}: {row.same} of {row.tokens} tokens the same{gap}")


def _print_official(steps: list[dict[str, Any]]) -> None:
    judged = [row for row in steps if row["judged"]]
    typer.echo(f"official vectors: {sum(row['ok'] for row in judged)} of {len(judged)} steps hold")
    for case in dict.fromkeys(row["case"] for row in steps):
        of_case = [row for row in steps if row["case"] == case]
        held = sum(row["ok"] for row in of_case)
        note = "" if of_case[0]["judged"] else " (not judged: hosted API and released code differ)"
        typer.echo(f"  {case}: {held} of {len(of_case)}{note}")
