"""Decode steps on a GPU: one new token per sequence through the whole model, as a fixed list of kernel launches.

`Transformer.run` is the reference implementation. A `Decoder` takes a filled model whose quantised weights are packed,
and a `State`. `step` launches everything for the rows of a `DecodeBuffers`: token ids, positions and slots are tensors
on the device that the host never reads, and every buffer stays in place, so a step can be captured as a CUDA graph and
replayed. Whatever differs between sequences (lengths, pages, selected experts and entries) is data.

Per layer: boundary (two launches), qkv projections, norm/rope/store, query projections, indexer if there are more
entries than it keeps, attention (two), two output projections, boundary, router with the shared expert, routing (fused
with the router for a single token), experts (two). Live taps add launches (`decode/taps.py`).

A step that verifies draft tokens has one row per token: several rows of a slot, adjacent and at consecutive positions.
`draft` launches the MTP block for such rows through the same layer functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.decode.layer_weights import LayerWeights, layer_weights
from birkhoff.decode.mtp import MTPWeights, join_input, mtp_weights
from birkhoff.decode.taps import (
    ATTENTION_SITES,
    EXPERT_SITES,
    NO_TAP,
    DecodeTap,
    DecodeTaps,
    tap_heads,
    tap_input,
    tap_output,
    tap_streams,
    tap_weights,
)
from birkhoff.errors import OptionError
from birkhoff.hooks import sites
from birkhoff.hooks.edit import Routing
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import gpu
from birkhoff.kernels.cuda.backend import CudaBackend, unsupported_reason
from birkhoff.kernels.cuda.compile import find_nvrtc
from birkhoff.kernels.decode_buffers import is_fp4
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import Q8_ROWS
from birkhoff.model.linear import Linear
from birkhoff.model.mhc import HeadMixer
from birkhoff.model.state import ENTRY, INDEX, LayerState, State
from birkhoff.model.transformer import Transformer

if TYPE_CHECKING:
    from birkhoff.kernels.triton_backend import TritonBackend

Rules = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor
]  # counts, table and sink of `KeyRules`, as kernels take them


def unsupported_model(model: Transformer) -> str | None:
    """Why `Decoder` cannot run a model, or None."""
    config = model.config
    if not model.packed:
        return "its experts are held as numbers"
    if model.numerics.released and not _in_released_formats(model):
        return "released numerics of weights in other formats than FP8 and FP4"
    if config.hc_mult != 4:
        return f"it has {config.hc_mult} residual streams, the kernels know 4"
    for name in ("head_dim", "q_lora_rank", "index_head_dim", "index_n_heads"):
        value = getattr(config, name)
        if value != gpu.power_of_two(value, 16):
            return f"{name} is {value}, the kernels need a power of two from 16"
    return None


def _in_released_formats(model: Transformer) -> bool:
    """Whether projections are FP8 and experts FP4."""
    layers = [module for module in model.modules() if isinstance(module, Linear) and module.role == "fp8"]
    stacks = [stack.types for stack in model.expert_stacks()]
    return all(layer.code_type is not None and layer.code_type.name == "FP8" for layer in layers) and all(
        types is not None and all(kind.name == "FP4" for kind in types) for types in stacks
    )


def _type_names(layers: Sequence[LayerWeights]) -> set[str]:
    """The types of the experts, and of the projections by one of them."""
    experts = {kind.name for w in layers for kind in w.expert_types}
    return experts | {w.shared_down.kernel_type for w in layers}


def _store_spans(model: Transformer) -> list[tuple[int, int, int]]:
    """(first, stop, stored): layers first .. stop - 1 of the model are the layers from `stored` on in its store.

    Usually one span. The MTP block counts as the layer after the last."""
    spans: list[tuple[int, int, int]] = []
    for layer, stored in enumerate(stack.layer for stack in model.expert_stacks()):
        if spans and stored == spans[-1][2] + layer - spans[-1][0]:
            spans[-1] = (spans[-1][0], layer + 1, spans[-1][2])
        else:
            spans.append((layer, layer + 1, stored))
    return spans


class Decoder:
    """Launches decode steps of `model` on `state`.

    `fast` requires (True) or refuses (False) the CUDA kernels; by default they are used where they apply. `pdl` enables
    programmatic dependent launch for them: a kernel may begin while its predecessor ends."""

    def __init__(self, model: Transformer, state: State, fast: bool | None = None, pdl: bool = True):
        reason = unsupported_model(model)
        if reason is not None:
            raise OptionError(
                f"this model cannot be decoded by GPU kernels: {reason}. Use kernels='reference'."
            )
        self.model, self.state, self.config = model, state, model.config
        self.dtype = model.numerics.dtype
        self.released = model.numerics.released
        self.store = model.expert_stacks()[0].store  # None: experts stay in the model's own memory
        self._store_spans = _store_spans(model) if self.store is not None else []
        with torch.no_grad():
            self.layers = [layer_weights(block) for block in model.blocks()]
            self.mtp: MTPWeights | None = (
                mtp_weights(model.mtp) if model.mtp is not None and state.mtp is not None else None
            )
            self.head = model.head.packed_weight()
        self.drafts = 0 if self.mtp is None else state.lookback  # rows of a slot after its first one
        device = state.device
        sliding, compressed = model.rope.sliding, model.rope.compressed
        self._omega = torch.stack([sliding, compressed, compressed, compressed]).to(device)
        self._steps_back = torch.tensor([0, 0, 3, 127], device=device)
        self.processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )
        self.unsupported = reason = "not wanted" if fast is False else self._unsupported_by_cuda()
        if fast and reason:
            raise OptionError(f"the CUDA kernels cannot serve this model: {reason}. Use fast=False.")
        layers = self.layers if self.mtp is None else [*self.layers, self.mtp.layer]
        self.kernels: CudaBackend | TritonBackend = (
            CudaBackend(device, pdl, _type_names(layers)) if reason is None else _triton_backend()
        )

    def fallbacks(self) -> list[str]:
        """What runs in place of kernels that the model or the GPU does without, in words."""
        prompts = gpu.prompt_fallback(self.state.device)
        decoding = f"decode steps run on Triton kernels instead of CUDA ones: {self.unsupported}"
        return [*([decoding] if self.unsupported else []), *([prompts] if prompts else [])]

    def buffers(self, rows: int, context: int) -> DecodeBuffers:
        """Buffers for `rows` tokens at positions below `context`."""
        return self._buffers(rows, context, self.layers)

    def draft_buffers(self, rows: int) -> DecodeBuffers:
        """Buffers for `draft` of `rows` tokens: the MTP block attends to its window only."""
        assert self.mtp is not None, "the model or its state was built without the MTP block"
        return self._buffers(rows, 1, [self.mtp.layer])

    def _buffers(self, rows: int, context: int, layers: Sequence[LayerWeights]) -> DecodeBuffers:
        return DecodeBuffers(
            self.config,
            rows,
            context,
            {w.ratio for w in layers},
            qkv=max(sum(part.out for part in w.qkv_proj) for w in layers),
            queries=max(sum(part.out for part in w.q_b_proj) for w in layers),
            ring=self.config.sliding_window + self.state.lookback,
            device=self.state.device,
            dtype=self.dtype,
            fp16_inputs=self.kernels.fp16_inputs,
            processors=self.processors,
            released=self.released,
            digits=rows > 1 and self._takes_digits(),
        )

    def step(self, buffers: DecodeBuffers, taps: DecodeTaps = NO_TAP) -> torch.Tensor:
        """Launch one step for the tokens in `buffers` -> `buffers.logits` [rows, vocab] float32."""
        from birkhoff.kernels.mhc import decode as mhc

        self._compute_phases(buffers)
        y = self._run_layers(self.layers, self.state.layers, buffers, taps, mhc.EMBED)
        tap = taps.at(len(self.layers) - 1)
        self._project_logits(self.model.hc_head, self.model.norm.weight, buffers, y, tap)
        self._count_reads(buffers, 0, len(self.layers))
        taps.end()
        return buffers.logits

    def draft(self, buffers: DecodeBuffers) -> torch.Tensor:
        """Launch the MTP block. `buffers.streams` are those after the last layer at `positions`, `token_ids` the
        tokens one position further -> `buffers.logits` of the tokens after these, and the streams to draft on from."""
        from birkhoff.kernels.mhc import decode as mhc

        w, state = self.mtp, self.state.mtp
        assert w is not None and state is not None, "the model or its state was built without the MTP block"
        self._compute_phases(buffers)
        join_input(w, self.kernels, self.model.embed, buffers, self.config.rms_norm_eps, self.released)
        first = len(self.layers)
        y = self._run_layers([w.layer], [state], buffers, NO_TAP, mhc.MIX_ONLY, first)
        self._project_logits(w.head, w.norm, buffers, y, NO_TAP)
        self._count_reads(buffers, first, first + 1)
        return buffers.logits

    def _run_layers(
        self,
        layers: Sequence[LayerWeights],
        states: Sequence[LayerState],
        buffers: DecodeBuffers,
        taps: DecodeTaps,
        mode: int,
        first: int = 0,
    ) -> torch.Tensor:
        """Launch consecutive layers, numbered from `first`; `mode` says where the first one's streams come from.

        Returns the output of the last sublayer, which is not written into the streams yet."""
        from birkhoff.kernels.mhc import decode as mhc

        c, kernels = self.config, self.kernels
        read_settings = (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps)
        embedding = (self.model.embed, buffers.token_ids)
        y: torch.Tensor | None = None
        for layer, (w, state) in enumerate(zip(layers, states), start=first):
            tap = taps.at(layer)
            for sublayer, site in enumerate((ATTENTION_SITES, EXPERT_SITES)):
                fn, base, scale = w.mixers[sublayer]
                norm = w.norms[sublayer]
                kernels.write_and_mix(
                    buffers.streams, y, buffers.post, buffers.mix, fn, buffers.mix_parts, mode, *embedding
                )
                reads = partial(_read_weights, (fn, base, scale, *read_settings))
                reading = tap_streams(tap, site.streams, buffers, fn, reads)
                kernels.read_streams(reading, base, scale, norm, *read_settings, c.rms_norm_eps)
                reread = tap_weights(tap, site.pre, buffers.pre)
                tap_weights(tap, site.post, buffers.post)
                tap_weights(tap, site.mix, buffers.mix)
                tap_input(tap, site.input, reading, norm, c.rms_norm_eps, reread)
                kept = tap.keep(site.output, buffers.expert_out if sublayer else buffers.attn_out)
                if sublayer:
                    target = buffers if kept is None else buffers.replace(expert_out=kept)
                    y = self.experts(w, target, buffers.topk_ids[layer], tap)
                else:
                    target = buffers if kept is None else buffers.replace(attn_out=kept)
                    y = self.attention(w, state, target, tap)
                if kept is None:
                    y = tap_output(tap, site.output, y, self.dtype)
                mode = mhc.KEEP
        assert y is not None, "no layers"
        return y

    def _project_logits(
        self, head: HeadMixer, norm: torch.Tensor, buffers: DecodeBuffers, y: torch.Tensor, tap: DecodeTap
    ) -> None:
        """Write the last output into the streams, merge and normalise them and multiply with the head."""
        from birkhoff.kernels.mhc import decode as mhc

        c = self.config
        mhc.write_and_mix(buffers.streams, y, buffers.post, buffers.mix, head.fn, buffers.mix_parts)
        reading = tap_streams(tap, sites.MHC_STREAMS_FINAL, buffers, head.fn, head.weights)
        mhc.read_streams(
            buffers.mix_parts,
            reading.streams,
            head.base,
            head.scale,
            norm,
            c.hc_sinkhorn_iters,
            c.hc_eps,
            c.rms_norm_eps,
            c.rms_norm_eps,
            buffers.x,
            buffers.pre,
        )
        reread = tap_weights(tap, sites.MHC_HEAD_MIX, buffers.pre)
        tap_input(tap, sites.FINAL_HIDDEN, reading, norm, c.rms_norm_eps, reread)
        self.kernels.gemv([self.head], (buffers.x, buffers.x), buffers.logits)

    def _count_reads(self, buffers: DecodeBuffers, begin: int, end: int) -> None:
        """Count the experts that layers `begin` .. `end` - 1 selected, where experts are in a store."""
        if self.store is not None:
            for first, stop, stored in self._store_spans:
                low, high = max(first, begin), min(stop, end)
                if low < high:
                    self.store.count_reads(buffers.topk_ids[low:high], stored + low - first)

    def attention(
        self, w: LayerWeights, state: LayerState, buffers: DecodeBuffers, tap: DecodeTap = NO_TAP
    ) -> torch.Tensor:
        """Launch one attention sublayer: `buffers.x` -> `buffers.attn_out` [rows, d]."""
        c = self.config
        indexed = w.ratio == 4 and buffers.max_entries > 0
        self._project_and_store(w, state, buffers)
        self._project_queries(w.q_b_proj if indexed else w.q_b_proj[:1], w, buffers)
        given = tap.rules(buffers.rows, c.num_attention_heads, w.ratio)
        rules = None if given is None else (given.counts, given.table, given.sink)
        if indexed:
            self._select_entries(w, state, buffers, rules)
        self._attend(w, state, buffers, buffers.topk_indices if indexed else None, rules)
        tap_heads(tap, buffers, c.num_attention_heads)
        self._project_heads(w, buffers)
        return buffers.attn_out

    def _project_and_store(self, w: LayerWeights, state: LayerState, buffers: DecodeBuffers) -> None:
        """`buffers.x` -> `buffers.qkv` and, normalised, `buffers.latent`; keys and entries are stored in `state`."""
        from birkhoff.kernels.compress.decode import norm_rope_store

        self._round(buffers.x, buffers.x_fp16)
        self.kernels.gemv(w.qkv_proj, (buffers.x_fp16, buffers.x), buffers.qkv)
        entry, index = [
            None if part is None else (*part, state.raw[kind].rows, state.pages[kind])
            for part, kind in ((w.compressor, ENTRY), (w.index, INDEX))
        ]
        norm_rope_store(
            buffers.qkv,
            w.q_norm,
            buffers.latent,
            buffers.latent_fp16 if self.kernels.fp16_inputs else None,
            w.kv_norm,
            state.keys.rows,
            entry,
            index,
            self.state.page_table,
            buffers.slots,
            buffers.positions,
            *buffers.phases(w.ratio),
            self.config.rms_norm_eps,
            self.kernels.pdl,
            self.drafts,
            self.released,
        )
        self._round(buffers.latent, buffers.latent_fp16)

    def _project_queries(
        self, projections: list[PackedWeight], w: LayerWeights, buffers: DecodeBuffers
    ) -> None:
        """Launch the query projections of attention and, if it is among them, of the indexer."""
        raw = (buffers.qkv, w.q_norm, self.config.rms_norm_eps)
        if self.released or not self.kernels.project_queries(projections, *raw, buffers.queries):
            self.kernels.gemv(projections, (buffers.latent_fp16, buffers.latent), buffers.queries)

    def _select_entries(
        self, w: LayerWeights, state: LayerState, buffers: DecodeBuffers, rules: Rules | None
    ) -> None:
        """Launch the indexer: the entries with the highest scores -> `buffers.topk_indices`."""
        from birkhoff.kernels.index.decode import force_and_forbid, score

        c = self.config
        heads = c.index_n_heads
        index_queries = c.num_attention_heads * c.head_dim  # first column
        head_weights = sum(part.out for part in w.qkv_proj) - heads  # first column
        score(
            buffers.queries[:, index_queries:],
            buffers.qkv[:, head_weights : head_weights + heads],
            state.pages[INDEX],
            self.state.page_table,
            buffers.slots,
            buffers.positions,
            *buffers.phases(w.ratio),
            buffers.scores,
            c.index_topk,
            (c.index_head_dim * heads) ** -0.5,
            self.kernels.pdl,
            self.released,
        )
        if rules is not None:
            force_and_forbid(buffers.scores, rules)
        self.kernels.topk(buffers.scores, buffers.positions, buffers.topk_indices)

    def _attend(
        self,
        w: LayerWeights,
        state: LayerState,
        buffers: DecodeBuffers,
        selected: torch.Tensor | None,
        rules: Rules | None,
    ) -> None:
        """Launch attention to the window and to the `selected` entries (None: all) -> `buffers.heads_out`."""
        c = self.config
        splits, keys_per_split = buffers.splits[w.ratio]
        size = (buffers.rows, splits, c.num_attention_heads)
        count = buffers.rows * splits * c.num_attention_heads
        self.kernels.attend(
            buffers.queries,
            state.keys.rows,
            c.sliding_window,
            state.pages.get(ENTRY),
            w.ratio,
            self.state.page_table,
            selected,
            buffers.slots,
            buffers.positions,
            *buffers.phases(w.ratio),
            buffers.partial_out[: count * c.head_dim].view(*size, c.head_dim),
            buffers.partial_max[:count].view(size),
            buffers.partial_sum[:count].view(size),
            w.sink,
            keys_per_split,
            c.head_dim**-0.5,
            c.rms_norm_eps,
            buffers.heads_out,
            buffers.heads_out_fp16,
            rules=rules,
        )

    def _project_heads(self, w: LayerWeights, buffers: DecodeBuffers) -> None:
        """Launch the two output projections: `buffers.heads_out` -> `buffers.attn_out`."""
        heads_out = (buffers.heads_out_fp16, buffers.heads_out)
        self.kernels.gemv(w.o_a_proj, heads_out, buffers.o_latent, self.config.o_lora_rank)
        self._round(buffers.o_latent, buffers.o_latent)
        self.kernels.gemv(w.o_b_proj, (buffers.o_latent, buffers.o_latent), buffers.attn_out)

    def experts(
        self, w: LayerWeights, buffers: DecodeBuffers, ids: torch.Tensor, tap: Tap = NO_TAP
    ) -> torch.Tensor:
        """Launch one expert sublayer: `buffers.x` -> expert ids in `ids`, outputs in `buffers.expert_out`."""
        c, kernels = self.config, self.kernels
        self._round(buffers.x, buffers.x_fp16)
        self._round(buffers.x_fp4_order, buffers.x_fp4_order)
        kernels.route_and_shared(w, buffers, ids, c.swiglu_limit, c.routed_scaling_factor)
        logits = buffers.router_gate_up[:, : c.n_routed_experts]
        tap.see(sites.MOE_ROUTER_LOGITS, logits)
        routing = Routing(logits, w.router_bias, w.hash_table, buffers.token_ids, c.routed_scaling_factor)
        edited, weights = tap.route(sites.MOE_TOPK, ids, buffers.topk_weights, routing)
        if edited is not ids:
            self._plan_experts(w, buffers, ids, edited, weights)
        layer = w.owner.layer
        if w.host is not None:
            w.host.begin(layer, buffers.x, ids, buffers.topk_weights)
        kernels.gate_up(w, buffers, c.swiglu_limit)
        self._round(buffers.expert_hidden, buffers.expert_hidden)
        self._round(buffers.shared_hidden, buffers.shared_hidden)
        kernels.down(w, buffers)
        if w.host is not None:
            w.host.end(layer, buffers.x, ids, buffers.expert_out)
        return buffers.expert_out

    def _round(self, x: torch.Tensor | None, out: torch.Tensor | None) -> None:
        """With released numerics, write x rounded to FP8 to `out`, the input of an FP8 or FP4 product. `out` may be x;
        None where the kernels do not read such a form of x."""
        if not self.released or x is None or out is None:
            return
        from birkhoff.kernels.quant.device import round_input

        round_input(x, out, self.dtype)

    def _plan_experts(
        self,
        w: LayerWeights,
        buffers: DecodeBuffers,
        ids: torch.Tensor,
        edited: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        """Plan the launches for edited experts and weights: routing by a table with one line for each row."""
        self.kernels.route(
            buffers.router_gate_up[:, : self.config.n_routed_experts],
            None,
            edited.contiguous(),
            torch.arange(len(ids), device=ids.device),
            w.expert_addresses,
            ids,
            buffers.topk_weights,
            buffers.pair_order,
            buffers.expert_slots,
            self.config.routed_scaling_factor,
        )
        buffers.topk_weights.copy_(weights)

    def _compute_phases(self, buffers: DecodeBuffers) -> None:
        """Cosines and sines of four angles per token: of its position in sliding and in compressed layers, and of the
        first of the 4 and of the 128 tokens of a block that it may complete. Compressed layers use the last three."""
        angles = (buffers.positions.unsqueeze(-1) - self._steps_back).float().unsqueeze(-1) * self._omega
        torch.cos(angles, out=buffers.cos)
        torch.sin(angles, out=buffers.sin)

    def _takes_digits(self) -> bool:
        """Whether FP4 experts read their inputs in digits. Not those of a store: experts in host memory and on the
        device give the same bits."""
        if self.released or self.store is not None or not isinstance(self.kernels, CudaBackend):
            return False
        layers = self.layers if self.mtp is None else [*self.layers, self.mtp.layer]
        return self.kernels.reads_digits(self.config) and all(
            is_fp4(w) and (w.shared_down.is_fp8 or w.shared_down.type == Q8_ROWS) for w in layers
        )

    def _unsupported_by_cuda(self) -> str | None:
        """Why the CUDA kernels cannot run the model (device, widths, form of its weights), or None."""
        reason = unsupported_reason(self.config, self.dtype, self.state.device)
        if reason is not None:
            return reason
        if find_nvrtc() is None:
            return "NVRTC, which compiles them, was not found beside PyTorch or in CUDA_HOME"
        layers = self.layers if self.mtp is None else [*self.layers, self.mtp.layer]
        if any(None in w.scale_offsets for w in layers):
            return "scales of its experts lie too far apart"
        return None


def _read_weights(mixer: tuple[torch.Tensor | float, ...], streams: torch.Tensor) -> torch.Tensor:
    """The weights [n, m] with which a sublayer would read `streams`."""
    from birkhoff.kernels.mhc import decode as mhc

    read: Callable[..., tuple[torch.Tensor, ...]] = mhc.read
    return read(streams.contiguous(), *mixer)[1]


def _triton_backend() -> TritonBackend:
    from birkhoff.kernels.triton_backend import TritonBackend

    return TritonBackend()
