"""What a consumer of captured rows is: the few calls the dispatcher makes, in the order it makes them.

    begin(request)          once, before the first chunk of a request
    submit_chunk(chunk)     any number of times, in the order the rows were made
    finalize(finish)        once; the future is done when the consumer can promise what its result says
    get_result(key)         at any time after
    shutdown()              once, after everything

Calls for one request come from one thread, calls for different requests may overlap when `writer_threads` is above one.
A consumer may raise: the dispatcher turns that into the request's result. `location` says whether it runs beside the
model (`worker`) or beside the server (`driver`); `reads_client_spec` whether requests address it by name. A consumer
with a `global_capture_spec` wants rows of every request.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol, runtime_checkable

from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.result import CaptureFinish, CaptureRequest, CaptureResult
from birkhoff.errors import CaptureValidationError, quoted

Location = Literal["worker", "driver"]


@runtime_checkable
class Consumer(Protocol):
    location: Location
    reads_client_spec: bool
    writer_threads: int

    def global_capture_spec(self) -> Mapping[str, Any] | None: ...
    def validate_client_spec(self, spec: Mapping[str, Any], path: str) -> None: ...
    def begin(self, request: CaptureRequest) -> None: ...
    def submit_chunk(self, chunk: Chunk) -> None: ...
    def finalize(self, finish: CaptureFinish) -> Future[CaptureResult]: ...
    def get_result(self, key: str) -> CaptureResult: ...
    def shutdown(self) -> None: ...


def check_name(spec: Mapping[str, Any], field: str, path: str, required: bool = True) -> None:
    """The rule for `request_id` and `tag`: text that could name a file and leads nowhere else."""
    value = spec.get(field)
    if value is None and not required:
        return
    if not isinstance(value, str) or not 0 < len(value) <= 256 or ".." in value or value.startswith("/"):
        raise CaptureValidationError(
            f"is {quoted(value)}, expected a name of 1 to 256 characters without '..' and without a leading '/'.",
            f"{path}.{field}",
            "V2",
        )
