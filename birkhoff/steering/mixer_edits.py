"""Edits of mixers: which streams a sublayer reads (`mhc_*_pre_mix`), which it writes (`mhc_*_post_mix`), how streams
are mixed while it runs (`mhc_*_res_mix`, `[from, to]`), and how the head reads them (`mhc_head_mix`).

    Patch("identity", "mhc_res_mix", "all")                           freeze mixing: every stream stays itself
    Patch("identity", "mhc_res_mix", {"ranges": [[6, -1]]}, streams=[2])    cut stream 2 off from layer 6 on
    Patch({"permutation": [1, 0, 2, 3]}, "mhc_attn_res_mix", [4])     swap streams 0 and 1

`streams` selects entries: those of the streams, and in a mixer [from, to] all entries from or to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks.edit import doubly_stochastic
from birkhoff.hooks.schema import HookSchema
from birkhoff.option_checks import as_int

WORDS = ("identity", "uniform")
EXACT_ITERS = 1000  # of Sinkhorn for a constant mixer, in float64


def is_mixer(hook: str) -> bool:
    return hook.startswith("mhc_") and hook.endswith("_mix")


@dataclass(frozen=True)
class MixerMatrix:
    """A constant mixer by its name: `identity`, `uniform` (every entry 1 / m), or a permutation: stream `i` becomes
    stream `permutation[i]`."""

    name: str
    permutation: tuple[int, ...] = ()

    @classmethod
    def parse(cls, value: Any) -> MixerMatrix | None:
        """The matrix that a word or `{"permutation": [...]}` names; None if the value is neither."""
        if isinstance(value, MixerMatrix):
            return value
        if isinstance(value, str):
            return cls(value) if value in WORDS else None
        if not isinstance(value, Mapping) or "permutation" not in value:
            return None
        order = value["permutation"]
        if (
            len(value) > 1
            or isinstance(order, str)
            or not isinstance(order, Sequence)
            or any(as_int(stream) is None for stream in order)
            or sorted(order) != list(range(len(order)))
        ):
            raise SteeringError(
                f"the source is {quoted(value)}, expected {{'permutation': [...]}} with every stream from 0 once."
            )
        return cls("permutation", tuple(order))

    def to_json(self) -> Any:
        return {"permutation": list(self.permutation)} if self.permutation else self.name

    def tensor(self, hook: str, row: HookSchema) -> torch.Tensor:
        """The matrix for a hook, flat."""
        m = row.logical_shape[0]
        if not is_mixer(hook):
            raise SteeringError(f"{self.name} is a mixer, and {hook} is none. Patch it with a vector.")
        if self.name == "uniform":
            return torch.full((row.width,), 1 / m)
        if len(row.logical_shape) == 1:
            raise SteeringError(
                f"{self.name} is a matrix, and {hook} has one weight for each of {m} streams. Give {m} numbers, or use "
                "it at mhc_res_mix."
            )
        if self.name == "identity":
            return torch.eye(m).flatten()
        if len(self.permutation) != m:
            raise SteeringError(
                f"the permutation has {len(self.permutation)} streams, this model has {m}: {list(range(m))}."
            )
        return torch.eye(m)[list(self.permutation)].flatten()


def mixer_entries(streams: Any, row: HookSchema) -> tuple[int, ...] | None:
    """The entries of a mixer's row that `streams` selects; None for all."""
    m = row.logical_shape[0]
    if streams is None or streams == "all":
        return None
    if streams == "post_mix":
        raise SteeringError(
            "streams='post_mix' adds to streams by weight, and a mixer is weights. Name streams."
        )
    if streams[-1] >= m:
        raise SteeringError(f"streams is {list(streams)}, this model has streams 0..{m - 1}.")
    if len(row.logical_shape) == 1:
        return tuple(streams)
    return tuple(i * m + j for i in range(m) for j in range(m) if i in streams or j in streams)


def renormalised(matrix: torch.Tensor, row: HookSchema) -> torch.Tensor:
    """A constant mixer [..., m * m] made doubly stochastic."""
    square = matrix.double().unflatten(-1, row.logical_shape)
    return doubly_stochastic(square, EXACT_ITERS).flatten(-2).float()
