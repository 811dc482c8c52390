"""`birkhoff vectors contrast | search | list | show | import`: create, evaluate and convert steering vectors.

Paths and JSON go to stdout, tables and status messages to stderr. `contrast` computes a vector from two files of texts
and shows how well each layer and stream separates them; `search` tries sites and strengths and shows the effect of each
on generated text; `import` converts a vector of another tool, whose operation and hook must be stated if the file lacks
them.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.command_group import CommandGroup
from birkhoff.cli.engine_io import open_engine
from birkhoff.cli.options import Json, Texts, shared_options, split_options
from birkhoff.cli.parsers import parse_floats, parse_layers, parse_streams, parse_words
from birkhoff.cli.terminal import print_status, progress_bar
from birkhoff.data.texts import read_texts
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.analysis.vector_search import Trial

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Create, search, list, show and import steering vectors."
)
MAX_REQUESTS = 16
EXPERT_COUNTS, EXPERT_STRENGTHS = (4, 12), (0.3, 1.0)


@app.command()
@shared_options("Model")
def contrast(
    positive: Texts,
    negative: Texts,
    hook: Annotated[
        str | None,
        typer.Option(
            help="Hook to read rows from. [default: mhc_streams_pre_attn; pre_attn on an ordinary model]"
        ),
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers: 4 or 2,4 or 2..6 or *.")] = "*",
    how: Annotated[
        str, typer.Option(help="Method: mean_diff, or pca of the pair differences.")
    ] = "mean_diff",
    tokens: Annotated[str, typer.Option(help="Row of a text: mean over its tokens, or last.")] = "mean",
    streams: Annotated[str | None, typer.Option(help="Keep only these streams: 0,2.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Vector file to write; without it only the table is shown.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write the table as SVG.")] = None,
    note: Annotated[str, typer.Option(help="Note stored in the file.")] = "",
    experts: Annotated[
        bool,
        typer.Option(
            "--experts", help="Contrast the experts of the texts instead of rows, for edits of the router."
        ),
    ] = False,
    requests: Annotated[
        str | None,
        typer.Option(help="With --experts: prompts to generate answers for, to search for the best edit."),
    ] = None,
    up: Annotated[
        str, typer.Option(help="With --requests: words of the positive side, joined by commas.")
    ] = "",
    down: Annotated[str, typer.Option(help="With --requests: words of the negative side.")] = "",
    json: Json = False,
    **options: Any,
) -> None:
    """Compute a steering vector from two sets of texts and show how well each layer and stream separates them.

    With --experts, show which experts separate them, and write edits of the router as JSON for `interventions`.
    """
    load_options, _ = split_options(options)
    if experts:
        others = {
            "plot": plot,
            "streams": streams,
            "note": note,
            "hook": hook,
            "how": how != "mean_diff",
            "tokens": tokens != "mean",
        }
        for name, given in others.items():
            if given:
                raise OptionError(f"--{name} is for vectors, not for --experts. Leave it out.")
        if requests is None and (up or down):
            raise OptionError("--up and --down measure answers to prompts. Add --requests FILE.")
        _contrast_experts(positive, negative, layers, out, requests, up, down, json, load_options)
        return
    if requests is not None or up or down:
        raise OptionError("--requests, --up and --down are for --experts. Use vectors search for vectors.")
    from birkhoff.analysis.contrast import contrast_rows, vector_of
    from birkhoff.analysis.forward import residual_hook
    from birkhoff.cli.vector_report import separation_svg, separation_table

    positive_texts = read_texts(positive)
    negative_texts = read_texts(negative)
    selector = parse_layers(layers)
    kept_streams = None if streams is None else parse_streams(streams)
    with open_engine(load_options, MAX_REQUESTS) as engine:
        site = hook or residual_hook(engine)
        rows = contrast_rows(engine, positive_texts, negative_texts, site, selector, tokens)
        separations = rows.separation(how)
        vector = vector_of(engine, rows, rows.layers, how, kept_streams, note)
    _print_table(separation_table(separations))
    if plot is not None:
        plot.write_text(separation_svg(separations), encoding="utf-8")
        print_status(f"drawn in {plot}")
    if out is not None:
        vector.save(out)
        print_status(f"{vector!r} from {len(positive_texts)} and {len(negative_texts)} texts")
    if json:
        result = {
            "vector": vector.describe(),
            "separation": [entry.to_json() for entry in separations],
            "path": None if out is None else str(out),
        }
        typer.echo(json_module.dumps(result))
    elif out is not None:
        typer.echo(str(out))


def _contrast_experts(
    positive: str,
    negative: str,
    layers: str,
    out: Path | None,
    requests: str | None,
    up: str,
    down: str,
    json: bool,
    load_options: Any,
) -> None:
    from birkhoff.analysis.expert_contrast import ExpertTrial, contrast_experts, search_experts
    from birkhoff.analysis.steering_effect import best_trial
    from birkhoff.cli.vector_report import expert_table, expert_trials_table
    from birkhoff.steering.steering_fields import intervention
    from birkhoff.steering.word_probe import WordProbe

    positive_texts, negative_texts = read_texts(positive), read_texts(negative)
    prompts = [] if requests is None else [_plain_text(text) for text in read_texts(requests)]
    if up or down:
        probe = WordProbe.of_words(parse_words(up), parse_words(down))
    else:
        probe = WordProbe.trained(map(_plain_text, positive_texts), map(_plain_text, negative_texts))
    trials: list[ExpertTrial] = []
    with open_engine(load_options, MAX_REQUESTS) as engine:
        contrast = contrast_experts(engine, positive_texts, negative_texts, parse_layers(layers))
        if prompts:
            trials = search_experts(
                engine, contrast, prompts, probe.score, 2, EXPERT_COUNTS, EXPERT_STRENGTHS, max_tokens=40
            )
    separations = contrast.separation()
    best = best_trial(trials, 1.0)
    edits = contrast.edits(best.count, best.way, best.strength) if best else contrast.edits(4, "add", 0.3)
    entries = [intervention(edit) for edit in edits]
    _print_table(expert_table(separations[:16]))
    if prompts:
        _print_table(expert_trials_table(trials, best))
        if best is None:
            print_status("no trial moved the answers towards the positive side within 1.0 nats of loss.")
    if out is not None:
        out.write_text(json_module.dumps({"interventions": entries}, indent=1) + "\n", encoding="utf-8")
    if json:
        result = {
            "separation": [entry.to_json() for entry in separations],
            "trials": [trial.to_json() for trial in trials],
            "best": None if best is None else best.to_json(),
            "interventions": entries,
            "path": None if out is None else str(out),
        }
        typer.echo(json_module.dumps(result))
    elif out is not None:
        typer.echo(str(out))


@app.command()
@shared_options("Model")
def search(
    positive: Texts,
    negative: Texts,
    requests: Annotated[str, typer.Option(help="Prompts to generate answers for, one per line.")],
    up: Annotated[str, typer.Option(help="Words that indicate the positive side, joined by commas.")] = "",
    down: Annotated[str, typer.Option(help="Words that indicate the negative side.")] = "",
    hooks: Annotated[
        str | None,
        typer.Option(
            help="Hooks to try, joined by commas. [default: mhc_streams_pre_attn; pre_attn on an ordinary model]"
        ),
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers: 4 or 2,4 or 2..6 or *.")] = "*",
    strengths: Annotated[
        str, typer.Option(help="Vector norms in units of the mean row norm, joined by commas.")
    ] = "0.25,0.5,0.8",
    each_stream: Annotated[bool, typer.Option(help="Also try each stream separately.")] = True,
    seeds: Annotated[int, typer.Option(help="Answers per prompt.")] = 2,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens of an answer.")] = 60,
    loss_bound: Annotated[
        float, typer.Option(help="Largest allowed loss increase of steered text, in nats per token.")
    ] = 1.0,
    out: Annotated[Path | None, typer.Option(help="Vector file to write the best vector to.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Steer with the contrast at every site and strength and show the effect on generated answers.

    Without --up and --down, a probe trained on half of the texts scores the answers, and the other half gives the
    direction.
    """
    load_options, _ = split_options(options)
    from birkhoff.analysis.contrast import contrast_rows
    from birkhoff.analysis.forward import residual_hook
    from birkhoff.analysis.steering_effect import best_trial
    from birkhoff.analysis.vector_search import count_trials, scaled_vector, search_vectors
    from birkhoff.cli.vector_report import trials_table
    from birkhoff.steering.word_probe import WordProbe

    positive_texts = read_texts(positive)
    negative_texts = read_texts(negative)
    prompts = [_plain_text(text) for text in read_texts(requests)]
    norms = parse_floats("strengths", strengths)
    if seeds < 1:
        raise OptionError(f"seeds is {seeds}, expected a positive whole number.")
    if up or down:
        probe = WordProbe.of_words(parse_words(up), parse_words(down))
    else:
        probe = WordProbe.trained(
            map(_plain_text, positive_texts[1::2]), map(_plain_text, negative_texts[1::2])
        )
        positive_texts, negative_texts = positive_texts[::2], negative_texts[::2]
    with open_engine(load_options, MAX_REQUESTS) as engine:
        selector = parse_layers(layers)
        contrasts = {
            hook: contrast_rows(engine, positive_texts, negative_texts, hook, selector)
            for hook in parse_words(hooks or residual_hook(engine))
        }
        trials: list[Trial] = []
        total = count_trials(contrasts, norms, each_stream)
        with progress_bar("searching", "trials") as advance:

            def record(trial: Trial) -> None:
                trials.append(trial)
                advance(len(trials), total)

            search_vectors(
                engine,
                contrasts,
                prompts,
                probe.score,
                seeds,
                norms,
                each_stream=each_stream,
                max_tokens=max_tokens,
                progress=record,
            )
        best = best_trial(trials, loss_bound)
        bounded = any(trial.loss_gained <= loss_bound for trial in trials)
        if best is not None and out is not None:
            scaled_vector(engine, contrasts[best.hook], best.layer, best.streams, best.strength).save(out)
    _print_table(trials_table(trials, best))
    if best is None:
        print_status(
            "no trial moved the answers towards the positive side. Try higher strengths, other hooks or other texts."
            if bounded
            else f"no trial stays within {loss_bound} nats of the unsteered text. Try lower strengths."
        )
    if json:
        result = {
            "trials": [trial.to_json() for trial in trials],
            "best": None if best is None else best.to_json(),
        }
        typer.echo(json_module.dumps(result))
    elif best is not None and out is not None:
        typer.echo(str(out))
    if best is None:
        raise typer.Exit(1)


@app.command(name="list")
def list_vectors(
    folder: Annotated[
        Path | None, typer.Argument(help="Directory; default: the vectors shipped with nano.")
    ] = None,
    json: Json = False,
) -> None:
    """List the vector files of a directory, one per line."""
    from birkhoff.embedded import shipped_vectors
    from birkhoff.steering.vector_file import SteeringVector

    if folder is not None and not folder.is_dir():
        raise OptionError(f"{folder} is no directory. Show one file: birkhoff vectors show FILE")
    paths = (
        sorted(folder.glob("*.safetensors")) if folder is not None else list(shipped_vectors("nano").values())
    )
    vectors = {path.stem: SteeringVector.load(path) for path in paths}
    if json:
        typer.echo(json_module.dumps({name: vector.describe() for name, vector in vectors.items()}))
        return
    for name, vector in vectors.items():
        site = f"{vector.hook}[{','.join(map(str, vector.layers))}]"
        typer.echo(f"{name}\t{vector.op}\t{site}\t{vector.method}\t{vector.note}")
    if not vectors:
        print_status(f"no vector files in {folder or 'nano'}")


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="A vector file, or a vector that ships with nano.")],
    json: Json = False,
) -> None:
    """Show the metadata of a vector file."""
    from birkhoff.steering.vector_file import SteeringVector

    description = SteeringVector.load(file).describe()
    if json:
        typer.echo(json_module.dumps(description))
        return
    for name, value in description.items():
        typer.echo(f"{name:15} {value if isinstance(value, str) else json_module.dumps(value)}")


@app.command(name="import")
def import_file(
    file: Annotated[Path, typer.Argument(help=".safetensors, .json, .gguf, .f32 or .pt.")],
    out: Annotated[Path, typer.Option(help="Vector file to write, or a directory if FILE holds several.")],
    op: Annotated[str | None, typer.Option(help="Operation: add, project or clamp.")] = None,
    hook: Annotated[str | None, typer.Option(help="Hook it applies to.")] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of a single tensor.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of a row (.f32 files).")] = None,
    streams: Annotated[str | None, typer.Option(help="Streams it covers: flat, all, or 0,2.")] = None,
    model: Annotated[str | None, typer.Option(help="Model it was made for.")] = None,
    note: Annotated[str | None, typer.Option(help="Note stored in the file.")] = None,
    json: Json = False,
) -> None:
    """Convert a vector of another tool to a vector file; options supply metadata the source lacks."""
    from birkhoff.analysis.vector_import import import_vectors

    metadata: dict[str, Any] = {"model": model, "note": note}
    if streams is not None:
        metadata["streams"] = streams if streams in ("flat", "all") else parse_streams(streams)
    metadata = {name: value for name, value in metadata.items() if value is not None}
    vectors = import_vectors(file, op=op, hook=hook, layer=layer, width=width, **metadata)
    if len(vectors) > 1 and out.suffix:
        raise OptionError(
            f"{file} holds {len(vectors)} vectors ({', '.join(vectors)}). Name a directory: --out DIR"
        )
    if not out.suffix:
        out.mkdir(parents=True, exist_ok=True)
    paths = {
        name: vector.save(out if out.suffix else out / f"{name}.safetensors")
        for name, vector in vectors.items()
    }
    for name, vector in vectors.items():
        print_status(f"{name}: {vector!r}")
    if json:
        typer.echo(
            json_module.dumps({str(paths[name]): vector.describe() for name, vector in vectors.items()})
        )
    else:
        for path in paths.values():
            typer.echo(str(path))


def _plain_text(text: Any) -> str:
    """A prompt itself, or the content of the last message."""
    return text if isinstance(text, str) else str(text[-1].get("content", ""))


def _print_table(table: Any) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, width=110).print(table)
