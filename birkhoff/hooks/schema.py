"""The shape and dtype of every hook of one model: the only source for admission, buffers and files.

`build_hook_schema(hidden, dtype, hc_mult, ...)` is called once where requests are checked and once where they run, and
the two results must be equal. A hook that is not in the schema is not tapped and is refused, never captured as empty.
A V4 model (`hc_mult` streams) never has `post_mlp`; an ordinary model has `pre_attn`, `post_attn`, `post_mlp` and,
where its engine can reach them, more (`ordinary_schema`).
Nothing here imports torch, so files can be read and requests checked without it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from birkhoff.config import V4Config
from birkhoff.errors import ConfigError, quoted
from birkhoff.hooks.sites import SITES, Site
from birkhoff.option_checks import check_int

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
VECTOR_OPS = ("add", "clamp", "patch", "project", "sae", "scale")
INDEXED_RATIO = 4  # tokens per entry of layers with an indexer
_AXES = {
    "d": ("hidden",),
    "m": ("stream",),
    "md": ("stream", "hidden"),
    "mm": ("from", "to"),
    "E": ("expert",),
    "k2": ("choice", "id_and_weight"),
    "z": ("head_and_channel",),
    "hc": ("head", "channel"),
    "2+h": ("first_end_and_heads",),
    "2": ("block_and_score",),
    "3": ("block_first_end",),
    "2+c": ("entry_token_and_channels",),
}


@dataclass(frozen=True)
class RaggedRows:
    """What the number of rows of a ragged hook depends on: tokens per entry by layer, the window, and how many entries
    an indexer keeps."""

    ratios: tuple[int, ...]
    window: int
    topk: int

    def total(self, hook: str, layer: int, length: int, tokens: int) -> int:
        """An upper bound of the rows of `tokens` tokens of such a text: not every token completes an entry."""
        if hook == "entry_tokens":
            tokens = min(tokens, length // self.ratios[layer] if self.ratios[layer] else 0)
        return tokens * self.most(hook, layer, length)

    def most(self, hook: str, layer: int, length: int) -> int:
        """An upper bound of the rows of one token of a text of `length` tokens."""
        ratio = self.ratios[layer]
        entries = length // ratio if ratio else 0
        chosen = min(entries, self.topk) if ratio == INDEXED_RATIO else entries
        if hook == "attn_weights":
            return min(self.window, length) + chosen + 1  # and the sink
        if hook == "entry_tokens":
            return min(pooled_tokens(ratio), length)
        return entries if hook == "index_scores" else chosen


def pooled_tokens(ratio: int) -> int:
    """How many tokens an entry holds: entries of four tokens also hold the four before them."""
    return 2 * ratio if ratio == INDEXED_RATIO else ratio


@dataclass(frozen=True)
class HookSchema:
    """One row of a hook: `width == prod(logical_shape)` numbers of `dtype`."""

    width: int
    dtype: str
    logical_shape: tuple[int, ...]
    steerable: bool = True
    once: bool = False  # fires once per model; stored at the last layer
    axes: tuple[str, ...] = ()  # a name for each axis of the row
    hash_routed: tuple[int, ...] = ()  # layers whose experts are chosen by token id and not by this row
    ops: tuple[str, ...] = ()  # edits of a hook that is not steerable
    layers: tuple[int, ...] | None = None  # the layers that have it; None: all
    ragged: RaggedRows | None = None  # any number of rows for a token

    @property
    def edits(self) -> tuple[str, ...]:
        """Names of the operations that can change it: all that take vectors if it is steerable."""
        return VECTOR_OPS if self.steerable else self.ops

    @property
    def replaceable(self) -> bool:
        """Whether its rows can be replaced by others: those of mixers can, though they take no vectors."""
        return self.steerable or "patch" in self.ops

    @property
    def row_bytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "width": self.width,
            "dtype": self.dtype,
            "shape": list(self.logical_shape),
            "axes": list(self.axes),
            "row_bytes": self.row_bytes,
            "steerable": self.steerable,
            "edits": list(self.edits),
            "level": "model" if self.once else "layer",
        }
        if self.hash_routed:
            out["hash_routed_layers"] = list(self.hash_routed)
        if self.layers is not None:
            out["layers"] = list(self.layers)
        if self.ragged is not None:
            out["ragged"] = True
        return out


Schema = Mapping[str, HookSchema]  # by name of the hook


def build_hook_schema(
    hidden: int,
    dtype: str,
    hc_mult: int | None,
    experts: int | None = None,
    experts_per_token: int | None = None,
    num_hash_layers: int = 0,
    heads: int | None = None,
    head_dim: int | None = None,
    attention: RaggedRows | None = None,
) -> dict[str, HookSchema]:
    """V4 with `hc_mult` streams, or an ordinary single-stream model when it is None. Hooks whose sizes are not given
    are absent."""
    for name, value in (
        ("hidden", hidden),
        ("hc_mult", hc_mult),
        ("experts", experts),
        ("experts_per_token", experts_per_token),
        ("heads", heads),
        ("head_dim", head_dim),
    ):
        if value is not None or name == "hidden":
            check_int(name, value, error=ConfigError)
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"dtype is {quoted(dtype)}, expected one of {', '.join(ITEM_BYTES)}.")
    if hc_mult is None:
        return ordinary_schema([site.name for site in SITES if site.plain], dtype, {"d": (hidden,)})
    sizes = {"d": (hidden,), "m": (hc_mult,), "md": (hc_mult, hidden), "mm": (hc_mult, hc_mult)}
    if experts is not None and experts_per_token is not None:
        sizes |= {"E": (experts,), "k2": (experts_per_token, 2)}
    if heads is not None and head_dim is not None:
        sizes["hc"] = (heads, head_dim)
        if attention is not None:
            sizes |= {"2+h": (2 + heads,), "2": (2,), "3": (3,), "2+c": (2 + head_dim,)}
    hashed = tuple(range(num_hash_layers))
    return {
        site.name: replace(
            _row(site, dtype, sizes),
            hash_routed=hashed if site.name.startswith("moe_") else (),
            ops=site.ops,
            layers=_layers_with(site, attention),
            ragged=attention if site.ragged else None,
        )
        for site in SITES
        if not site.absent and site.shape in sizes
    }


def _row(site: Site, dtype: str, sizes: Mapping[str, tuple[int, ...]]) -> HookSchema:
    shape, stored = sizes[site.shape], dtype if site.dtype == "model" else site.dtype
    return HookSchema(math.prod(shape), stored, shape, site.edit, site.once, _AXES[site.shape])


def _layers_with(site: Site, attention: RaggedRows | None) -> tuple[int, ...] | None:
    if site.layers == "all" or attention is None:
        return None
    wanted = (INDEXED_RATIO,) if site.layers == "indexed" else tuple(set(attention.ratios) - {0})
    return tuple(layer for layer, ratio in enumerate(attention.ratios) if ratio in wanted)


def ordinary_schema(
    sites: Collection[str], dtype: str, sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, HookSchema]:
    """The schema of a model without hyper-connections that has these sites; `sizes` by the letters of row shapes."""
    return {site.name: _row(site, dtype, sizes) for site in SITES if site.name in sites}


def schema_of(config: V4Config, dtype: str) -> dict[str, HookSchema]:
    """The schema of a V4 model that computes in `dtype`."""
    return build_hook_schema(
        config.hidden_size,
        dtype,
        config.hc_mult,
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.num_hash_layers,
        config.num_attention_heads,
        config.head_dim,
        RaggedRows(tuple(config.compress_ratios), config.sliding_window, config.index_topk),
    )
