"""Named model sizes: the two releases, the embedded model and the test model.

`flash` and `pro` are the released configurations; `nano` is the embedded model. `tiny` is the smallest model that
covers every feature: two layers of each attention kind, both routings, MTP, a YaRN ramp with a fractional step, a
SwiGLU limit that clips, FP8 matrices smaller than a tile, and enough index heads that scores do not tie.
"""

from __future__ import annotations

from dataclasses import replace

from birkhoff.config import RopeScaling, V4Config
from birkhoff.errors import OptionError
from birkhoff.option_checks import as_int

_YARN = RopeScaling(factor=16.0, original_max_position_embeddings=65536)

PRESETS: dict[str, V4Config] = {
    "flash": V4Config(rope_scaling=_YARN),
    "pro": V4Config(
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
        index_topk=1024,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
        rope_scaling=_YARN,
    ),
    "nano": V4Config(
        vocab_size=4096,
        hidden_size=384,
        num_hidden_layers=8,
        num_attention_heads=6,
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=256,
        o_groups=2,
        o_lora_rank=128,
        sliding_window=64,
        compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128),
        index_n_heads=16,
        index_head_dim=64,
        index_topk=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=128,
        num_hash_layers=2,
        max_position_embeddings=4096,
    ),
    "tiny": V4Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=8,
        compress_ratios=(0, 0, 4, 128, 4, 128),
        index_n_heads=16,
        index_head_dim=16,
        index_topk=12,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        num_hash_layers=3,
        swiglu_limit=1.0,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=256),
        max_position_embeddings=4096,
    ),
}


def preset(
    like: str, layers: int | None = None, mtp: bool = True, routed_experts: int | None = None
) -> V4Config:
    """Return a named configuration, optionally with only its first layers, fewer experts or without MTP."""
    if like not in PRESETS:
        raise OptionError(f"like is {like!r}, expected one of {', '.join(PRESETS)}.")
    config = PRESETS[like]
    if layers is not None:
        if as_int(layers) is None or not 1 <= layers <= config.num_hidden_layers:
            raise OptionError(f"layers is {layers!r}, expected 1 to {config.num_hidden_layers} for {like}.")
        config = replace(
            config,
            num_hidden_layers=layers,
            compress_ratios=config.compress_ratios[:layers],
            num_hash_layers=min(config.num_hash_layers, layers),
        )
    if routed_experts is not None:
        least, most = config.num_experts_per_tok, config.n_routed_experts
        if as_int(routed_experts) is None or not least <= routed_experts <= most:
            raise OptionError(
                f"routed_experts is {routed_experts!r}, expected {least}, which a token uses, to {most} for {like}."
            )
        config = replace(config, n_routed_experts=routed_experts)
    return config if mtp else replace(config, num_nextn_predict_layers=0)
