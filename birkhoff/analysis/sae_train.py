"""Train a dictionary on a source of rows, with progress, and such that a run that was killed goes on.

A trainer's state is written beside the result every so often; a later call with the same settings begins from it,
skips the batches it has seen and ends with the same dictionary, bit for bit, as a run that was never stopped. Settings
that differ are refused. The state is taken away when the dictionary is done.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from birkhoff.analysis.sae_rows import RowSource
from birkhoff.errors import SaeError, SaeFileError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.evaluate import Quality, quality
from birkhoff.sae.train import StepReport, Trainer, TrainOptions

STATE, SETTINGS = "training.safetensors", "training.json"
FINISH_BATCHES = 16  # threshold, largest activations and quality are found on this many batches

Tell = Callable[[StepReport], None]


@dataclass(frozen=True)
class Trained:
    """The dictionary, and how well it does on rows of its last epoch."""

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
    tell: Tell | None = None,
    metadata: dict[str, Any] | None = None,
) -> Trained:
    """Train, and write the dictionary to `out` when it is given; `every` so many steps the state is kept there."""
    settings = {
        "options": asdict(options),
        "hook": source.hook,
        "layer": source.layer,
        "view": source.view,
        "source": getattr(source, "batch_rows", None),
    }
    trainer = _resumed(out, options, settings) if out is not None else None
    batches = _endless(source)
    if trainer is None:
        first = next(batches)
        trainer = Trainer(options, first)
        batches = itertools.chain([first], batches)
    for _ in range(trainer.done):
        next(batches)
    while trainer.done < options.steps:
        report = trainer.step(next(batches))
        if tell is not None:
            tell(report)
        if out is not None and trainer.done % every == 0 and trainer.done < options.steps:
            _keep(out, trainer, settings)
    some = [next(batches) for _ in range(FINISH_BATCHES)]
    said = {**(metadata or {}), "training": asdict(options) | {"rows": trainer.rows_seen}}
    sae = trainer.finish(some, hook=source.hook, layer=source.layer, view=source.view, metadata=said)
    if out is not None:
        sae.save(out)
        (out / STATE).unlink(missing_ok=True)
        (out / SETTINGS).unlink(missing_ok=True)
    return Trained(sae, quality(sae, some), trainer.done, trainer.rows_seen)


def _endless(source: RowSource) -> Iterator[torch.Tensor]:
    for epoch in itertools.count():
        empty = True
        for batch in source.batches(epoch):
            empty = False
            yield batch
        if empty:
            raise SaeError(
                "the source has no rows, or fewer than one batch. Capture more, or lower batch_rows."
            )


def _resumed(out: Path, options: TrainOptions, settings: dict[str, Any]) -> Trainer | None:
    try:
        known = json.loads((out / SETTINGS).read_bytes())
        state = load_file(out / STATE)
    except FileNotFoundError:
        return None
    except (ValueError, OSError, SafetensorError) as error:
        raise SaeFileError(
            f"{out} holds a training state that cannot be read ({error}). Remove it to begin anew."
        ) from None
    if known != json.loads(json.dumps(settings)):
        raise SaeError(
            f"{out} holds the state of a training with other settings ({json.dumps(known)}). Use the same ones to go "
            "on, or another directory."
        )
    return Trainer.restored(options, state)


def _keep(out: Path, trainer: Trainer, settings: dict[str, Any]) -> None:
    """Whole or not at all: settings first, so that a state is never without them."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in trainer.state().items()}
    for name, data in ((SETTINGS, json.dumps(settings).encode()), (STATE, save(state))):
        fresh = out / f"{name}.tmp"
        fresh.write_bytes(data)
        os.replace(fresh, out / name)
