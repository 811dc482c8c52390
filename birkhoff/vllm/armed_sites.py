"""Which sites an engine on vLLM arms, chosen when it starts: the option `hooks`, and the architectures that are known.

An armed site costs an operation in every step, and in a recorded graph it cannot be added later, so nothing else is
touched: a layer without armed sites keeps vLLM's own code."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from birkhoff.errors import OptionError, SiteError, UnsupportedModel, did_you_mean, quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.plan import Key
from birkhoff.hooks.schema import HookSchema, build_hook_schema, ordinary_schema
from birkhoff.hooks.sites import BY_NAME


@dataclass(frozen=True)
class Architecture:
    """Where the sites of an ordinary decoder layer of vLLM are. Its layers are called with the output of the last
    sublayer and the residual it is added to; `adding_norm` adds the output of attention. `attn_out` and `mlp_out` name
    the module whose output is added to the residual, `mlp` the module of the MLP."""

    adding_norm: str = "post_attention_layernorm"
    attn_out: str = "self_attn"
    mlp: str = "mlp"
    mlp_out: str = "mlp"


_PRE_NORM = Architecture()
_SANDWICH = Architecture(
    "pre_feedforward_layernorm", "post_attention_layernorm", "mlp", "post_feedforward_layernorm"
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": _PRE_NORM,
    "MistralForCausalLM": _PRE_NORM,
    "Qwen2ForCausalLM": _PRE_NORM,
    "Qwen3ForCausalLM": _PRE_NORM,
    "Qwen3MoeForCausalLM": _PRE_NORM,
    "Phi3ForCausalLM": _PRE_NORM,
    "MixtralForCausalLM": Architecture(mlp="block_sparse_moe", mlp_out="block_sparse_moe"),
    "Gemma2ForCausalLM": _SANDWICH,
    "Gemma3ForCausalLM": _SANDWICH,
}
V4 = "DeepseekV4ForCausalLM"
RESIDUALS = ("pre_attn", "post_attn", "post_mlp")  # armed unless the option `hooks` says otherwise
ORDINARY = (*RESIDUALS, "attn_out", "mlp_in", "mlp_out", "final_hidden")
V4_HOOKS = (
    "pre_attn",
    "post_attn",
    "mlp_in",
    "mlp_out",
    "mhc_streams_pre_attn",
    "mhc_streams_pre_mlp",
    "mhc_streams_final",
    "mhc_attn_post_mix",
    "mhc_ffn_post_mix",
    "mhc_attn_res_mix",
    "mhc_ffn_res_mix",
    "final_hidden",
)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The architecture that a `config.json` names, if hooks are known for it."""
    names = config.get("architectures") or ()
    name = str(names[0]) if names else None
    if name != V4 and name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"the architecture is {quoted(name)}, and on vLLM the hooks are known for "
            f"{', '.join((*ARCHITECTURES, V4))}. Use the backend transformers, or birkhoff for DeepSeek-V4."
        )
    assert name is not None
    return name


def parse_hooks(value: Any, architecture: str, num_layers: int) -> dict[str, tuple[int, ...]]:
    """The option `hooks` as layers by hook: None (the residuals, or all hooks of V4), "none", a list of names, or
    layers by name; as text, names separated by commas or the JSON of either."""
    known = V4_HOOKS if architecture == V4 else ORDINARY
    if value is None:
        value = V4_HOOKS if architecture == V4 else RESIDUALS
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, Mapping):
        chosen = dict(value)
    elif isinstance(value, Collection) and all(isinstance(name, str) for name in value):
        chosen = dict.fromkeys(value, "all")
    else:
        raise OptionError(f"hooks is {quoted(value)}, expected names of hooks, or layers by name.")
    armed = {}
    for name, layers in chosen.items():
        if name not in known:
            raise OptionError(
                f"hooks names {quoted(name)}, which cannot be armed on vLLM: {', '.join(known)}."
                f"{did_you_mean(str(name), known)}"
            )
        once = BY_NAME[name].once
        armed[name] = (num_layers - 1,) if once else tuple(parse_layers(layers).expand(num_layers))
    return armed


def _from_text(text: str) -> Any:
    text = text.strip()
    if text in ("", "none"):
        return ()
    if text.startswith(("{", "[")):
        try:
            return json.loads(text)
        except ValueError as error:
            raise OptionError(f"hooks is {quoted(text)}, which is not JSON ({error}).") from None
    return tuple(name.strip() for name in text.split(","))


def armed_schema(config: Mapping[str, Any], dtype: str, armed: Collection[str]) -> dict[str, HookSchema]:
    """The schema of the armed hooks, from a `config.json`; the front and every rank make the same."""
    if architecture_of(config) == V4:
        schema = build_hook_schema(int(config["hidden_size"]), dtype, int(config["hc_mult"]))
    else:
        schema = ordinary_schema(ORDINARY, dtype, {"d": (int(config["hidden_size"]),)})
    return {name: row for name, row in schema.items() if name in armed}


def check_armed(keys: Collection[Key], armed: Mapping[str, Collection[int]]) -> None:
    """Refuse a site that was not armed when the engine started."""
    for hook, layer in sorted(keys):
        if layer not in armed.get(hook, ()):
            raise SiteError(
                f"{hook}[{layer}] is not armed: sites are chosen when the engine starts, and {hook} is armed at layers "
                f"{quoted(sorted(armed.get(hook, ())))}. Start with hooks that include it."
            )
