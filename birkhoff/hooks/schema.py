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
from dataclasses import dataclass
from typing import Any

from birkhoff.config import V4Config
from birkhoff.errors import ConfigError, quoted
from birkhoff.hooks.sites import SITES
from birkhoff.option_checks import check_int

ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
VECTOR_OPS = ("add", "clamp", "patch", "project", "sae", "scale")
_AXES = {
    "d": ("hidden",),
    "m": ("stream",),
    "md": ("stream", "hidden"),
    "mm": ("from", "to"),
    "E": ("expert",),
    "k2": ("choice", "id_and_weight"),
    "z": ("head_and_channel",),
}


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

    @property
    def edits(self) -> tuple[str, ...]:
        """Names of the operations that can change it: all that take vectors if it is steerable."""
        return VECTOR_OPS if self.steerable else self.ops

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
        return out


def build_hook_schema(
    hidden: int,
    dtype: str,
    hc_mult: int | None,
    experts: int | None = None,
    experts_per_token: int | None = None,
    num_hash_layers: int = 0,
) -> dict[str, HookSchema]:
    """V4 with `hc_mult` streams, or an ordinary single-stream model when it is None."""
    for name, value in (
        ("hidden", hidden),
        ("hc_mult", hc_mult),
        ("experts", experts),
        ("experts_per_token", experts_per_token),
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
    schema = {}
    for site in SITES:
        if not site.absent and site.shape in sizes:
            shape = sizes[site.shape]
            stored = dtype if site.dtype == "model" else site.dtype
            hashed = tuple(range(num_hash_layers)) if site.name.startswith("moe_") else ()
            axes = _AXES[site.shape]
            schema[site.name] = HookSchema(
                math.prod(shape), stored, shape, site.edit, site.once, axes, hashed, site.ops
            )
    return schema


def ordinary_schema(
    sites: Collection[str], dtype: str, sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, HookSchema]:
    """The schema of a model without hyper-connections that has these sites; `sizes` by the letters of row shapes."""
    return {
        site.name: HookSchema(
            math.prod(sizes[site.shape]),
            dtype if site.dtype == "model" else site.dtype,
            sizes[site.shape],
            site.edit,
            site.once,
            _AXES[site.shape],
        )
        for site in SITES
        if site.name in sites
    }


def schema_of(config: V4Config, dtype: str) -> dict[str, HookSchema]:
    """The schema of a V4 model that computes in `dtype`."""
    return build_hook_schema(
        config.hidden_size,
        dtype,
        config.hc_mult,
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.num_hash_layers,
    )
