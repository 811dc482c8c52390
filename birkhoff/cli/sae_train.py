"""`birkhoff sae train`: train a sparse autoencoder on stored captures, or on texts that it runs itself.

An interrupted run resumes. Options and progress that training of crosscoders shares are here too.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.byte_size import format_bytes
from birkhoff.cli.engine_io import open_engine
from birkhoff.cli.options import DATA_HELP, Json, shared_options, split_options
from birkhoff.cli.terminal import print_status, progress_bar
from birkhoff.data.texts import open_texts, read_texts
from birkhoff.errors import OptionError

if TYPE_CHECKING:
    from birkhoff.analysis.sae_rows import RowSource
    from birkhoff.api.engine import Engine
    from birkhoff.sae.dictionary import Sae
    from birkhoff.sae.train import StepReport, TrainOptions

MAX_REQUESTS = 8
Features = Annotated[int, typer.Option(help="Number of features.")]
Steps = Annotated[int, typer.Option(help="Training steps.")]
BatchRows = Annotated[int, typer.Option(help="Rows per training step.")]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Peak learning rate. [default: 2e-3, less from 4,096 features or rows of 1,024 numbers on]"
    ),
]


@contextmanager
def training_progress(steps: int) -> Iterator[Callable[[StepReport], None]]:
    """A progress bar of training steps, and ten lines of how it goes."""
    with progress_bar("training", "steps") as advance:

        def report_step(report: StepReport) -> None:
            advance(report.step, steps)
            if report.step % max(1, steps // 10) == 0:
                print_status(
                    f"step {report.step}: {report.explained:.1%} explained, {report.dead} features dead"
                )

        yield report_step


@shared_options("Model")
def train(
    hook: Annotated[str, typer.Option(help="Hook to train on.")],
    layer: Annotated[int, typer.Option(help="Layer to train on.")],
    out: Annotated[Path, typer.Option(help="Directory to write the SAE to.")],
    store: Annotated[Path | None, typer.Option(help="Directory of stored captures (a tag).")] = None,
    texts: Annotated[str | None, typer.Option(help=f"Texts to run instead. {DATA_HELP}")] = None,
    view: Annotated[
        str, typer.Option(help="single; for streams: flat, per_stream, read or mean.")
    ] = "single",
    features: Features = 4096,
    k: Annotated[int, typer.Option(help="Active features per row; on average for all kinds but topk.")] = 32,
    kind: Annotated[
        str, typer.Option(help="batchtopk, matryoshka (both saved as jumprelu), topk, jumprelu or gated.")
    ] = "batchtopk",
    steps: Steps = 1000,
    batch_rows: BatchRows = 2048,
    rate: Rate = None,
    decay: Annotated[
        float, typer.Option(help="Final share of the steps over which the learning rate decays to 0.")
    ] = 0.3,
    dead_after: Annotated[
        int,
        typer.Option(
            help="Rows without activation after which a feature counts as dead and gets the auxiliary loss."
        ),
    ] = 100_000,
    products: Annotated[
        str | None,
        typer.Option(
            help="float32 or bfloat16; weights are float32. [default: bfloat16 on a GPU, else float32]"
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(help="Compute a batch in this many parts, to save memory.")] = 1,
    sparsity: Annotated[
        float | None, typer.Option(help="Weight of the penalty of jumprelu and gated. [default: 1]")
    ] = None,
    prefix: Annotated[
        list[int] | None,
        typer.Option(
            help="Features of a prefix of a matryoshka SAE; repeatable, ascending, the last is --features. "
            "[default: 1/16, 1/8, 1/4, 1/2 and all of them]"
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help="With --live on a GPU: share of its free memory for training; the model gets the rest."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed and rows give the same SAE.")] = 0,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Directory that keeps the rows of --texts, so that they are computed once. [default: OUT/rows]"
        ),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Keep no rows: run --texts again in every epoch.")
    ] = False,
    json: Json = False,
    **options: Any,
) -> None:
    """Train an SAE on stored captures, or on texts, whose rows are computed once and kept."""
    if (store is None) == (texts is None):
        raise OptionError("sae train needs --store DIR or --texts FILE, one of the two.")
    if store is not None and (rows is not None or live):
        raise OptionError(f"{'--live' if live else '--rows'} is for --texts; --store has rows already.")
    if rows is not None and live:
        raise OptionError("--live keeps no rows, and --rows says where to keep them. Give one of the two.")
    load_options, _ = split_options(options)
    from birkhoff.analysis.sae_rows import StoreRows
    from birkhoff.sae.train import TrainOptions

    device = _training_device(load_options.get("device"), texts is not None)
    if share is not None and (not live or device != "cuda"):
        raise OptionError(
            "--share divides a GPU between model and training: it needs --live and --device cuda."
        )
    train_options = TrainOptions(
        features,
        k=k,
        kind=kind,
        steps=steps,
        rate=rate,
        decay=decay,
        dead_after=dead_after,
        seed=seed,
        products=products or ("bfloat16" if device == "cuda" else "float32"),
        accumulate=accumulate,
        sparsity=sparsity,
        prefixes=tuple(prefix) if prefix else None,
    )
    run = _TrainingRun(train_options, hook, layer, view, batch_rows, device, out, json)
    if store is not None:
        run.train(StoreRows(store, hook, layer, view, batch_rows, seed))
        return
    assert texts is not None
    if live:
        run.train_live(texts, load_options, share)
    else:
        run.train_kept(texts, load_options, out / "rows" if rows is None else rows)


@dataclass(frozen=True)
class _TrainingRun:
    """What is trained, on which rows, and where the result goes."""

    options: TrainOptions
    hook: str
    layer: int
    view: str
    batch_rows: int
    device: str
    out: Path
    json: bool

    def train(self, source: RowSource) -> None:
        """Train on the rows of `source` and print the result."""
        from birkhoff.analysis.sae_train import train_sae

        with training_progress(self.options.steps) as report_step:
            result = train_sae(source, self.options, self.out, progress=report_step, device=self.device)
        quality = result.quality
        print_status(
            f"{result.steps} steps, {result.rows} rows: {quality.explained_variance:.1%} of the variance explained "
            f"with {quality.l0:.1f} features a row, {quality.dead_share:.1%} dead"
        )
        path = str(self.out)
        typer.echo(json_module.dumps({"path": path, **result.to_json()}) if self.json else path)

    def train_live(self, texts: str, load_options: dict[str, Any], share: float | None) -> None:
        """Train while the model runs the texts, on a GPU with `share` of its free memory."""
        from birkhoff.analysis.sae_rows import LiveRows
        from birkhoff.analysis.sae_train import check_share, share_device

        most = None
        if share is not None:
            import torch

            model_bytes, most = share_device(share, torch.cuda.mem_get_info()[0])
            load_options = {"gpu_memory": model_bytes, **load_options}
        site = (self.hook, self.layer, self.view, self.batch_rows, self.options.seed)
        with open_engine(load_options, MAX_REQUESTS) as engine:
            live_rows = LiveRows(engine, list(token_ids(engine, texts)), *site, device=self.device)
            if most is not None:
                pool_rows = live_rows.pool_batches * self.batch_rows
                check_share(self.options, live_rows.width, self.batch_rows, pool_rows, most)
            self.train(live_rows)

    def train_kept(self, texts: str, load_options: dict[str, Any], kept: Path) -> None:
        """Compute the rows of the texts, keep them in the directory `kept`, and train on them without the model."""
        from birkhoff.analysis.sae_rows import kept_rows

        site = (self.hook, self.layer, self.view, self.batch_rows, self.options.seed)
        with open_engine(load_options, MAX_REQUESTS) as engine:
            data = open_texts(texts)
            description = data.describe()
            with progress_bar("running", "texts") as advance:
                source = kept_rows(
                    engine,
                    data,
                    kept,
                    *site,
                    source=description,
                    progress=lambda done: advance(done, description["texts"]),
                )
        size = sum(file.stat().st_size for file in kept.rglob("*") if file.is_file())
        print_status(f"rows of {description['texts']} texts are kept in {kept} ({format_bytes(size)})")
        self.train(source)


def _training_device(device: str | None, has_model: bool) -> str:
    """Where to train: with the model, which is on the GPU if there is one, or for stored rows on the CPU unless told
    otherwise."""
    import torch

    if device is None or device == "auto":
        return "cuda" if has_model and torch.cuda.is_available() else "cpu"
    kind = device.partition(":")[0]
    if kind == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device is cuda, but PyTorch sees no CUDA device. Train on the CPU: --device cpu")
    return kind


def token_ids(engine: Engine, data: str, sae: Sae | None = None) -> Iterator[list[int]]:
    """The tokens of every text of a data set, begun as the dictionary expects it."""
    from birkhoff.analysis.sae_rows import text_ids

    for text in read_texts(data):
        if not isinstance(text, str):
            yield engine.encode_chat(text)
        else:
            yield engine.prompt_ids(text) if sae is None else text_ids(engine, sae, text)
