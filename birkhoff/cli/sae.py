"""`birkhoff sae train | eval | features | import | export`: dictionaries of features as directories.

Paths and JSON go to stdout, progress and talk to stderr. `train` reads a store of captures, or runs texts itself; it
goes on where it was killed. `eval` has the model in the loop; `features` writes what each feature means beside it.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.cli.answer import open_engine
from birkhoff.cli.options import divide, takes
from birkhoff.cli.talk import bar, say
from birkhoff.cli.vectors import read_texts
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

app = typer.Typer(
    no_args_is_help=True, help="Dictionaries of features (sparse autoencoders): train, judge, read."
)
MOST_AT_ONCE = 8
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Out = Annotated[Path, typer.Option(help="Directory of the dictionary.", show_default=False)]
Directory = Annotated[Path, typer.Argument(help="Directory of a dictionary.", show_default=False)]
Hook = Annotated[str | None, typer.Option(help="Where its rows come from.", show_default=False)]
Layer = Annotated[int | None, typer.Option(help="Their layer.", show_default=False)]
View = Annotated[str | None, typer.Option(help="single, flat, per_stream, read or mean.", show_default=False)]


@app.command()
@takes("Model")
def train(
    hook: Annotated[str, typer.Option(help="Where the rows come from.", show_default=False)],
    layer: Annotated[int, typer.Option(help="Their layer.", show_default=False)],
    out: Out,
    store: Annotated[
        Path | None, typer.Option(help="Directory of captures (a tag).", show_default=False)
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="Or texts to run now.", show_default=False)] = None,
    view: Annotated[str, typer.Option(help="single; flat, per_stream, read or mean of streams.")] = "single",
    features: Annotated[int, typer.Option(help="Size of the dictionary.")] = 4096,
    k: Annotated[int, typer.Option(help="Features per row.")] = 32,
    kind: Annotated[str, typer.Option(help="batchtopk (leaves as jumprelu) or topk.")] = "batchtopk",
    steps: Annotated[int, typer.Option(help="Batches to learn from.")] = 1000,
    batch_rows: Annotated[int, typer.Option(help="Captured rows per batch.")] = 2048,
    rate: Annotated[float, typer.Option(help="Learning rate at its highest.")] = 2e-3,
    decay: Annotated[
        float, typer.Option(help="Share of the steps over which the rate falls to nothing.")
    ] = 0.3,
    dead_after: Annotated[
        int, typer.Option(help="Rows without firing after which a feature is helped.")
    ] = 100_000,
    seed: Annotated[int, typer.Option(help="The same seed and rows give the same dictionary.")] = 0,
    json: Json = False,
    **options: Any,
) -> None:
    """Train a dictionary on captured rows, or on texts that run meanwhile."""
    if (store is None) == (texts is None):
        raise OptionError("sae train needs --store DIR or --texts FILE, one of the two.")
    loading, _ = divide(options)
    from birkhoff.analysis.sae_rows import LiveRows, RowSource, StoreRows
    from birkhoff.analysis.sae_train import train_sae
    from birkhoff.sae.train import StepReport, TrainOptions

    wish = TrainOptions(
        features, k=k, kind=kind, steps=steps, rate=rate, decay=decay, dead_after=dead_after, seed=seed
    )

    def run(source: RowSource) -> None:
        with bar("training", "steps") as advance:

            def tell(report: StepReport) -> None:
                advance(report.step, steps)
                if report.step % max(1, steps // 10) == 0:
                    say(f"step {report.step}: {report.explained:.1%} explained, {report.dead} features dead")

            done = train_sae(source, wish, out, tell=tell)
        quality = done.quality
        say(
            f"{done.steps} steps, {done.rows} rows: {quality.explained_variance:.1%} of the variance explained with "
            f"{quality.l0:.1f} features a row, {quality.dead_share:.1%} dead"
        )
        typer.echo(json_module.dumps({"path": str(out), **done.to_json()}) if json else str(out))

    if store is not None:
        run(StoreRows(store, hook, layer, view, batch_rows, seed))
        return
    assert texts is not None
    with open_engine(loading, MOST_AT_ONCE) as engine:
        run(LiveRows(engine, list(_ids(engine, texts)), hook, layer, view, batch_rows, seed))


@app.command(name="eval")
@takes("Model")
def evaluate(
    directory: Directory,
    texts: Annotated[Path, typer.Option(help="A .jsonl or .txt file of texts.", show_default=False)],
    hook: Hook = None,
    layer: Layer = None,
    view: View = None,
    limit: Annotated[int | None, typer.Option(help="Only the first texts.", show_default=False)] = None,
    most_tokens: Annotated[int, typer.Option(help="Cut texts to this many tokens.")] = 512,
    json: Json = False,
    **options: Any,
) -> None:
    """Explained variance, features per row, dead share, and the loss recovered with the model in the loop."""
    loading, _ = divide(options)
    from birkhoff.analysis.sae_quality import loss_recovered, row_quality
    from birkhoff.sae.dictionary import Sae

    with open_engine(loading, MOST_AT_ONCE) as engine:
        sae = Sae.load(directory, hook, layer, view)
        some = [ids[:most_tokens] for ids in _ids(engine, texts)][:limit]
        leave = [token for token in (engine.config.bos_token_id,) if token is not None]
        quality, _measure = row_quality(engine, sae, some)
        loss = loss_recovered(engine, sae, some, leave)
    found = {**quality.to_json(), **loss.to_json()}
    if json:
        typer.echo(json_module.dumps(found))
        return
    for name, value in found.items():
        typer.echo(f"{name:20} {value if isinstance(value, int) else format(value, '.4f')}")


@app.command(name="features")
@takes("Model")
def features_of(
    directory: Directory,
    texts: Annotated[Path, typer.Option(help="A .jsonl or .txt file of texts.", show_default=False)],
    feature: Annotated[
        list[int] | None, typer.Option(help="Only these; may be repeated.", show_default=False)
    ] = None,
    contexts: Annotated[int, typer.Option(help="Contexts per feature.")] = 8,
    hook: Hook = None,
    layer: Layer = None,
    view: View = None,
    limit: Annotated[int | None, typer.Option(help="Only the first texts.", show_default=False)] = None,
    write: Annotated[bool, typer.Option("--write", help="Keep features.json and labels beside it.")] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Where each feature fires, how often, and which tokens it speaks for."""
    loading, _ = divide(options)
    from birkhoff.analysis.sae_features import explain, save_features
    from birkhoff.sae.dictionary import Sae

    with open_engine(loading, MOST_AT_ONCE) as engine:
        sae = Sae.load(directory, hook, layer, view)
        some = list(_ids(engine, texts))[:limit]
        found = explain(engine, sae, some, feature or None, contexts=contexts)
    if write:
        path = save_features(found, directory)
        say(f"{len(found)} features in {path}")
    if json:
        typer.echo(json_module.dumps({str(number): entry.to_json() for number, entry in found.items()}))
        return
    for number, entry in found.items():
        typer.echo(
            f"{number}\t{entry.density:.4%}\t{entry.largest:.2f}\t{entry.label}\t{' '.join(entry.promotes[:5])!r}"
        )


@app.command(name="import")
def import_dictionary(
    source: Directory, out: Out, hook: Hook = None, layer: Layer = None, view: View = None, json: Json = False
) -> None:
    """Read a dictionary of SAELens, Gemma Scope or dictionary_learning, say where it belongs, and keep it as ours."""
    _copied(source, out, "saelens", hook, layer, view, False, json)


@app.command()
def export(
    source: Directory,
    out: Out,
    layout: Annotated[str, typer.Option(help="saelens or manifest.")] = "saelens",
    half: Annotated[bool, typer.Option("--half", help="Round matrices to bfloat16: half the bytes.")] = False,
    json: Json = False,
) -> None:
    """Write a dictionary for another tool."""
    _copied(source, out, layout, None, None, None, half, json)


def _copied(
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
    say(f"{sae!r}")
    typer.echo(
        json_module.dumps({"path": str(out), "features": sae.d_sae, "width": sae.d_model})
        if json
        else str(out)
    )


def _ids(engine: Engine, path: Path) -> Iterator[list[int]]:
    for text in read_texts(path):
        yield engine.prompt_ids(text) if isinstance(text, str) else engine.encode_chat(text)
