"""Taps of a GPU decode step: extra launches at live sites, none elsewhere.

Edited streams are mixed a second time. The input of a sublayer is recomputed from the streams at a live site, and
normalised again when it was edited. The output of a sublayer is summed at a live site before it is written back. A
tensor that is only observed is used unchanged, so observing a step does not change its results. All operations have
fixed shapes, so a tapped step can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.hooks import sites
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import NoTap, Reads, Tap


class DecodeTap(Tap, Protocol):
    """The tap of one layer; it knows in advance which sites are live."""

    def live(self, site: Site) -> bool: ...

    def keep(self, site: Site, like: torch.Tensor) -> torch.Tensor | None:
        """Memory for an output that is only observed, so that it need not be copied; None for no preference."""
        ...


class DecodeTaps(Protocol):
    """The taps of all layers."""

    def at(self, layer: int) -> DecodeTap: ...

    def end(self) -> None:
        """Called after the last site of a step."""
        ...


class NoDecodeTap(NoTap):
    """No site is live."""

    def at(self, layer: int) -> NoDecodeTap:
        return self

    def live(self, site: Site) -> bool:
        return False

    def keep(self, site: Site, like: torch.Tensor) -> torch.Tensor | None:
        return None

    def end(self) -> None:
        pass


NO_TAP = NoDecodeTap()


class SublayerSites(NamedTuple):
    streams: Site
    pre: Site
    post: Site
    mix: Site
    input: Site
    output: Site


ATTENTION_SITES = SublayerSites(
    sites.MHC_STREAMS_PRE_ATTN,
    sites.MHC_ATTN_PRE_MIX,
    sites.MHC_ATTN_POST_MIX,
    sites.MHC_ATTN_RES_MIX,
    sites.PRE_ATTN,
    sites.POST_ATTN,
)
EXPERT_SITES = SublayerSites(
    sites.MHC_STREAMS_PRE_MLP,
    sites.MHC_FFN_PRE_MIX,
    sites.MHC_FFN_POST_MIX,
    sites.MHC_FFN_RES_MIX,
    sites.MLP_IN,
    sites.MLP_OUT,
)


def tap_streams(
    tap: DecodeTap, site: Site, buffers: DecodeBuffers, fn: torch.Tensor, reads: Reads
) -> DecodeBuffers:
    """Pass the streams through their tap; returns the buffers as the next sublayer reads them.

    `buffers.streams` become the streams that are carried on. If the sublayer reads other values than were mixed with
    `fn`, they are mixed again."""
    from birkhoff.kernels.mhc import decode as mhc

    read, carried = tap.part(site, buffers.streams, reads)
    if carried is not buffers.streams:
        buffers.streams.copy_(carried)
    if read is carried:
        read = buffers.streams
        if carried is buffers.streams:
            return buffers
    reading = buffers.replace(streams=read.contiguous())
    mhc.write_and_mix(reading.streams, None, None, None, fn, buffers.mix_parts, mhc.MIX_ONLY)
    return reading


def tap_weights(tap: DecodeTap, site: Site, weights: torch.Tensor) -> bool:
    """Pass mixing weights through their tap; edited ones replace those in the buffer. Returns whether they were."""
    edited = tap(site, weights)
    if edited is weights:
        return False
    weights.copy_(edited)
    return True


def tap_input(
    tap: DecodeTap, site: Site, buffers: DecodeBuffers, norm: torch.Tensor, eps: float, reread: bool = False
) -> None:
    """Pass the input of a sublayer, before its norm, through its tap; normalise it again if it was edited, or if the
    weights it is read with were (`reread`)."""
    from birkhoff.kernels.mhc.prefill import collapse
    from birkhoff.kernels.norm.decode import norm_into

    if not reread and not tap.live(site):
        return
    u = collapse(buffers.streams, buffers.pre)
    edited = tap(site, u)
    if reread or edited is not u:
        norm_into(edited.contiguous(), norm, eps, buffers.x, buffers.x_fp16, buffers.x_fp4_order)


def tap_output(tap: DecodeTap, site: Site, output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Pass the output of a sublayer, [n, d] or in parts [n, p, d], through its tap; unchanged if only observed."""
    if not tap.live(site):
        return output
    whole = (output if output.dim() == 2 else output.sum(1)).to(dtype)
    edited = tap(site, whole)
    return output if edited is whole else edited.contiguous()


def tap_heads(tap: DecodeTap, buffers: DecodeBuffers, heads: int) -> None:
    """Pass the output of the attention heads through its tap; written back in both dtypes if it was edited."""
    if not tap.live(sites.ATTN_HEAD_OUT):
        return
    whole = torch.unflatten(buffers.heads_out, 1, (heads, -1))
    edited = tap(sites.ATTN_HEAD_OUT, whole)
    if edited is whole:
        return
    for buffer in (buffers.heads_out, buffers.heads_out_fp16):
        if buffer is not None:
            buffer.copy_(edited.flatten(1))
