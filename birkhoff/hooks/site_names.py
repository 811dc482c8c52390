"""The names of hooks: our aliases, and the names of the same tensors in other tools.

An address is (hook, layer) with layers counted from 0; hooks that fire once per model have the address (hook, L-1).
`resolve` maps a name and layer to the address where the tensor is tapped: aliases are followed, negative layers
count from the end, and names that the model does not have are refused with alternatives. Captures and edits use the
same names. The tables of other tools are bijections between addresses and their names: a name that is not in the
table is unknown, never guessed. Wherever a hook is named, a name of another tool may stand instead: it says its layer
itself. The same name may mean another tensor on an ordinary model than on V4. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from birkhoff.errors import OptionError, SelectorError, SiteError, did_you_mean, quoted
from birkhoff.hooks.layers import LayerSelector
from birkhoff.hooks.schema import Schema
from birkhoff.hooks.sites import BY_NAME, SITES
from birkhoff.option_checks import as_int

Address = tuple[str, int]

POST_BLOCK = "post_block"  # another name of post_mlp, on ordinary models
STREAMS_POST_MLP = "mhc_streams_post_mlp"  # the streams leaving a layer, which the next layer reads
ALIASES: tuple[str, ...] = (POST_BLOCK, STREAMS_POST_MLP)
# Names of edits for the mixers of both sublayers.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {f"mhc_{kind}_mix": (f"mhc_attn_{kind}_mix", f"mhc_ffn_{kind}_mix") for kind in ("pre", "post", "res")}
)

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

# Tensors of ordinary models, by the name in the other tool: TransformerLens' HookedTransformer and its bridge.
_ORDINARY = {
    "blocks.{}.hook_resid_pre": "pre_attn",
    "blocks.{}.hook_in": "pre_attn",
    "blocks.{}.hook_resid_mid": "post_attn",
    "blocks.{}.hook_resid_post": "post_mlp",
    "blocks.{}.hook_out": "post_mlp",
    "blocks.{}.hook_attn_out": "attn_out",
    "blocks.{}.attn.hook_out": "attn_out",
    "blocks.{}.hook_mlp_out": "mlp_out",
    "blocks.{}.mlp.hook_out": "mlp_out",
    "blocks.{}.attn.hook_z": "attn_z",
}
# What V4 has in place of a tensor that HookedTransformer names, with its prefix or without.
_INSTEAD_ON_V4 = {
    "resid_pre": "mhc_streams_pre_attn",
    "resid_mid": "mhc_streams_pre_mlp",
    "resid_post": STREAMS_POST_MLP,
    "attn_out": "post_attn",
    "mlp_out": "mlp_out",
    "z": "attn_head_out",
}
# What to call instead of reading a hook that HookedTransformer has.
_ELSEWHERE = {
    "pattern": "Attention weights: engine.attention_patterns(text, layers).",
    "attn_scores": "Attention weights: engine.attention_patterns(text, layers).",
    "embed": "What enters the first layer is mhc_streams_pre_attn[0], or pre_attn[0] of an ordinary model.",
    "pos_embed": "Positions are rotary: there is no embedding of them to read.",
}
_V4 = {name: hook for table in TOOLS.values() for hook, name in table.items()}


def from_tool(name: str, num_layers: int, streams: bool = True) -> Address | None:
    """The hook (or alias) and layer of a tensor's name in another tool, on V4 (`streams`) or on an ordinary model; None
    if it is no such name."""
    match = re.fullmatch(r"([a-z]+(?:\.[a-z]+)?)\.(\d{1,5})([.:].+)", name, re.ASCII)
    table = _V4 if streams else _ORDINARY
    template = name if match is None else f"{match[1]}.{{}}{match[3]}"
    hook = table.get(template)
    if hook is None or (match is None) is ("{}" in template):
        return None
    return hook, num_layers - 1 if match is None else int(match[2])


def counterpart(name: str, streams: bool | None = None) -> str:
    """` DeepSeek-V4 has 'hook' instead.` for a name of HookedTransformer such as `resid_pre`, or what an ordinary model
    has, or both if `streams` is None; nothing for any other name."""
    match = re.fullmatch(r"(?:blocks\.\d{1,5}\.)?(?:attn\.)?(?:hook_)?([a-z_]+)", name, re.ASCII)
    hook = _INSTEAD_ON_V4.get(match[1]) if match else None
    if match is not None and match[1] in _ELSEWHERE:
        return f" {_ELSEWHERE[match[1]]}"
    if match is None or hook is None:
        return ""
    mixed = ", the four residual streams" if hook.startswith("mhc_streams") else ""
    ordinary = _ORDINARY["blocks.{}.attn.hook_z" if match[1] == "z" else f"blocks.{{}}.hook_{match[1]}"]
    texts = [f" DeepSeek-V4 has {hook!r} instead{mixed}."] if streams is not False else []
    return "".join(texts + ([] if streams else [f" An ordinary model has {ordinary!r}."]))


def select(hook: str, layers: LayerSelector | None, schema: Schema, num_layers: int) -> dict[int, Address]:
    """The addresses of a hook at the selected layers, by layer; a name of another tool says its layer itself, and
    hooks that fire once have only the last. `layers` may be None where the name says enough."""
    address = from_tool(hook, num_layers, has_streams(schema))
    if address is not None:
        own = address[1]
        if (
            layers is not None
            and not _once(address[0])
            and layers.expand(num_layers) not in ((own,), tuple(range(num_layers)))
        ):
            raise SelectorError(
                f"{hook} is a tensor of layer {own}, but other layers are selected. Leave the layers out.",
                "layers",
                "layer",
            )
        return {own: resolve(*address, schema, num_layers)}
    if hook in schema and schema[hook].once:
        return {num_layers - 1: (hook, num_layers - 1)}
    if layers is None:
        raise SelectorError(f'{quoted(hook)} needs layers: a list of them, or "all".', "layers", "empty")
    chosen = layers_with(hook, layers, schema, num_layers)
    return {layer: resolve(hook, layer, schema, num_layers) for layer in chosen}


def has_streams(schema: Schema) -> bool:
    """Whether this is the schema of a model with several residual streams."""
    return "mhc_streams_final" in schema


def refusal(hook: str, schema: Schema) -> str | None:
    """Why this model does not have the hook, and what it has instead; None if it has it."""
    streams = has_streams(schema)
    foreign = from_tool(hook, 1, streams)
    if foreign is not None:
        return refusal(foreign[0], schema)
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
    hint = counterpart(hook, streams) or did_you_mean(hook, [*schema, *(ALIASES if streams else ())])
    return f"{quoted(hook)} is not a hook of this model.{hint} It has: {', '.join(sorted(schema))}."


def members(hook: str, schema: Schema) -> tuple[str, ...]:
    """The hooks that an edit of this name changes: those of a group, or itself."""
    group = GROUPS.get(hook, ())
    return group if group and all(member in schema for member in group) else (hook,)


def resolve(hook: str, layer: int | None, schema: Schema, num_layers: int) -> Address:
    """The address where the tensor of this name and layer is tapped. Once-per-model hooks accept any layer; a name of
    another tool takes its own or None."""
    why = refusal(hook, schema)
    if why is not None:
        raise SiteError(why)
    foreign = from_tool(hook, num_layers, has_streams(schema))
    if foreign is not None:
        if as_int(layer) is not None and layer != foreign[1] and not _once(foreign[0]):
            raise SiteError(f"{hook} is a tensor of layer {foreign[1]}, not of {quoted(layer)}.")
        hook, layer = foreign
    if hook in schema and schema[hook].once:
        return hook, num_layers - 1
    if layer is None or as_int(layer) is None or not -num_layers <= layer < num_layers:
        nearest = f" Nearest: {hook}[{0 if layer < 0 else num_layers - 1}]." if isinstance(layer, int) else ""
        raise SiteError(f"{hook}[{quoted(layer)}]: this model has layers 0..{num_layers - 1}.{nearest}")
    return follow_alias(hook, layer % num_layers, num_layers)


def follow_alias(hook: str, layer: int, num_layers: int) -> Address:
    """The address that an alias stands for at a layer from 0; other hooks stand for themselves."""
    if hook == POST_BLOCK:
        return "post_mlp", layer
    if hook == STREAMS_POST_MLP:
        return ("mhc_streams_pre_attn", layer + 1) if layer + 1 < num_layers else ("mhc_streams_final", layer)
    return hook, layer


def address_of(key: object, num_layers: int, streams: bool) -> Address | None:
    """The address that a key (hook, layer) stands for: aliases, names of other tools and negative layers are followed;
    None if it is no such key."""
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
        return None
    hook, layer = key[0], as_int(key[1])
    if layer is None:
        return None
    foreign = from_tool(hook, num_layers, streams)
    if foreign is not None:
        return follow_alias(*foreign, num_layers) if layer == foreign[1] else None
    if not -num_layers <= layer < num_layers:
        return None
    return (hook, num_layers - 1) if _once(hook) else follow_alias(hook, layer % num_layers, num_layers)


def layers_with(hook: str, layers: LayerSelector, schema: Schema, num_layers: int) -> tuple[int, ...]:
    """The selected layers that have a hook. "all" and "every" select among those that have it; a layer that is named
    and does not have it is refused."""
    chosen = layers.expand(num_layers)
    has = schema[hook].layers if hook in schema else None
    if has is None:
        return chosen
    known = f"Layers with {hook}: {', '.join(map(str, has)) or 'none'}."
    lacking = [layer for layer in chosen if layer not in has]
    if lacking and layers.every is None:
        raise SelectorError(f"{hook}[{lacking[0]}]: this layer has none. {known}", "layers", "layer")
    chosen = tuple(layer for layer in chosen if layer in has)
    if not chosen:
        raise SelectorError(f"none of the selected layers has {hook}. {known}", "layers", "layer")
    return chosen


def known_name(hook: str) -> bool:
    """Whether any model has a hook or alias of this name, or a tensor of this name in another tool."""
    return hook in BY_NAME or hook in ALIASES or any(from_tool(hook, 1, kind) for kind in (True, False))


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
