"""Small random models in the sizes that vLLM's CPU kernels take, and prompts for them."""

from __future__ import annotations

import torch

from tests.hf.models import make

VOCAB, D, LAYERS, CONTEXT = 256, 128, 4, 256
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_OWN = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
}
FAMILIES = tuple(_OWN)


def make_model(model_type, folder, **options):
    """Write the model and return it. Logits are far apart, and an edit changes the text."""
    model = make(model_type, folder, **{**_SIZES, **_OWN[model_type], **options})
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 2.0 if "lm_head" in name else 1.4
                weight.copy_(torch.randn(weight.shape, generator=generator) * gain / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return model


def prompts_of(*lengths, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB - 2, (length,), generator=generator).tolist() for length in lengths]
