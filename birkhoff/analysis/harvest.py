"""Activations of a whole data set, into capture files, such that being killed costs only the texts in flight.

Every text is one request, named by its number in the data set. It is done when its rows are durable. A run first
repairs what an earlier one left, forgets texts that did not come to their end, and goes on with those that are not
done; so the store of a run that was killed any number of times holds, text by text, the bytes of one that was not. For
that rows must not depend on which texts ran beside each other: load the engine with `batch_invariant=True`. Memory does
not grow with the data: a few texts are in the engine, a bounded number waits for the disk.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from birkhoff.analysis import run_manifest
from birkhoff.analysis.dataset import DatasetText
from birkhoff.capture.planner import FILES, CapturePlanner
from birkhoff.capture.spec.request import Capture
from birkhoff.capture.store.finished import forget, survey
from birkhoff.capture.store.naming import slug
from birkhoff.capture.store.repair import repair
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
MOST_WAITING = 64  # texts that have run and wait for the disk; one sync then serves many of them

ProgressCallback = Callable[[int], None]  # number of texts processed


@dataclass
class HarvestReport:
    """What is in the store, and what this run did for it. Rows are counted over all hooks and layers."""

    out: str
    texts: int = 0
    rows: int = 0
    bytes: int = 0
    new_texts: int = 0
    new_rows: int = 0
    forgotten_texts: int = 0  # begun by an earlier run, not finished by it, run again by this one
    bad_texts: list[str] = field(default_factory=list)  # what is wrong with the first few
    skipped: int = 0
    notices: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return vars(self)


@dataclass
class HarvestEstimate:
    """What a harvest would store. `exact` is False when a filter by token decides while the texts run."""

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
    """Run every text that is not done yet and keep what `capture` asks for under `out`.

    `source` says what the texts are; a later run into the same directory must say the same."""
    began, root = time.monotonic(), Path(out)
    wish = _as_files(engine, capture)
    settings = {
        "capture": {name: value for name, value in wish.to_json().items() if name != "return"},
        "model": run_manifest.model_digest(engine.model),
        "engine": engine.settings,
        "source": dict(source or {}),
    }
    if wish.project is not None:
        settings["projection"] = engine.projections.find(wish.project).digest
    if run_manifest.read(root) is not None:
        repair(root)
    # The disk sets the pace: rows that are sure to be written need not be spilled to another place before. Results are
    # kept for twice as many texts as can be under way, so that none is gone before it is read and few outlive that.
    planner = CapturePlanner(
        engine.schema,
        engine.config.num_hidden_layers,
        engine.name,
        root,
        overload_policy="block",
        kept_results=2 * (2 * engine.max_requests + MOST_WAITING),
        rules=engine.capture_rules,
    )
    report = HarvestReport(str(root))
    tag = root / slug(str(wish.tag))
    try:
        changed = run_manifest.begin(root, settings)
        if changed:
            report.notices.append(
                f"this run differs in {'; '.join(changed)}: new rows may differ in their last bits"
            )
        count = _Count(progress)
        todo = _todo(_numbered(texts), _take_stock(tag, report), count)
        _run(engine, todo, wish, planner, report, skip_bad, count)
    except BaseException:  # leave no half text to whoever reads what there is
        planner.close()
        forget(tag, survey(tag).unfinished)
        raise
    planner.close()
    report.seconds = time.monotonic() - began
    return report


def estimate_harvest(
    engine: Engine,
    texts: Iterable[DatasetText | str],
    capture: Capture,
    *,
    skip_bad: bool = False,
    progress: ProgressCallback | None = None,
) -> HarvestEstimate:
    """Count rows and bytes without running a text."""
    found = HarvestEstimate()
    wish = _as_files(engine, capture)
    count = _Count(progress)
    layers = engine.config.num_hidden_layers
    schema = engine.schema
    shapes = engine.projections.shapes
    for text in _numbered(texts):
        count()
        try:
            ids = _ids(engine, text)
            with _blaming(text):
                cost = wish.resolve(
                    schema, layers, ids, 1, projections=shapes, path=f"capture.{FILES}"
                ).estimate
        except DataError as error:
            _bad(found, error, skip_bad)
            continue
        found.texts += 1
        found.tokens += len(ids)
        found.rows += cost.rows
        found.bytes += cost.bytes
        found.exact &= cost.exact
        for hook, nbytes in cost.bytes_by_hook:
            found.bytes_by_hook[hook] = found.bytes_by_hook.get(hook, 0) + nbytes
    return found


class _Count:
    """Texts dealt with so far, told to whoever watches."""

    def __init__(self, progress: ProgressCallback | None):
        self._progress = progress
        self._number = 0

    def __call__(self) -> None:
        self._number += 1
        if self._progress is not None:
            self._progress(self._number)


def _as_files(engine: Engine, capture: Capture) -> Capture:
    """The capture as it is sent with every text: to files, sharded unless said otherwise.

    What no text could mend is refused here, before one of them is blamed for it."""
    if capture.request_id is not None:
        raise OptionError(
            "capture.request_id is set, but a harvest names every text by its number. Leave it out."
        )
    if capture.returns not in (None, "file"):
        raise OptionError(f"capture.return is {capture.returns!r}, but a harvest writes files. Leave it out.")
    wish = capture.replace(returns="file", layout=capture.layout or "sharded", tag=capture.tag or TAG)
    wish.resolve(
        engine.schema,
        engine.config.num_hidden_layers,
        engine.max_context - 1,
        1,
        projections=engine.projections.shapes,
        path=f"capture.{FILES}",
    )
    return wish


def _numbered(texts: Iterable[DatasetText | str]) -> Iterator[DatasetText]:
    for number, text in enumerate(texts):
        yield text if isinstance(text, DatasetText) else DatasetText(number, f"text {number}", text)


def _take_stock(tag: Path, report: HarvestReport) -> set[int]:
    """Numbers of the texts that are done; the beginnings of others are taken away."""
    found = survey(tag)
    forget(tag, found.unfinished)
    report.forgotten_texts = len(found.unfinished)
    for progress in found.finished.values():
        report.texts += 1
        report.rows += progress.rows
        report.bytes += progress.nbytes
    return {int(name) for name in found.finished}


def _todo(texts: Iterable[DatasetText], done: set[int], count: _Count) -> Iterator[DatasetText]:
    for text in texts:
        if text.number not in done:
            yield text
        else:
            count()


def _run(
    engine: Engine,
    texts: Iterator[DatasetText],
    wish: Capture,
    planner: CapturePlanner,
    report: HarvestReport,
    skip_bad: bool,
    count: _Count,
) -> None:
    """Texts into the engine, out of it, and to the disk: three stages, each with a bounded number of texts."""
    running: deque[tuple[DatasetText, Request]] = deque()
    landed: deque[tuple[DatasetText, Request]] = deque()
    more = True
    try:
        while more or running:
            while more and len(running) < 2 * engine.max_requests:
                text = next(texts, None)
                if text is None:
                    more = False
                    break
                try:
                    running.append((text, _submit(engine, text, wish, planner)))
                except DataError as error:
                    _bad(report, error, skip_bad)
                    count()
            if running:
                text, request = running.popleft()
                with _blaming(text):
                    engine.wait(request)
                landed.append((text, request))
            while len(landed) > (MOST_WAITING if more or running else 0):
                _acknowledge(*landed.popleft(), report)
                count()
    finally:
        for _, request in running:
            engine.cancel(request)


def _submit(engine: Engine, text: DatasetText, wish: Capture, planner: CapturePlanner) -> Request:
    ids = _ids(engine, text)
    named = wish.replace(request_id=f"{text.number:09d}")
    with _blaming(text):
        return engine.submit_prompt(ids, named, planner)


def _ids(engine: Engine, text: DatasetText) -> list[int]:
    if text.problem is not None:
        raise DataError(f"{text.where} {text.problem}. Mend it, or leave bad texts out: --skip-bad")
    with _blaming(text):
        chat = text.messages is not None
        ids = engine.encode_chat(text.messages) if chat else engine.prompt_ids(text.prompt or "")
    if len(ids) >= engine.max_context:
        raise DataError(
            f"{text.where} has {len(ids)} tokens, and a context of {engine.max_context} holds one less. Cut it, load "
            "with a larger max_context, or leave bad texts out: --skip-bad"
        )
    return ids


@contextmanager
def _blaming(text: DatasetText) -> Iterator[None]:
    """What is wrong with a request is wrong with its text; what is wrong with the engine is not."""
    try:
        yield
    except (RequestError, CapacityError, LogitsError) as error:
        raise DataError(f"{text.where}: {error}") from error


def _bad(report: HarvestReport | HarvestEstimate, error: DataError, skip_bad: bool) -> None:
    if not skip_bad:
        raise error
    report.skipped += 1
    if len(report.bad_texts) < 20:
        report.bad_texts.append(str(error))


def _acknowledge(text: DatasetText, request: Request, report: HarvestReport) -> None:
    """Wait until a text's rows are durable, and count them."""
    (capture,) = request.results.captures
    result = capture.result()
    while not result.finished:  # a slow disk is waited for, as any writer would
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
