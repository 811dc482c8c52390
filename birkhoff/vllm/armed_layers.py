"""Armed modules of ordinary models: vLLM's own modules, wrapped where a site is, and untouched where none is.

A layer of vLLM is called with the output of the last sublayer and the residual, whose sum is the residual stream. An
armed layer that has a site on its input adds them first and is then called as the first layer is, with one tensor. The
output of an armed layer is the sum and a residual of zeros. Both are the arithmetic of vLLM in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from birkhoff.hooks.sites import ATTN_OUT, FINAL_HIDDEN, MLP_IN, MLP_OUT, POST_ATTN, POST_MLP, PRE_ATTN, Site
from birkhoff.vllm.armed_sites import ARCHITECTURES
from birkhoff.vllm.switched_model import shallow_copy

# How armed modules reach the hooks of their rank: captures and edits the rows of a site in place.
SiteCall = Callable[[torch.Tensor, int, Site], None]


class ArmedLayer(nn.Module):
    """A decoder layer with sites on the residual that enters or leaves it."""

    def __init__(self, layer: nn.Module, number: int, before: bool, after: bool, call: SiteCall):
        super().__init__()
        self.layer = layer
        self._number = number
        self._before = before
        self._after = after
        self._call = call

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._before:
            # A new tensor: the caller may keep the old one.
            hidden_states = hidden_states.clone() if residual is None else hidden_states + residual
            residual = None
            self._call(hidden_states, self._number, PRE_ATTN)
        hidden_states, residual = self.layer(positions, hidden_states, residual, **more)
        if self._after:
            hidden_states = hidden_states + residual
            self._call(hidden_states, self._number, POST_MLP)
            residual = torch.zeros_like(hidden_states)
        return hidden_states, residual


class ArmedModule(nn.Module):
    """A module of a layer with one site."""

    def __init__(self, module: nn.Module, number: int, site: Site, call: SiteCall):
        super().__init__()
        self.module = module
        self._number = number
        self._site = site
        self._call = call


class ArmedNorm(ArmedModule):
    """A norm that adds its input to the residual: the site is the sum."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        self._call(total, self._number, self._site)
        return self.module(total), total


class ArmedInput(ArmedModule):
    """A module whose first argument is a site."""

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        x = x.clone()
        self._call(x, self._number, self._site)
        return self.module(x, *more, **named)


class ArmedOutput(ArmedModule):
    """A module whose output is a site."""

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = self.module(*given, **named).clone()
        self._call(out, self._number, self._site)
        return out


def arm_ordinary(inner: Any, architecture: str, armed: Mapping[str, Sequence[int]], call: SiteCall) -> None:
    """Replace the layers of a decoder that have armed sites on this rank. The layers themselves are not changed."""
    numbers = range(inner.start_layer, inner.end_layer)
    names = ARCHITECTURES[architecture]

    def has(site: Site, number: int) -> bool:
        return number in armed.get(site.name, ())

    wrapped = (
        (names.attn_out, ATTN_OUT, ArmedOutput),
        (names.adding_norm, POST_ATTN, ArmedNorm),
        (names.mlp, MLP_IN, ArmedInput),
        (names.mlp_out, MLP_OUT, ArmedOutput),
    )
    for number in numbers:
        if not any(has(site, number) for site in (PRE_ATTN, ATTN_OUT, POST_ATTN, MLP_IN, MLP_OUT, POST_MLP)):
            continue
        layer = shallow_copy(inner.layers[number])
        for name, site, kind in wrapped:
            if has(site, number):
                setattr(layer, name, kind(getattr(layer, name), number, site, call))
        before, after = has(PRE_ATTN, number), has(POST_MLP, number)
        if before or after:
            layer = ArmedLayer(layer, number, before, after, call)
        inner.layers[number] = layer
    last = len(inner.layers) - 1
    if has(FINAL_HIDDEN, last) and last in numbers:
        inner.norm = ArmedNorm(inner.norm, last, FINAL_HIDDEN, call)
