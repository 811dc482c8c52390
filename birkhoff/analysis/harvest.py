"""Stores activations of a whole data set in capture files; an interrupted run loses only the texts in progress.

Every text is one request, named by its index in the data set, and is complete when its rows are on disk. A run first
repairs the files an earlier run left, removes incomplete texts, and continues with those that are missing. The
resulting store is byte-identical, text by text, to that of an uninterrupted run, provided that rows do not depend on
which texts share a batch: load the engine with `batch_invariant=True`. Memory does not grow with the data: a bounded
number of texts is in the engine or waits for the disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from birkhoff import notebook
from birkhoff.analysis import run_manifest
from birkhoff.capture.planner import FILES, CapturePlanner
from birkhoff.capture.spec.request import Capture
from birkhoff.capture.store.finished import forget, survey
from birkhoff.capture.store.naming import slug
from birkhoff.capture.store.repair import repair
from birkhoff.data.texts import DatasetText
from birkhoff.engine.request import Request
from birkhoff.errors import (
    CapacityError,
    CaptureWriteError,
    DataError,
    LogitsError,
    OptionError,
    RequestError,
)

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TAG = "harvest"
MAX_WAITING = 64  # texts that have run and wait for the disk; batching them lets one sync serve many

ProgressCallback = Callable[[int], None]  # number of texts processed


@dataclass
class HarvestReport:
    """Content of the store and what this run added. Rows are counted over all hooks and layers."""

    out: str
    texts: int = 0
    rows: int = 0
    bytes: int = 0
    new_texts: int = 0
    new_rows: int = 0
    forgotten_texts: int = 0  # left incomplete by an earlier run and run again
    bad_texts: list[str] = field(default_factory=list)  # problems of the first 20
    skipped: int = 0
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass
class HarvestEstimate:
    """What a harvest would store. `exact` is False if a token filter decides during the run."""

    texts: int = 0
    tokens: int = 0
    rows: int = 0
    bytes: int = 0
    bytes_by_hook: dict[str, int] = field(default_factory=dict)
    exact: bool = True
    bad_texts: list[str] = field(default_factory=list)
    skipped: int = 0

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def harvest(
    engine: Engine,
    texts: Iterable[DatasetText | str],
    capture: Capture,
    out: str | Path,
    *,
    source: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    progress: ProgressCallback | None = None,
) -> HarvestReport:
    """Run every text that is not complete yet and store the rows selected by `capture` under `out`.

    `source` describes the texts; a later run into the same directory must have the same description.
    """
    start, root = time.monotonic(), Path(out)
    total = len(texts) if isinstance(texts, Sized) else None
    progress = progress or notebook.progress("capturing texts", total)
    spec = _file_capture(engine, capture)
    settings = {
        "capture": {name: value for name, value in spec.to_json().items() if name != "return"},
        "model": run_manifest.model_digest(engine.model),
        "engine": engine.settings,
        "source": dict(source or {}),
    }
    if spec.project is not None:
        settings["projection"] = engine.projections.find(spec.project).digest
    if run_manifest.read(root) is not None:
        repair(root)
    # "block": the engine waits for the disk, instead of spilling rows that are going to be written anyway. Results are
    # kept for twice as many texts as can be in progress, so that none is dropped before it is read.
    planner = CapturePlanner(
        engine.schema,
        engine.config.num_hidden_layers,
        engine.name,
        root,
        overload_policy="block",
        kept_results=2 * (2 * engine.max_requests + MAX_WAITING),
        rules=engine.capture_rules,
        on_device=True,
    )
    report = HarvestReport(str(root))
    tag = root / slug(str(spec.tag))
    try:
        changed = run_manifest.begin(root, settings)
        if changed:
            report.notices.append(
                f"this run differs in {'; '.join(changed)}: new rows may differ in their last bits"
            )
        count = _ProgressCounter(progress)
        remaining = _skip_done(_numbered(texts), _completed(tag, report), count)
        _run(engine, remaining, spec, planner, report, skip_bad, count)
    except BaseException:  # remove partial texts from the store
        planner.close()
        forget(tag, survey(tag).unfinished)
        raise
    planner.close()
    report.seconds = time.monotonic() - start
    return report


def estimate_harvest(
    engine: Engine,
    texts: Iterable[DatasetText | str],
    capture: Capture,
    *,
    skip_bad: bool = False,
    progress: ProgressCallback | None = None,
) -> HarvestEstimate:
    """Count rows and bytes without running the texts."""
    estimate = HarvestEstimate()
    spec = _file_capture(engine, capture)
    count = _ProgressCounter(progress)
    layers = engine.config.num_hidden_layers
    schema = engine.schema
    shapes = engine.projections.shapes
    for text in _numbered(texts):
        count()
        try:
            ids = _token_ids(engine, text)
            with _name_text(text):
                cost = spec.resolve(
                    schema, layers, ids, 1, projections=shapes, path=f"capture.{FILES}"
                ).estimate
        except DataError as error:
            _skip_or_raise(estimate, error, skip_bad)
            continue
        estimate.texts += 1
        estimate.tokens += len(ids)
        estimate.rows += cost.rows
        estimate.bytes += cost.bytes
        estimate.exact &= cost.exact
        for hook, nbytes in cost.bytes_by_hook:
            estimate.bytes_by_hook[hook] = estimate.bytes_by_hook.get(hook, 0) + nbytes
    return estimate


class _ProgressCounter:
    """Counts processed texts and reports the count."""

    def __init__(self, progress: ProgressCallback | None):
        self._progress = progress
        self._count = 0

    def __call__(self) -> None:
        self._count += 1
        if self._progress is not None:
            self._progress(self._count)


def _file_capture(engine: Engine, capture: Capture) -> Capture:
    """Return the capture of every text: to files, sharded by default.

    Errors of the capture itself are raised here, so that they are not attributed to a text.
    """
    if capture.request_id is not None:
        raise OptionError(
            "capture.request_id is set, but a harvest names every text by its number. Leave it out."
        )
    if capture.returns not in (None, "file"):
        raise OptionError(f"capture.return is {capture.returns!r}, but a harvest writes files. Leave it out.")
    spec = capture.replace(returns="file", layout=capture.layout or "sharded", tag=capture.tag or TAG)
    spec.resolve(
        engine.schema,
        engine.config.num_hidden_layers,
        engine.max_context - 1,
        1,
        projections=engine.projections.shapes,
        path=f"capture.{FILES}",
    )
    return spec


def _numbered(texts: Iterable[DatasetText | str]) -> Iterator[DatasetText]:
    for index, text in enumerate(texts):
        yield text if isinstance(text, DatasetText) else DatasetText(index, f"text {index}", text)


def _completed(tag: Path, report: HarvestReport) -> set[int]:
    """Return the indices of complete texts and remove incomplete ones from the store."""
    stored = survey(tag)
    forget(tag, stored.unfinished)
    report.forgotten_texts = len(stored.unfinished)
    for progress in stored.finished.values():
        report.texts += 1
        report.rows += progress.rows
        report.bytes += progress.nbytes
    return {int(name) for name in stored.finished}


def _skip_done(
    texts: Iterable[DatasetText], done: set[int], count: _ProgressCounter
) -> Iterator[DatasetText]:
    for text in texts:
        if text.index not in done:
            yield text
        else:
            count()


def _run(
    engine: Engine,
    texts: Iterator[DatasetText],
    spec: Capture,
    planner: CapturePlanner,
    report: HarvestReport,
    skip_bad: bool,
    count: _ProgressCounter,
) -> None:
    """Submit texts, wait for their steps, wait for the disk: three stages with a bounded number of texts each."""
    running: deque[tuple[DatasetText, Request]] = deque()
    computed: deque[tuple[DatasetText, Request]] = deque()
    more = True
    try:
        while more or running:
            while more and len(running) < 2 * engine.max_requests:
                text = next(texts, None)
                if text is None:
                    more = False
                    break
                try:
                    running.append((text, _submit(engine, text, spec, planner)))
                except DataError as error:
                    _skip_or_raise(report, error, skip_bad)
                    count()
            if running:
                text, request = running.popleft()
                with _name_text(text):
                    engine.wait(request)
                computed.append((text, request))
            while len(computed) > (MAX_WAITING if more or running else 0):
                _wait_durable(*computed.popleft(), report)
                count()
    finally:
        for _, request in running:
            engine.cancel(request)


def _submit(engine: Engine, text: DatasetText, spec: Capture, planner: CapturePlanner) -> Request:
    ids = _token_ids(engine, text)
    named = spec.replace(request_id=f"{text.index:09d}")
    with _name_text(text):
        return engine.submit_prompt(ids, named, planner)


def _token_ids(engine: Engine, text: DatasetText) -> list[int]:
    """Encode a text; an invalid or too long one is a `DataError`."""
    if text.problem is not None:
        raise DataError(f"{text.where} {text.problem}. Mend it, or leave bad texts out: --skip-bad")
    with _name_text(text):
        is_chat = text.messages is not None
        ids = engine.encode_chat(text.messages) if is_chat else engine.prompt_ids(text.prompt or "")
    if len(ids) >= engine.max_context:
        raise DataError(
            f"{text.where} has {len(ids)} tokens, and a context of {engine.max_context} holds one less. Cut it, load "
            "with a larger max_context, or leave bad texts out: --skip-bad"
        )
    return ids


@contextmanager
def _name_text(text: DatasetText) -> Iterator[None]:
    """Convert errors of a request to a `DataError` that names its text; errors of the engine pass through."""
    try:
        yield
    except (RequestError, CapacityError, LogitsError) as error:
        raise DataError(f"{text.where}: {error}") from error


def _skip_or_raise(report: HarvestReport | HarvestEstimate, error: DataError, skip_bad: bool) -> None:
    if not skip_bad:
        raise error
    report.skipped += 1
    if len(report.bad_texts) < 20:
        report.bad_texts.append(str(error))


def _wait_durable(text: DatasetText, request: Request, report: HarvestReport) -> None:
    """Wait until the rows of a text are on disk, and count them."""
    (capture,) = request.results.captures
    result = capture.result()
    while not result.finished:  # `result` waits with a time limit; a slow disk is not an error
        result = capture.result()
    if result.status != "ok":
        raise CaptureWriteError(
            f"{text.where} could not be written: {result.error}. Make room or mend the disk, then run "
            "the same command again; what is done stays done."
        )
    report.texts += 1
    report.new_texts += 1
    report.rows += result.rows
    report.new_rows += result.rows
    report.bytes += result.bytes
