"""Writes the page of hooks, `docs/sites.md`, from the tables themselves: `python -m birkhoff.hooks.site_docs`.

The page cannot say anything the code does not: rows come from `sites.py`, aliases and other tools' names from
`names.py`, and sizes from the schema of V4-Flash. A test compares the page in the repository with what is printed here.
"""

from __future__ import annotations

from birkhoff.config import V4Config
from birkhoff.hooks.schema import schema_of
from birkhoff.hooks.site_names import POST_BLOCK, STREAMS_POST_MLP, TOOLS, unnamed
from birkhoff.hooks.sites import SITES, Site

_SHAPES = {"d": "`(d,)`", "m": "`(m,)`", "md": "`(m, d)`", "mm": "`(m, m)`", "E": "`(E,)`", "k2": "`(k, 2)`"}


def document() -> str:
    """The whole page, as Markdown."""
    flash = V4Config()
    parts = [_opening(flash), _table(flash), _rules(flash), _aliases(), _tools()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _opening(flash: V4Config) -> str:
    sizes = (
        f"`d` = {flash.hidden_size}, `m` = {flash.hc_mult}, `E` = {flash.n_routed_experts}, "
        f"`k` = {flash.num_experts_per_tok}, {flash.num_hidden_layers} layers"
    )
    return f"""# Hooks

Every place where a model can be looked at or changed. One name serves both: the tensor captured under a name is the
tensor edited under that name. This page is written by `python -m birkhoff.hooks.site_docs`; edit the tables in
`birkhoff/hooks/sites.py` and `names.py`, not the page.

Letters: `d` hidden size, `m` residual streams, `E` routed experts, `k` experts per token. A row is what one token has
at one layer. Bytes are those of V4-Flash in bfloat16 ({sizes}).
Ids never change; new hooks append."""


def _table(flash: V4Config) -> str:
    schema = schema_of(flash, "bfloat16")
    lines = ["| id | name | row | stored as | bytes | edit | fires | what it is |", "|" + " --- |" * 8]
    for site in SITES:
        size = f"{schema[site.name].row_bytes:,}" if site.name in schema else "–"
        stored = "the model's dtype" if site.dtype == "model" else site.dtype
        lines.append(
            f"| {site.id} | `{site.name}` | {_SHAPES[site.shape]} | {stored} | {size} | {'yes' if site.edit else 'no'} "
            f"| {_fires(site)} | {site.doc} |"
        )
    return "\n".join(lines)


def _fires(site: Site) -> str:
    if site.absent:
        return "ordinary models only"
    if site.once:
        return "once, at the last layer"
    return "every layer, choice by token id in the first" if site.name.startswith("moe_") else "every layer"


def _rules(flash: V4Config) -> str:
    schema = schema_of(flash, "bfloat16")
    once = ", ".join(f"`{site.name}`" for site in SITES if site.once)
    plain = ", ".join(f"`{site.name}`" for site in SITES if site.plain)
    moe = ", ".join(f"`{name}`" for name in schema if schema[name].hash_routed)
    per_token = sum(row.row_bytes * (1 if row.once else flash.num_hidden_layers) for row in schema.values())
    return f"""## Rules

- Layers count from 0 through the whole model; `-1` is the last.
- {once} fire once per model: whatever layers are asked for, they are stored at the last layer.
- Hooks with a `float32` row are mixing weights and routing: they can be captured, not edited.
- `mhc_attn_res_mix` and `mhc_ffn_res_mix` are indexed `[from, to]`: stream `j` after the sublayer is
  `post_mix[j] * output + sum over i of res_mix[i, j] * stream[i]`.
- A model without hyper-connections has exactly {plain}.
- Hash-routed layers: the first {flash.num_hash_layers} layers of V4-Flash choose experts by token id. {moe} exist
  there as everywhere, and the gate still gives the weights, but its largest scores are not the experts that ran. The
  schema lists these layers as `hash_routed`.
- Everything at every layer is {per_token / 2**20:.1f} MiB a token of V4-Flash: choose layers and positions, or reduce.
"""


def _aliases() -> str:
    return f"""## Aliases

| alias | stands for |
| --- | --- |
| `{POST_BLOCK}` | `post_mlp`, on ordinary models. A V4 model has neither and names what to use instead |
| `{STREAMS_POST_MLP}` | the streams leaving layer `l`: `mhc_streams_pre_attn` of `l + 1`, or `mhc_streams_final` |"""


def _tools() -> str:
    header = "| hook | " + " | ".join(TOOLS) + " |"
    lines = [header, "|" + " --- |" * (1 + len(TOOLS))]
    for hook in dict.fromkeys(hook for table in TOOLS.values() for hook in table):
        cells = [f"`{table[hook].format('i')}`" if hook in table else "–" for table in TOOLS.values()]
        lines.append(f"| `{hook}` | " + " | ".join(cells) + " |")
    missing = "\n".join(
        f"- Without a name in `{tool}`: {', '.join(f'`{name}`' for name in unnamed(tool))}." for tool in TOOLS
    )
    return f"""## Names in other tools

`i` is the layer. For `transformers`, `:input` is a module's first argument and `:output[n]` a part of what it returns;
`moe_topk` is parts 2 and 1 of `mlp.gate`, stacked. Some early ports of V4 store the mixer as `[to, from]`: rows and
columns both sum to about one, so only rebuilding the streams tells the two apart.

{chr(10).join(lines)}

{missing}"""


if __name__ == "__main__":
    print(document(), end="")
