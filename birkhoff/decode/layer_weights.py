"""The weights of one layer as the kernels of a GPU decode step read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from birkhoff.kernels.cuda.backend import scale_offset
from birkhoff.kernels.linear.packed import PackedWeight
from birkhoff.kernels.packed import PackedType
from birkhoff.model.block import Block
from birkhoff.model.compressor import Compressor
from birkhoff.model.moe import Experts
from birkhoff.offload.host_experts import HostExperts


@dataclass(eq=False)
class LayerWeights:
    """Weights of one layer. Lists hold matrices that one launch multiplies with the same input."""

    ratio: int  # compression of the layer's attention: 0 (sliding), 4 (CSA) or 128 (HCA)
    mixers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # fn, base, scale; of attention, of experts
    norms: list[torch.Tensor]  # of the attention input, of the experts' input
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    sink: torch.Tensor
    qkv_proj: list[PackedWeight]  # query latent and keys; raw entries, raw index keys and index head weights
    q_b_proj: list[PackedWeight]  # queries; index queries
    o_a_proj: list[PackedWeight]
    o_b_proj: list[PackedWeight]
    compressor: tuple[torch.Tensor, torch.Tensor] | None  # position biases and norm of the entries
    index: tuple[torch.Tensor, torch.Tensor] | None  # the same of the index keys
    router: PackedWeight
    router_bias: torch.Tensor | None
    hash_table: torch.Tensor | None  # [vocab, k] expert ids of each token, in hash-routed layers
    shared_gate_up: PackedWeight
    shared_down: PackedWeight
    expert_addresses: torch.Tensor  # [E, 4] int64: codes and scales of gate and up, of down
    expert_types: tuple[PackedType, PackedType]  # of gate and up, of down
    scale_offsets: list[int | None]  # `scale_offset` of gate and up, of down; of FP4 experts only
    host_range: tuple[int, int] | None  # addresses from .. to of experts in host memory
    host: HostExperts | None  # computes the experts without an address
    owner: Experts  # keeps the memory at `expert_addresses` alive


def layer_weights(block: Block) -> LayerWeights:
    """The weights of a block. Only scales are copied: the modules keep views of the stacked weights."""
    a, m = block.attn, block.ffn
    q_b_proj = [a.wq_b.packed_weight()]
    if a.indexer is not None:
        q_b_proj.append(a.indexer.wq_b.packed_weight())
    assert m.experts.types is not None, "the experts are held as numbers"
    store, host = m.experts.store, m.experts.host
    return LayerWeights(
        ratio=a.ratio,
        mixers=[(mixer.fn, mixer.base, mixer.scale) for mixer in (block.hc_attn, block.hc_ffn)],
        norms=[block.attn_norm.weight, block.ffn_norm.weight],
        q_norm=a.q_norm.weight,
        kv_norm=a.kv_norm.weight,
        sink=a.attn_sink,
        qkv_proj=a.in_proj.stack(),
        q_b_proj=q_b_proj,
        o_a_proj=[a.wo_a.packed_weight()],
        o_b_proj=[a.wo_b.packed_weight()],
        compressor=None if a.compressor is None else _bias_and_norm(a.compressor),
        index=None if a.indexer is None else _bias_and_norm(a.indexer.compressor),
        router=m.gate.project.packed_weight(),
        router_bias=m.gate.bias,
        hash_table=m.gate.tid2eid,
        shared_gate_up=m.shared_experts.gate_up.packed_weight(),
        shared_down=m.shared_experts.w2.packed_weight(),
        expert_addresses=m.experts.addresses() if store is None else store.decode_table[m.experts.layer],
        expert_types=m.experts.types,
        scale_offsets=[scale_offset(torch.tensor(extremes)) for extremes in _scale_ranges(m.experts)],
        # With all cold experts left to the CPU, kernels read none in host memory.
        host_range=None if store is None or (host is not None and host.share == 1) else store.host_range(),
        host=host,
        owner=m.experts,
    )


def _bias_and_norm(compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    return compressor.ape, compressor.norm.weight


def _scale_ranges(experts: Experts) -> list[tuple[int, int]]:
    """Smallest and largest scale over all FP4 experts: of gate and up, and of down."""
    ranges: list[tuple[int, int]] = []
    if experts.types is None or any(kind.name != "FP4" for kind in experts.types):
        return ranges
    for name, part in (("gate_up_scale", 1), ("down_scale", 3)):
        if experts.store is None:
            scales = [experts.get_buffer(name)]
        else:
            scales = [experts.stored_parts(expert)[part] for expert in range(experts.count)]
        extremes = torch.stack([torch.stack(each.aminmax()).cpu() for each in scales])
        ranges.append((int(extremes.min()), int(extremes.max())))
    return ranges
