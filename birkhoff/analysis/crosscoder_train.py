"""Trains a crosscoder or transcoder on rows of several sites of the same tokens.

Rows come from a harvest of all its sites. Batches have rows of many texts: requests are read in an order drawn by the
seed and their rows mixed in a pool; every row is used once per epoch. A checkpoint in the output directory makes an
interrupted run continue to the same dictionary.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.analysis.sae_train import SETTINGS as TRAINING
from birkhoff.analysis.sae_train import STATE, restore_trainer, save_checkpoint
from birkhoff.capture.store.request_reader import RequestReader
from birkhoff.capture.store.row_reader import stored_sites
from birkhoff.data.export_rows import tag_directory
from birkhoff.errors import CaptureFileError, OptionError
from birkhoff.hooks.site_names import Address
from birkhoff.option_checks import check_int
from birkhoff.sae.crosscoder import Crosscoder, CrossMeasure, SitePart
from birkhoff.sae.train import StepReport, Trainer, TrainOptions

POOL_BATCHES = 8
FINISH_BATCHES = 16
Batch = tuple[torch.Tensor, torch.Tensor]  # rows of the inputs and of the outputs, side by side


@dataclass(frozen=True)
class CrosscoderResult:
    """The dictionary and its quality on rows of the last epoch."""

    crosscoder: Crosscoder
    quality: Mapping[str, Any]
    steps: int
    rows: int

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.crosscoder.kind, "steps": self.steps, "trained_rows": self.rows, **self.quality}


class SiteRowSource:
    """Rows of several sites of the same tokens, from a harvest. `views` names the view of hooks with streams."""

    def __init__(
        self,
        run: str | Path,
        inputs: Sequence[Address],
        outputs: Sequence[Address] | None = None,
        *,
        stream_view: str = "flat",
        batch_rows: int = 2048,
        seed: int = 0,
        skip: int = 1,
    ):
        check_int("batch_rows", batch_rows)
        self._directory = tag_directory(run)
        self.batch_rows, self._seed, self._skip = batch_rows, seed, skip
        stored = stored_sites(self._directory)

        def part(address: Address) -> SitePart:
            if address not in stored:
                names = ", ".join(f"{hook}.{layer}" for hook, layer in stored)
                raise CaptureFileError(
                    f"{self._directory} holds no rows of {address[0]}.{address[1]}, expected sites among {names[:400]}."
                )
            shape = stored[address].row_shape
            view = stream_view if address[0].startswith("mhc_streams") else "single"
            width = shape[-1] if view == "mean" else int(torch.Size(shape).numel())
            return SitePart(*address, view, width)

        self.inputs = tuple(part(address) for address in inputs)
        self.outputs = self.inputs if outputs is None else tuple(part(address) for address in outputs)

    @property
    def same(self) -> bool:
        return self.inputs == self.outputs

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Batches of one epoch; a remainder smaller than a batch is left out."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        pool: list[Batch] = []
        count = 0
        for inputs, outputs in self._texts(generator, verify=epoch == 0):
            pool.append((inputs, outputs))
            count += len(inputs)
            if count >= POOL_BATCHES * self.batch_rows:
                rows = _shuffled(pool, generator)
                half = max(1, count // 2 // self.batch_rows) * self.batch_rows
                yield from _cut(rows, half, self.batch_rows)
                pool, count = [(rows[0][half:], rows[1][half:])], count - half
        if count >= self.batch_rows:
            rows = _shuffled(pool, generator)
            yield from _cut(rows, count // self.batch_rows * self.batch_rows, self.batch_rows)

    def _texts(self, generator: torch.Generator, verify: bool) -> Iterator[Batch]:
        """Rows of every text, without the first tokens, in an order drawn for the epoch."""
        sites = list(dict.fromkeys((*self.inputs, *self.outputs)))
        readers = [RequestReader(self._directory, site.hook, site.layer) for site in sites]
        try:
            numbers = [reader.numbers() for reader in readers]
            names = list(numbers[0])
            for index in torch.randperm(len(names), generator=generator).tolist():
                name = names[index]
                entries = [
                    reader.read(of[name], verify) for reader, of in zip(readers, numbers) if name in of
                ]
                positions = entries[0].positions or []
                if len(entries) < len(sites) or any(entry.positions != positions for entry in entries):
                    raise CaptureFileError(
                        f"request {name} has rows of its sites at different positions. Harvest all sites of "
                        "a crosscoder together, at the same positions."
                    )
                kept = [row for row, position in enumerate(positions) if position >= self._skip]
                rows = {
                    site: site.read(torch.from_numpy(entry.array)[kept])
                    for site, entry in zip(sites, entries)
                }
                if kept:
                    inputs = torch.cat([rows[site] for site in self.inputs], 1)
                    outputs = inputs if self.same else torch.cat([rows[site] for site in self.outputs], 1)
                    yield inputs, outputs
        finally:
            for reader in readers:
                reader.close()


def train_crosscoder(
    source: SiteRowSource,
    options: TrainOptions,
    out: Path | None = None,
    *,
    device: torch.device | str = "cpu",
    every: int = 200,
    half: bool = False,
    progress: Callable[[StepReport], None] | None = None,
) -> CrosscoderResult:
    """Train on a source and save to `out` if given; with `half` matrices are saved in bfloat16."""
    settings = {
        "options": asdict(options),
        "inputs": [asdict(site) for site in source.inputs],
        "outputs": [asdict(site) for site in source.outputs],
        "batch_rows": source.batch_rows,
    }
    trainer = None if out is None else restore_trainer(out, options, settings, device)
    batches = _repeat(source)
    if trainer is None:
        first = next(batches)
        parts = [site.width for site in source.inputs]
        targets = None if source.same else first[1]
        target_parts = None if source.same else [site.width for site in source.outputs]
        trainer = Trainer(options, first[0], targets, parts, target_parts, device)
        batches = itertools.chain([first], batches)
    for _ in range(trainer.done):
        next(batches)
    while trainer.done < options.steps:
        inputs, outputs = next(batches)
        report = trainer.step(inputs, None if source.same else outputs)
        if progress is not None:
            progress(report)
        if out is not None and trainer.done % every == 0 and trainer.done < options.steps:
            save_checkpoint(out, trainer, settings)
    last = [next(batches) for _ in range(FINISH_BATCHES)]
    metadata = {"training": json.loads(json.dumps(asdict(options))) | {"rows": trainer.rows_seen}}
    sae = trainer.finish((inputs for inputs, _ in last), metadata=metadata, transcodes=True)
    crosscoder = Crosscoder(sae, source.inputs, None if source.same else source.outputs)
    if out is not None:
        crosscoder.save(out, half)
        crosscoder = Crosscoder.load(out)
        for name in (STATE, TRAINING):
            (out / name).unlink(missing_ok=True)
    measure = CrossMeasure(crosscoder)
    for inputs, outputs in last:
        measure.add(inputs, outputs)
    return CrosscoderResult(crosscoder, measure.result(), trainer.done, trainer.rows_seen)


def _repeat(source: SiteRowSource) -> Iterator[Batch]:
    for epoch in itertools.count():
        empty = True
        for batch in source.batches(epoch):
            empty = False
            yield batch
        if empty:
            raise OptionError(
                f"the harvest has fewer rows than a batch of {source.batch_rows}. Harvest more, or lower batch_rows."
            )


def _shuffled(pool: list[Batch], generator: torch.Generator) -> Batch:
    inputs = torch.cat([batch[0] for batch in pool])
    order = torch.randperm(len(inputs), generator=generator)
    if all(batch[0] is batch[1] for batch in pool):
        rows = inputs[order]
        return rows, rows
    return inputs[order], torch.cat([batch[1] for batch in pool])[order]


def _cut(rows: Batch, count: int, size: int) -> Iterator[Batch]:
    for first in range(0, count, size):
        yield rows[0][first : first + size], rows[1][first : first + size]
