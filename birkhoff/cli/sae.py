"""`birkhoff sae train | eval | features | active | read | search | show | import | export`: sparse autoencoders.

Paths and JSON go to stdout, progress and status messages to stderr. `train` reads stored captures or runs texts itself,
and resumes an interrupted run. `eval` includes the model loss with the reconstruction spliced in; `features` describes
each feature by a label with its score, contexts and examples, which `search` and `show` read; `read` does so from
stored rows at any scale.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from birkhoff.cli.command_group import CommandGroup
from birkhoff.cli.crosscoder import crosscoder
from birkhoff.cli.engine_io import open_engine
from birkhoff.cli.options import Json, Texts, shared_options, split_options
from birkhoff.cli.report import Tokens, read_tokenizer
from birkhoff.cli.sae_train import MAX_REQUESTS, token_ids, train
from birkhoff.cli.terminal import print_status, progress_bar
from birkhoff.errors import OptionError, did_you_mean, quoted

if TYPE_CHECKING:
    from birkhoff.sae.feature_index import FeatureIndex
    from birkhoff.sae.features import FeatureEntry

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Train, evaluate, describe, import and export sparse autoencoders (SAEs).",
)
Out = Annotated[Path, typer.Option(help="Directory to write the SAE to.")]
Directory = Annotated[
    Path, typer.Argument(help="Directory of an SAE, nano for its own, or the name of a published one.")
]
Hook = Annotated[str | None, typer.Option(help="Hook of its rows, if the SAE does not name it.")]
Layer = Annotated[int | None, typer.Option(help="Layer of its rows, if the SAE does not name it.")]
View = Annotated[str | None, typer.Option(help="View of the row: single, flat, per_stream, read or mean.")]

app.command()(train)


@app.command(name="eval")
@shared_options("Model")
def evaluate(
    directory: Directory,
    texts: Texts,
    hook: Hook = None,
    layer: Layer = None,
    view: View = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N texts.")] = None,
    most_tokens: Annotated[int, typer.Option(help="Truncate texts to this many tokens.")] = 512,
    json: Json = False,
    **options: Any,
) -> None:
    """Measure explained variance, active features per row, dead share, and the model loss recovered."""
    load_options, _ = split_options(options)
    from birkhoff.analysis.sae_quality import loss_recovered, row_quality
    from birkhoff.analysis.sae_rows import begin_token
    from birkhoff.sae.dictionary import Sae

    with open_engine(load_options, MAX_REQUESTS) as engine:
        sae = Sae.load(directory, hook, layer, view)
        sequences = [ids[:most_tokens] for ids in token_ids(engine, texts, sae)][:limit]
        excluded = [token for token in (begin_token(engine),) if token is not None]
        quality, _ = row_quality(engine, sae, sequences)
        loss = loss_recovered(engine, sae, sequences, excluded)
    result = {**quality.to_json(), **loss.to_json()}
    if json:
        typer.echo(json_module.dumps(result))
        return
    for name, value in result.items():
        shown = format(value, ".4f") if isinstance(value, float) else "-" if value is None else value
        typer.echo(f"{name:20} {shown}")
    if loss.recovered is None:
        print_status(
            "recovered is not defined: without these rows the model loses less than 0.01 nats per token"
        )


@app.command(name="features")
@shared_options("Model")
def features_of(
    directory: Directory,
    texts: Texts,
    feature: Annotated[list[int] | None, typer.Option(help="Only this feature; repeatable.")] = None,
    contexts: Annotated[int, typer.Option(help="Top contexts per feature.")] = 8,
    hook: Hook = None,
    layer: Layer = None,
    view: View = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N texts.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write features.json to DIRECTORY.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Describe features: label and its held-out score, contexts, examples, frequency and promoted tokens."""
    load_options, _ = split_options(options)
    from birkhoff.analysis.sae_features import explain, save_features
    from birkhoff.embedded import dictionary_path
    from birkhoff.sae.dictionary import Sae

    own = dictionary_path(directory)
    if write and not own.exists():
        raise OptionError(
            f"--write needs an SAE in a directory of your own, and {directory} is none. Import it first."
        )

    with open_engine(load_options, MAX_REQUESTS) as engine:
        sae = Sae.load(directory, hook, layer, view)
        sequences = list(token_ids(engine, texts, sae))[:limit]
        entries = explain(engine, sae, sequences, feature or None, contexts=contexts)
    if write:
        path = save_features(entries, own)
        print_status(f"{len(entries)} features in {path}")
    if json:
        typer.echo(json_module.dumps({str(index): entry.to_json() for index, entry in entries.items()}))
        return
    for index, entry in entries.items():
        typer.echo(
            f"{index}\t{entry.density:.4%}\t{entry.largest:.2f}\t{_score(entry)}\t{entry.label}\t"
            f"{' '.join(entry.promotes[:5])!r}"
        )


@app.command()
@shared_options("Model")
def active(
    directory: Directory,
    text: Annotated[str, typer.Argument(help="The text to read.")],
    k: Annotated[int, typer.Option(help="Features shown per token.")] = 3,
    order: Annotated[
        Literal["specific", "strength"] | None,
        typer.Option(
            help="specific (activation times -log of how often the feature is active) or strength; specific by default "
            "if the SAE is described."
        ),
    ] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Show the active features of every token of a text."""
    load_options, _ = split_options(options)
    with open_engine(load_options, MAX_REQUESTS) as engine, engine.attach("sae", directory):
        rows = engine.features(text, "sae", k, order=order)
        tokens = engine.trace(text, []).tokens or []  # a text has been encoded, so there is a tokenizer
    for token, features in zip(tokens[-len(rows) :], rows):
        if json:
            shown = [feature.to_json() for feature in features]
            typer.echo(json_module.dumps({"token": token, "features": shown}, ensure_ascii=False))
            continue
        labels = "   ".join(f"#{f.feature} {f.label or 'no label'} {f.activation:.1f}" for f in features)
        typer.echo(f"{token!r}\t{labels}")


@app.command()
def read(
    directory: Directory,
    store: Annotated[
        Path, typer.Option(help="Harvest of its hook and layer: the --out of capture, or a tag.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory to write features.parquet to. [default: DIRECTORY, where the page reads it]"
        ),
    ] = None,
    model: Tokens = None,
    promotes: Annotated[
        bool,
        typer.Option("--promotes", help="Load the model too, for the tokens that each feature promotes."),
    ] = False,
    contexts: Annotated[int, typer.Option(help="Top contexts per feature.")] = 8,
    partners: Annotated[int, typer.Option(help="Features that fire with it, per feature.")] = 8,
    device: Annotated[str, typer.Option(help="Device that encodes the rows: cpu or cuda.")] = "cpu",
    hook: Hook = None,
    layer: Layer = None,
    view: View = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first N texts.")] = None,
    json: Json = False,
) -> None:
    """Describe features from stored rows in one pass: top activations, density, co-firing, labels."""
    for name, value in (("limit", limit), ("contexts", contexts), ("partners", partners)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}, expected a positive whole number.")
    from birkhoff.analysis.sae_features import promoted_tokens
    from birkhoff.analysis.sae_read import read_features
    from birkhoff.embedded import dictionary_path
    from birkhoff.sae.dictionary import Sae

    target = dictionary_path(directory) if out is None else out
    if out is None and not (target.is_dir() and directory.exists()):
        raise OptionError(f"{directory} is no directory of your own. Say where to write: --out DIR")
    sae = Sae.load(directory, hook, layer, view)
    tokenizer, captured = read_tokenizer(model, store)
    if tokenizer is None:
        raise OptionError(
            f"labels and contexts need a tokenizer, and {captured or store} has none. Name another: --model"
        )
    spelled = None
    if promotes:
        with open_engine({"model": captured}) as engine:
            both = promoted_tokens(engine, sae)
        spelled = [
            tuple([tokenizer.decode([token]) for token in side[row].tolist()] for side in both)
            for row in range(sae.d_sae)
        ]
    with progress_bar("reading", "texts") as advance:
        found = read_features(
            sae,
            store,
            tokenizer.decode,
            contexts=contexts,
            partners=partners,
            device=device,
            spelled=spelled,
            limit=limit,
            progress=advance,
        )
    path = found.save(target)
    counted = "" if found.exact_cofiring else "; co-firing is estimated"
    print_status(
        f"{len(found.features)} of {sae.d_sae} features fire on {found.rows} rows of {found.texts} texts, read in "
        f"{found.seconds:.1f} s{counted}"
    )
    typer.echo(json_module.dumps({"path": str(path), **found.to_json()}) if json else str(path))


app.command()(crosscoder)


@app.command()
def search(
    directory: Directory,
    words: Annotated[list[str], typer.Argument(help="Words to search for.")],
    limit: Annotated[int, typer.Option(help="Show at most this many features.")] = 20,
    json: Json = False,
) -> None:
    """Find features by words in their labels, tokens and contexts."""
    described = _descriptions(directory)
    found = described.search(" ".join(words), limit)
    if json:
        typer.echo(json_module.dumps([match.to_json() for match in found]))
        return
    for match in found:
        entry = match.entry
        context = entry.contexts[0]["text"] if entry.contexts else ""
        typer.echo(f"{entry.feature}\t{_score(entry)}\t{entry.label}\t{','.join(match.where)}\t{context!r}")
    print_status(f"{len(found)} of {len(described)} described features")


@app.command()
def show(
    directory: Directory,
    feature: Annotated[str, typer.Argument(help="Number or label of the feature.")],
    json: Json = False,
) -> None:
    """Show one feature: label and how it was made, frequency, tokens, contexts and examples."""
    described = _descriptions(directory)
    feature_id = _feature_id(described, feature, directory)
    entry = described[feature_id]
    if json:
        typer.echo(json_module.dumps({"feature": feature_id, **entry.to_json()}))
        return
    typer.echo(f"{feature_id}  {entry.label}")
    scored = (
        "" if entry.score is None else f", correlation {entry.score:.2f} on {entry.scored_rows} held-out rows"
    )
    typer.echo(f"label made by: {entry.made}{scored}")
    typer.echo(f"active on {entry.density:.2%} of tokens, at most {entry.largest:.2f}")
    typer.echo(f"promotes {' '.join(map(repr, entry.promotes))}")
    typer.echo(f"suppresses {' '.join(map(repr, entry.suppresses))}")
    if entry.cofires:
        fires = (f"{one['feature']} ({one['correlation']:.2f})" for one in entry.cofires)
        typer.echo(f"fires with {', '.join(fires)}")
    for title, shown in (("strongest", entry.contexts), ("examples", entry.examples)):
        typer.echo(f"{title}:")
        for context in shown:
            typer.echo(f"  {context['value']:8.2f}  {context['text']!r}")


def _feature_id(described: FeatureIndex, feature: str, directory: Path) -> int:
    """The described feature of this number or label."""
    if feature.isdecimal() and int(feature) in described:
        return int(feature)
    labels = {number: entry.label for number, entry in described.items()}
    matches = [number for number, label in labels.items() if label == feature]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise OptionError(
            f"{len(matches)} features are labelled {quoted(feature)} ({matches[:4]}). Give the number."
        )
    raise OptionError(
        f"feature {quoted(feature)} is not described in {directory}; {len(described)} others are."
        f"{did_you_mean(feature, labels.values())} Find one by word: birkhoff sae search {directory} WORD"
    )


def _score(entry: FeatureEntry) -> str:
    return "-" if entry.score is None else f"{entry.score:.2f}"


def _descriptions(directory: Path) -> FeatureIndex:
    """The descriptions in a directory or of a named dictionary; an `OptionError` if there are none."""
    from birkhoff.sae.feature_index import FeatureIndex
    from birkhoff.sae.files import locate_sae

    path, _ = locate_sae(directory)
    if not path.exists():
        raise OptionError(
            f"{directory} does not exist. Give the directory of an SAE, nano for its own, or a published name."
        )
    described = FeatureIndex.read(path if path.is_dir() else path.parent)
    if not described:
        raise OptionError(
            f"{directory} has no descriptions of features. Make them: birkhoff sae features {directory} --texts FILE "
            "--write"
        )
    return described


@app.command(name="import")
def import_dictionary(
    source: Directory, out: Out, hook: Hook = None, layer: Layer = None, view: View = None, json: Json = False
) -> None:
    """Convert an SAE of SAELens, Gemma Scope or dictionary_learning; options name its hook, layer and view."""
    _copy(source, out, "saelens", hook, layer, view, False, json)


@app.command()
def export(
    source: Directory,
    out: Out,
    layout: Annotated[str, typer.Option(help="saelens or manifest.")] = "saelens",
    half: Annotated[
        bool, typer.Option("--half", help="Round matrices to bfloat16, which halves the size.")
    ] = False,
    json: Json = False,
) -> None:
    """Write an SAE in the layout of another tool."""
    _copy(source, out, layout, None, None, None, half, json)


def _copy(
    source: Path,
    out: Path,
    layout: str,
    hook: str | None,
    layer: int | None,
    view: str | None,
    half: bool,
    json: bool,
) -> None:
    from birkhoff.sae.compact import compact, rounded
    from birkhoff.sae.dictionary import Sae

    if half and layout != "saelens":
        raise OptionError("--half is for --layout saelens.")
    sae = Sae.load(source, hook, layer, view)
    (rounded(sae) if half else sae).save(out, layout)
    if half:
        compact(out)
    print_status(f"{sae!r}")
    typer.echo(
        json_module.dumps({"path": str(out), "features": sae.d_sae, "width": sae.d_model})
        if json
        else str(out)
    )
