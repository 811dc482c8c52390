"""Foreign tensor names and ours, one table per dialect. Ours are the released checkpoint's names.

A table is a list of rows (ours, theirs), most particular first; `{}` stands for any text. Translation to ours only
succeeds when translating back gives the same foreign name, so every table is a bijection by construction: a foreign
name that no row produces is left untranslated and later reported as unknown, never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = tuple[tuple[str, str], ...]

RELEASED: Table = (("{}", "{}"),)

# What `transformers` writes for DeepseekV4ForCausalLM: our names behind "model.", with a few words of its own.
TRANSFORMERS: Table = (
    ("head.weight", "head.weight"),
    ("embed.weight", "model.embed_tokens.weight"),
    ("hc_head_{}", "model.hc_head.hc_{}"),
    ("layers.{}.attn.kv_norm.weight", "model.layers.{}.attn.norm.weight"),
    ("{}", "model.{}"),
)

# "base-fp8" and "bf16" differ from "released" in number formats, not in names.
DIALECTS: Mapping[str, Table] = {
    "released": RELEASED,
    "base-fp8": RELEASED,
    "bf16": RELEASED,
    "transformers": TRANSFORMERS,
}


def to_theirs(name: str, table: Table) -> str:
    """A dialect's name for one of ours."""
    return _translate(name, table, 0)


def to_ours(name: str, table: Table) -> str | None:
    """Our name for a dialect's, or None when the dialect has no such name."""
    for row in table:
        middle = _match(name, row[1])
        if middle is not None:
            ours = row[0].replace("{}", middle)
            return ours if to_theirs(ours, table) == name else None
    return None


def names_table(names: Mapping[str, object]) -> Table:
    """The table whose dialect these names belong to."""
    return TRANSFORMERS if "model.embed_tokens.weight" in names else RELEASED


def _translate(name: str, table: Table, side: int) -> str:
    for row in table:
        middle = _match(name, row[side])
        if middle is not None:
            return row[1 - side].replace("{}", middle)
    raise AssertionError(
        f"no row of the table covers {name}"
    )  # the last row of every table covers all of ours


def _match(name: str, pattern: str) -> str | None:
    """The text that `{}` stands for ("" in a pattern without one), or None."""
    before, hole, after = pattern.partition("{}")
    if not hole:
        return "" if name == pattern else None
    if len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after):
        return name[len(before) : len(name) - len(after)]
    return None
