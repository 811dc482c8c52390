"""The names of hooks: our aliases, and the names of the same tensors in other tools.

An address is (hook, layer) with layers counted from 0; hooks that fire once per model have the address (hook, L-1).
`resolve` maps a name and layer to the address where the tensor is tapped: aliases are followed, negative layers
count from the end, and names that the model does not have are refused with alternatives. Captures and edits use the
same names. The tables of other tools are bijections between addresses and their names: a name that is not in the
table is unknown, never guessed. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from birkhoff.errors import OptionError, SiteError, did_you_mean, quoted
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.sites import BY_NAME, SITES
from birkhoff.option_checks import as_int

Address = tuple[str, int]

POST_BLOCK = "post_block"  # another name of post_mlp, on ordinary models
STREAMS_POST_MLP = "mhc_streams_post_mlp"  # the streams leaving a layer, which the next layer reads
ALIASES: tuple[str, ...] = (POST_BLOCK, STREAMS_POST_MLP)

# TransformerLens' adapter of DeepseekV4ForCausalLM; the streams are 4-D there: [batch, position, stream, hidden].
_TRANSFORMER_LENS = {
    "mhc_streams_pre_attn": "blocks.{}.hook_in",
    "mhc_streams_pre_mlp": "blocks.{}.mlp_hc.hook_in",
    STREAMS_POST_MLP: "blocks.{}.hook_out",
    "pre_attn": "blocks.{}.attn_hc.hook_out",
    "mlp_in": "blocks.{}.mlp_hc.hook_out",
    "mhc_attn_post_mix": "blocks.{}.attn_hc.hook_post",
    "mhc_ffn_post_mix": "blocks.{}.mlp_hc.hook_post",
    "mhc_attn_res_mix": "blocks.{}.attn_hc.hook_comb",
    "mhc_ffn_res_mix": "blocks.{}.mlp_hc.hook_comb",
    "post_attn": "blocks.{}.attn.hook_out",
    "mlp_out": "blocks.{}.mlp.hook_out",
    "mhc_streams_final": "hc_head.hook_in",
    "final_hidden": "hc_head.hook_out",
}
# Modules of Transformers' DeepseekV4ForCausalLM: `:input` is the first argument, `:output[i]` one part of a tuple.
_TRANSFORMERS = {
    "mhc_streams_pre_attn": "model.layers.{}:input",
    "mhc_streams_pre_mlp": "model.layers.{}.ffn_hc:input",
    STREAMS_POST_MLP: "model.layers.{}:output",
    "pre_attn": "model.layers.{}.attn_hc:output[2]",
    "mlp_in": "model.layers.{}.ffn_hc:output[2]",
    "mhc_attn_post_mix": "model.layers.{}.attn_hc:output[0]",
    "mhc_ffn_post_mix": "model.layers.{}.ffn_hc:output[0]",
    "mhc_attn_res_mix": "model.layers.{}.attn_hc:output[1]",
    "mhc_ffn_res_mix": "model.layers.{}.ffn_hc:output[1]",
    "post_attn": "model.layers.{}.self_attn:output[0]",
    "mlp_out": "model.layers.{}.mlp:output",
    "moe_router_logits": "model.layers.{}.mlp.gate:output[0]",
    "mhc_streams_final": "model.hc_head:input",
    "final_hidden": "model.hc_head:output",
}
TOOLS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"transformer_lens": MappingProxyType(_TRANSFORMER_LENS), "transformers": MappingProxyType(_TRANSFORMERS)}
)


def refusal(hook: str, schema: Mapping[str, HookSchema]) -> str | None:
    """Why this model does not have the hook, and what it has instead; None if it has it."""
    streams = "mhc_streams_final" in schema
    if (
        hook in schema
        or (hook == POST_BLOCK and "post_mlp" in schema)
        or (hook == STREAMS_POST_MLP and streams)
    ):
        return None
    if hook in ("post_mlp", POST_BLOCK) and streams:
        return (
            f"{hook} is a single residual after the MLP, which a model with several streams does not have. Use "
            "mhc_streams_pre_mlp, mhc_streams_pre_attn of the next layer (also called mhc_streams_post_mlp of this "
            f"one), or mhc_streams_final after the last. This model has: {', '.join(sorted(schema))}."
        )
    hint = did_you_mean(hook, [*schema, *(ALIASES if streams else ())])
    return f"{quoted(hook)} is not a hook of this model.{hint} It has: {', '.join(sorted(schema))}."


def resolve(hook: str, layer: int, schema: Mapping[str, HookSchema], num_layers: int) -> Address:
    """The address where the tensor of this name and layer is tapped. Once-per-model hooks accept any layer."""
    why = refusal(hook, schema)
    if why is not None:
        raise SiteError(why)
    if hook in schema and schema[hook].once:
        return hook, num_layers - 1
    if as_int(layer) is None or not -num_layers <= layer < num_layers:
        nearest = f" Nearest: {hook}[{0 if layer < 0 else num_layers - 1}]." if isinstance(layer, int) else ""
        raise SiteError(f"{hook}[{quoted(layer)}]: this model has layers 0..{num_layers - 1}.{nearest}")
    layer %= num_layers
    if hook == POST_BLOCK:
        return "post_mlp", layer
    if hook == STREAMS_POST_MLP:
        return ("mhc_streams_pre_attn", layer + 1) if layer + 1 < num_layers else ("mhc_streams_final", layer)
    return hook, layer


def known_name(hook: str) -> bool:
    """Whether any model has a hook or alias of this name."""
    return hook in BY_NAME or hook in ALIASES


def to_tool(tool: str, address: Address, num_layers: int) -> str | None:
    """The name of the tensor at this address in another tool, or None if it has none."""
    table = _table(tool)
    hook, layer = address
    if not 0 <= layer < num_layers:
        raise SiteError(f"{hook}[{layer}]: this model has layers 0..{num_layers - 1}.")
    if hook not in table or (_once(hook) and layer != num_layers - 1):
        return None
    return table[hook].format(layer)


def unnamed(tool: str) -> list[str]:
    """Hooks of a V4 model that a tool's table has no name for, by ascending id."""
    table = _table(tool)
    return [site.name for site in SITES if not site.absent and site.name not in table]


def _once(hook: str) -> bool:
    return hook in BY_NAME and BY_NAME[hook].once


def _table(tool: str) -> Mapping[str, str]:
    if tool not in TOOLS:
        raise OptionError(f"names is {quoted(tool)}, expected one of {', '.join(TOOLS)}.")
    return TOOLS[tool]
