"""Speed of harvesting activations on a device, beside reading the prompts alone and the limits of bus and disk.

    prompts        the texts run without any capture
    device         `stream_acts` to the model's device
    shuffled       the same, shuffled over a buffer
    host           `stream_acts` to host memory; `share_of_limit` compares it with the slower of the bus and of reading
    files          `harvest` to files, durable at the end; beside the disk's own speed in the same folder

Each is measured for the streams of one layer and for those of all layers, and all on the same texts. `share_of_prompts`
is tokens per second divided by those of the prompts alone in the same run. The bus is a copy of a gigabyte to pinned
memory, the disk a file of as many bytes as were stored, written and synced; files of one layer are made of as many more
texts that they have the bytes of all layers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import birkhoff
from birkhoff.analysis.harvest import harvest
from birkhoff.api.engine import Engine
from birkhoff.bench.goodput import random_core
from birkhoff.bench.report import Row, check_positive, facts, significant
from birkhoff.bench.timing import disk_seconds, synchronize
from birkhoff.capture.spec.request import Capture
from birkhoff.convert.presets import preset
from birkhoff.data.texts import DatasetText

BUS_BYTES = 1 << 30


@dataclass(frozen=True)
class HarvestSetting:
    """`texts` prompts of `tokens` random tokens each."""

    texts: int = 256
    tokens: int = 1024
    batch_rows: int = 4096
    shuffle_rows: int = 65_536
    file_texts: int = 32

    def __post_init__(self) -> None:
        check_positive(self)


def bench_harvest(
    model: str | None = None,
    device: str = "cuda",
    setting: HarvestSetting | None = None,
    *,
    layers: int = 4,
    disk: str | Path | None = None,
) -> Iterator[Row]:
    """Rows for a checkpoint, or for random weights of full width on a GPU with `layers` layers."""
    setting = setting or HarvestSetting()
    with tempfile.TemporaryDirectory(prefix="birkhoff-bench-", dir=disk) as folder:
        if model is not None:
            engine = birkhoff.load(model, device=device, prefix_cache=False)
        else:
            core = random_core(preset("flash", layers, False), layers, 64, 4096)
            engine = Engine(core, None, None, name=f"random flash, {layers} layers")
        with engine:
            yield from measure(engine, setting, Path(folder))


def measure(engine: Engine, setting: HarvestSetting, folder: Path) -> Iterator[Row]:
    """All rows of one engine."""
    device = engine.model.device
    generator = torch.Generator().manual_seed(0)

    def texts(count: int) -> list[list[int]]:
        """Other tokens every time, so that no prefix is known."""
        ids = torch.randint(engine.config.vocab_size, (count, setting.tokens), generator=generator)
        return [row.tolist() for row in ids]

    common = facts() | {"bench": "harvest", "model": engine.name, "device": device.type, **vars(setting)}
    total = setting.texts * setting.tokens
    _run_prompts(engine, texts(setting.texts))
    alone = total / _seconds(device, _run_prompts, engine, texts(setting.texts))
    yield common | {"kind": "prompts", "tokens_per_second": significant(alone)}
    bus = _bus_rate(device)
    if bus is not None:
        yield common | {"kind": "bus", "gb_per_second": significant(bus / 1e9)}
    middle = engine.config.num_hidden_layers // 2
    for sites, layers in (("one layer", [middle]), ("all layers", "all")):
        capture = Capture({"mhc_streams_pre_attn": layers})
        options: dict[str, dict[str, Any]] = {
            "device": {"device": device},
            "shuffled": {"device": device, "shuffle_rows": setting.shuffle_rows},
            "host": {},
        }
        for kind, keywords in options.items():
            consumer = _CountedStream(engine, capture, setting.batch_rows, keywords)
            consumer(texts(max(1, setting.texts // 4)))
            seconds = _seconds(device, consumer, texts(setting.texts))
            num_bytes = consumer.bytes
            assert consumer.rows == total, "every token has a row"
            row = common | {
                "kind": kind,
                "sites": sites,
                "tokens_per_second": significant(total / seconds),
                "gb_per_second": significant(num_bytes / seconds / 1e9),
                "share_of_prompts": significant(total / seconds / alone),
            }
            if kind == "host" and bus is not None:
                limit = min(bus, alone * num_bytes / total)
                row["share_of_limit"] = significant(num_bytes / seconds / limit)
            yield row
        times = engine.config.num_hidden_layers if layers == [middle] else 1
        data = texts(times * setting.file_texts)
        yield common | {"kind": "files", "sites": sites, **_files(engine, data, capture, folder / sites)}


class _CountedStream:
    """Iterates over a stream and counts what it handed out."""

    def __init__(self, engine: Engine, capture: Capture, batch_rows: int, options: dict[str, Any]):
        self._engine, self._capture = engine, capture
        self._batch_rows, self._options = batch_rows, options
        self.rows = self.bytes = 0

    def __call__(self, texts: list[list[int]]) -> None:
        self.rows = self.bytes = 0
        for batch in self._engine.stream_acts(texts, self._capture, self._batch_rows, **self._options):
            self.rows += len(batch)
            self.bytes += sum(rows.tensor.nbytes for rows in batch.sites.values())


def _files(engine: Engine, texts: list[list[int]], capture: Capture, folder: Path) -> Row:
    """The speed of a harvest to files, and of the disk with as many bytes right after it."""
    data = [
        DatasetText(index, f"text {index}", prompt=ids)  # type: ignore[arg-type]
        for index, ids in enumerate(texts)
    ]
    began = time.perf_counter()
    report = harvest(engine, data, capture, folder)
    seconds = time.perf_counter() - began
    disk = disk_seconds(folder, report.bytes)
    tokens = sum(map(len, texts))
    return {
        "tokens_per_second": significant(tokens / seconds),
        "gb_per_second": significant(report.bytes / seconds / 1e9),
        "disk_gb_per_second": significant(report.bytes / disk / 1e9),
        "share_of_disk": significant(disk / seconds),
    }


def _run_prompts(engine: Engine, texts: list[list[int]]) -> None:
    engine.generate(texts, max_tokens=1, temperature=0)


def _seconds(device: torch.device, work: Callable[..., object], *arguments: object) -> float:
    synchronize(device)
    began = time.perf_counter()
    work(*arguments)
    synchronize(device)
    return time.perf_counter() - began


def _bus_rate(device: torch.device) -> float | None:
    """Bytes per second from the device to pinned host memory; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(BUS_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(BUS_BYTES, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    return (
        4 * BUS_BYTES / _seconds(device, lambda: [target.copy_(source, non_blocking=True) for _ in range(4)])
    )
