"""A harvest on the machines of a Ray cluster: a pool of actors with one engine each, fed and supervised by Ray Data.

One task reads the data set and hands out parts of `part_texts` texts; Ray Data gives them to the actors, holds back
the reader while they are busy, restarts an actor whose process or machine dies and runs its part again. This process
joins complete parts (`analysis/harvest_parts.py`), so that a part is run again only for its texts that were not yet
stored. `out` and the data must be reachable from every machine under the same path, and Birkhoff must be installed
there. Needs the extra `ray`.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from birkhoff.analysis.harvest import HarvestReport
from birkhoff.analysis.harvest_parts import PartJoiner, harvest_part, split_texts
from birkhoff.capture.spec.request import Capture
from birkhoff.data.texts import DatasetText, open_texts
from birkhoff.errors import BirkhoffError, OptionError, quoted
from birkhoff.extras import require
from birkhoff.option_checks import check_int

PART_TEXTS = 256
MAX_REQUESTS = 8


class HarvestActor:
    """One engine. Called by Ray Data with one part at a time; returns its number and report."""

    def __init__(self, options: Mapping[str, Any], capture: Mapping[str, Any], job: Mapping[str, Any]):
        import birkhoff

        options = {"max_requests": MAX_REQUESTS, "batch_invariant": True, **options}
        self._engine = birkhoff.load(options.pop("model", "nano"), **options)
        self._capture = Capture.from_json(capture)
        self._job = job

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        numbers, reports = [], []
        for number, texts in zip(batch["part"], batch["texts"]):
            report: dict[str, Any]
            try:
                report = harvest_part(
                    self._engine,
                    [DatasetText(**fields) for fields in json.loads(texts)],
                    self._capture,
                    self._job["out"],
                    int(number),
                    source=self._job["source"],
                    skip_bad=self._job["skip_bad"],
                ).to_json()
            # Sent as data: Ray would wrap it, and the caller expects our classes.
            except BirkhoffError as error:
                report = {"error": [type(error).__name__, str(error)]}
            numbers.append(int(number))
            reports.append(json.dumps(report))
        return {"part": numbers, "report": reports}


def capture_on_ray(
    address: str,
    data: str | Path,
    capture: Capture,
    out: str | Path,
    load_options: Mapping[str, Any] | None = None,
    *,
    actors: int | None = None,
    gpus: float | None = None,
    cpus: float = 1,
    part_texts: int = PART_TEXTS,
    text_field: str = "text",
    whole_file: bool = False,
    limit: int | None = None,
    skip_bad: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> HarvestReport:
    """Store the rows of every text of a data set with a pool of actors; an interrupted run resumes.

    `address` is that of a cluster ("auto", "host:6379", "ray://host:10001"), or "local" for this machine. `actors` is
    their number, by default one per GPU of the cluster, or per machine if there is none; each has `gpus` GPUs (by
    default 1 if the cluster has some) and `cpus` CPUs. `load_options` are those of `birkhoff.load`, with `model`.
    """
    check_int("part_texts", part_texts)
    if actors is not None:
        check_int("actors", actors)
    ray = require("ray", "capturing on a cluster")
    require("ray.data", "capturing on a cluster")
    start = time.monotonic()
    source = open_texts(data, text_field, whole_file)
    description = source.describe()
    total = min((count for count in (limit, description["texts"]) if count is not None), default=None)
    root = Path(out).resolve()
    ours = _connect(ray, address)
    try:
        with PartJoiner(root, capture, description) as joiner:
            reader = {
                "data": str(Path(data).resolve()) if Path(data).exists() else str(data),
                "options": (text_field, whole_file),
                "limit": limit,
                "part_texts": part_texts,
                "done": sorted(joiner.done),
            }
            job = {"out": str(root), "source": description, "skip_bad": skip_bad}
            constructor = (dict(load_options or {}), capture.to_json(), job)
            # Closed here also after an error, whose traceback would keep the actors and their CPUs.
            with closing(_parts(ray, reader, actors, gpus, cpus, constructor)) as parts:
                for row in parts:
                    _raise(row)
                    joiner.commit(row["part"])
                    part, report = row["report"], joiner.report
                    report.skipped += part["skipped"]
                    report.bad_texts += part["bad_texts"][: 20 - len(report.bad_texts)]
                    if progress is not None:
                        progress(len(joiner.done) + report.skipped, total)
            joiner.report.seconds = time.monotonic() - start
            return joiner.report
    finally:
        if ours:
            ray.shutdown()


def read_parts(_: Mapping[str, Any], reader: Mapping[str, Any]) -> Iterator[dict[str, list[Any]]]:
    """Task of the cluster that reads the data set and yields the parts that miss texts, one at a time."""
    texts = itertools.islice(open_texts(reader["data"], *reader["options"]), reader["limit"])
    for number, missing in split_texts(texts, reader["part_texts"], frozenset(reader["done"])):
        yield {"part": [number], "texts": [json.dumps([asdict(text) for text in missing])]}


def _connect(ray: Any, address: str) -> bool:
    """Connect to the cluster, or start one here. Returns whether this call did it."""
    if ray.is_initialized():
        return False
    if not address:
        raise OptionError("the address of Ray is empty, expected auto, local, HOST:6379 or ray://HOST:10001.")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdigit():  # Ray itself tries an address where nothing listens for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()
        options: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
        if address == "local":
            options["include_dashboard"] = False
        ray.init(address=address, **options)
    except (OSError, OverflowError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"there is no Ray cluster at {quoted(address)} ({str(error)[:300]}). Start one (ray start), or give "
            "local for this machine alone."
        ) from None
    return True


def _parts(
    ray: Any,
    reader: Mapping[str, Any],
    actors: int | None,
    gpus: float | None,
    cpus: float,
    constructor: tuple[Any, ...],
) -> Generator[dict[str, Any], None, None]:
    """Run all parts and yield their numbers and reports as they end."""
    resources = ray.cluster_resources()
    present = int(resources.get("GPU", 0))
    each = (1.0 if present else 0.0) if gpus is None else gpus
    nodes = sum(1 for node in ray.nodes() if node["Alive"])
    count = actors or (max(1, int(present / each)) if each else nodes)
    context = ray.data.DataContext.get_current()
    kept = context.target_max_block_size, context.enable_progress_bars
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    # A block per part: blocks are what Ray Data schedules, repeats and limits.
    context.target_max_block_size, context.enable_progress_bars = 1, False
    try:
        rows = ray.data.from_items([{"start": 0}], override_num_blocks=1)
        # The reader takes no CPU from the actors; other resources than theirs also keep the two apart.
        parts = rows.map_batches(read_parts, batch_size=None, fn_kwargs={"reader": dict(reader)}, num_cpus=0)
        done = parts.map_batches(
            HarvestActor,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=2),
            fn_constructor_args=constructor,
            num_cpus=cpus,
            num_gpus=each or None,
        )
        for row in done.iter_rows():
            yield {"part": int(row["part"]), "report": json.loads(row["report"])}
    finally:
        context.target_max_block_size, context.enable_progress_bars = kept


def _raise(row: Mapping[str, Any]) -> None:
    """Raise the error of a part as it was raised in its actor."""
    import birkhoff.errors

    if "error" in row["report"]:
        name, message = row["report"]["error"]
        raise getattr(birkhoff.errors, name, BirkhoffError)(message)
