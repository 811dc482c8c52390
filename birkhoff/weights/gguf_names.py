"""Map released tensor names to GGUF names and back, with one table.

The block table covers trunk layers (`blk.N.`), the MTP block of dialect A (`blk.L.` in a separate file) and that of
dialect B (`mtp.0.`). GGUF stacks the experts of a layer in one tensor; the expert id comes from the released name.
Names without a table row stay untranslated and are reported as unexpected.
"""

from __future__ import annotations

import re
from typing import NamedTuple

ROOT = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight",
    "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}
BLOCK = {
    "attn_norm.weight": "attn_norm.weight",
    "hc_attn_fn": "hc_attn_fn.weight",
    "hc_attn_base": "hc_attn_base.weight",
    "hc_attn_scale": "hc_attn_scale.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "hc_ffn_fn": "hc_ffn_fn.weight",
    "hc_ffn_base": "hc_ffn_base.weight",
    "hc_ffn_scale": "hc_ffn_scale.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
}
STACKS = {"w1": "ffn_gate_exps.weight", "w3": "ffn_up_exps.weight", "w2": "ffn_down_exps.weight"}
# Dialect B keeps the released names of tensors that only MTP has.
DS4_MTP = {
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head_fn.weight",
    "hc_head_base": "hc_head_base.weight",
    "hc_head_scale": "hc_head_scale.weight",
}
# Dialect A; `nextn.eh_proj.weight` is e_proj and h_proj concatenated along columns.
NEXTN = {
    "enorm.weight": "nextn.enorm.weight",
    "hnorm.weight": "nextn.hnorm.weight",
    "norm.weight": "nextn.shared_head_norm.weight",
    "hc_head_fn": "nextn.hc_head_fn.weight",
    "hc_head_base": "nextn.hc_head_base.weight",
    "hc_head_scale": "nextn.hc_head_scale.weight",
}
EH_PROJ = "nextn.eh_proj.weight"

_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_ROOT_FROM_GGUF = {theirs: ours for ours, theirs in ROOT.items()}
_BLOCK_FROM_GGUF = {theirs: ours for ours, theirs in BLOCK.items()}
_STACK_FROM_GGUF = {theirs: part for part, theirs in STACKS.items()}
_DS4_FROM_GGUF = {theirs: ours for ours, theirs in DS4_MTP.items()}
_NEXTN_FROM_GGUF = {theirs: ours for ours, theirs in NEXTN.items()}


class GGUFName(NamedTuple):
    """The GGUF tensor that holds a released tensor, and the expert id if it is a stack of experts."""

    name: str
    expert: int | None = None


class ReleasedName(NamedTuple):
    """The released name of a GGUF tensor, with `{}` for the expert id. `halves`: e_proj next to h_proj."""

    ours: str
    stacked: bool = False
    halves: bool = False


def block_name(suffix: str, prefix: str) -> GGUFName | None:
    """Map `attn.wq_a.weight`, `blk.3` to `blk.3.attn_q_a.weight`; None for a name that blocks do not have."""
    if suffix in BLOCK:
        return GGUFName(f"{prefix}.{BLOCK[suffix]}")
    match = _EXPERT.fullmatch(suffix)
    return GGUFName(f"{prefix}.{STACKS[match[2]]}", int(match[1])) if match else None


def trunk_name(name: str) -> GGUFName | None:
    """Return the GGUF name of a trunk tensor."""
    if name in ROOT:
        return GGUFName(ROOT[name])
    parts = name.split(".", 2)
    return block_name(parts[2], f"blk.{parts[1]}") if parts[0] == "layers" and len(parts) == 3 else None


def to_released(name: str, trunk_layers: int) -> ReleasedName | None:
    """Return the released name of a GGUF tensor, or None. Blocks from `trunk_layers` on are MTP."""
    if name in _ROOT_FROM_GGUF:
        return ReleasedName(_ROOT_FROM_GGUF[name])
    head, _, rest = name.partition(".")
    block, _, suffix = rest.partition(".")
    if head not in ("blk", "mtp") or not block.isdecimal() or len(block) > 5 or str(int(block)) != block:
        return None
    index = int(block)
    if head == "blk" and index < trunk_layers:
        return _in_block(suffix, f"layers.{index}")
    ours = f"mtp.{index if head == 'mtp' else index - trunk_layers}"
    if head == "blk" and suffix == EH_PROJ:
        return ReleasedName(f"{ours}.{{}}_proj.weight", halves=True)
    suffix_ours = (_DS4_FROM_GGUF if head == "mtp" else _NEXTN_FROM_GGUF).get(suffix)
    return ReleasedName(f"{ours}.{suffix_ours}") if suffix_ours else _in_block(suffix, ours)


def _in_block(suffix: str, ours: str) -> ReleasedName | None:
    if suffix in _BLOCK_FROM_GGUF:
        return ReleasedName(f"{ours}.{_BLOCK_FROM_GGUF[suffix]}")
    part = _STACK_FROM_GGUF.get(suffix)
    return ReleasedName(f"{ours}.ffn.experts.{{}}.{part}.weight", stacked=True) if part else None
