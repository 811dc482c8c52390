"""A decoding step on a GPU that is watched or changed: the launches of `decode/gpu.py`, more where a site is live.

Nothing is added where nothing happens. Streams that are changed are mixed a second time; a live input is collapsed
beside the fused launch, and normalised again when it is changed; a live output is summed up before it is written. What
is only looked at goes on as it was, so looking changes no bit of what follows. All operations have fixed shapes, so the
step can be recorded like one without taps.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Protocol

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.gpu import Decoder
from birkhoff.hooks import sites
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import Reads, Tap

ATTENTION = (
    sites.MHC_STREAMS_PRE_ATTN,
    sites.MHC_ATTN_PRE_MIX,
    sites.MHC_ATTN_POST_MIX,
    sites.MHC_ATTN_RES_MIX,
    sites.PRE_ATTN,
    sites.POST_ATTN,
)
EXPERTS = (
    sites.MHC_STREAMS_PRE_MLP,
    sites.MHC_FFN_PRE_MIX,
    sites.MHC_FFN_POST_MIX,
    sites.MHC_FFN_RES_MIX,
    sites.MLP_IN,
    sites.MLP_OUT,
)


class DecodeTap(Tap, Protocol):
    """A tap of one layer that knows beforehand where something happens."""

    def live(self, site: Site) -> bool: ...

    def keep(self, site: Site, like: torch.Tensor) -> torch.Tensor | None:
        """Where to write an output that is only looked at, so that it need not be copied; None: anywhere."""
        ...


class DecodeTaps(Protocol):
    def at(self, layer: int) -> DecodeTap: ...

    def end(self) -> None:
        """All sites of the step were met."""
        ...


def tapped_step(decoder: Decoder, buffers: DecodeBuffers, taps: DecodeTaps) -> torch.Tensor:
    """`Decoder.step` with taps -> logits [rows, vocab] float32, in the desk's own memory."""
    from birkhoff.kernels.mhc import decode as mhc

    c = decoder.config
    model = decoder.model
    kernels = decoder.kernels
    how = (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, c.rms_norm_eps)
    decoder._phases(buffers)
    embedding = (model.embed, buffers.token_ids)
    mode, y = mhc.EMBED, None
    for number, w in enumerate(decoder.layers):
        tap = taps.at(number)
        for sublayer, (streams, pre, post, mix, entering, leaving) in enumerate((ATTENTION, EXPERTS)):
            fn, base, scale = w.mixers[sublayer]
            kernels.write_and_mix(
                buffers.streams, y, buffers.post, buffers.mix, fn, buffers.mix_parts, mode, *embedding
            )
            reading = _part(tap, streams, buffers, fn, partial(_read_weights, (fn, base, scale, *how[:3])))
            kernels.read_streams(reading, base, scale, w.norms[sublayer], *how)
            tap.see(pre, buffers.pre)
            tap.see(post, buffers.post)
            tap.see(mix, buffers.mix)
            _input(tap, entering, reading, w.norms[sublayer], c.rms_norm_eps)
            kept = tap.keep(leaving, buffers.expert_out if sublayer else buffers.attn_out)
            if sublayer:
                made = decoder._experts(w, _with(buffers, expert_out=kept), buffers.topk_ids[number], tap)
            else:
                made = decoder._attention(w, decoder.state.layers[number], _with(buffers, attn_out=kept))
            y = made if kept is not None else _output(tap, leaving, made, decoder.dtype)
            mode = mhc.KEEP
    tap = taps.at(len(decoder.layers) - 1)
    head = model.hc_head
    mhc.write_and_mix(buffers.streams, y, buffers.post, buffers.mix, head.fn, buffers.mix_parts)
    reading = _part(tap, sites.MHC_STREAMS_FINAL, buffers, head.fn, head.weights)
    norm = model.norm.weight
    mhc.read_streams(
        buffers.mix_parts, reading.streams, head.base, head.scale, norm, *how, buffers.x, buffers.pre
    )
    tap.see(sites.MHC_HEAD_MIX, buffers.pre)
    _input(tap, sites.FINAL_HIDDEN, reading, norm, c.rms_norm_eps)
    kernels.gemv([decoder.head], (buffers.x, buffers.x), buffers.logits)
    decoder.count_reads(buffers)
    taps.end()
    return buffers.logits


def _with(buffers: DecodeBuffers, **places: torch.Tensor | None) -> DecodeBuffers:
    """The desk, with another place for some of what is computed."""
    given = {name: tensor for name, tensor in places.items() if tensor is not None}
    if not given:
        return buffers
    other = copy(buffers)
    for name, tensor in given.items():
        setattr(other, name, tensor)
    return other


def _part(
    tap: DecodeTap, site: Site, buffers: DecodeBuffers, fn: torch.Tensor, reads: Reads
) -> DecodeBuffers:
    """Streams through their tap: the desk as the coming sublayer reads it, mixed again when it reads something new."""
    from birkhoff.kernels.mhc import decode as mhc

    read, carried = tap.part(site, buffers.streams, reads)
    if carried is not buffers.streams:
        buffers.streams.copy_(carried)
    if read is carried:
        read = buffers.streams
        if carried is buffers.streams:
            return buffers
    reading = copy(buffers)
    reading.streams = read.contiguous()
    mhc.write_and_mix(reading.streams, None, None, None, fn, buffers.mix_parts, mhc.MIX_ONLY)
    return reading


def _read_weights(given: tuple, streams: torch.Tensor) -> torch.Tensor:
    from birkhoff.kernels.mhc.decode import read

    return read(streams.contiguous(), *given)[1]


def _input(tap: DecodeTap, site: Site, buffers: DecodeBuffers, norm: torch.Tensor, eps: float) -> None:
    """A sublayer's input before its norm through its tap; normalised again when it was changed."""
    from birkhoff.kernels.mhc.prefill import collapse
    from birkhoff.kernels.norm.decode import norm_into

    if not tap.live(site):
        return
    u = collapse(buffers.streams, buffers.pre)
    changed = tap(site, u)
    if changed is not u:
        norm_into(changed.contiguous(), norm, eps, buffers.x, buffers.x_fp16, buffers.x_fp4_order)


def _output(tap: DecodeTap, site: Site, made: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sublayer's output, in parts [n, p, d] or whole, through its tap; as it was when it was only looked at."""
    if not tap.live(site):
        return made
    whole = (made if made.dim() == 2 else made.sum(1)).to(dtype)
    changed = tap(site, whole)
    return made if changed is whole else changed.contiguous()
