"""Armed modules of ordinary models: vLLM's own modules, wrapped where a site is, and untouched where none is.

A layer of vLLM is called with the output of the last sublayer and the residual, whose sum is the residual stream. An
armed layer that has a site on its input adds them first and is then called as the first layer is, with one tensor. The
output of an armed layer is the sum and a residual of zeros. Both are the arithmetic of vLLM in another order. In a step
in which nothing is captured or edited (`SiteCalls.idle`) the wrapped module is called as if it were not wrapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from birkhoff.hooks.sites import ATTN_OUT, FINAL_HIDDEN, MLP_IN, MLP_OUT, POST_ATTN, POST_MLP, PRE_ATTN, Site
from birkhoff.vllm.armed_sites import ARCHITECTURES


class SiteCalls(Protocol):
    """How armed modules reach the hooks of their rank."""

    def idle(self) -> bool:
        """Whether no site of the running step captures or edits. Not asked while a compiler traces: what it traces has
        every site. False while a graph is recorded."""
        ...

    def __call__(self, x: torch.Tensor, layer: int, site: Site) -> None:
        """Capture and edit the rows of a site in place."""
        ...


def _idle(call: SiteCalls) -> bool:
    return not torch.compiler.is_compiling() and call.idle()


class ArmedLayer(nn.Module):
    """A decoder layer with sites on the residual that enters or leaves it."""

    def __init__(self, layer: nn.Module, number: int, before: bool, after: bool, call: SiteCalls):
        super().__init__()
        self.layer = layer
        self._number = number
        self._before = before
        self._after = after
        self._call = call

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _idle(self._call):
            untouched: tuple[torch.Tensor, torch.Tensor] = self.layer(
                positions, hidden_states, residual, **more
            )
            return untouched
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


class ArmedNorm(nn.Module):
    """A norm that adds its input to the residual: the site is the sum."""

    def __init__(self, norm: nn.Module, number: int, site: Site, call: SiteCalls):
        super().__init__()
        self.norm = norm
        self._number = number
        self._site = site
        self._call = call

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if _idle(self._call):
            untouched: tuple[torch.Tensor, torch.Tensor] = self.norm(x, residual)
            return untouched
        total = x + residual
        self._call(total, self._number, self._site)
        return self.norm(total), total


class ArmedInput(nn.Module):
    """A module whose first argument is a site."""

    def __init__(self, module: nn.Module, number: int, site: Site, call: SiteCalls):
        super().__init__()
        self.module = module
        self._number = number
        self._site = site
        self._call = call

    def forward(self, x: torch.Tensor, *more: Any, **named: Any) -> Any:
        if not _idle(self._call):
            x = x.clone()
            self._call(x, self._number, self._site)
        return self.module(x, *more, **named)


class ArmedOutput(nn.Module):
    """A module whose output is a site."""

    def __init__(self, module: nn.Module, number: int, site: Site, call: SiteCalls):
        super().__init__()
        self.module = module
        self._number = number
        self._site = site
        self._call = call

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = self.module(*given, **named)
        if not _idle(self._call):
            out = out.clone()
            self._call(out, self._number, self._site)
        return out


def arm_ordinary(model: Any, architecture: str, armed: Mapping[str, Sequence[int]], call: SiteCalls) -> None:
    """Wrap the modules of this rank's layers that have armed sites."""
    inner = model.model
    numbers = range(inner.start_layer, inner.end_layer)
    names = ARCHITECTURES[architecture]

    def has(site: Site, number: int) -> bool:
        return number in armed.get(site.name, ())

    for number in numbers:
        layer = inner.layers[number]
        if has(ATTN_OUT, number):
            setattr(
                layer, names.attn_out, ArmedOutput(getattr(layer, names.attn_out), number, ATTN_OUT, call)
            )
        if has(POST_ATTN, number):
            norm = ArmedNorm(getattr(layer, names.adding_norm), number, POST_ATTN, call)
            setattr(layer, names.adding_norm, norm)
        if has(MLP_IN, number):
            setattr(layer, names.mlp, ArmedInput(getattr(layer, names.mlp), number, MLP_IN, call))
        if has(MLP_OUT, number):
            setattr(layer, names.mlp_out, ArmedOutput(getattr(layer, names.mlp_out), number, MLP_OUT, call))
        before, after = has(PRE_ATTN, number), has(POST_MLP, number)
        if before or after:
            inner.layers[number] = ArmedLayer(layer, number, before, after, call)
    last = len(inner.layers) - 1
    if has(FINAL_HIDDEN, last) and last in numbers:
        inner.norm = ArmedNorm(inner.norm, last, FINAL_HIDDEN, call)
