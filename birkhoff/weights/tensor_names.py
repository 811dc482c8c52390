"""Translate tensor names between the released checkpoint and `save_pretrained` of transformers.

The table lists (released, transformers) patterns, most specific first; `{}` matches any text. Translation to released
names succeeds only if translating back gives the same name, so the table is a bijection: a name that no row produces
stays untranslated and is later reported as unexpected.
"""

from __future__ import annotations

# Released names of DeepseekV4ForCausalLM prefixed with "model.", with a few exceptions.
_TABLE = (
    ("head.weight", "head.weight"),
    ("embed.weight", "model.embed_tokens.weight"),
    ("hc_head_{}", "model.hc_head.hc_{}"),
    ("layers.{}.attn.kv_norm.weight", "model.layers.{}.attn.norm.weight"),
    ("{}", "model.{}"),
)


def to_transformers(name: str) -> str:
    """Return the transformers name of a released name."""
    for released, transformers in _TABLE:
        text = _match(name, released)
        if text is not None:
            return transformers.replace("{}", text)
    raise AssertionError(f"no row of the table matches {name}")  # the last row matches every released name


def from_transformers(name: str) -> str | None:
    """Return the released name of a transformers name, or None if transformers has no such name."""
    for released, transformers in _TABLE:
        text = _match(name, transformers)
        if text is not None:
            ours = released.replace("{}", text)
            return ours if to_transformers(ours) == name else None
    return None


def _match(name: str, pattern: str) -> str | None:
    """Return the text matched by `{}` ("" in a pattern without one), or None if there is no match."""
    before, wildcard, after = pattern.partition("{}")
    if not wildcard:
        return "" if name == pattern else None
    if len(name) >= len(before) + len(after) and name.startswith(before) and name.endswith(after):
        return name[len(before) : len(name) - len(after)]
    return None
