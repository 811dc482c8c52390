"""Other people's code with our weights: `transformers`' DeepseekV4ForCausalLM as the judge of ours."""

from __future__ import annotations

import re

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from birkhoff.config import V4Config
from birkhoff.model.transformer import Transformer

_RENAME = (
    (r"^embed\.weight$", "model.embed_tokens.weight"),
    (r"^head\.weight$", "lm_head.weight"),
    (r"^norm\.weight$", "model.norm.weight"),
    (r"^hc_head_(fn|base|scale)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"(compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"),
    (r"\.attn\.", ".self_attn."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.ape$", ".position_bias"),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"shared_experts\.w1\.", "shared_experts.gate_proj."),
    (r"shared_experts\.w3\.", "shared_experts.up_proj."),
    (r"shared_experts\.w2\.", "shared_experts.down_proj."),
)


def oracle_name(name: str) -> str:
    for pattern, replacement in _RENAME:
        name = re.sub(pattern, replacement, name)
    return name


def oracle_config(config: V4Config) -> DeepseekV4Config:
    raw = config.to_dict()
    scaling = raw.pop("rope_scaling", None)
    for key in ("model_type", "architectures", "expert_dtype", "quantization_config"):
        raw.pop(key, None)
    raw["compress_ratios"] = list(config.compress_ratios)
    if scaling:
        scaling["rope_type"] = scaling.pop("type")
        raw["rope_parameters"] = scaling
    if isinstance(raw["eos_token_id"], tuple):
        raw["eos_token_id"] = list(raw["eos_token_id"])
    return DeepseekV4Config(**raw, attn_implementation="eager", experts_implementation="eager")


def build_oracle(ours: Transformer) -> DeepseekV4ForCausalLM:
    """The reference port holding exactly our weights (its trunk; it has no MTP block)."""
    theirs = DeepseekV4ForCausalLM(oracle_config(ours.config)).float().eval()
    given: dict[str, torch.Tensor] = {}
    stacks: dict[str, list] = {}
    for d in ours.destinations():
        if d.name.startswith("mtp."):
            continue
        name, tensor = oracle_name(d.name), d.tensor.detach().float() if d.kind == "value" else d.tensor.long()
        match = re.match(r"(.*\.experts)\.(\d+)\.(w[123])\.weight$", name)
        if match:
            stacks.setdefault(match[1], []).append((int(match[2]), match[3], tensor))
        else:
            given[name] = tensor
    for prefix, parts in stacks.items():
        by = {(e, w): t for e, w, t in parts}
        count = 1 + max(e for e, _ in by)
        given[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((by[e, "w1"], by[e, "w3"])) for e in range(count)])
        given[f"{prefix}.down_proj"] = torch.stack([by[e, "w2"] for e in range(count)])
    missing, unexpected = theirs.load_state_dict(given, strict=False)
    missing = [name for name in missing if "rotary" not in name]
    assert not missing and not unexpected, (missing, unexpected)
    return theirs
