"""How often each expert was read, in a file: what a placement begins with, and what a run leaves for the next.

One JSON object: format, version, layers, experts, steps, `counts` [layers][experts], and a SHA-256 of all of that in
canonical form. Counts of long runs are decayed (`engine.heat`), so `steps` is how many steps they stand for. A file
that was cut, changed or made for another shape of model is refused; it is written whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from birkhoff.atomic_file import write_atomic
from birkhoff.errors import CountsFileError

FORMAT, VERSION = "birkhoff expert counts", 1
MOST_BYTES = 64 * 2**20  # a thousand layers of a thousand experts take 20
_MOST = 2**53
_FIELDS = {"format", "version", "layers", "experts", "steps", "counts", "sha256"}
_AGAIN = "Count again, or load without the file."


@dataclass(frozen=True)
class ExpertCounts:
    """`reads` [layers, experts] int64 in `steps` steps."""

    reads: torch.Tensor
    steps: int

    def save(self, path: str | Path) -> None:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "layers": self.reads.shape[0],
            "experts": self.reads.shape[1],
            "steps": self.steps,
            "counts": self.reads.tolist(),
        }
        path = Path(path)
        try:
            write_atomic(path, json.dumps({**body, "sha256": _digest(body)}) + "\n")
        except OSError as error:
            raise CountsFileError(
                f"{path} cannot be written ({error.strerror}). Choose another place."
            ) from None

    @classmethod
    def load(cls, path: str | Path, layers: int, experts: int) -> ExpertCounts:
        """Counts of a model of that shape."""
        path = Path(path)
        body = _read(path)
        if body["layers"] != layers or body["experts"] != experts:
            raise CountsFileError(
                f"{path.name} counts {body['layers']} layers of {body['experts']} experts, this model has {layers} of "
                f"{experts}. Take the counts of this model."
            )
        return cls(torch.tensor(body["counts"], dtype=torch.int64), body["steps"])


def _read(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise CountsFileError(f"{path.name} has {size} bytes, counts have at most {MOST_BYTES}. {_AGAIN}")
        body = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise CountsFileError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    except (ValueError, RecursionError):  # JSON or UTF-8
        raise CountsFileError(f"{path.name} is no JSON object of expert counts. {_AGAIN}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CountsFileError(
            f"{path.name} is JSON, but holds no expert counts (format {FORMAT!r}). {_AGAIN}"
        )
    if body.get("version") != VERSION:
        seen = body.get("version")
        raise CountsFileError(f"{path.name} has version {seen!r}, this build reads {VERSION}. {_AGAIN}")
    if set(body) != _FIELDS:
        odd = sorted(set(body) ^ _FIELDS)
        raise CountsFileError(f"{path.name} lacks or adds {', '.join(odd)}. {_AGAIN}")
    digest = body.pop("sha256")
    if digest != _digest(body):
        raise CountsFileError(
            f"{path.name} was changed since it was written: its checksum does not fit. {_AGAIN}"
        )
    _check(path.name, body)
    return body


def _check(name: str, body: dict[str, Any]) -> None:
    layers, experts, steps, counts = (body[key] for key in ("layers", "experts", "steps", "counts"))
    if not all(_whole(number) and number > 0 for number in (layers, experts)) or not _whole(steps):
        raise CountsFileError(f"{name} has layers, experts or steps that are no counts. {_AGAIN}")
    rows_fit = isinstance(counts, list) and len(counts) == layers
    if not rows_fit or not all(isinstance(row, list) and len(row) == experts for row in counts):
        raise CountsFileError(
            f"{name} says {layers} layers of {experts} experts, its counts are not that many. {_AGAIN}"
        )
    if not all(_whole(number) and number <= steps for row in counts for number in row):
        raise CountsFileError(
            f"{name} holds a count that is no whole number from 0 to its {steps} steps. {_AGAIN}"
        )


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _no_constant(word: str) -> None:
    raise ValueError(word)


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
