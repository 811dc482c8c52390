"""The shape and dtype of every hook of one model: the only source of truth for admission, buffers and files.

`build_hook_schema(hidden, dtype, hc_mult, ...)` is built once where requests are checked and once where they are run,
and the two must compare equal. A hook that is not in the schema is not tapped and is refused, never captured as empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from birkhoff.hooks.sites import SITES


@dataclass(frozen=True)
class HookSchema:
    """One row of a hook: `width == prod(logical_shape)` numbers of `dtype`."""

    width: int
    dtype: str
    logical_shape: tuple[int, ...]
    steerable: bool = True
    once: bool = False  # fires once per model; stored at the last layer


def build_hook_schema(
    hidden: int, dtype: str, hc_mult: int | None, experts: int | None = None, experts_per_token: int | None = None
) -> dict[str, HookSchema]:
    """V4 with `hc_mult` streams, or an ordinary single-stream model when it is None."""
    if hc_mult is None:
        return {site.name: HookSchema(hidden, dtype, (hidden,)) for site in SITES if site.plain}
    sizes = {"d": (hidden,), "m": (hc_mult,), "md": (hc_mult, hidden), "mm": (hc_mult, hc_mult)}
    if experts is not None and experts_per_token is not None:
        sizes |= {"E": (experts,), "k2": (experts_per_token, 2)}
    schema = {}
    for site in SITES:
        if not site.absent and site.shape in sizes:
            shape = sizes[site.shape]
            stored = dtype if site.dtype == "model" else site.dtype
            schema[site.name] = HookSchema(math.prod(shape), stored, shape, site.edit, site.once)
    return schema
