"""Manifold-constrained hyper-connections: how a sublayer reads from the residual streams and writes back (spec 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import mhc
from birkhoff.kernels.quant.rounded_rows import Input
from birkhoff.model.compiled import CompiledHeadMixer, CompiledMixer
from birkhoff.model.linear import Destination, Numerics, RMSNorm

MixerOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Mixer(nn.Module):
    """The hyper-connection of one sublayer: `read` before it, `write` after it."""

    def __init__(self, config: V4Config, numerics: Numerics):
        super().__init__()
        self.numerics, self.kernels = numerics, numerics.kernels
        m = config.hc_mult
        self.iters = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.rms_eps = config.rms_norm_eps
        self.fn = nn.Parameter(torch.empty((2 + m) * m, m * config.hidden_size, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty((2 + m) * m, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))
        self.compiled: CompiledMixer | None = None
        self._prepared: tuple[tuple[Any, ...], Any] | None = None  # with the key it was prepared for

    def _prepared_fn(self, dtype: torch.dtype) -> Any:
        """`fn` as the kernels take it for streams of `dtype`, cached until `fn` changes."""
        if torch.is_grad_enabled():
            return self.fn
        version = 0 if self.fn.is_inference() else self.fn._version
        key = (self.fn.data_ptr(), version, dtype, self.kernels.name)
        if self._prepared is None or self._prepared[0] != key:
            self._prepared = key, self.kernels.mhc_prepare(self.fn, dtype)
        return self._prepared[1]

    def read(self, streams: torch.Tensor) -> MixerOutput:
        """[n, m, d] -> input [n, d], read-in weights [n, m], write-out weights [n, m], mixer [n, from, to]."""
        if self.compiled is not None and self.compiled.accepts(streams):
            return self.compiled.read(streams)
        settings = (self.base, self.scale, self.iters, self.eps, self.rms_eps)
        output: MixerOutput = self.kernels.mhc_read(streams, self._prepared_fn(streams.dtype), *settings)
        return output

    @property
    def reads_input(self) -> bool:
        """Whether `read_input` is faster than `read` and a norm."""
        return self.kernels.on_gpu and not torch.is_grad_enabled()

    def read_input(
        self, streams: torch.Tensor, norm: RMSNorm, inner: int | None = None
    ) -> tuple[Input, torch.Tensor, torch.Tensor]:
        """[n, m, d] -> normalised input [n, d], write-out weights, mixer. `inner`: that of the experts that read it."""
        settings = (self.base, self.scale, self.iters, self.eps, self.rms_eps)
        found: tuple[Input, torch.Tensor, torch.Tensor] = self.kernels.mhc_read_input(
            streams,
            self._prepared_fn(streams.dtype),
            *settings,
            norm.weight,
            norm.eps,
            self.numerics.released,
            inner,
        )
        return found

    def weights(self, streams: torch.Tensor) -> torch.Tensor:
        """The read-in weights [n, m] alone."""
        return self.read(streams)[1]

    reread = staticmethod(mhc.reread)

    def write(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """Mix the streams [n, m, d] and add the output y [n, d] of the sublayer."""
        if self.compiled is not None and self.compiled.accepts(streams):
            return self.compiled.write(streams, y, post, mix)
        written: torch.Tensor = self.kernels.mhc_write(streams, y, post, mix)
        return written

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

    def merge(self, streams: torch.Tensor, tap: Tap) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, m, d] -> merged [n, d] and the streams that are carried past the head, through the sites of a head."""
        seen, streams = tap.part(sites.MHC_STREAMS_FINAL, streams, self.weights)
        merged, weights = self(seen)
        merged = self.reread(seen, merged, weights, tap(sites.MHC_HEAD_MIX, weights))
        return tap(sites.FINAL_HIDDEN, merged), streams

    def weights(self, streams: torch.Tensor) -> torch.Tensor:
        """The read-out weights [n, m] alone."""
        return self.forward(streams)[1]

    reread = staticmethod(mhc.reread)

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("fn", "base", "scale"):
            yield Destination(f"{name}_{part}", getattr(self, part))
