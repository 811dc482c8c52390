"""A small random model of every family, written to disk as Transformers writes it."""

from __future__ import annotations

import torch
import transformers

VOCAB, D, LAYERS = 96, 32, 3
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_OWN = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "qwen2_moe": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1,
        **_EXPERTS,
    },
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, **_EXPERTS},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "phi3": {},
    "olmo2": {},
    "gpt2": {"n_positions": 128},
    "gpt_neox": {"rotary_pct": 0.5},
}
TYPES = tuple(_OWN)


def make(model_type: str, folder, seed: int = 0, **options):
    """Write a random model of the family and return it. Weights are large enough that no two logits are close."""
    keys = {**_COMMON, **_OWN[model_type], **options}
    if model_type in ("gpt2", "gpt_neox"):
        for name in ("num_key_value_heads", *(["intermediate_size"] if model_type == "gpt2" else [])):
            keys.pop(name, None)
    config = transformers.AutoConfig.for_model(model_type, **keys)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for name, weight in model.named_parameters():
        is_norm = weight.dim() == 1 and "bias" not in name
        torch.nn.init.normal_(weight, 1.0 if is_norm else 0.0, 0.1 if weight.dim() == 1 else 0.2)
    model.save_pretrained(folder)
    return model
