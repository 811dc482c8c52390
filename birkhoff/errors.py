"""Everything Birkhoff refuses, as one tree.

    BirkhoffError
    ├── ConfigError              config            a config.json that describes no model we can run
    │   └── UnsupportedModel     model-unsupported another architecture, named
    ├── CheckpointError          weights           files that are missing, cut short or inconsistent
    │   ├── TensorMissing        weights-missing   names the model needs and the files lack
    │   ├── TensorUnexpected     weights-extra     names the files hold and the model lacks
    │   ├── TensorShape          weights-shape
    │   ├── TensorDtype          weights-dtype
    │   └── TensorValue          weights-value     a scale that is NaN, an expert id out of range
    ├── SaeFileError             sae-file          files of a dictionary that are missing, cut short or of another kind
    ├── CountsFileError          counts-file       counts of experts that are missing, changed or of another model
    ├── RequestError             request           what one caller asked for cannot be done
    │   ├── OptionError          option-invalid    a keyword, flag or sampling value
    │   ├── TokenError           token-invalid     a token id outside the vocabulary
    │   ├── PromptError          prompt-invalid    empty, not text
    │   │   └── ContextError     context-length    longer than the context
    │   ├── ChatError            chat-invalid      a conversation or completion outside the format
    │   ├── DataError            data-invalid      a data file, or one text of it, by its place
    │   ├── SiteError            site-unknown      a hook or layer this model does not have
    │   ├── SelectorError        selector-invalid  layers or positions that cannot be chosen
    │   ├── SteeringError        steering-invalid  an edit or vector that cannot be applied
    │   │   ├── SteeringSyntax   steering-syntax   a steering line, with a caret where it fails
    │   │   ├── VectorFileError  vector-file       a vector file that is missing, changed or does not say what it is for
    │   │   └── SaeError         sae-invalid       a dictionary of features, or an edit of them, that makes no sense
    │   │       └── SaeBusy      sae-busy          running requests still use the dictionary
    │   └── CaptureValidationError capture-invalid what a capture asks for, by field path
    ├── CaptureError             capture           a capture that could not be written or read
    │   ├── CaptureFileError     capture-file      files that are cut short or inconsistent (also a ValueError)
    │   │   └── CaptureChecksum  capture-checksum  bytes that changed since they were written
    │   ├── CaptureWriteError    capture-write     the disk refused, or a chunk that makes no sense
    │   ├── CaptureExists        capture-exists    this request id already has files
    │   ├── CaptureLocked        capture-locked    another writer holds the capture root
    │   └── CaptureSettings      capture-settings  a directory that was begun with other settings
    ├── ConvertError             convert           an output that cannot be begun, resumed or trusted
    ├── CapacityError            engine-full       more cache than can ever be free
    ├── EngineClosed             engine-closed     a call after close()
    ├── LogitsError              logits-invalid    NaN or nothing to choose from, in one request
    └── TextUnavailable          text-unavailable  text calls on a checkpoint without tokenizer files

Every message says what was seen, what was expected and the next move. `code` is stable and is also the wire code.
"""

from __future__ import annotations


def quoted(value: object, limit: int = 80) -> str:
    """How a caller's value appears in a message: its repr, cut so that no message echoes a whole prompt."""
    if isinstance(value, (str, bytes)):
        value = value[: limit + 1]  # repr of a whole prompt would be built only to be thrown away
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of more than some thousand digits
        text = f"a {type(value).__name__} too long to show"
    return text if len(text) <= limit else text[: limit - 1] + "…"


class BirkhoffError(Exception):
    """Root of everything a user may want to catch."""

    code = "error"


class ConfigError(BirkhoffError):
    code = "config"


class UnsupportedModel(ConfigError):
    code = "model-unsupported"


class CheckpointError(BirkhoffError):
    code = "weights"


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


class SiteError(RequestError):
    code = "site-unknown"


class SteeringError(RequestError):
    """`path` is the field at fault, where the edit came as fields; it stands first in the message."""

    code = "steering-invalid"

    def __init__(self, message: str, path: str = ""):
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path


class SteeringSyntax(SteeringError):
    """`place` is where the line stopped making sense; the message shows it with a caret."""

    code = "steering-syntax"

    def __init__(self, message: str, line: str, place: int):
        shown = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in line)
        start = max(0, place - 60)  # a long line is cut around the fault
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
    """`path` is the field at fault and stands first in the message; `rule` is the broken rule, "V1" to "V12"."""

    code = "capture-invalid"

    def __init__(self, message: str, path: str = "", rule: str = ""):
        super().__init__(f"{path}: {message}" if path else message)
        self.reason = message
        self.path = path
        self.rule = rule


class CaptureError(BirkhoffError):
    code = "capture"


class CaptureFileError(CaptureError, ValueError):
    """Also a ValueError, which is what readers of these files have always raised."""

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


class EngineClosed(BirkhoffError):
    code = "engine-closed"


class LogitsError(BirkhoffError):
    code = "logits-invalid"


class TextUnavailable(BirkhoffError):
    code = "text-unavailable"
