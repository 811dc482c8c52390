"""All exceptions that Birkhoff raises on purpose, as one tree.

    class                        code              raised for
    BirkhoffError
    ├── ConfigError              config            a config.json that describes no supported model
    │   └── UnsupportedModel     model-unsupported another architecture
    ├── CheckpointError          weights           files that are missing, truncated or inconsistent
    │   ├── TensorMissing        weights-missing   tensors that the model needs and the files lack
    │   ├── TensorUnexpected     weights-extra     tensors in the files that the model does not have
    │   ├── TensorShape          weights-shape     a tensor of the wrong shape
    │   ├── TensorDtype          weights-dtype     a tensor of the wrong dtype
    │   └── TensorValue          weights-value     a NaN scale, an expert id out of range
    ├── HubError                 hub               a model that is not in the hub cache, or that the hub does not give
    ├── SaeFileError             sae-file          SAE files that are missing, truncated or of another format
    ├── CountsFileError          counts-file       expert counts that are missing, altered or of another model
    ├── RequestError             request           a request that cannot be fulfilled
    │   ├── OptionError          option-invalid    a keyword, flag or sampling value
    │   ├── TokenError           token-invalid     a token id outside the vocabulary
    │   ├── PromptError          prompt-invalid    a prompt that is empty or not text
    │   │   └── ContextError     context-length    a prompt longer than the context
    │   ├── ChatError            chat-invalid      a conversation or completion that violates the format
    │   ├── DataError            data-invalid      a data file or one of its records
    │   ├── PackageMissing       package-missing   an optional package that is not installed
    │   ├── SiteError            site-unknown      a hook or layer that the model does not have
    │   ├── SelectorError        selector-invalid  an invalid selection of layers or positions
    │   ├── SteeringError        steering-invalid  an edit or vector that cannot be applied
    │   │   ├── SteeringSyntax   steering-syntax   a steering line, with a caret at the error
    │   │   ├── VectorFileError  vector-file       a vector file that is missing, altered or lacks its site
    │   │   └── SaeError         sae-invalid       an invalid SAE or feature edit
    │   │       └── SaeBusy      sae-busy          an SAE that running requests still use
    │   └── CaptureValidationError capture-invalid an invalid capture request, by field path
    ├── CaptureError             capture           a capture that could not be written or read
    │   ├── CaptureFileError     capture-file      truncated or inconsistent files (also a ValueError)
    │   │   └── CaptureChecksum  capture-checksum  bytes that changed after they were written
    │   ├── CaptureWriteError    capture-write     a disk error or an invalid chunk
    │   ├── CaptureExists        capture-exists    a request id that already has files
    │   ├── CaptureLocked        capture-locked    a capture root in use by another writer
    │   └── CaptureSettings      capture-settings  a directory created with other settings
    ├── ConvertError             convert           an output that cannot be started, resumed or verified
    ├── CapacityError            engine-full       a request for more cache than exists
    ├── DiskFull                 disk-full         too little space on disk (also a ConvertError and a CapacityError)
    ├── EngineClosed             engine-closed     a call after close()
    ├── LogitsError              logits-invalid    NaN logits, or no token left to sample, in one request
    └── TextUnavailable          text-unavailable  a text call on a checkpoint without a tokenizer

Every message states what was seen, what was expected and what to do next. `code` is stable and is also the code in HTTP
responses.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

MAX_MESSAGE = 4000


def quoted(value: object, limit: int = 80) -> str:
    """Return the repr of a caller's value for a message, truncated to `limit` characters."""
    value = _beginning(value, limit, 4)
    try:
        text = repr(value)
    except ValueError:  # Python does not format integers of more than 4300 digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return ` Did you mean 'name'?` with the name nearest to a caller's value, or nothing if none is near."""
    close = difflib.get_close_matches(value, list(names), n=1) if isinstance(value, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""


def _beginning(value: object, limit: int, depth: int) -> object:
    """The part of a value that its first `limit` characters show: the repr of a whole prompt would take long."""
    if isinstance(value, (str, bytes)):
        return value[: limit + 1]
    if type(value) not in (list, tuple, dict) or depth == 0:
        return value
    if isinstance(value, dict):
        return {key: _beginning(each, limit, depth - 1) for key, each in islice(value.items(), limit)}
    parts = [_beginning(each, limit, depth - 1) for each in value[:limit]]  # type: ignore[index]
    return parts if isinstance(value, list) else tuple(parts)


class BirkhoffError(Exception):
    """Base class of all Birkhoff errors. Messages may show what a file or a caller said, so they are cut."""

    code = "error"

    def __init__(self, *arguments: object):
        super().__init__(
            *(
                each[: MAX_MESSAGE - 1] + "…" if isinstance(each, str) and len(each) > MAX_MESSAGE else each
                for each in arguments
            )
        )


class ConfigError(BirkhoffError):
    code = "config"


class UnsupportedModel(ConfigError):
    code = "model-unsupported"


class CheckpointError(BirkhoffError):
    code = "weights"
    tensor = ""  # the stored tensor that it is about, if it is about one


class TensorMissing(CheckpointError):
    code = "weights-missing"


class TensorUnexpected(CheckpointError):
    code = "weights-extra"


class TensorShape(CheckpointError):
    code = "weights-shape"


class TensorDtype(CheckpointError):
    code = "weights-dtype"


class TensorValue(CheckpointError):
    code = "weights-value"


class HubError(BirkhoffError):
    code = "hub"


class SaeFileError(BirkhoffError):
    code = "sae-file"


class CountsFileError(BirkhoffError):
    code = "counts-file"


class RequestError(BirkhoffError):
    code = "request"


class OptionError(RequestError):
    code = "option-invalid"


class TokenError(RequestError):
    code = "token-invalid"


class PromptError(RequestError):
    code = "prompt-invalid"


class ContextError(PromptError):
    code = "context-length"


class ChatError(RequestError):
    code = "chat-invalid"


class DataError(RequestError):
    code = "data-invalid"


class PackageMissing(RequestError):
    code = "package-missing"


class SiteError(RequestError):
    code = "site-unknown"


class SteeringError(RequestError):
    """`path` is the field at fault, if the edit was given as fields; the message starts with it."""

    code = "steering-invalid"

    def __init__(self, message: str, path: str = ""):
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path


class SteeringSyntax(SteeringError):
    """`place` is the character index of the error; the message shows it with a caret."""

    code = "steering-syntax"

    def __init__(self, message: str, line: str, place: int):
        shown = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in line)
        start = max(0, place - 60)  # show a window around the error
        view = shown[start : place + 60]
        super().__init__(f"{message}, at character {place + 1}.\n  {view}\n  {' ' * (place - start)}^")
        self.line = line
        self.place = place


class VectorFileError(SteeringError):
    code = "vector-file"


class SaeError(SteeringError):
    code = "sae-invalid"


class SaeBusy(SaeError):
    code = "sae-busy"


class SelectorError(RequestError):
    """`path` is the field at fault; `kind` is "form", "layer", "empty" or "position"."""

    code = "selector-invalid"

    def __init__(self, message: str, path: str = "", kind: str = "form"):
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path
        self.kind = kind


class CaptureValidationError(RequestError):
    """`path` is the field at fault and starts the message; `rule` is the violated rule, "V1" to "V12"."""

    code = "capture-invalid"

    def __init__(self, message: str, path: str = "", rule: str = ""):
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path
        self.rule = rule


class CaptureError(BirkhoffError):
    code = "capture"


class CaptureFileError(CaptureError, ValueError):
    """Also a ValueError, so that readers can catch either."""

    code = "capture-file"


class CaptureChecksum(CaptureFileError):
    code = "capture-checksum"


class CaptureWriteError(CaptureError):
    code = "capture-write"


class CaptureExists(CaptureError):
    code = "capture-exists"


class CaptureLocked(CaptureError):
    code = "capture-locked"


class CaptureSettings(CaptureError):
    code = "capture-settings"


class ConvertError(BirkhoffError):
    code = "convert"


class CapacityError(BirkhoffError):
    code = "engine-full"


class DiskFull(ConvertError, CapacityError):
    code = "disk-full"


class EngineClosed(BirkhoffError):
    code = "engine-closed"


class LogitsError(BirkhoffError):
    code = "logits-invalid"


class TextUnavailable(BirkhoffError):
    code = "text-unavailable"
