"""vLLM's own decoder, and beside it a copy with armed modules for the steps that capture or edit.

Both have the same weights and, where no site is, the same modules. Whichever runs is decided once for a step, so a step
that no request captures or edits runs the very objects, and the compiled code, that vLLM runs without hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


def shallow_copy(module: nn.Module) -> Any:
    """The module again, with the same parameters, hooks and children; its children can be replaced."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made


class SwitchedModel(nn.Module):
    """Runs `own` in a step for which `idle` is true, otherwise `armed`. With `warm`, both run in the first call, vLLM's
    profiling run, in which decoders are compiled and memory is measured."""

    def __init__(self, own: nn.Module, armed: nn.Module, idle: Callable[[], bool], warm: bool = False):
        super().__init__()
        self.own = own
        self.armed = armed
        self._both = (own, armed)  # found faster than children
        self._idle = idle
        self._warm = warm

    def forward(self, *given: Any, **named: Any) -> Any:
        own, armed = self._both
        if self._warm:
            self._warm = False
            armed(*given, **named)
        return (own if self._idle() else armed)(*given, **named)

    __call__ = forward  # without the hooks of modules, which `own` and `armed` have: every step passes here

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("own"), name)


def arm_model(
    model: Any,
    arm: Callable[[Any], None],
    idle: Callable[[], bool],
    compile_copy: Callable[[Any], bool] = lambda copied: False,
) -> None:
    """Put a switch in the place of a model's decoder. `arm` replaces modules of the copy; `compile_copy` has it
    compiled by itself and says whether it did."""
    own = model.model
    armed = shallow_copy(own)
    armed.layers = nn.ModuleList(own.layers)
    arm(armed)
    model.model = SwitchedModel(own, armed, idle, compile_copy(armed))
