"""Armed layers of DeepSeek-V4, for the layers that vLLM has for CPUs and for NVIDIA GPUs.

A layer of the NVIDIA shape is handed (output of the last sublayer, streams before it, write weights, mix) and hands on
the same, so that writing one output and reading the next input is one fused kernel. An armed layer takes the two apart,
because its sites are between them; layers beside it stay fused. On a CPU the layers hand on the streams themselves.
What the hooks see is the input of a sublayer before its norm, as in our own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from birkhoff.errors import UnsupportedModel
from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap

TapAt = Callable[[int], Tap]  # the tap of a layer, in the running step
_ENDS = ("mhc_streams_final", "final_hidden")


class LayerBoundary(Protocol):
    """The two halves of a boundary between sublayers, for one layer."""

    def read(self, streams: torch.Tensor, sublayer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input of the sublayer "attn" or "ffn" before its norm, write weights, and mix."""
        ...

    def write(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        """The streams after a sublayer."""
        ...


class CpuBoundary:
    """By the methods of vLLM's layer for CPUs."""

    def __init__(self, layer: Any):
        self._layer = layer

    def read(self, streams: torch.Tensor, sublayer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self._layer
        weights = (getattr(layer, f"hc_{sublayer}_{name}") for name in ("fn", "scale", "base"))
        read: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = layer.hc_pre(streams, *weights)
        return read

    def write(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        written: torch.Tensor = self._layer.hc_post(output, streams, post, mix)
        return written


class NvidiaBoundary:
    """By the unfused kernels of vLLM for NVIDIA GPUs: `pre` and `post` are `mhc_pre_tilelang`, `mhc_post_tilelang`."""

    def __init__(self, layer: Any, pre: Callable[..., Any], post: Callable[..., Any]):
        self._layer = layer
        self._pre = pre
        self._post = post

    def read(self, streams: torch.Tensor, sublayer: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self._layer
        post, mix, x = self._pre(
            streams,
            getattr(layer, f"hc_{sublayer}_fn"),
            getattr(layer, f"hc_{sublayer}_scale"),
            getattr(layer, f"hc_{sublayer}_base"),
            layer.rms_norm_eps,
            layer.hc_eps,
            layer.hc_eps,
            layer.hc_post_alpha,
            layer.hc_sinkhorn_iters,
        )
        return x, post, mix

    def write(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        written: torch.Tensor = self._post(output, streams, post, mix)
        return written


class ArmedV4Layer(nn.Module):
    """A layer of V4 whose sites are hooked. It is called like vLLM's own, and hands on what that hands on."""

    def __init__(self, layer: Any, number: int, tap_at: TapAt, boundary: LayerBoundary, fused: bool):
        super().__init__()
        self.layer = layer
        self.use_fused_mhc = fused
        self._number = number
        self._tap_at = tap_at
        self._boundary = boundary

    def hc_post(self, *given: torch.Tensor) -> torch.Tensor:
        return self._boundary.write(*given)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor | None,
        post_mix: torch.Tensor | None = None,
        res_mix: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        *more: Any,
        **named: Any,
    ) -> tuple[Any, ...]:
        layer, boundary, tap = self.layer, self._boundary, self._tap_at(self._number)
        if residual is None:
            streams = x
        else:
            assert post_mix is not None and res_mix is not None
            streams = boundary.write(x, residual, post_mix, res_mix)
        if streams.dim() == 2:  # the first layer of the NVIDIA shape is handed the embeddings
            streams = streams.unsqueeze(1).expand(-1, layer.hc_mult, -1).contiguous()
        read, streams = tap.part(sites.MHC_STREAMS_PRE_ATTN, streams)
        u, post, mix = boundary.read(read, "attn")
        post = tap(sites.MHC_ATTN_POST_MIX, post.reshape(len(post), -1)).reshape(post.shape)
        mix = tap(sites.MHC_ATTN_RES_MIX, mix)
        u = tap(sites.PRE_ATTN, u)
        y = tap(sites.POST_ATTN, layer.attn(positions, layer.attn_norm(u), None))
        read, streams = tap.part(sites.MHC_STREAMS_PRE_MLP, boundary.write(y, streams, post, mix))
        u, post, mix = boundary.read(read, "ffn")
        post = tap(sites.MHC_FFN_POST_MIX, post.reshape(len(post), -1)).reshape(post.shape)
        mix = tap(sites.MHC_FFN_RES_MIX, mix)
        u = tap(sites.MLP_IN, u)
        y = tap(sites.MLP_OUT, layer.ffn(layer.ffn_norm(u), input_ids, *more, **named))
        if self.use_fused_mhc:
            return y, streams, post, mix
        return boundary.write(y, streams, post, mix), None, None, None


class ArmedHead(nn.Module):
    """The merge of the streams before the final norm."""

    def __init__(self, head: nn.Module, number: int, tap_at: TapAt):
        super().__init__()
        self.head = head
        self._number = number
        self._tap_at = tap_at

    def forward(self, streams: torch.Tensor, *more: Any) -> torch.Tensor:
        tap = self._tap_at(self._number)
        read, _ = tap.part(sites.MHC_STREAMS_FINAL, streams)
        return tap(sites.FINAL_HIDDEN, self.head(read, *more))


def arm_v4(
    inner: Any,
    armed: Mapping[str, Sequence[int]],
    tap_at: TapAt,
    boundary_of: Callable[[Any], LayerBoundary] | None = None,
) -> None:
    """Replace the layers of a decoder that have armed sites on this rank. `boundary_of` makes the boundary of one."""
    numbers = range(inner.start_layer, inner.end_layer)
    boundary_of = boundary_of or _boundary_of
    chosen = {layer for hook, layers in armed.items() if hook not in _ENDS for layer in layers}
    for number in sorted(chosen & set(numbers)):
        layer = inner.layers[number]
        if getattr(layer, "use_sequence_parallel", False):
            raise UnsupportedModel(
                "vLLM divides the tokens of V4 among ranks here (sequence parallelism), and hooks need all rows. "
                "Start without expert parallelism."
            )
        fused = getattr(layer, "use_fused_mhc", True)  # the layer for GPUs is always fused
        inner.layers[number] = ArmedV4Layer(layer, number, tap_at, boundary_of(layer), fused)
    last = len(inner.layers) - 1
    if last in numbers and any(hook in armed for hook in _ENDS):
        if not hasattr(inner, "hc_head_op"):
            raise UnsupportedModel(
                f"the head of this V4 is one fused kernel: {' and '.join(_ENDS)} cannot be armed. Leave them out of "
                "hooks."
            )
        inner.hc_head_op = ArmedHead(inner.hc_head_op, last, tap_at)


def _boundary_of(layer: Any) -> LayerBoundary:
    if hasattr(layer, "hc_pre"):
        return CpuBoundary(layer)
    from vllm.model_executor.kernels.mhc.tilelang import mhc_post_tilelang, mhc_pre_tilelang

    return NvidiaBoundary(layer, mhc_pre_tilelang, mhc_post_tilelang)
