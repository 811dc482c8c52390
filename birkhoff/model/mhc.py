"""The residual path: how a sublayer reads from the streams and writes back (spec 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.kernels import mhc
from birkhoff.model.compiled import CompiledHeadMixer, CompiledMixer
from birkhoff.model.linear import Destination, Numerics


class Mixer(nn.Module):
    """One sublayer's hyper-connection: `read` before it, `write` after it."""

    def __init__(self, config: V4Config, numerics: Numerics):
        super().__init__()
        self.kernels = numerics.kernels
        m = config.hc_mult
        self.iters = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.rms_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + m) * m, m * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty((2 + m) * m, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.compiled: CompiledMixer | None = None
        self._made: tuple[tuple, Any] | None = None

    def _fn(self, dtype: torch.dtype) -> Any:
        """`fn` as kernels like it best beside streams of `dtype`, made once for as long as it stays as it is."""
        if torch.is_grad_enabled():
            return self.fn
        now = (
            self.fn.data_ptr(),
            0 if self.fn.is_inference() else self.fn._version,
            dtype,
            self.kernels.name,
        )
        if self._made is None or self._made[0] != now:
            self._made = now, self.kernels.mhc_prepare(self.fn, dtype)
        return self._made[1]

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[n, m, d] -> input [n, d], read-in [n, m], write-out [n, m], mixer [n, from, to]."""
        if self.compiled is not None and self.compiled.accepts(streams):
            return self.compiled.read(streams)
        given = (self.base, self.scale, self.iters, self.eps, self.rms_eps)
        return self.kernels.mhc_read(streams, self._fn(streams.dtype), *given)

    def weights(self, streams: torch.Tensor) -> torch.Tensor:
        """The read-in weights [n, m] alone."""
        return self.read(streams)[1]

    def write(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        if self.compiled is not None and self.compiled.accepts(streams):
            return self.compiled.write(streams, y, post, mix)
        return self.kernels.mhc_write(streams, y, post, mix)

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("fn", "base", "scale"):
            yield Destination(f"{name}_{part}", getattr(self, part))


class HeadMixer(nn.Module):
    """Merges the streams into one before the output head."""

    def __init__(self, config: V4Config):
        super().__init__()
        m = config.hc_mult
        self.eps = config.hc_eps
        self.rms_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty(m, m * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(m, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32))
        self.compiled: CompiledHeadMixer | None = None

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, m, d] -> merged [n, d], read-out weights [n, m]."""
        if self.compiled is not None and self.compiled.accepts(streams):
            return self.compiled(streams)
        return mhc.head(streams, self.fn, self.base, self.scale, self.eps, self.rms_eps)

    def weights(self, streams: torch.Tensor) -> torch.Tensor:
        return self(streams)[1]

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("fn", "base", "scale"):
            yield Destination(f"{name}_{part}", getattr(self, part))
