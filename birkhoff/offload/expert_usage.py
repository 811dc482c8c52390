"""How often each expert is read: estimates that decide which experts are on the device, and the file they persist in.

A cold expert costs the bus one read in every step that uses it, and all experts have the same size, so the best n
experts to keep on the device are the n most often read, whatever their layers. Rates are estimates with a half-life.
Two experts are swapped only if the difference is significant and pays for the copies within a few hundred steps, so
that equal experts do not alternate.

The file is one JSON object: format, version, layers, experts, steps, `counts` [layers][experts], and a SHA-256 of all
of that in canonical form. Counts of long runs are decayed; `steps` is the number of steps they stand for. A file that
was truncated, modified or made for another shape of model is refused. Writing is atomic.
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
from birkhoff.offload.expert_layout import ExpertId
from birkhoff.small_file import read_json

HALF_LIFE = 20_000  # steps
# Standard deviations of the difference of two rates; among ten thousand equal experts the extremes are 5.6 apart.
DEVIATIONS = 6.0
LEAST_GAIN = 0.004  # reads per step: the two copies of a swap are paid back within 500 steps

FORMAT, VERSION = "birkhoff expert counts", 1
MAX_BYTES = 64 * 2**20  # a thousand layers of a thousand experts take 20 MiB
_MAX_COUNT = 2**53
_FIELDS = {"format", "version", "layers", "experts", "steps", "counts", "sha256"}
_AGAIN = "Count again, or load without the file."


@dataclass(frozen=True)
class ExpertCounts:
    """Steps that read each expert: `reads` [layers, experts] int64, out of `steps` steps."""

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
        try:
            write_atomic(path, json.dumps({**body, "sha256": _digest(body)}) + "\n")
        except OSError as error:
            raise CountsFileError(
                f"{path} cannot be written ({error.strerror}). Choose another place."
            ) from None

    @classmethod
    def load(cls, path: str | Path, layers: int, experts: int) -> ExpertCounts:
        """Read the counts of a model of that shape."""
        path = Path(path)
        body = _read(path)
        if body["layers"] != layers or body["experts"] != experts:
            raise CountsFileError(
                f"{path.name} counts {body['layers']} layers of {body['experts']} experts, this model has {layers} of "
                f"{experts}. Take the counts of this model."
            )
        return cls(torch.tensor(body["counts"], dtype=torch.int64), body["steps"])


class ExpertUsage:
    """Decayed read rates of all experts, starting from `counts` or from zero."""

    def __init__(
        self, layers: int, experts: int, counts: ExpertCounts | None = None, half_life: float = HALF_LIFE
    ):
        self._decay = 0.5 ** (1 / half_life)
        self._reads = torch.zeros(layers, experts, dtype=torch.float64)
        self._steps = 0.0
        if counts is not None and counts.steps:
            weight = min(1.0, half_life / counts.steps)  # earlier counts weigh at most one half-life
            self._reads = counts.reads.double() * weight
            self._steps = counts.steps * weight

    @property
    def rates(self) -> torch.Tensor:
        """[layers, experts]: the share of steps that read each expert."""
        return self._reads / max(self._steps, 1.0)

    def add(self, reads: torch.Tensor, steps: int) -> None:
        """Add the reads [layers, experts] of the last `steps` steps."""
        decay = self._decay**steps
        self._reads = self._reads * decay + reads.double()
        self._steps = self._steps * decay + steps

    def counts(self) -> ExpertCounts:
        steps = round(self._steps)
        return ExpertCounts(self._reads.round().long().clamp(max=steps), steps)

    def hottest(self, count: int) -> torch.Tensor:
        """[layers, experts] bool: the `count` experts with the highest rates; ties are spread over the layers."""
        layers, experts = self._reads.shape
        order = self._reads.T.flatten().sort(descending=True, stable=True).indices[:count]
        chosen = torch.zeros(layers * experts, dtype=torch.bool).index_fill_(0, order, True)
        return chosen.view(experts, layers).T.contiguous()

    def swaps(self, resident: torch.Tensor, limit: int) -> list[tuple[ExpertId, ExpertId]]:
        """Up to `limit` pairs (arriving, leaving) that are worth swapping, largest gain first."""
        rates = self.rates
        hot, cold = resident.nonzero(), (~resident).nonzero()
        count = min(limit, len(hot), len(cold))
        if not count or self._steps < 1:
            return []
        arriving = rates[~resident].topk(count)
        leaving = rates[resident].topk(count, largest=False)
        noise = DEVIATIONS * ((arriving.values + leaving.values) / self._steps).sqrt()
        pays = arriving.values - leaving.values > noise.clamp(min=LEAST_GAIN)
        pairs = zip(cold[arriving.indices].tolist(), hot[leaving.indices].tolist(), pays.tolist())
        return [((a[0], a[1]), (b[0], b[1])) for a, b, worth in pairs if worth]


def _read(path: Path) -> dict[str, Any]:
    try:
        body = read_json(path, MAX_BYTES)
    except OSError as error:
        raise CountsFileError(f"{path} cannot be read ({error.strerror}). Check the path.") from None
    except (ValueError, RecursionError):  # JSON or UTF-8
        raise CountsFileError(f"{path.name} is no JSON object of expert counts. {_AGAIN}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CountsFileError(
            f"{path.name} is JSON, but holds no expert counts (format {FORMAT!r}). {_AGAIN}"
        )
    if body.get("version") != VERSION:
        raise CountsFileError(
            f"{path.name} has version {body.get('version')!r}, this build reads {VERSION}. {_AGAIN}"
        )
    if set(body) != _FIELDS:
        odd = sorted(set(body) ^ _FIELDS)
        raise CountsFileError(f"{path.name} lacks or adds {', '.join(odd)}. {_AGAIN}")
    if body.pop("sha256") != _digest(body):
        raise CountsFileError(
            f"{path.name} was changed since it was written: its checksum does not fit. {_AGAIN}"
        )
    _check(path.name, body)
    return body


def _check(name: str, body: dict[str, Any]) -> None:
    layers, experts, steps, counts = (body[key] for key in ("layers", "experts", "steps", "counts"))
    if not all(_is_count(size) and size > 0 for size in (layers, experts)) or not _is_count(steps):
        raise CountsFileError(f"{name} has layers, experts or steps that are no counts. {_AGAIN}")
    rows_fit = isinstance(counts, list) and len(counts) == layers
    if not rows_fit or not all(isinstance(row, list) and len(row) == experts for row in counts):
        raise CountsFileError(
            f"{name} says {layers} layers of {experts} experts, its counts are not that many. {_AGAIN}"
        )
    if not all(_is_count(reads) and reads <= steps for row in counts for reads in row):
        raise CountsFileError(
            f"{name} holds a count that is no whole number from 0 to its {steps} steps. {_AGAIN}"
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
