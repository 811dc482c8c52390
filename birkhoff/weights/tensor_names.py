"""Translate tensor names between dialects and the released checkpoint, with one table per dialect.

A table is a list of (released, dialect) patterns, most specific first; `{}` matches any text. Translation to released
names succeeds only if translating back gives the same dialect name, so every table is a bijection: a dialect name that
no row produces stays untranslated and is later reported as unexpected.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = tuple[tuple[str, str], ...]

RELEASED: Table = (("{}", "{}"),)

# `save_pretrained` of DeepseekV4ForCausalLM: released names prefixed with "model.", with a few exceptions.
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
    """Return a dialect's name for a released name."""
    return _translate(name, table, 0)


def to_ours(name: str, table: Table) -> str | None:
    """Return the released name for a dialect's name, or None if the dialect has no such name."""
    for row in table:
        middle = _match(name, row[1])
        if middle is not None:
            ours = row[0].replace("{}", middle)
            return ours if to_theirs(ours, table) == name else None
    return None


def names_table(names: Mapping[str, object]) -> Table:
    """Return the table of the dialect that these names belong to."""
    return TRANSFORMERS if "model.embed_tokens.weight" in names else RELEASED


def _translate(name: str, table: Table, side: int) -> str:
    for row in table:
        middle = _match(name, row[side])
        if middle is not None:
            return row[1 - side].replace("{}", middle)
    raise AssertionError(f"no row of the table matches {name}")  # the last row matches every released name


def _match(name: str, pattern: str) -> str | None:
    """Return the text matched by `{}` ("" in a pattern without one), or None if there is no match."""
    before, wildcard, after = pattern.partition("{}")
    if not wildcard:
        return "" if name == pattern else None
    if len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after):
        return name[len(before) : len(name) - len(after)]
    return None
