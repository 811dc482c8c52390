"""Names of tensors of ordinary models in the files of other tools, and our sites of the same tensors.

SAELens stores TransformerLens' names, Gemma Scope 2 those of modules of Transformers. On V4 these tensors do not exist
or mean something else; give `hook` and `layer` there.
"""

from __future__ import annotations

import re

from birkhoff.hooks.site_names import from_tool

_TRANSFORMERS = {
    "output": "post_mlp",
    "self_attn.o_proj.input": "attn_z",
    "post_feedforward_layernorm.output": "mlp_out",
}


def site_of(hook_name: object) -> tuple[str, int] | None:
    """(hook, layer) of a tensor's name in another tool; None if it is no site of ours."""
    name = str(hook_name)
    match = re.fullmatch(r"model\.layers\.(\d{1,4})\.(.+)", name, re.ASCII)
    if match is None:
        return from_tool(name, 1, streams=False)
    return (_TRANSFORMERS[match[2]], int(match[1])) if match[2] in _TRANSFORMERS else None
