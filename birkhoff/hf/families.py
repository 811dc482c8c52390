"""The model families that run through Transformers: one row each says where the layers are and where every site is.

A site is the first argument of a module, (a part of) its output, or a residual. A residual is a module's first argument
that the layer also carries past the module: it is edited in place, so that an edit acts on both paths. Nothing here
imports Transformers, so that `birkhoff inspect` can describe a checkpoint without it.

On all ordinary models `pre_attn` is the residual entering a layer, `post_attn` the residual after attention was added
and `post_mlp` the residual leaving the layer; an edit of them is read by everything that follows. `attn_z`, `attn_out`,
`mlp_in` and `mlp_out` are inputs and outputs of the sublayers: `attn_out` and `mlp_out` are what is added to the
residual, after a norm that follows the sublayer, if there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Side = Literal["input", "residual", "output"]


@dataclass(frozen=True)
class Point:
    """Where a site is: a module of the layer ("" for the layer itself), and one side of it; `part` of a tuple."""

    module: str
    side: Side
    part: int = 0


ROUTER = MappingProxyType(
    {
        "moe_router_logits": Point("mlp.gate", "output", 0),
        "moe_topk": Point("mlp.gate", "output", 2),  # ids; the weights are part 1
    }
)
# In the order in which the forward pass reaches them: two sites of one module are hooked in this order.
_PRE_NORM = MappingProxyType(
    {
        "pre_attn": Point("", "input"),
        "attn_z": Point("self_attn.o_proj", "input"),
        "attn_out": Point("self_attn", "output"),
        "post_attn": Point("post_attention_layernorm", "residual"),
        "mlp_in": Point("mlp", "input"),
        "mlp_out": Point("mlp", "output"),
        "post_mlp": Point("", "output"),
    }
)
_SANDWICH = MappingProxyType(  # a norm before and after each sublayer
    {
        **_PRE_NORM,
        "attn_out": Point("post_attention_layernorm", "output"),
        "post_attn": Point("pre_feedforward_layernorm", "residual"),
        "mlp_out": Point("post_feedforward_layernorm", "output"),
    }
)
_POST_NORM = MappingProxyType({**_SANDWICH, "post_attn": Point("mlp", "residual")})
_GPT2 = MappingProxyType(
    {
        **_PRE_NORM,
        "attn_z": Point("attn.c_proj", "input"),
        "attn_out": Point("attn", "output"),
        "post_attn": Point("ln_2", "residual"),
    }
)
_NEOX = MappingProxyType(
    {**_PRE_NORM, "attn_z": Point("attention.dense", "input"), "attn_out": Point("attention", "output")}
)


# Transformers' DeepseekV4: the same names as `hooks/site_names.py` lists for it. Its streams can only be captured here.
_V4 = MappingProxyType(
    {
        "mhc_streams_pre_attn": Point("", "input"),
        "mhc_attn_post_mix": Point("attn_hc", "output", 0),
        "mhc_attn_res_mix": Point("attn_hc", "output", 1),
        "pre_attn": Point("attn_hc", "output", 2),
        "post_attn": Point("self_attn", "output"),
        "mhc_streams_pre_mlp": Point("ffn_hc", "input"),
        "mhc_ffn_post_mix": Point("ffn_hc", "output", 0),
        "mhc_ffn_res_mix": Point("ffn_hc", "output", 1),
        "mlp_in": Point("ffn_hc", "output", 2),
        "mlp_out": Point("mlp", "output"),
        **ROUTER,
    }
)


@dataclass(frozen=True)
class Family:
    """One row of the table. `sliding` says how the model takes sliding windows: not at all, as the one mask of all
    layers, or as one mask per layer type. Without `cached` every step computes the whole text again, request by
    request: slow, and independent of any cache."""

    model_type: str
    title: str
    architecture: str
    points: Mapping[str, Point]
    layers: str = "model.layers"
    norm: str = "model.norm"
    sliding: Literal["none", "all", "by_type"] = "none"
    moe: bool = False
    cached: bool = True
    stream_merge: str = ""  # the module that merges the residual streams before the final norm
    capture_only: tuple[str, ...] = ()  # sites that other models can edit


FAMILIES: tuple[Family, ...] = (
    Family("llama", "Llama 2 and 3", "LlamaForCausalLM", _PRE_NORM),
    Family("qwen2", "Qwen 2, 2.5", "Qwen2ForCausalLM", _PRE_NORM, sliding="by_type"),
    Family("qwen3", "Qwen 3", "Qwen3ForCausalLM", _PRE_NORM, sliding="by_type"),
    Family("qwen2_moe", "Qwen 1.5 and 2 MoE", "Qwen2MoeForCausalLM", _PRE_NORM, sliding="by_type", moe=True),
    Family("qwen3_moe", "Qwen 3 MoE", "Qwen3MoeForCausalLM", _PRE_NORM, sliding="all", moe=True),
    Family("mistral", "Mistral", "MistralForCausalLM", _PRE_NORM, sliding="all"),
    Family("mixtral", "Mixtral", "MixtralForCausalLM", _PRE_NORM, sliding="all", moe=True),
    Family("gemma2", "Gemma 2", "Gemma2ForCausalLM", _SANDWICH, sliding="by_type"),
    Family("gemma3_text", "Gemma 3 (text)", "Gemma3ForCausalLM", _SANDWICH, sliding="by_type"),
    Family("phi3", "Phi-3, Phi-4", "Phi3ForCausalLM", _PRE_NORM, sliding="all"),
    Family("olmo2", "OLMo 2", "Olmo2ForCausalLM", _POST_NORM),
    Family("gpt2", "GPT-2", "GPT2LMHeadModel", _GPT2, layers="transformer.h", norm="transformer.ln_f"),
    Family(
        "gpt_neox",
        "GPT-NeoX, Pythia",
        "GPTNeoXForCausalLM",
        _NEOX,
        layers="gpt_neox.layers",
        norm="gpt_neox.final_layer_norm",
    ),
)
ORACLE = Family(
    "deepseek_v4",
    "DeepSeek-V4 (as an oracle)",
    "DeepseekV4ForCausalLM",
    _V4,
    cached=False,
    stream_merge="model.hc_head",
    capture_only=("mhc_streams_pre_attn", "mhc_streams_pre_mlp", "mhc_streams_final"),
)
BY_TYPE: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (*FAMILIES, ORACLE)}
)


def points_of(family: Family, config: Mapping[str, Any], dense_layers: bool = False) -> dict[str, Point]:
    """The sites that a model of the family with this config has.

    A layer that adds attention and MLP to its input at once has no residual between them. Router sites are offered when
    every layer has experts."""
    points = dict(family.points)
    if family.model_type == "gpt_neox" and config.get("use_parallel_residual", True):
        del points["post_attn"]
    if family.moe and not dense_layers:
        points |= ROUTER
    return points
