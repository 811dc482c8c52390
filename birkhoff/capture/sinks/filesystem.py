"""The consumer that writes files: a `CaptureWriter` behind the consumer's calls.

Its result is `ok` when every row is durable, and a caller may wait for it. What goes wrong with one request never comes
out of these calls: the writer notes it with the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import Location, check_name
from birkhoff.capture.sinks.result import KEPT_RESULTS, CaptureFinish, CaptureRequest, CaptureResult, Results
from birkhoff.capture.store.disk import Disk
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.naming import LAYOUTS
from birkhoff.capture.store.writer import CaptureWriter
from birkhoff.errors import CaptureValidationError, quoted


class FilesystemConsumer:
    """`options` as keywords: see `FileOptions`; `root` is the only one that must be given."""

    location: Location = "worker"
    reads_client_spec = True

    def __init__(self, root: str, disk: Disk | None = None, kept_results: int = KEPT_RESULTS, **options: Any):
        self.options = FileOptions(root, **options)
        self.writer = CaptureWriter(self.options, disk)
        self.writer_threads = self.options.writer_threads
        self.patience_bytes = (
            self.options.coalesce_max_bytes
        )  # rows may wait with their maker: they would wait here
        self._results = Results(kept_results)

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        for field in ("request_id", "tag"):
            check_name(spec, field, path)
        layout = spec.get("layout")
        if layout is not None and layout not in LAYOUTS:
            raise CaptureValidationError(
                f"is {quoted(layout)}, expected one of {', '.join(LAYOUTS)}.", f"{path}.layout", "V10"
            )

    def begin(self, request: CaptureRequest) -> None:
        self._results.begin(request.key)
        self.writer.begin(request)

    def submit_chunk(self, chunk: Chunk) -> None:
        self.writer.append(chunk)

    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]:
        return self._results.put(finish.key, self.writer.finish(finish))

    def get_result(self, key: str, wait: bool = False) -> CaptureResult:
        """The result, or `pending`. With `wait`, after at most `timeout_seconds`."""
        return self._results.get(key, self.options.timeout_seconds if wait else 0)

    def shutdown(self) -> None:
        self.writer.close()
