"""One V4 layer: read the streams, attend, write back; read the streams, apply the experts, write back.

Every tensor that can be observed or edited has a line with `tap`, and there are no others. There is no plain residual
addition: `write` is the residual path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.tap import NoTap, Tap
from birkhoff.model.attention import Attention
from birkhoff.model.batch import Batch
from birkhoff.model.linear import Destination, Numerics, RMSNorm
from birkhoff.model.mhc import Mixer
from birkhoff.model.moe import MoE
from birkhoff.model.rope import Rope, StepPhases
from birkhoff.model.state import Fresh, LayerState

_NO_TAP = NoTap()


class Block(nn.Module):
    def __init__(
        self, config: V4Config, ratio: int, hashed: bool, rope: Rope, numerics: Numerics, packed: bool = False
    ):
        super().__init__()
        self.hc_attn = Mixer(config, numerics)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.attn = Attention(config, ratio, rope, numerics, packed)
        self.hc_ffn = Mixer(config, numerics)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.ffn = MoE(config, hashed, numerics, packed)

    def forward(
        self, streams: torch.Tensor, batch: Batch, phases: StepPhases, state: LayerState | Fresh, tap: Tap
    ) -> torch.Tensor:
        """streams [n, m, d] -> [n, m, d]."""
        if tap.streams_only and self.hc_attn.reads_input:
            return self._forward_fused(streams, batch, phases, state, tap)
        seen, streams = tap.part(sites.MHC_STREAMS_PRE_ATTN, streams, self.hc_attn.weights)  # read, carried
        u, pre, post, mix = self.hc_attn.read(seen)  # [n, d], [n, m], [n, m], [n, m, m]
        u = self.hc_attn.reread(seen, u, pre, tap(sites.MHC_ATTN_PRE_MIX, pre))
        post = tap(sites.MHC_ATTN_POST_MIX, post)
        mix = tap(sites.MHC_ATTN_RES_MIX, mix)
        u = tap(sites.PRE_ATTN, u)
        y = tap(sites.POST_ATTN, self.attn(self.attn_norm(u), batch, phases, state, tap))
        streams = self.hc_attn.write(streams, y, post, mix)

        seen, streams = tap.part(sites.MHC_STREAMS_PRE_MLP, streams, self.hc_ffn.weights)
        u, pre, post, mix = self.hc_ffn.read(seen)
        u = self.hc_ffn.reread(seen, u, pre, tap(sites.MHC_FFN_PRE_MIX, pre))
        post = tap(sites.MHC_FFN_POST_MIX, post)
        mix = tap(sites.MHC_FFN_RES_MIX, mix)
        u = tap(sites.MLP_IN, u)
        y = tap(sites.MLP_OUT, self.ffn(self.ffn_norm(u), batch, tap))
        return self.hc_ffn.write(streams, y, post, mix)

    def _forward_fused(
        self, streams: torch.Tensor, batch: Batch, phases: StepPhases, state: LayerState | Fresh, tap: Tap
    ) -> torch.Tensor:
        """`forward` if at most streams are captured, by kernels that normalise the input of a sublayer where it is
        read."""
        tap.see(sites.MHC_STREAMS_PRE_ATTN, streams)
        x, post, mix = self.hc_attn.read_input(streams, self.attn_norm)
        streams = self.hc_attn.write(streams, self.attn(x, batch, phases, state), post, mix)
        tap.see(sites.MHC_STREAMS_PRE_MLP, streams)
        x, post, mix = self.hc_ffn.read_input(streams, self.ffn_norm, self.ffn.experts.inner)
        return self.hc_ffn.write(streams, self.ffn(x, batch, _NO_TAP), post, mix)

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("hc_attn", "attn_norm", "attn", "hc_ffn", "ffn_norm", "ffn"):
            yield from getattr(self, part).destinations(f"{name}.{part}")
