"""Decoding steps on a GPU: the whole model for one new token per sequence, as a fixed list of kernel launches.

`Transformer.run` is the plain twin. A `Decoder` takes a filled model whose quantised weights are packed and a `State`;
`step` launches everything for the rows of a `Desk`: token ids, positions and slots are tensors on the device, nothing is
asked of them by the host, and every buffer stays where it is, so a step can be captured as a CUDA graph and replayed.
What differs between sequences (lengths, pages, chosen experts and entries) is data. Taps are not served here: a step
that is watched or changed runs the plain way.

Per layer: boundary (two launches), first products, small stage, query products, indexer when there are more entries
than it keeps, attention (two), two output products, boundary, router with the shared expert, routing, experts (two).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from birkhoff.errors import OptionError
from birkhoff.kernels import gpu
from birkhoff.kernels.cuda.compile import find_nvrtc
from birkhoff.kernels.cuda.launch import FastKernels, scale_offset, unfit
from birkhoff.kernels.linear.rows import Rows
from birkhoff.model.attention import Attention
from birkhoff.model.block import Block
from birkhoff.model.compressor import Compressor
from birkhoff.model.linear import Linear
from birkhoff.model.moe import MoE
from birkhoff.model.state import ENTRY, INDEX, LayerState, State
from birkhoff.model.transformer import Transformer

if TYPE_CHECKING:
    from birkhoff.kernels.portable import PortableKernels


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


def _codes(*layers: Linear) -> Rows:
    """FP8 layers that read one input, stacked."""
    named = [(layer, part) for layer in layers for part in layer.parts]
    return Rows.fp8([(getattr(layer, f"codes_{part}"), getattr(layer, f"scale_{part}")) for layer, part in named])


class LayerWeights:
    """One block's weights as the kernels read them; matrices that are read as stored are not copied."""

    def __init__(self, block: Block):
        a, m = block.attn, block.ffn
        assert isinstance(a, Attention) and isinstance(m, MoE)
        self.ratio = a.ratio
        self.mixers = [(mixer.fn, mixer.base, mixer.scale) for mixer in (block.hc_attn, block.hc_ffn)]
        self.norms = [block.attn_norm.weight, block.ffn_norm.weight]
        self.q_norm, self.kv_norm, self.sink = a.q_norm.weight, a.kv_norm.weight, a.attn_sink
        self.enter = [_codes(a.wq_a, a.wkv)]
        plain = [] if a.compressor is None else [a.compressor.project.weight]
        queries = [a.wq_b]
        if a.indexer is not None:
            plain += [a.indexer.compressor.project.weight, a.indexer.weights_proj.weight]
            queries.append(a.indexer.wq_b)
        if plain:
            self.enter.append(Rows.plain(plain))
        self.query = [_codes(a.wq_b)] if len(queries) == 1 else [_codes(a.wq_b), _codes(queries[1])]
        self.o_a, self.o_b = [_codes(a.wo_a)], [_codes(a.wo_b)]
        self.compressor = None if a.compressor is None else _compressor(a.compressor)
        self.index = None if a.indexer is None else _compressor(a.indexer.compressor)
        self.gate = Rows.plain([m.gate.project.weight])
        self.bias, self.hashed = m.gate.bias, m.gate.tid2eid
        self.shared_open, self.shared_close = _codes(m.shared_experts.open), _codes(m.shared_experts.w2)
        self.experts = addresses(m)
        self.offsets = [scale_offset([m.experts.gate_up_scale]), scale_offset([m.experts.down_scale])]
        self.held = m.experts  # the addresses above stay valid as long as this lives


def _compressor(compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    return compressor.ape, compressor.norm.weight


def addresses(moe: MoE) -> torch.Tensor:
    """Where each expert's codes and scales begin: [E, 4] int64 (gate and up, scales, down, scales)."""
    experts = moe.experts
    rows = []
    for expert in range(experts.count):
        parts = (experts.gate_up, experts.gate_up_scale, experts.down, experts.down_scale)
        rows.append([part[expert].data_ptr() for part in parts])
    return torch.tensor(rows, dtype=torch.int64, device=experts.gate_up.device)


@dataclass
class Desk:
    """The buffers of a step of `rows` tokens, in sequences of up to `context` tokens.

    `room` is how many entries an indexer may meet; 0 when it would keep all of them, so that nothing is scored."""

    rows: int
    context: int
    room: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    shares: dict[int, tuple[int, int]] = field(default_factory=dict)  # by ratio: shares of the keys, keys of a share

    def half(self, name: str) -> torch.Tensor | None:
        """The float16 form of a buffer, where kernels want one."""
        return self.buffers.get(f"{name}_half")

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["buffers"][name]
        except KeyError:
            raise AttributeError(name) from None


class Decoder:
    """`fast` demands (or refuses) the CUDA kernels, which are otherwise used where they apply; `early` lets them begin
    while their predecessors end."""

    def __init__(self, model: Transformer, state: State, fast: bool | None = None, early: bool = True):
        reason = refusal(model)
        if reason is not None:
            raise OptionError(f"this model cannot be decoded by GPU kernels: {reason}. Use kernels='reference'.")
        self.model, self.state, self.config = model, state, model.config
        self.dtype = model.numerics.dtype
        with torch.no_grad():
            self.layers = [LayerWeights(block) for block in model.layers]  # type: ignore[arg-type]
            self.head = Rows.plain([model.head.weight])
        omega = model.rope.sliding, model.rope.compressed
        device = state.device
        self.omega = torch.stack([omega[0], omega[1], omega[1], omega[1]]).to(device)  # see `_phases`
        self.before = torch.tensor([0, 0, 3, 127], device=device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        reason = "not wanted" if fast is False else why_not_fast(self)
        if fast and reason:
            raise OptionError(f"the CUDA kernels cannot serve this model: {reason}. Use fast=False.")
        self.kernels: FastKernels | PortableKernels = FastKernels(device, early) if reason is None else _portable()

    def desk(self, rows: int, context: int) -> Desk:
        """Buffers for `rows` tokens at positions below `context`."""
        c, device, dtype = self.config, self.state.device, self.dtype
        room = context // 4 if context // 4 > c.index_topk else 0
        whole = {"dtype": torch.float32, "device": device}
        numbers = {"dtype": torch.int32, "device": device}
        ids = [torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3)]
        desk = Desk(rows, context, room, *ids)
        d, h, k, inner = c.hidden_size, c.num_attention_heads, c.num_experts_per_tok, c.moe_intermediate_size
        from birkhoff.kernels.attend.triton import shares_of
        from birkhoff.kernels.mhc.triton import COUNT, padded, slices

        ring = c.sliding_window + self.state.lookback
        reach = {0: ring, 4: ring + min(c.index_topk, context // 4), 128: ring + context // 128}
        desk.shares = {
            ratio: shares_of(rows, h, reach[ratio], self.processors) for ratio in {w.ratio for w in self.layers}
        }
        most = max(shares for shares, _ in desk.shares.values())
        entered = max(sum(part.out for part in w.enter) for w in self.layers)
        queries = max(sum(part.out for part in w.query) for w in self.layers)
        make = {
            "streams": torch.empty(rows, 4, d, dtype=dtype, device=device),
            "parts": torch.empty(rows, slices(rows, d)[1], padded(COUNT), **whole),
            "x": torch.empty(rows, d, dtype=dtype, device=device),
            "pre": torch.empty(rows, 4, **whole), "post": torch.empty(rows, 4, **whole),
            "mix": torch.empty(rows, 4, 4, **whole),
            "entered": torch.empty(rows, entered, **whole),
            "latent": torch.empty(rows, c.q_lora_rank, dtype=dtype, device=device),
            "queries": torch.empty(rows, queries, dtype=dtype, device=device),
            "cos": torch.empty(rows, 4, c.qk_rope_head_dim // 2, **whole),
            "sin": torch.empty(rows, 4, c.qk_rope_head_dim // 2, **whole),
            "scores": torch.empty(rows, max(room, 1), **whole),
            "chosen": torch.empty(rows, c.index_topk, **numbers),
            "sums": torch.empty(rows * most * h * c.head_dim, **whole),
            "peaks": torch.empty(rows * most * h, **whole), "masses": torch.empty(rows * most * h, **whole),
            "mixed": torch.empty(rows, h * c.head_dim, dtype=dtype, device=device),
            "middle": torch.empty(rows, c.o_groups * c.o_lora_rank, dtype=dtype, device=device),
            "attended": torch.empty(rows, d, **whole),
            "opened": torch.empty(rows, c.n_routed_experts + 2 * inner, **whole),
            "ids": torch.empty(rows, k, **numbers), "weights": torch.empty(rows, k, **whole),
            "order": torch.empty(2, rows * k, **numbers),
            "slot_list": torch.zeros(min(c.n_routed_experts, rows * k), 16, **numbers),
            "z": torch.empty(rows * k, inner, dtype=dtype, device=device),
            "z_shared": torch.empty(rows, inner, dtype=dtype, device=device),
            "y": torch.empty(rows, k + 1, d, **whole),
            "logits": torch.empty(rows, c.vocab_size, **whole),
        }  # fmt: skip
        if self.kernels.halves:
            for name, like in (("x_half", "x"), ("x_mixed", "x"), ("latent_half", "latent"), ("mixed_half", "mixed")):
                make[name] = torch.empty_like(make[like], dtype=torch.float16)
            for name in ("middle", "z", "z_shared"):
                make[name] = make[name].half()
        desk.buffers = make
        return desk

    def step(self, desk: Desk) -> torch.Tensor:
        """Launch one step for the desk's tokens -> logits [rows, vocab] float32, in the desk's own memory."""
        from birkhoff.kernels.mhc import triton as mhc

        c, kernels = self.config, self.kernels
        how = (c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, c.rms_norm_eps)
        self._phases(desk)
        embedding = (self.model.embed, desk.token_ids)
        mode, y = mhc.EMBED, None
        for number, w in enumerate(self.layers):
            for sublayer in (0, 1):
                fn, base, scale = w.mixers[sublayer]
                mhc.write_and_mix(desk.streams, y, desk.post, desk.mix, fn, desk.parts, mode, *embedding, kernels.early)
                kernels.read_streams(desk, base, scale, w.norms[sublayer], *how)
                y = self._experts(w, desk) if sublayer else self._attention(w, self.state.layers[number], desk)
                mode = mhc.KEEP
        head, norm = self.model.hc_head, self.model.norm.weight
        mhc.write_and_mix(desk.streams, y, desk.post, desk.mix, head.fn, desk.parts)
        mhc.read_streams(desk.parts, desk.streams, head.base, head.scale, norm, *how, desk.x, desk.pre)
        kernels.product([self.head], (desk.x, desk.x), desk.logits)
        return desk.logits

    def _phases(self, desk: Desk) -> None:
        """Angles by a token's position in sliding and in compressed layers, and by the first of the 4 and of the 128
        tokens it may end; a compressed layer is given the last three."""
        at = (desk.positions.unsqueeze(-1) - self.before).float().unsqueeze(-1) * self.omega
        torch.cos(at, out=desk.cos)
        torch.sin(at, out=desk.sin)

    def _attention(self, w: LayerWeights, state: LayerState, desk: Desk) -> torch.Tensor:
        from birkhoff.kernels.attend.triton import attend
        from birkhoff.kernels.compress.triton import settle
        from birkhoff.kernels.index.triton import score

        c, kernels, early = self.config, self.kernels, self.kernels.early
        table, ids = self.state.page_table, (desk.slots, desk.positions)
        cos, sin = (desk.cos, desk.sin) if w.ratio == 0 else (desk.cos[:, 1:], desk.sin[:, 1:])
        kernels.product(w.enter, (desk.half("x"), desk.x), desk.entered)
        entry, index = [
            None if part is None else (*part, state.raw[kind].rows, state.pages[kind])
            for part, kind in ((w.compressor, ENTRY), (w.index, INDEX))
        ]
        settle(
            desk.entered, w.q_norm, desk.latent, desk.half("latent"), w.kv_norm, state.keys.rows, entry, index, table,
            *ids, cos, sin, c.rms_norm_eps, early,
        )  # fmt: skip
        searched = w.ratio == 4 and desk.room > 0
        kernels.product(w.query if searched else w.query[:1], (desk.half("latent"), desk.latent), desk.queries)
        if searched:
            heads, own = c.index_n_heads, c.num_attention_heads * c.head_dim
            first = sum(part.out for part in w.enter) - heads
            score(
                desk.queries[:, own:], desk.entered[:, first : first + heads], state.pages[INDEX], table, *ids, cos, sin,
                desk.scores, c.index_topk, (c.index_head_dim * heads) ** -0.5, early,
            )  # fmt: skip
            kernels.choose(desk.scores, desk.positions, desk.chosen)
        shares, share = desk.shares[w.ratio]
        size = (desk.rows, shares, c.num_attention_heads)
        count = desk.rows * shares * c.num_attention_heads
        attend(
            desk.queries, state.keys.rows, c.sliding_window, state.pages.get(ENTRY), w.ratio, table,
            desk.chosen if searched else None, *ids, cos, sin,
            desk.sums[: count * c.head_dim].view(*size, c.head_dim), desk.peaks[:count].view(size),
            desk.masses[:count].view(size), w.sink, share, c.head_dim**-0.5, c.rms_norm_eps, desk.mixed,
            desk.half("mixed"), early,
        )  # fmt: skip
        kernels.product(w.o_a, (desk.half("mixed"), desk.mixed), desk.middle, c.o_lora_rank)
        kernels.product(w.o_b, (desk.middle, desk.middle), desk.attended)
        return desk.attended

    def _experts(self, w: LayerWeights, desk: Desk) -> torch.Tensor:
        c, kernels = self.config, self.kernels
        kernels.open_shared(w, desk, c.swiglu_limit)
        kernels.route(
            desk.opened[:, : c.n_routed_experts], w.bias, w.hashed, desk.token_ids, w.experts, desk.ids, desk.weights,
            desk.order, desk.slot_list, c.routed_scaling_factor,
        )  # fmt: skip
        kernels.open_experts(w, desk, c.swiglu_limit)
        kernels.close_experts(w, desk)
        return desk.y


def _portable() -> PortableKernels:
    from birkhoff.kernels.portable import PortableKernels

    return PortableKernels()


def why_not_fast(decoder: Decoder) -> str | None:
    """What keeps a model from the CUDA kernels: the device, a width, or weights that were not stored as they expect."""
    reason = unfit(decoder.config, decoder.dtype, decoder.state.device)
    if reason is not None:
        return reason
    if find_nvrtc() is None:
        return "NVRTC, which compiles them, was not found beside PyTorch or in CUDA_HOME"
    if any(None in w.offsets for w in decoder.layers):
        return "scales of its experts lie too far apart"
    if any(rows.weight.dtype is torch.float32 for w in decoder.layers for rows in (*w.enter, w.gate)):
        return "some of its weights need more than bfloat16"
    return None
