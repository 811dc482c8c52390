"""Decoding steps on a GPU: the whole model for one new token per sequence, as a fixed list of kernel launches.

`Transformer.run` is the plain twin. A `Decoder` takes a filled model whose quantised weights are packed and a `State`;
`step` launches everything for the rows of a `DecodeBuffers`: token ids, positions and slots are tensors on the device, the host
asks nothing of them, and every buffer stays where it is, so a step can be captured as a CUDA graph and replayed.
What differs between sequences (lengths, pages, chosen experts and entries) is data. A step that is watched or changed
is `tapped.py`'s: these launches, and more where a site is live.

Per layer: boundary (two launches), first products, small stage, query products, indexer when there are more entries
than it keeps, attention (two), two output products, boundary, router with the shared expert, routing (with the router
where there is one token), experts (two).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from birkhoff.decode.buffers import DecodeBuffers
from birkhoff.errors import OptionError
from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import gpu
from birkhoff.kernels.cuda.backend import CudaBackend, scale_offset, unsupported_reason
from birkhoff.kernels.cuda.compile import find_nvrtc
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.model.attention import Attention
from birkhoff.model.block import Block
from birkhoff.model.compressor import Compressor
from birkhoff.model.linear import Linear, become_views
from birkhoff.model.moe import Experts, MoE
from birkhoff.model.state import ENTRY, INDEX, LayerState, State
from birkhoff.model.transformer import Transformer

if TYPE_CHECKING:
    from birkhoff.kernels.triton_backend import TritonBackend


def refusal(model: Transformer) -> str | None:
    """Why a model cannot be decoded here, or None."""
    config = model.config
    if not model.packed:
        return "its weights are not packed as FP8 and FP4 codes"
    if model.numerics.released:
        return "released numerics round activations, which these kernels do not"
    if config.hc_mult != 4:
        return f"it has {config.hc_mult} residual streams, the kernels know 4"
    for name in ("head_dim", "q_lora_rank", "index_head_dim", "index_n_heads"):
        value = getattr(config, name)
        if value != gpu.power_of_two(value, 16):
            return f"{name} is {value}, the kernels need a power of two from 16"
    return None


def _codes(*layers: Linear) -> PackedWeight:
    """FP8 layers that read one input, stacked; a single one as prompts read it."""
    if len(layers) == 1:
        return layers[0].rows()
    named = [(layer, part) for layer in layers for part in layer.parts]
    made = PackedWeight.fp8(
        [(getattr(layer, f"codes_{part}"), getattr(layer, f"scale_{part}")) for layer, part in named]
    )
    become_views(layers, made.weight)
    return made


class LayerWeights:
    """One block's weights as the kernels read them; nothing but scales is in memory twice."""

    def __init__(self, block: Block):
        a, m = block.attn, block.ffn
        assert isinstance(a, Attention) and isinstance(m, MoE)
        self.ratio = a.ratio
        self.mixers = [(mixer.fn, mixer.base, mixer.scale) for mixer in (block.hc_attn, block.hc_ffn)]
        self.norms = [block.attn_norm.weight, block.ffn_norm.weight]
        self.q_norm = a.q_norm.weight
        self.kv_norm = a.kv_norm.weight
        self.sink = a.attn_sink
        self.qkv_proj = [_codes(a.wq_a, a.wkv)]
        plain = [] if a.compressor is None else [a.compressor.project]
        queries = [a.wq_b]
        if a.indexer is not None:
            plain += [a.indexer.compressor.project, a.indexer.weights_proj]
            queries.append(a.indexer.wq_b)
        if plain:
            self.qkv_proj.append(PackedWeight.plain([layer.weight for layer in plain]))
            become_views(plain, self.qkv_proj[-1].weight)
        self.q_b_proj = [_codes(a.wq_b)] if len(queries) == 1 else [_codes(a.wq_b), _codes(queries[1])]
        self.o_a_proj = [_codes(a.wo_a)]
        self.o_b_proj = [_codes(a.wo_b)]
        self.compressor = None if a.compressor is None else _compressor(a.compressor)
        self.index = None if a.indexer is None else _compressor(a.indexer.compressor)
        self.router = m.gate.project.rows()
        self.router_bias: torch.Tensor | None = m.gate.bias
        self.hash_table = m.gate.tid2eid
        self.shared_gate_up = _codes(m.shared_experts.open)
        self.shared_down = _codes(m.shared_experts.w2)
        self.expert_addresses = addresses(m)
        self.scale_offsets = [scale_offset(torch.tensor(span)) for span in spans(m.experts)]
        self.host_range = None if m.experts.store is None else m.experts.store.far()
        self.held = m.experts  # the addresses above stay valid as long as this lives


def _compressor(compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    return compressor.ape, compressor.norm.weight


def addresses(moe: MoE) -> torch.Tensor:
    """Where each expert's codes and scales begin: [E, 4] int64 (gate and up, scales, down, scales)."""
    return moe.experts.addresses()


def spans(experts: Experts) -> list[tuple[int, int]]:
    """The least and the largest scale of all experts' gate and up, and of their down."""
    found = []
    for name, place in (("gate_up_scale", 1), ("down_scale", 3)):
        stored = [part[place] for part in map(experts.at_home, range(experts.count))]
        whole = [experts.get_buffer(name)] if experts.store is None else stored
        ends = torch.stack([torch.stack(scales.aminmax()).cpu() for scales in whole])
        found.append((int(ends.min()), int(ends.max())))
    return found


def _rows_of_store(model: Transformer) -> list[tuple[int, int, int]]:
    """Layers first .. stop - 1 of the model are layers from a third number on in its store; one span, as a rule."""
    spans: list[tuple[int, int, int]] = []
    for number, layer in enumerate(stack.layer for stack in model.expert_stacks()[: len(model.layers)]):
        if spans and layer == spans[-1][2] + number - spans[-1][0]:
            spans[-1] = (spans[-1][0], number + 1, spans[-1][2])
        else:
            spans.append((number, number + 1, layer))
    return spans


class Decoder:
    """`fast` demands (or refuses) the CUDA kernels, which are otherwise used where they apply; `pdl` lets them begin
    while their predecessors end."""

    def __init__(self, model: Transformer, state: State, fast: bool | None = None, pdl: bool = True):
        reason = refusal(model)
        if reason is not None:
            raise OptionError(
                f"this model cannot be decoded by GPU kernels: {reason}. Use kernels='reference'."
            )
        self.model, self.state, self.config = model, state, model.config
        self.dtype = model.numerics.dtype
        self.store = model.expert_stacks()[0].store  # None: experts lie where they were loaded
        self._counted = _rows_of_store(model) if self.store is not None else []
        with torch.no_grad():
            self.layers = [LayerWeights(block) for block in model.layers]  # type: ignore[arg-type]
            self.head = model.head.rows()
        omega = model.rope.sliding, model.rope.compressed
        device = state.device
        self.omega = torch.stack([omega[0], omega[1], omega[1], omega[1]]).to(device)  # see `_phases`
        self.before = torch.tensor([0, 0, 3, 127], device=device)
        self.processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )
        reason = "not wanted" if fast is False else why_not_fast(self)
        if fast and reason:
            raise OptionError(f"the CUDA kernels cannot serve this model: {reason}. Use fast=False.")
        self.kernels: CudaBackend | TritonBackend = (
            CudaBackend(device, pdl) if reason is None else _portable()
        )

    def buffers(self, rows: int, context: int) -> DecodeBuffers:
        """Buffers for `rows` tokens at positions below `context`."""
        return DecodeBuffers(
            self.config,
            rows,
            context,
            {w.ratio for w in self.layers},
            qkv=max(sum(part.out for part in w.qkv_proj) for w in self.layers),
            queries=max(sum(part.out for part in w.q_b_proj) for w in self.layers),
            ring=self.config.sliding_window + self.state.lookback,
            device=self.state.device,
            dtype=self.dtype,
            fp16_inputs=self.kernels.fp16_inputs,
            processors=self.processors,
        )

    def step(self, buffers: DecodeBuffers) -> torch.Tensor:
        """Launch one step for the desk's tokens -> logits [rows, vocab] float32, in the desk's own memory."""
        from birkhoff.kernels.mhc import decode as mhc

        c, kernels = self.config, self.kernels
        how = (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, c.rms_norm_eps)
        self._phases(buffers)
        embedding = (self.model.embed, buffers.token_ids)
        mode, y = mhc.EMBED, None
        for number, w in enumerate(self.layers):
            for sublayer in (0, 1):
                fn, base, scale = w.mixers[sublayer]
                kernels.write_and_mix(
                    buffers.streams, y, buffers.post, buffers.mix, fn, buffers.mix_parts, mode, *embedding
                )
                kernels.read_streams(buffers, base, scale, w.norms[sublayer], *how)
                at = self.state.layers[number]
                y = (
                    self._experts(w, buffers, buffers.topk_ids[number])
                    if sublayer
                    else self._attention(w, at, buffers)
                )
                mode = mhc.KEEP
        head, norm = self.model.hc_head, self.model.norm.weight
        mhc.write_and_mix(buffers.streams, y, buffers.post, buffers.mix, head.fn, buffers.mix_parts)
        mhc.read_streams(
            buffers.mix_parts, buffers.streams, head.base, head.scale, norm, *how, buffers.x, buffers.pre
        )
        kernels.gemv([self.head], (buffers.x, buffers.x), buffers.logits)
        self.count_reads(buffers)
        return buffers.logits

    def count_reads(self, buffers: DecodeBuffers) -> None:
        """Tell the store of experts which of them this step has read."""
        for first, stop, layer in self._counted:
            self.store.count(buffers.topk_ids[first:stop], layer)  # type: ignore[union-attr]

    def _phases(self, buffers: DecodeBuffers) -> None:
        """Angles by a token's position in sliding and in compressed layers, and by the first of the 4 and of the 128
        tokens it may end; a compressed layer is given the last three."""
        at = (buffers.positions.unsqueeze(-1) - self.before).float().unsqueeze(-1) * self.omega
        torch.cos(at, out=buffers.cos)
        torch.sin(at, out=buffers.sin)

    def _attention(self, w: LayerWeights, state: LayerState, buffers: DecodeBuffers) -> torch.Tensor:
        from birkhoff.kernels.compress.decode import norm_rope_store
        from birkhoff.kernels.index.decode import score

        c, kernels, pdl = self.config, self.kernels, self.kernels.pdl
        table = self.state.page_table
        ids = (buffers.slots, buffers.positions)
        cos, sin = (buffers.cos, buffers.sin) if w.ratio == 0 else (buffers.cos[:, 1:], buffers.sin[:, 1:])
        kernels.gemv(w.qkv_proj, (buffers.x_fp16, buffers.x), buffers.qkv)
        entry, index = [
            None if part is None else (*part, state.raw[kind].rows, state.pages[kind])
            for part, kind in ((w.compressor, ENTRY), (w.index, INDEX))
        ]
        norm_rope_store(
            buffers.qkv,
            w.q_norm,
            buffers.latent,
            buffers.latent_fp16,
            w.kv_norm,
            state.keys.rows,
            entry,
            index,
            table,
            *ids,
            cos,
            sin,
            c.rms_norm_eps,
            pdl,
        )
        searched = w.ratio == 4 and buffers.max_entries > 0
        kernels.gemv(
            w.q_b_proj if searched else w.q_b_proj[:1], (buffers.latent_fp16, buffers.latent), buffers.queries
        )
        if searched:
            heads = c.index_n_heads
            own = c.num_attention_heads * c.head_dim
            first = sum(part.out for part in w.qkv_proj) - heads
            score(
                buffers.queries[:, own:],
                buffers.qkv[:, first : first + heads],
                state.pages[INDEX],
                table,
                *ids,
                cos,
                sin,
                buffers.scores,
                c.index_topk,
                (c.index_head_dim * heads) ** -0.5,
                pdl,
            )
            kernels.topk(buffers.scores, buffers.positions, buffers.topk_indices)
        splits, split = buffers.splits[w.ratio]
        size = (buffers.rows, splits, c.num_attention_heads)
        count = buffers.rows * splits * c.num_attention_heads
        kernels.attend(
            buffers.queries,
            state.keys.rows,
            c.sliding_window,
            state.pages.get(ENTRY),
            w.ratio,
            table,
            buffers.topk_indices if searched else None,
            *ids,
            cos,
            sin,
            buffers.partial_out[: count * c.head_dim].view(*size, c.head_dim),
            buffers.partial_max[:count].view(size),
            buffers.partial_sum[:count].view(size),
            w.sink,
            split,
            c.head_dim**-0.5,
            c.rms_norm_eps,
            buffers.heads_out,
            buffers.heads_out_fp16,
        )
        kernels.gemv(w.o_a_proj, (buffers.heads_out_fp16, buffers.heads_out), buffers.o_latent, c.o_lora_rank)
        kernels.gemv(w.o_b_proj, (buffers.o_latent, buffers.o_latent), buffers.attn_out)
        return buffers.attn_out

    def _experts(
        self, w: LayerWeights, buffers: DecodeBuffers, ids: torch.Tensor, tap: Tap | None = None
    ) -> torch.Tensor:
        c, kernels = self.config, self.kernels
        kernels.route_and_shared(w, buffers, ids, c.swiglu_limit, c.routed_scaling_factor)
        if tap is not None:
            tap.see(sites.MOE_ROUTER_LOGITS, buffers.router_gate_up[:, : c.n_routed_experts])
            tap.see(sites.MOE_TOPK, ids, buffers.topk_weights)
        kernels.gate_up(w, buffers, c.swiglu_limit)
        kernels.down(w, buffers)
        return buffers.expert_out


def _portable() -> TritonBackend:
    from birkhoff.kernels.triton_backend import TritonBackend

    return TritonBackend()


def why_not_fast(decoder: Decoder) -> str | None:
    """What keeps a model from the CUDA kernels: the device, a width, or weights that were not stored as they expect."""
    reason = unsupported_reason(decoder.config, decoder.dtype, decoder.state.device)
    if reason is not None:
        return reason
    if find_nvrtc() is None:
        return "NVRTC, which compiles them, was not found beside PyTorch or in CUDA_HOME"
    if any(None in w.scale_offsets for w in decoder.layers):
        return "scales of its experts lie too far apart"
    if any(rows.weight.dtype is torch.float32 for w in decoder.layers for rows in (*w.qkv_proj, w.router)):
        return "some of its weights need more than bfloat16"
    return None
