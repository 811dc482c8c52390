"""Small V4 models for tests: configurations that reach every mechanism, and random weights that exercise them."""

from __future__ import annotations

import torch

from birkhoff.config import RopeScaling, V4Config
from birkhoff.decode.cpu import install_cpu_decode
from birkhoff.kernels.select import select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer

TINY = V4Config(
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
    num_hash_layers=2,
    swiglu_limit=1.0,
    max_position_embeddings=1024,
    rope_scaling=RopeScaling(4.0, 64),
    num_nextn_predict_layers=1,
)


def variant(**changes) -> V4Config:
    from dataclasses import replace

    if "compress_ratios" in changes:
        changes.setdefault("num_hidden_layers", len(changes["compress_ratios"]))
        changes.setdefault("num_hash_layers", min(2, changes["num_hidden_layers"]))
    return replace(TINY, **changes)


MICRO = variant(
    vocab_size=40,
    hidden_size=16,
    num_attention_heads=2,
    head_dim=8,
    qk_rope_head_dim=4,
    q_lora_rank=8,
    o_lora_rank=4,
    compress_ratios=(4, 128),
    index_n_heads=3,
    index_head_dim=8,
    n_routed_experts=4,
    moe_intermediate_size=8,
    num_hash_layers=1,
    num_nextn_predict_layers=0,
)  # two layers, for thousands of steps


def fill_random(model: Transformer, seed: int) -> None:
    """Random weights of realistic size: norms near one, mixers neither identity nor uniform, distinct router scores."""
    g = torch.Generator().manual_seed(seed)

    def draw(shape, spread, around=0.0):
        return torch.randn(shape, generator=g) * spread + around

    with torch.no_grad():
        for d in model.destinations():
            shape, name = d.tensor.shape, d.name
            if d.kind == "ids":
                rows = torch.rand(shape[0], model.config.n_routed_experts, generator=g).argsort(-1)[
                    :, : shape[1]
                ]
                d.tensor.copy_(rows)
            elif name.endswith(("norm.weight", "_scale")):
                d.tensor.copy_(draw(shape, 0.2, 1.0))
            elif name.endswith(("_base", "attn_sink", "gate.bias")):
                d.tensor.copy_(draw(shape, 0.7 if "_base" in name else 0.5))
            elif name.endswith("ape"):
                d.tensor.copy_(draw(shape, 0.5))
            elif name == "embed.weight":
                d.tensor.copy_(draw(shape, 1.0))
            else:
                d.tensor.copy_(draw(shape, 1.5 * shape[-1] ** -0.5))


def random_model(
    config: V4Config = TINY, seed: int = 0, dtype=torch.float32, released: bool = False, kernels="reference"
) -> Transformer:
    model = Transformer(config, Numerics(dtype, released, select(kernels)))
    fill_random(model, seed)
    return model.eval()


def fused_model(config: V4Config = TINY, seed: int = 0, **options) -> Transformer:
    """`random_model`, fused, with the compiled CPU sublayers where they apply."""
    return install_cpu_decode(random_model(config, seed, **options))


def random_tokens(config: V4Config, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed + 1000))


def weights_of(model: Transformer) -> dict[str, torch.Tensor]:
    """Every tensor under its released name, detached."""
    return {d.name: d.tensor.detach() for d in model.destinations()}
