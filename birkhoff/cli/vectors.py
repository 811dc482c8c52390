"""`birkhoff vectors contrast | search | list | show | import`: steering vectors as files.

Paths and JSON go to stdout, tables and talk to stderr. `contrast` makes a vector from two files of texts and shows how
well every layer and stream tells them apart; `search` tries places and strengths and shows what each does to text;
`import` gives a vector of another tool the words it lacks, and never guesses what it is for.
"""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.answer import open_engine
from birkhoff.cli.options import divide, takes
from birkhoff.cli.talk import bar, say
from birkhoff.errors import OptionError, quoted

if TYPE_CHECKING:
    from birkhoff.analysis.search import Trial
    from birkhoff.steering.extract import Separation
    from birkhoff.steering.vector_file import SteeringVector

app = typer.Typer(no_args_is_help=True, help="Steering vectors: make, search, import, look at.")
MOST_AT_ONCE = 16
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Texts = Annotated[Path, typer.Option(help="A .jsonl or .txt file of texts.", show_default=False)]


@app.command()
@takes("Model")
def contrast(
    positive: Texts,
    negative: Texts,
    hook: Annotated[str, typer.Option(help="Where to take the rows.")] = "mhc_streams_pre_attn",
    layers: Annotated[str, typer.Option(help="4 or 2,4 or 2..6 or *.")] = "*",
    how: Annotated[str, typer.Option(help="mean_diff, or pca of pairs.")] = "mean_diff",
    tokens: Annotated[str, typer.Option(help="mean of a text's tokens, or the last.")] = "mean",
    streams: Annotated[
        str | None, typer.Option(help="Keep only these streams: 0,2.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Vector file; without it only the table.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the table as SVG.", show_default=False)] = None,
    note: Annotated[str, typer.Option(help="A sentence to keep in the file.")] = "",
    json: Json = False,
    **options: Any,
) -> None:
    """A steering vector from two sets of texts, and how well each layer and stream tells them apart."""
    loading, _ = divide(options)
    from birkhoff.analysis.contrast import contrast_rows, vector_of
    from birkhoff.cli.separation import separation_svg, separation_table

    up = read_texts(positive)
    down = read_texts(negative)
    chosen = parse_layers(layers)
    kept = None if streams is None else numbers("streams", streams)
    with open_engine(loading, MOST_AT_ONCE) as engine:
        rows = contrast_rows(engine, up, down, hook, chosen, tokens)
        found = rows.separation(how)
        vector = vector_of(engine, rows, rows.layers, how, kept, note)
    _print(separation_table(found))
    if plot is not None:
        plot.write_text(separation_svg(found), encoding="utf-8")
        say(f"drawn in {plot}")
    if out is not None:
        vector.save(out)
        say(f"{vector!r} from {len(up)} and {len(down)} texts")
    if json:
        typer.echo(json_module.dumps(_result(vector, found) | {"path": None if out is None else str(out)}))
    elif out is not None:
        typer.echo(str(out))


@app.command()
@takes("Model")
def search(
    positive: Texts,
    negative: Texts,
    requests: Annotated[Path, typer.Option(help="Requests to answer, one per line.", show_default=False)],
    up: Annotated[str, typer.Option(help="Words that speak for the positive side, joined by commas.")] = "",
    down: Annotated[str, typer.Option(help="Words that speak against it.")] = "",
    hooks: Annotated[str, typer.Option(help="Hooks joined by commas.")] = "mhc_streams_pre_attn",
    layers: Annotated[str, typer.Option(help="4 or 2,4 or 2..6 or *.")] = "*",
    strengths: Annotated[
        str, typer.Option(help="Lengths in mean row norms, joined by commas.")
    ] = "0.25,0.5,0.8",
    each_stream: Annotated[bool, typer.Option(help="Also try every stream alone.")] = True,
    seeds: Annotated[int, typer.Option(help="Answers per request.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Length of an answer.")] = 60,
    loss_bound: Annotated[float, typer.Option(help="Nats per token a steered text may cost more.")] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Write the best vector here.", show_default=False)] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Try a contrast at every place and strength, and show what it does to answers. Without words, a probe trained on
    half of the texts judges, and the other half makes the direction."""
    loading, _ = divide(options)
    from birkhoff.analysis.contrast import contrast_rows
    from birkhoff.analysis.search import best_trial, scaled_vector
    from birkhoff.analysis.search import search as run_search
    from birkhoff.cli.separation import trials_table
    from birkhoff.steering.word_probe import WordProbe

    higher = read_texts(positive)
    lower = read_texts(negative)
    asked = [str(text) for text in read_texts(requests)]
    sizes = [_number("strengths", piece) for piece in strengths.split(",")]
    if seeds < 1:
        raise OptionError(f"seeds is {seeds}, expected a positive whole number.")
    if up or down:
        probe = WordProbe.of_words(_words(up), _words(down))
    else:
        probe = WordProbe.trained(map(plain_text, higher[1::2]), map(plain_text, lower[1::2]))
        higher, lower = higher[::2], lower[::2]
    with open_engine(loading, MOST_AT_ONCE) as engine:
        chosen = parse_layers(layers)
        contrasts = {hook: contrast_rows(engine, higher, lower, hook, chosen) for hook in _words(hooks)}
        trials: list[Trial] = []
        with bar("searching", "trials") as advance:

            def tell(trial: Trial) -> None:
                trials.append(trial)
                advance(len(trials), total)

            places = sum(
                1 + (rows.positive[layer].shape[1] if each_stream and rows.positive[layer].ndim == 3 else 0)
                for rows in contrasts.values()
                for layer in rows.layers
            )
            total = places * len(sizes)
            run_search(
                engine,
                contrasts,
                asked,
                probe.score,
                seeds,
                sizes,
                each_stream=each_stream,
                max_tokens=max_tokens,
                tell=tell,
            )
        best = best_trial(trials, loss_bound)
        if best is not None and out is not None:
            scaled_vector(engine, contrasts[best.hook], best.layer, best.streams, best.strength).save(out)
    _print(trials_table(trials, best))
    if best is None:
        say(f"no trial stays within {loss_bound} nats of the unsteered text. Try lower strengths.")
    if json:
        found = None if best is None else best.to_json()
        typer.echo(json_module.dumps({"trials": [trial.to_json() for trial in trials], "best": found}))
    elif best is not None and out is not None:
        typer.echo(str(out))
    if best is None:
        raise typer.Exit(1)


@app.command(name="list")
def list_vectors(
    folder: Annotated[
        Path | None, typer.Argument(help="A directory; else those of nano.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Vector files of a directory, one line each."""
    from birkhoff.embedded import shipped_vectors
    from birkhoff.steering.vector_file import SteeringVector

    if folder is not None and not folder.is_dir():
        raise OptionError(f"{folder} is no directory. Show one file: birkhoff vectors show FILE")
    paths = (
        sorted(folder.glob("*.safetensors")) if folder is not None else list(shipped_vectors("nano").values())
    )
    found = {path.stem: SteeringVector.load(path) for path in paths}
    if json:
        typer.echo(json_module.dumps({name: vector.describe() for name, vector in found.items()}))
        return
    for name, vector in found.items():
        where = f"{vector.hook}[{','.join(map(str, vector.layers))}]"
        typer.echo(f"{name}\t{vector.op}\t{where}\t{vector.method}\t{vector.note}")
    if not found:
        say(f"no vector files in {folder or 'nano'}")


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A vector file.", show_default=False)], json: Json = False
) -> None:
    """What a vector file says of itself."""
    from birkhoff.steering.vector_file import SteeringVector

    said = SteeringVector.load(file).describe()
    if json:
        typer.echo(json_module.dumps(said))
        return
    for name, value in said.items():
        typer.echo(f"{name:15} {value if isinstance(value, str) else json_module.dumps(value)}")


@app.command(name="import")
def import_file(
    file: Annotated[
        Path, typer.Argument(help=".safetensors, .json, .gguf, .f32 or .pt.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Vector file, or a directory for several.", show_default=False)],
    op: Annotated[
        str | None, typer.Option(help="add, project or clamp: never guessed.", show_default=False)
    ] = None,
    hook: Annotated[str | None, typer.Option(help="Where it belongs.", show_default=False)] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of a single tensor.", show_default=False)] = None,
    width: Annotated[int | None, typer.Option(help="Width of raw rows.", show_default=False)] = None,
    streams: Annotated[str | None, typer.Option(help="flat, all, or 0,2.", show_default=False)] = None,
    model: Annotated[str | None, typer.Option(help="The model it was made for.", show_default=False)] = None,
    note: Annotated[
        str | None, typer.Option(help="A sentence to keep in the file.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Give a vector of another tool the words it lacks, and write it as a vector file."""
    from birkhoff.analysis.vector_files import import_vectors

    said: dict[str, Any] = {"model": model, "note": note}
    if streams is not None:
        said["streams"] = streams if streams in ("flat", "all") else numbers("streams", streams)
    given = {name: value for name, value in said.items() if value is not None}
    found = import_vectors(file, op=op, hook=hook, layer=layer, width=width, **given)
    if len(found) > 1 and out.suffix:
        raise OptionError(
            f"{file} holds {len(found)} vectors ({', '.join(found)}). Name a directory: --out DIR"
        )
    if not out.suffix:
        out.mkdir(parents=True, exist_ok=True)
    paths = {
        name: vector.save(out if out.suffix else out / f"{name}.safetensors")
        for name, vector in found.items()
    }
    for name, vector in found.items():
        say(f"{name}: {vector!r}")
    if json:
        typer.echo(json_module.dumps({str(paths[name]): vector.describe() for name, vector in found.items()}))
    else:
        for path in paths.values():
            typer.echo(str(path))


def read_texts(path: Path) -> list[Any]:
    """Every text of a file: a prompt, or the messages of a conversation. A bad one is refused by its place."""
    from birkhoff.cli.data import open_data

    found = []
    for text in open_data(path, "text", False):
        if text.problem is not None:
            raise OptionError(f"{text.where} {text.problem}. Mend it.")
        found.append(text.prompt if text.messages is None else text.messages)
    return found


def plain_text(text: Any) -> str:
    return text if isinstance(text, str) else str(text[-1].get("content", ""))


def parse_layers(text: str) -> Any:
    from birkhoff.cli.capture import parse_hooks

    (selector,) = parse_hooks(f"x={text}").values()
    return selector


def numbers(name: str, text: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text.replace(" ", "")):
        raise OptionError(f"{name} is {quoted(text)}, expected whole numbers joined by commas.")
    return [int(piece) for piece in text.split(",")]


def _words(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError(f"{name} has {quoted(text)}, expected numbers joined by commas.") from None


def _result(vector: SteeringVector, found: Sequence[Separation]) -> dict[str, Any]:
    return {"vector": vector.describe(), "separation": [entry.to_json() for entry in found]}


def _print(table: Any) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, width=110).print(table)
