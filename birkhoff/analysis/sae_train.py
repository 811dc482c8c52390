"""Trains an SAE on a row source, with progress reports and resumption of interrupted runs.

The trainer state is written to the output directory at intervals. A later call with the same settings continues from
it, skips the batches already seen and gives the same SAE, bit for bit, as an uninterrupted run; different settings
are an error. The state is deleted when training is complete.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from birkhoff import notebook
from birkhoff.analysis.sae_rows import RowSource
from birkhoff.atomic_file import write_atomic
from birkhoff.errors import SaeError, SaeFileError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.evaluate import Quality, quality
from birkhoff.sae.train import StepReport, Trainer, TrainOptions
from birkhoff.small_file import read_json

STATE, SETTINGS = "training.safetensors", "training.json"
FINISH_BATCHES = 16  # batches for the threshold, the largest activations and the quality

ProgressCallback = Callable[[StepReport], None]


@dataclass(frozen=True)
class TrainResult:
    """The SAE and its quality on rows of the last epoch."""

    sae: Sae
    quality: Quality
    steps: int
    rows: int

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "trained_rows": self.rows, **self.quality.to_json()}


def train_sae(
    source: RowSource,
    options: TrainOptions,
    out: Path | None = None,
    *,
    every: int = 200,
    progress: ProgressCallback | None = None,
) -> TrainResult:
    """Train an SAE and save it to `out` if given; a checkpoint is written there every `every` steps."""
    settings = {
        "options": asdict(options),
        "hook": source.hook,
        "layer": source.layer,
        "view": source.view,
        "source": getattr(source, "batch_rows", None),
    }
    trainer = restore_trainer(out, options, settings) if out is not None else None
    batches = _repeat(source)
    if trainer is None:
        first = next(batches)
        trainer = Trainer(options, first)
        batches = itertools.chain([first], batches)
    for _ in range(trainer.done):
        next(batches)
    bar = notebook.progress("training", options.steps) if progress is None else None
    while trainer.done < options.steps:
        report = trainer.step(next(batches))
        if bar is not None:
            bar(trainer.done)
        if progress is not None:
            progress(report)
        if out is not None and trainer.done % every == 0 and trainer.done < options.steps:
            save_checkpoint(out, trainer, settings)
    last_batches = [next(batches) for _ in range(FINISH_BATCHES)]
    metadata = {"training": asdict(options) | {"rows": trainer.rows_seen}}
    sae = trainer.finish(
        last_batches, hook=source.hook, layer=source.layer, view=source.view, metadata=metadata
    )
    if out is not None:
        sae.save(out)
        (out / STATE).unlink(missing_ok=True)
        (out / SETTINGS).unlink(missing_ok=True)
    return TrainResult(sae, quality(sae, last_batches), trainer.done, trainer.rows_seen)


def _repeat(source: RowSource) -> Iterator[torch.Tensor]:
    """Yield batches epoch after epoch without end."""
    for epoch in itertools.count():
        empty = True
        for batch in source.batches(epoch):
            empty = False
            yield batch
        if empty:
            raise SaeError(
                "the source has no rows, or fewer than one batch. Capture more, or lower batch_rows."
            )


def restore_trainer(
    out: Path, options: TrainOptions, settings: dict[str, Any], device: torch.device | str = "cpu"
) -> Trainer | None:
    """Return the trainer of an interrupted run in `out`, or None."""
    try:
        saved = read_json(out / SETTINGS)
        state = load_file(out / STATE)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, SafetensorError) as error:
        raise SaeFileError(
            f"{out} holds a training state that cannot be read ({error}). Remove it to begin anew."
        ) from None
    if saved != json.loads(json.dumps(settings)):
        raise SaeError(
            f"{out} holds the state of a training with other settings ({json.dumps(saved)}). Use the same ones to go "
            "on, or another directory."
        )
    return Trainer.restored(options, state, device)


def save_checkpoint(out: Path, trainer: Trainer, settings: dict[str, Any]) -> None:
    """Write settings and trainer state atomically; settings first, so that a state is never without them."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in trainer.state().items()}
    write_atomic(out / SETTINGS, json.dumps(settings), sync=False)
    write_atomic(out / STATE, save(state), sync=False)
