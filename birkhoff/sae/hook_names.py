"""Names of tensors of ordinary models in the files of other tools, and our sites of the same tensors.

SAELens stores TransformerLens' names, Gemma Scope 2 those of modules of Transformers. On V4 these tensors do not exist
or mean something else; give `hook` and `layer` there.
"""

from __future__ import annotations

import re

_TRANSFORMER_LENS = {
    "hook_resid_pre": "pre_attn",
    "hook_resid_mid": "post_attn",
    "hook_resid_post": "post_mlp",
    "hook_attn_out": "attn_out",
    "hook_mlp_out": "mlp_out",
    "attn.hook_z": "attn_z",
}
_TRANSFORMERS = {
    "output": "post_mlp",
    "self_attn.o_proj.input": "attn_z",
    "post_feedforward_layernorm.output": "mlp_out",
}


def site_of(hook_name: object) -> tuple[str, int] | None:
    """(hook, layer) of a tensor's name in another tool; None if it is no site of ours."""
    match = re.fullmatch(r"(blocks|model\.layers)\.(\d{1,4})\.(.+)", str(hook_name))
    if match is None:
        return None
    table = _TRANSFORMER_LENS if match[1] == "blocks" else _TRANSFORMERS
    return (table[match[3]], int(match[2])) if match[3] in table else None
