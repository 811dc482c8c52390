"""Decode steps on a CPU: compiled sublayers for a few rows, one or two calls each.

`Attention`, `MoE`, `Mixer`, `HeadMixer` and `MTP` are the reference implementations. `install_cpu_decode` attaches a
compiled replacement to each of them (attribute `compiled`) when the model computes in float32 with plain numerics and
CPU kernels: those of `native.py`, or the ones below, compiled by Numba, on a machine without a C++ compiler.

A replacement holds views of its module's weights, packed or as numbers, and works on the rings and pages
of the state in place. Matrix products are `_product`s, everything between them is `kernels/cpu_decode`. The cost of
a row does not depend on the other rows of a step, so draft tokens of one request are rows like any
other, and weights are read once per step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from birkhoff.decode.native import MAX_EXPERT_ROWS, ForFewRows, install_native, is_decode_step
from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import cpu_decode
from birkhoff.kernels.linear.cpu import matmul
from birkhoff.kernels.packed import native
from birkhoff.kernels.rope import Phases
from birkhoff.model.attention import Attention
from birkhoff.model.attention_rows import AttentionRows
from birkhoff.model.batch import Batch, Group
from birkhoff.model.compressor import Compressor
from birkhoff.model.linear import Linear, SharedInput
from birkhoff.model.mhc import HeadMixer, Mixer
from birkhoff.model.moe import Experts, MoE
from birkhoff.model.mtp import MTP
from birkhoff.model.state import ENTRY, INDEX, Fresh, LayerState
from birkhoff.model.transformer import Transformer

Array = np.ndarray[Any, Any]

_NO_PAGES = np.zeros((1, 1, 1), np.float32)
_NO_TABLE = np.zeros((1, 1), np.int64)
_ALL_ENTRIES = np.zeros((0, 0), np.bool_)
_NO_HASH_IDS = np.zeros((0, 0), np.int64)
_NO_RULES = (np.zeros(0, np.int32), np.zeros((0, 0, 0), np.int32), np.zeros((0, 0), np.float32))


def install_cpu_decode(model: Transformer, loops: bool = False) -> Transformer:
    """Fuse the linear layers of a filled model and attach the compiled sublayers where they apply; returns `model`.

    They are native (`decode/native.py`), or loops where the native kernels cannot be built; `loops` asks for these."""
    model.fuse()
    numerics = model.numerics
    if numerics.kernels.name != "cpu" or numerics.dtype is not torch.float32 or numerics.released:
        return model
    if native.available() and not loops:
        install_native(model)
        return model
    for module in model.modules():
        if isinstance(module, Attention):
            module.compiled = CpuAttention(module)
        elif isinstance(module, MoE):
            module.compiled = CpuMoE(module)
        elif isinstance(module, Mixer):
            module.compiled = CpuMixer(module)
        elif isinstance(module, HeadMixer):
            module.compiled = CpuHeadMixer(module)
        elif isinstance(module, MTP):
            module.compiled = CpuMTPInput(module)
    return model


def _array(tensor: torch.Tensor) -> Array:
    return tensor.detach().numpy()


class _LoopProduct:
    """`x [n, in] -> [n, out]` with float32 numbers, in compiled loops."""

    def __init__(self, weight: torch.Tensor):
        self.weight = _array(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.weight.shape[0])
        matmul(x.numpy(), self.weight, out.numpy())
        return out

    def grouped(self, x: torch.Tensor, group: int) -> torch.Tensor:
        rows, width = self.weight.shape
        out = torch.empty(len(x), rows)
        for g in range(rows // group):
            part = slice(g * group, (g + 1) * group)
            columns = x[:, g * width : (g + 1) * width].contiguous()  # contiguous rows are read faster
            matmul(columns.numpy(), self.weight[part], out[:, part].numpy())
        return out


def _product(source: Linear | SharedInput) -> Any:
    """The product of a layer, or of layers with a common input, whose results are side by side."""
    layers = [source] if isinstance(source, Linear) else source.layers
    if any(layer.as_stored for layer in layers):
        return native.Product([matrix for layer in layers for matrix in layer.matrices()])
    return _LoopProduct(source.weight if isinstance(source, Linear) else source.stacked_weight())


class CpuMixer(ForFewRows):
    """Replaces `Mixer.read` and `Mixer.write`."""

    def __init__(self, mixer: Mixer):
        self.weights = _array(mixer.fn), _array(mixer.base), _array(mixer.scale)
        self.settings = mixer.iters, np.float32(mixer.eps), np.float32(mixer.rms_eps)

    def read(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        n, m, d = streams.shape
        u = np.empty((n, d), np.float32)
        pre = np.empty((n, m), np.float32)
        post = np.empty((n, m), np.float32)
        mix = np.empty((n, m, m), np.float32)
        cpu_decode.read_streams(
            streams.contiguous().numpy(), *self.weights, *self.settings, u, pre, post, mix
        )
        return torch.from_numpy(u), torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(mix)

    def write(
        self, streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, mix: torch.Tensor
    ) -> torch.Tensor:
        out = np.empty(streams.shape, np.float32)
        cpu_decode.write_streams(*(x.contiguous().numpy() for x in (streams, y, post, mix)), out)
        return torch.from_numpy(out)


class CpuHeadMixer(ForFewRows):
    """Replaces `HeadMixer.forward`."""

    def __init__(self, head: HeadMixer):
        self.weights = _array(head.fn), _array(head.base), _array(head.scale)
        self.settings = np.float32(head.eps), np.float32(head.rms_eps)

    def __call__(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        n, m, d = streams.shape
        merged = np.empty((n, d), np.float32)
        weights = np.empty((n, m), np.float32)
        cpu_decode.merge_streams(streams.contiguous().numpy(), *self.weights, *self.settings, merged, weights)
        return torch.from_numpy(merged), torch.from_numpy(weights)


class CpuMTPInput(ForFewRows):
    """Replaces the input projections of `MTP`."""

    def __init__(self, mtp: MTP):
        self.norms = _array(mtp.hnorm.weight), _array(mtp.enorm.weight), np.float32(mtp.hnorm.eps)
        self.h_proj = _product(mtp.h_proj)
        self.e_proj = _product(mtp.e_proj)

    def __call__(self, streams: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        n, m, d = streams.shape
        normed = torch.empty(n * m, d)
        normed_token = torch.empty(n, d)
        cpu_decode.norm_mtp_input(
            streams.contiguous().numpy(),
            embedded.contiguous().numpy(),
            *self.norms,
            normed.numpy(),
            normed_token.numpy(),
        )
        joined: torch.Tensor = self.h_proj(normed).view(n, m, d) + self.e_proj(normed_token).unsqueeze(1)
        return joined


class CpuPooling:
    """Weights and shape of one compressor, as the compiled loops read them."""

    def __init__(self, compressor: Compressor):
        self.kind = compressor.kind
        self.ratio = compressor.ratio
        self.overlap = compressor.overlap
        self.ape = _array(compressor.ape)
        self.norm = _array(compressor.norm.weight)
        self.omega = _array(compressor.rope.compressed)


class CpuAttention:
    """Replaces `Attention.forward`."""

    def __init__(self, attention: Attention):
        a = self.attention = attention
        self.in_proj = _product(a.in_proj)
        self.q_norm = _array(a.q_norm.weight)
        self.kv_norm = _array(a.kv_norm.weight)
        self.sink = _array(a.attn_sink)
        self.wq_b = _product(a.wq_b)
        self.wo_a = _product(a.wo_a)
        self.wo_b = _product(a.wo_b)
        self.index_wq_b = None if a.indexer is None else _product(a.indexer.wq_b)
        self.rank = len(a.wq_a.stored)
        self.eps = np.float32(a.eps)
        self.scale = np.float32(a.scale)
        self.entry_pooling = None if a.compressor is None else CpuPooling(a.compressor)
        self.index_pooling = None if a.indexer is None else CpuPooling(a.indexer.compressor)

    def accepts(self, batch: Batch, state: LayerState | Fresh) -> bool:
        return is_decode_step(batch, state)

    def __call__(
        self, x: torch.Tensor, batch: Batch, phases: Phases, state: LayerState | Fresh, tap: Tap
    ) -> torch.Tensor:
        assert isinstance(state, LayerState)
        a, group = self.attention, batch.groups[0]
        n = batch.num_tokens
        slots, positions = group.cached("arrays", lambda: (_array(group.slots), _array(group.first)))
        cos = phases.cos.numpy()
        sin = phases.sin.numpy()
        ring = state.keys.array
        given = tap.rules(n, a.heads, a.ratio) if tap.ragged else None
        rules = _NO_RULES if given is None else tuple(map(_array, (given.counts, given.table, given.sink)))
        qkv = self.in_proj(x)
        projected = qkv.numpy()
        latent = torch.empty(n, self.rank)
        cpu_decode.norm_qkv(
            projected, self.q_norm, self.kv_norm, self.eps, cos, sin, ring, slots, positions, latent.numpy()
        )
        queries = self.wq_b(latent).view(n, a.heads, a.head_dim)
        pages: Array = _NO_PAGES
        table: Array | None = _NO_TABLE
        selected: Array = _ALL_ENTRIES
        if self.entry_pooling is not None:
            column = self.rank + a.head_dim
            pages = _array(state.pages[ENTRY])
            table = state.state.table_array
            column = self._compress(self.entry_pooling, projected, column, slots, positions, state)
            if self.index_pooling is not None:
                column = self._compress(self.index_pooling, projected, column, slots, positions, state)
                selected = self._select_entries(
                    projected[:, column:], latent, cos, sin, group, slots, positions, state, rules[:2]
                )
        attended = torch.empty(n, a.heads, a.head_dim)
        cpu_decode.attend(
            queries.numpy(),
            self.eps,
            ring,
            a.window,
            pages,
            table,
            a.ratio,
            selected,
            slots,
            positions,
            self.sink,
            self.scale,
            cos,
            sin,
            *rules,
            attended.numpy(),
        )
        if tap.ragged:
            attended = AttentionRows(a, x, phases, batch, state).run(tap, attended, given is not None)
        attended = tap(sites.ATTN_HEAD_OUT, attended)
        out: torch.Tensor = self.wo_b(self.wo_a.grouped(attended.view(n, -1), a.group_rank))
        return out

    def _compress(
        self,
        pooling: CpuPooling,
        projected: Array,
        column: int,
        slots: Array,
        positions: Array,
        state: LayerState,
    ) -> int:
        """Store the raw rows from `column` on and the entries they complete; returns the next unread column."""
        stop = column + 2 * int(pooling.ape.shape[1])
        ring = state.raw[pooling.kind].array
        pages = _array(state.pages[pooling.kind])
        cpu_decode.store_compressor_rows(projected[:, column:stop], pooling.ape, ring, slots, positions)
        cpu_decode.pool_entries(
            ring,
            pages,
            state.state.table_array,
            slots,
            positions,
            pooling.ratio,
            pooling.overlap,
            pooling.norm,
            self.eps,
            pooling.omega,
        )
        return stop

    def _select_entries(
        self,
        weights: Array,
        latent: torch.Tensor,
        cos: Array,
        sin: Array,
        group: Group,
        slots: Array,
        positions: Array,
        state: LayerState,
        rules: tuple[Array, ...],
    ) -> Array:
        """Entries each row attends to, [n, E] bool; empty when the indexer keeps all of them."""
        indexer = self.attention.indexer
        assert indexer is not None
        count = (group.last_position + 1) // 4
        if count <= indexer.topk:
            return _ALL_ENTRIES
        selected = np.empty((len(slots), count), np.bool_)
        scale = np.float32((indexer.width * indexer.heads) ** -0.5)
        assert self.index_wq_b is not None
        queries = self.index_wq_b(latent).view(len(slots), indexer.heads, indexer.width)
        cpu_decode.topk_entries(
            queries.numpy(),
            cos,
            sin,
            weights,
            scale,
            _array(state.pages[INDEX]),
            state.state.table_array,
            slots,
            positions,
            indexer.topk,
            *rules,
            selected,
        )
        return selected


class _LoopExperts:
    """Routed experts held as float32 numbers, in compiled loops."""

    def __init__(self, routed: Experts):
        self.gate_up, self.down = _array(routed.gate_up), _array(routed.down)
        self.limit = np.float32(routed.limit)

    def add(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """out [n, d] += the weighted sum over the experts of each row."""
        cpu_decode.add_experts(
            x.numpy(), ids.numpy(), weights.numpy(), self.gate_up, self.down, self.limit, out.numpy()
        )


class CpuMoE:
    """Replaces `MoE.forward`, for rows of any sequences."""

    def __init__(self, moe: MoE):
        self.in_proj = _product(moe.in_proj)
        self.gate = moe.gate
        routed = moe.experts
        self.count, self.inner = routed.count, routed.inner
        self.add_experts = _LoopExperts(routed) if routed.types is None else routed.products()
        self.shared_down = _product(moe.shared_experts.w2)
        self.bias = np.zeros(0, np.float32) if self.gate.bias is None else _array(self.gate.bias)
        self.limit = np.float32(routed.limit)
        self.factor = np.float32(self.gate.factor)

    def accepts(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= MAX_EXPERT_ROWS and not torch.is_grad_enabled()

    def __call__(self, x: torch.Tensor, batch: Batch, tap: Tap) -> torch.Tensor:
        n, k = x.shape[0], self.gate.topk
        table = self.gate.tid2eid
        hash_ids = _NO_HASH_IDS if table is None else table[batch.token_ids].long().numpy()
        logits = torch.empty(n, self.count)
        ids = torch.empty(n, k, dtype=torch.long)
        weights = torch.empty(n, k)
        gated = torch.empty(n, self.inner)
        cpu_decode.route_rows(
            self.in_proj(x).numpy(),
            hash_ids,
            self.bias,
            self.factor,
            self.limit,
            logits.numpy(),
            ids.numpy(),
            weights.numpy(),
            gated.numpy(),
        )
        tap.see(sites.MOE_ROUTER_LOGITS, logits)
        ids, weights = tap.route(sites.MOE_TOPK, ids, weights, self.gate.routing(logits, batch.token_ids))
        out: torch.Tensor = self.shared_down(gated)
        self.add_experts.add(x, ids, weights, out)
        return out
