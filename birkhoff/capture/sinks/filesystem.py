"""Consumer that writes capture files with a `CaptureWriter`.

Its result is `ok` when every row is durable. A failure of one request is recorded by the writer and becomes the result
of that request; it is not raised.

    engine.add_consumer("files", FilesystemConsumer("captures", default_layout="sharded", fsync=False))
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import KEPT_RESULTS, CaptureFinish, CaptureRequest, CaptureResult, Results
from birkhoff.capture.store.disk import Disk
from birkhoff.capture.store.file_options import FileOptions
from birkhoff.capture.store.writer import CaptureWriter


class FilesystemConsumer:
    """Files go under `root`. `options` are the other fields of `FileOptions`, as keywords."""

    reads_client_spec = True

    def __init__(self, root: str, disk: Disk | None = None, kept_results: int = KEPT_RESULTS, **options: Any):
        self.options = FileOptions(root, **options)
        self.writer = CaptureWriter(self.options, disk)
        self.writer_threads = self.options.writer_threads
        self.buffer_bytes = self.options.coalesce_max_bytes
        self._results = Results(kept_results)

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return None

    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None:
        pass  # rules V2 and V10 check the fields that concern files

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
