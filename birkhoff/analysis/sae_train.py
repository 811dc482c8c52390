"""Trains an SAE on a row source, with progress reports and resumption of interrupted runs.

The trainer state and the position in the source are written to the output directory at intervals. A later call with the
same settings continues from there and gives the same SAE, bit for bit, as an uninterrupted run; different settings are
an error. The state is deleted when training is complete.

A model and a trainer may share one GPU: `share_device` divides its memory.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from birkhoff import notebook
from birkhoff.analysis.sae_rows import LiveBatches, LiveRows, RowSource
from birkhoff.atomic_file import remove_partials, save_tensors, write_atomic
from birkhoff.byte_size import format_bytes
from birkhoff.errors import OptionError, SaeError, SaeFileError
from birkhoff.option_checks import check_float
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.evaluate import Quality, quality
from birkhoff.sae.train import StepReport, Trainer, TrainOptions, training_bytes
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
    device: torch.device | str = "cpu",
) -> TrainResult:
    """Train an SAE on `device` and save it to `out` if given; a checkpoint is written there every `every` steps. The
    result is the same after an interruption, bit for bit, on the same kind of device. A dictionary of the view "read"
    gets the spread "read"; `sae.at(hook, layer, "read", spread)` has another."""
    device = torch.device(device)
    settings = {
        "options": asdict(options),
        "hook": source.hook,
        "layer": source.layer,
        "view": source.view,
        "source": getattr(source, "batch_rows", None),
        "device": device.type,
    }
    feed = _EpochFeed(source)
    trainer = restore_trainer(out, options, settings, device, feed) if out is not None else None
    rows: torch.Tensor | None = None
    if trainer is None:
        rows = feed.next()
        trainer = Trainer(options, rows, device=device)
    bar = notebook.progress("training", options.steps) if progress is None else None
    while trainer.done < options.steps:
        report = trainer.step(feed.next() if rows is None else rows)
        rows = None
        if bar is not None:
            bar(trainer.done)
        if progress is not None:
            progress(report)
        if out is not None and trainer.done % every == 0 and trainer.done < options.steps:
            save_checkpoint(out, trainer, settings, feed)
    last_batches = [feed.next() for _ in range(FINISH_BATCHES)]
    metadata = {"training": asdict(options) | {"rows": trainer.rows_seen}}
    sae = trainer.finish(
        last_batches,
        hook=source.hook,
        layer=source.layer,
        view=source.view,
        spread="read" if source.view == "read" else None,
        metadata=metadata,
    )
    steps, rows_seen = trainer.done, trainer.rows_seen
    del trainer  # its memory is needed to judge the result
    if out is not None:
        sae.save(out)
        (out / STATE).unlink(missing_ok=True)
        (out / SETTINGS).unlink(missing_ok=True)
    return TrainResult(
        sae, quality(sae.to(device), (batch.to(device) for batch in last_batches)), steps, rows_seen
    )


class _EpochFeed:
    """The batches of a source, epoch after epoch without end."""

    def __init__(self, source: RowSource):
        self._source = source
        self.go_to({"epoch": 0, "batches": 0})

    def next(self) -> torch.Tensor:
        rows = next(self._batches, None)
        if rows is None:
            if not self._count:
                raise SaeError(
                    "the source has no rows, or fewer than one batch. Capture more, or lower batch_rows."
                )
            self.go_to({"epoch": self._epoch + 1, "batches": 0})
            return self.next()
        self._count += 1
        return rows

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._epoch, "batches": self._count}
        if isinstance(self._batches, LiveBatches):
            state["stream"] = self._batches.state()
        return state

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: texts from their stream's, other sources by passing over the batches of the epoch."""
        self._epoch, self._count = int(state["epoch"]), int(state["batches"])
        if isinstance(self._source, LiveRows):
            self._batches: Iterator[torch.Tensor] = self._source.resumed(self._epoch, state.get("stream"))
        else:
            self._batches = itertools.islice(self._source.batches(self._epoch), self._count, None)


def restore_trainer(
    out: Path,
    options: TrainOptions,
    settings: dict[str, Any],
    device: torch.device | str = "cpu",
    feed: _EpochFeed | None = None,
) -> Trainer | None:
    """Return the trainer of an interrupted run in `out`, with `feed` where that run was; or None.

    What a killed run was writing is deleted: a state can be as large as all memory of the training."""
    remove_partials(out)
    try:
        saved = read_json(out / SETTINGS)
        with safe_open(out / STATE, "pt") as stored:
            position = json.loads(stored.metadata()["source"])
            state = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  not a mapping
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise SaeFileError(
            f"{out} holds a training state that cannot be read ({error}). Remove it to begin anew."
        ) from None
    if saved != json.loads(json.dumps(settings)):
        raise SaeError(
            f"{out} holds the state of a training with other settings ({json.dumps(saved)}). Use the same ones to go "
            "on, or another directory."
        )
    if feed is not None:
        feed.go_to(position)
    return Trainer.restored(options, state, device)


def save_checkpoint(
    out: Path, trainer: Trainer, settings: dict[str, Any], feed: _EpochFeed | None = None
) -> None:
    """Write settings and trainer state atomically; settings first, so that a state is never without them."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in trainer.state().items()}
    write_atomic(out / SETTINGS, json.dumps(settings), sync=False)
    save_tensors(out / STATE, state, {"source": json.dumps(None if feed is None else feed.state())})


def share_device(share: float, free_bytes: int) -> tuple[int, int]:
    """Bytes of a device for the model and for training, which gets `share` of what is free."""
    check_float("share", share, 0.0, 1.0, exclude_low=True)
    if share == 1.0:
        raise OptionError("share is 1, which leaves nothing for the model. Give less, or train on --store.")
    training = int(share * free_bytes)
    return free_bytes - training, training


def check_share(options: TrainOptions, width: int, batch_rows: int, buffer_rows: int, most: int) -> int:
    """The bytes that training needs, with a buffer of rows on the device; an `OptionError` if they are more than
    `most`."""
    needed = training_bytes(options, width, batch_rows) + 4 * width * buffer_rows
    if needed > most:
        raise OptionError(
            f"training {options.features} features on rows of {width} needs {format_bytes(needed)}, and its share of "
            f"the device is {format_bytes(most)}. Raise --share, or lower --features or --batch-rows."
        )
    return needed
