"""Decode steps on a CPU in C++: layers in which nothing is captured or edited are one call, parts of a layer otherwise.

`install_native` attaches replacements with the interfaces of those in `decode/cpu.py`; they read weights packed or as
numbers. Whole layers (`NativeLayers`) and their parts run the same compiled functions on the same rows, so capturing
in a layer changes no bit of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap
from birkhoff.kernels.packed import PackedMatrix, layer, native
from birkhoff.kernels.packed.layer import CacheFields, LayerFields, MixerFields, PoolingFields, StepFields
from birkhoff.kernels.rope import Phases
from birkhoff.model.attention import Attention
from birkhoff.model.attention_rows import AttentionRows
from birkhoff.model.batch import Batch
from birkhoff.model.block import Block
from birkhoff.model.compressor import Compressor
from birkhoff.model.linear import Linear, RMSNorm, SharedInput
from birkhoff.model.mhc import HeadMixer, Mixer
from birkhoff.model.moe import MoE
from birkhoff.model.mtp import MTP
from birkhoff.model.rope import StepPhases
from birkhoff.model.state import ENTRY, INDEX, Fresh, LayerState
from birkhoff.model.transformer import Transformer

MAX_ROWS = 16  # of layers, attention and mixers
MAX_EXPERT_ROWS = 64  # up to here, reading each expert once for all its rows halves the time


def is_decode_step(batch: Batch, state: object) -> bool:
    """Whether a step is one token per sequence, at most `MAX_ROWS` of them, on a state that is kept."""
    return (
        len(batch.groups) == 1
        and batch.groups[0].length == 1
        and batch.num_tokens <= MAX_ROWS
        and not isinstance(state, Fresh)
        and not torch.is_grad_enabled()
    )


def install_native(model: Transformer) -> None:
    """Attach native layers and sublayers to a filled model that computes in float32 with plain numerics."""
    model.compiled = NativeLayers(model.blocks())
    model.hc_head.compiled = NativeHeadMixer(model.hc_head)
    if model.mtp is not None:
        model.mtp.compiled = NativeMTPInput(model.mtp)
        model.mtp.compiled_block = NativeLayers([model.mtp.block])
        model.mtp.hc_head.compiled = NativeHeadMixer(model.mtp.hc_head)


class ForFewRows:
    """Accepts up to `MAX_ROWS` rows while no gradient is recorded."""

    def accepts(self, streams: torch.Tensor) -> bool:
        return streams.shape[0] <= MAX_ROWS and not torch.is_grad_enabled()


class NativeMixer(ForFewRows):
    """Replaces `Mixer.read` and `Mixer.write`."""

    def __init__(self, fields: MixerFields):
        self.fields = fields

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return layer.read_streams(self.fields, streams.contiguous())

    def write(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        return layer.write_streams(*(x.contiguous() for x in (streams, y, post, mix)))


class NativeHeadMixer(ForFewRows):
    """Replaces `HeadMixer.forward`."""

    def __init__(self, head: HeadMixer):
        self.weights = layer.Weights()
        self.fields = _mixer_fields(self.weights, head)

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.merge_streams(self.fields, streams.contiguous())


class NativeMTPInput(ForFewRows):
    """Replaces the input projections of `MTP`."""

    def __init__(self, mtp: MTP):
        self.h_norm, self.e_norm = mtp.hnorm, mtp.enorm
        self.h_proj, self.e_proj = (
            native.Product(mtp.h_proj.matrices()),
            native.Product(mtp.e_proj.matrices()),
        )

    def __call__(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        joined: torch.Tensor = self.h_proj(self.h_norm(streams)) + self.e_proj(
            self.e_norm(embedded)
        ).unsqueeze(1)
        return joined


class NativeAttention:
    """Replaces `Attention.forward`, with a call before and one after the site between heads and output."""

    def __init__(self, fields: LayerFields, attention: Attention):
        self.fields = fields
        self.attention = attention

    def accepts(self, batch: Batch, state: LayerState | Fresh) -> bool:
        return is_decode_step(batch, state)

    def __call__(
        self, x: torch.Tensor, batch: Batch, phases: Phases, state: LayerState | Fresh, tap: Tap
    ) -> torch.Tensor:
        assert isinstance(state, LayerState)
        step = _NativeStep(batch, phases, phases)
        attended = layer.attend_rows(self.fields, _cache_fields(state), step.fields, x.contiguous())
        if tap.ragged:
            attended = AttentionRows(self.attention, x, phases, batch, state).run(tap, attended)
        attended = tap(sites.ATTN_HEAD_OUT, attended)
        return layer.project_out(self.fields, attended.contiguous())


class NativeMoE:
    """Replaces `MoE.forward`, for rows of any sequences, with a call before and one after the sites of the router."""

    def __init__(self, fields: LayerFields, moe: MoE):
        self.fields = fields
        self.gate = moe.gate

    def accepts(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= MAX_EXPERT_ROWS and not torch.is_grad_enabled()

    def __call__(self, x: torch.Tensor, batch: Batch, tap: Tap) -> torch.Tensor:
        x = x.contiguous()
        step = _NativeStep(batch)
        logits, ids, weights, shared = layer.route(self.fields, step.fields, x)
        tap.see(sites.MOE_ROUTER_LOGITS, logits)
        ids, weights = tap.route(sites.MOE_TOPK, ids, weights, self.gate.routing(logits, batch.token_ids))
        return layer.run_experts(self.fields, step.fields, x, ids.contiguous(), weights.contiguous(), shared)


class _NativeStep:
    """The rows of a step as the kernels take them."""

    def __init__(self, batch: Batch, sliding: Phases | None = None, compressed: Phases | None = None):
        group = batch.groups[0]
        tensors = [batch.token_ids, group.slots, group.first]
        for phases in (sliding, compressed):
            tensors += [] if phases is None else [phases.cos, phases.sin]
        self._kept = tensors = [tensor.contiguous() for tensor in tensors]
        tokens, slots, positions, *angles = (tensor.data_ptr() for tensor in tensors)
        cos, sin = angles[::2], angles[1::2]
        self.fields = StepFields(
            batch.num_tokens, torch.get_num_threads(), tokens, slots, positions, *cos, *sin
        )


class NativeLayers:
    """Runs whole layers in one call. Making it attaches the parts of every layer to its modules."""

    def __init__(self, blocks: Sequence[Block]):
        self.weights = layer.Weights()
        self.fields = (LayerFields * len(blocks))(*(_layer_fields(self.weights, block) for block in blocks))
        self._caches: WeakKeyDictionary[LayerState, ctypes.Array[CacheFields]] = WeakKeyDictionary()
        for index, block in enumerate(blocks):
            fields = self.fields[index]
            block.hc_attn.compiled = NativeMixer(fields.attention_mixer)
            block.attn.compiled = NativeAttention(fields, block.attn)
            block.hc_ffn.compiled = NativeMixer(fields.expert_mixer)
            block.ffn.compiled = NativeMoE(fields, block.ffn)

    def accepts(self, batch: Batch, state: object) -> bool:
        return is_decode_step(batch, state)

    def __call__(
        self,
        streams: torch.Tensor,
        first: int,
        stop: int,
        batch: Batch,
        phases: StepPhases,
        states: Sequence[LayerState],
    ) -> torch.Tensor:
        """Streams [n, m, d] before layer `first` -> after layer `stop - 1`; `states` are those of all layers."""
        caches = self._caches.get(states[0])
        if caches is None:
            caches = self._caches[states[0]] = (CacheFields * len(states))(*map(_cache_fields, states))
        step = _NativeStep(batch, phases.sliding, phases.compressed)
        return layer.run_layers(self.fields, caches, step.fields, first, stop, streams.contiguous())


def _matrices(source: Linear | SharedInput) -> list[PackedMatrix]:
    layers = [source] if isinstance(source, Linear) else source.layers
    return [matrix for each in layers for matrix in each.matrices()]


def _mixer_fields(
    weights: layer.Weights, mixer: Mixer | HeadMixer, norm: RMSNorm | None = None
) -> MixerFields:
    return MixerFields(
        weights.matrix(mixer.fn),
        weights.address(mixer.base),
        weights.address(mixer.scale),
        None if norm is None else weights.address(norm.weight),
        mixer.iters if isinstance(mixer, Mixer) else 0,
        mixer.eps,
        mixer.rms_eps,
        0.0 if norm is None else norm.eps,
    )


def _pooling_fields(weights: layer.Weights, compressor: Compressor | None) -> PoolingFields:
    if compressor is None:
        return PoolingFields()
    return PoolingFields(
        weights.address(compressor.ape),
        weights.address(compressor.norm.weight),
        weights.address(compressor.rope.compressed),
        compressor.ratio,
        compressor.overlap,
        compressor.width,
    )


def _layer_fields(weights: layer.Weights, block: Block) -> LayerFields:
    a, m = block.attn, block.ffn
    indexer, routed, gate = a.indexer, m.experts, m.gate
    fields = LayerFields(
        hidden=routed.hidden,
        streams=block.hc_attn.fn.shape[1] // routed.hidden,
        heads=a.heads,
        head_dim=a.head_dim,
        rank=len(a.wq_a.stored),
        pairs=a.rope_dim // 2,
        window=a.window,
        ratio=a.ratio,
        group_rank=a.group_rank,
        experts=routed.count,
        inner=routed.inner,
        topk=gate.topk,
        eps=a.eps,
        scale=a.scale,
        factor=gate.factor,
        limit=routed.limit,
        attention_mixer=_mixer_fields(weights, block.hc_attn, block.attn_norm),
        expert_mixer=_mixer_fields(weights, block.hc_ffn, block.ffn_norm),
        in_proj=weights.linears(_matrices(a.in_proj)),
        wq_b=weights.linears(_matrices(a.wq_b)),
        wo_a=weights.linears(_matrices(a.wo_a)),
        wo_b=weights.linears(_matrices(a.wo_b)),
        q_norm=weights.address(a.q_norm.weight),
        kv_norm=weights.address(a.kv_norm.weight),
        sink=weights.address(a.attn_sink),
        entry=_pooling_fields(weights, a.compressor),
        index=_pooling_fields(weights, None if indexer is None else indexer.compressor),
        router=weights.linears(_matrices(m.in_proj)),
        shared_down=weights.linears(_matrices(m.shared_experts.w2)),
        bias=weights.address(gate.bias),
        hash_table=weights.address(gate.tid2eid, torch.int32),
    )
    if indexer is not None:
        fields.index_heads, fields.index_width, fields.index_topk = indexer.heads, indexer.width, indexer.topk
        fields.index_wq_b = weights.linears(_matrices(indexer.wq_b))
    if routed.types is not None:
        fields.expert_matrices = weights.matrices(
            [matrix for expert in range(routed.count) for matrix in routed.matrices(expert)]
        )
        return fields
    halves = [half for expert in routed.gate_up.detach() for half in expert.split(routed.inner)]
    gate_up = list(map(PackedMatrix.floats, halves))
    # the third matrix of an expert is not read: down is transposed
    fields.expert_matrices = weights.matrices(
        [
            matrix
            for expert in range(routed.count)
            for matrix in (*gate_up[2 * expert : 2 * expert + 2], gate_up[0])
        ]
    )
    fields.transposed_down = weights.address(routed.down)
    return fields


def _cache_fields(state: LayerState) -> CacheFields:
    fields = CacheFields(
        keys=state.keys.rows.data_ptr(),
        key_size=state.keys.size,
        table=state.state.page_table.data_ptr(),
        table_stride=state.state.page_table.stride(0),
    )
    if ENTRY in state.raw:
        fields.entry_raw, fields.raw_size = state.raw[ENTRY].rows.data_ptr(), state.raw[ENTRY].size
        fields.entry_pages, fields.per_page = state.pages[ENTRY].data_ptr(), state.pages[ENTRY].shape[1]
    if INDEX in state.raw:
        assert state.raw[INDEX].size == fields.raw_size
        fields.index_raw, fields.index_pages = state.raw[INDEX].rows.data_ptr(), state.pages[INDEX].data_ptr()
    return fields
