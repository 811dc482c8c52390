"""Consumer that keeps statistics of one site instead of rows: moments, norms, firing rates, top contexts of features.

It has a global capture spec and so receives rows of every request of the engine. Moments are combined chunk by chunk
in float64 with Chan's rule, so the result does not depend on the chunking (up to rounding) and variances do not cancel.
With an encoder, a feature fires where `row @ encoder + bias` is above its threshold; for each feature the rows with the
largest activations are remembered by request, position and token. A row with a NaN or an infinity is counted and left
out, because it would dominate the mean. Memory depends on the widths, not on the number of rows. NumPy only.

Read `stats()`, or give `out`: the arrays are written there as `.npz` at shutdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from birkhoff.atomic_file import atomic_path
from birkhoff.capture.sinks.chunk import Chunk
from birkhoff.capture.sinks.consumer import CountingConsumer
from birkhoff.capture.spec.dtypes import Array, to_float32
from birkhoff.errors import CaptureWriteError, OptionError, quoted
from birkhoff.option_checks import check_int


@dataclass(frozen=True)
class Context:
    """A row where a feature has a large activation; -1 for labels that the row lacks."""

    activation: float
    request: str
    position: int
    token_id: int


@dataclass(frozen=True)
class SaeStats:
    """A snapshot of the statistics. Arrays per feature are None without an encoder."""

    rows: int
    nonfinite_rows: int  # excluded from everything else
    mean: Array  # [width]
    second_moment: Array  # [width], E[x²]
    variance: Array  # [width]
    norm_mean: float
    norm_rms: float
    norm_max: float
    firing: Array | None  # [features], number of rows where each fired
    activation_sum: Array | None  # [features], over the rows where it fired
    top: list[list[Context]] | None  # largest first


class SaeStatsConsumer(CountingConsumer):
    """Statistics of one hook and layer over every request. `encoder` is [width, features].

    `block_activations` bounds the number of activations computed at a time.
    """

    reads_client_spec = False

    def __init__(
        self,
        hook: str,
        layer: int,
        encoder: Array | None = None,
        bias: Array | None = None,
        threshold: float | Array = 0.0,
        top_k: int = 8,
        positions: str = "all",
        block_activations: int = 1 << 22,
        out: str | None = None,
    ):
        super().__init__()
        check_int("top_k", top_k)
        if encoder is not None and encoder.ndim != 2:
            raise OptionError(f"encoder has shape {encoder.shape}, expected [width, features].")
        self.hook = hook
        self.layer = layer
        self._positions = positions
        self._top_k = top_k
        self._block = block_activations
        self._out = None if out is None else Path(out)
        if self._out is not None and not self._out.parent.is_dir():
            raise OptionError(f"out is {quoted(out)}, expected a file in a directory that exists.")
        self._encoder = None if encoder is None else np.asarray(encoder, np.float32)
        features = 0 if encoder is None else encoder.shape[1]
        self._bias = np.zeros(features, np.float32) if bias is None else np.asarray(bias, np.float32)
        self._threshold = np.broadcast_to(np.asarray(threshold, np.float32), (features,))
        if self._bias.shape != (features,):
            raise OptionError(f"bias has shape {self._bias.shape}, expected [{features}].")
        self._count = self._nonfinite = 0
        self._mean: Array = np.zeros(0)
        self._spread: Array = np.zeros(0)  # sum of squared distances from the mean
        self._norms = (0.0, 0.0, 0.0)  # sum, sum of squares, largest
        self._firing = np.zeros(features, np.int64)
        self._sum = np.zeros(features)
        self._best = np.full((features, top_k), -np.inf, np.float32)
        self._where = np.full((features, top_k), None, object)  # (request, position, token id)

    def global_capture_spec(self) -> Mapping[str, Any] | None:
        return {"hooks": {self.hook: [self.layer]}, "positions": self._positions}

    def submit_chunk(self, chunk: Chunk) -> None:
        if (chunk.hook, chunk.layer) != (self.hook, self.layer) or not chunk.num_rows:
            return
        with self._lock:
            width = chunk.width if self._encoder is None else self._encoder.shape[0]
            if (self._count and len(self._mean) != chunk.width) or chunk.width != width:
                raise CaptureWriteError(
                    f"rows of {chunk.hook}[{chunk.layer}] are {chunk.width} wide, and the statistics are of "
                    f"{width if self._encoder is not None else len(self._mean)}. Use another consumer for them."
                )
            rows = to_float32(chunk.array(), chunk.dtype, chunk.scales())
            finite = np.flatnonzero(np.isfinite(rows).all(1))  # indices in the chunk
            self._nonfinite += len(rows) - len(finite)
            self._counts_of(chunk).add(chunk)
            if not len(finite):
                return
            rows = rows[finite]
            self._add_moments(rows.astype(np.float64))
            if self._encoder is not None:
                block = max(1, self._block // max(len(self._bias), 1))
                for start in range(0, len(rows), block):
                    self._add_features(rows[start : start + block], chunk, finite[start : start + block])

    def shutdown(self) -> None:
        if self._out is not None:
            stats = {name: value for name, value in vars(self.stats()).items() if value is not None}
            stats.pop("top", None)
            with atomic_path(self._out) as path, path.open("wb") as file:
                np.savez(file, **stats)

    def stats(self) -> SaeStats:
        with self._lock:
            count = max(self._count, 1)
            mean, variance = self._mean.copy(), self._spread / count
            total, squares, largest = self._norms
            encoded = self._encoder is not None
            return SaeStats(
                rows=self._count,
                nonfinite_rows=self._nonfinite,
                mean=mean,
                second_moment=variance + mean**2,
                variance=variance,
                norm_mean=total / count,
                norm_rms=float(np.sqrt(squares / count)),
                norm_max=largest,
                firing=self._firing.copy() if encoded else None,
                activation_sum=self._sum.copy() if encoded else None,
                top=[self._contexts(feature) for feature in range(len(self._firing))] if encoded else None,
            )

    def _contexts(self, feature: int) -> list[Context]:
        order = np.argsort(-self._best[feature], kind="stable")
        return [
            Context(float(self._best[feature, index]), *self._where[feature, index])
            for index in order
            if self._where[feature, index] is not None
        ]

    def _add_moments(self, rows: Array) -> None:
        count = len(rows)
        mean = rows.mean(0)
        spread = ((rows - mean) ** 2).sum(0)
        if not self._count:
            self._mean = mean
            self._spread = spread
        else:
            total = self._count + count
            difference = mean - self._mean
            self._mean = self._mean + difference * (count / total)
            self._spread = self._spread + spread + difference**2 * (self._count * count / total)
        self._count += count
        norms = np.sqrt((rows**2).sum(1))
        norm_sum, squares, largest = self._norms
        self._norms = (norm_sum + norms.sum(), squares + (norms**2).sum(), max(largest, float(norms.max())))

    def _add_features(self, rows: Array, chunk: Chunk, indices: Array) -> None:
        activations = rows @ self._encoder + self._bias  # [n, features]
        fired = activations > self._threshold
        self._firing += fired.sum(0)
        self._sum += np.where(fired, activations, 0).sum(0, dtype=np.float64)
        candidates = np.where(fired, activations, -np.inf)
        better = np.flatnonzero(candidates.max(0) > self._best.min(1))
        if not len(better):
            return
        values = np.concatenate([self._best[better], candidates[:, better].T], axis=1)  # [b, k + n]
        chosen = np.argsort(-values, axis=1, kind="stable")[:, : self._top_k]
        for index, feature in enumerate(better):
            old = self._where[feature].copy()
            for slot, source in enumerate(chosen[index]):
                new = int(source) - self._top_k
                self._where[feature, slot] = old[source] if new < 0 else self._label(chunk, int(indices[new]))
        self._best[better] = np.take_along_axis(values, chosen, axis=1)
        self._where[self._best == -np.inf] = None

    def _label(self, chunk: Chunk, row: int) -> tuple[str, int, int]:
        position = -1 if chunk.positions is None else int(chunk.positions[row])
        return chunk.request_id, position, -1 if chunk.token_ids is None else int(chunk.token_ids[row])
