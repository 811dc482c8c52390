"""`Call`: a Python function as an edit of `logits`, `trace` and a local `generate`.

    Call(lambda rows: rows * 0, "mlp_out", [4])
    Call(lambda rows, site: rows + table[list(site.positions)], "mhc_streams_pre_attn", "all", where="all_prompt")

The function gets the rows of the request's selected tokens, `[r, *row_shape]`, and where they are (`CallSite`: hook,
layer, positions). It returns rows of the same shape, or None to change nothing. Functions are no data: they are not
part of any request over HTTP, have no hash, and the prefix cache keeps nothing that was computed with one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from birkhoff.errors import SteeringError, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.call_use import CallSite, CallUse
from birkhoff.hooks.plan import Key
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.schema import Schema
from birkhoff.steering.request_edit import bound, parse_fields
from birkhoff.steering.vector_edits import PATHS


@dataclass(frozen=True)
class Call:
    """`fn(rows)` or `fn(rows, site)`; the other fields select tokens and streams as those of `Add` do.

    `layers` may be left out where the hook says its layer itself: `Call(fn, "blocks.3.mlp.hook_out")`."""

    fn: Callable[..., Any]
    hook: str
    layers: Any = None
    where: Any = None
    phase: str = "both"
    path: str = "both"

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise SteeringError(
                f"fn is {quoted(self.fn)}, expected a function of rows: Call(fn, hook, layers)."
            )
        _with_site(self.fn)  # refuses functions that cannot be called with rows
        if not isinstance(self.hook, str):
            raise SteeringError(f"hook is {quoted(self.hook)}, expected the name of a hook.")
        parse_fields(self, path=PATHS)

    def resolve(
        self, schema: Schema, num_layers: int, prompt: Sequence[int] | None, max_tokens: int
    ) -> ResolvedEdit:
        """Resolve against one model and one prompt. All errors of the edit are raised here."""
        why = site_names.refusal(self.hook, schema)
        if why is not None:
            raise SteeringError(why)
        if self.path != "both" and "mhc_streams_final" not in schema:
            raise SteeringError(
                f"path is {quoted(self.path)}, but edits of this model act on what is read and on what is carried. "
                "Leave path out."
            )
        fn = _with_site(self.fn)
        sites: dict[Key, CallUse] = {}
        for hook, at in site_names.select(self.hook, self.layers, schema, num_layers).values():
            if not schema[hook].replaceable:
                others = ", ".join(sorted(name for name, row in schema.items() if row.replaceable))
                raise SteeringError(
                    f"{hook} is capture-only: it can be read, not changed by a function. Others can: {others}."
                )
            path: Any = self.path if hook.startswith("mhc_streams") else "both"
            sites[hook, at] = CallUse(fn, CallSite(hook, at), path)
        report = {"functions": ", ".join(f"{hook}[{layer}]" for hook, layer in sites)}
        return ResolvedEdit(sites, bound(self.where, prompt, max_tokens), self.phase, report=report)


def split_calls(steer: Any) -> tuple[Any, list[Call]]:
    """Split edits into those that are data, in the form given, and functions."""
    if isinstance(steer, Call):
        return None, [steer]
    if not isinstance(steer, (list, tuple)) or not any(isinstance(edit, Call) for edit in steer):
        return steer, []
    return [edit for edit in steer if not isinstance(edit, Call)], [
        edit for edit in steer if isinstance(edit, Call)
    ]


def _with_site(fn: Callable[..., Any]) -> Callable[[torch.Tensor, CallSite], Any]:
    """The function with two arguments: one that requires a second argument, or has one called `site`, gets the site."""
    try:
        signature = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):  # builtins of PyTorch have none
        return lambda rows, site: fn(rows)
    parameters = list(signature.parameters.values())
    required = [
        parameter
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if "site" in signature.parameters and len(required) <= 2:
        return lambda rows, site: fn(rows, site=site)
    if len(required) == 2:
        return fn
    if len(required) > 2 or not parameters:
        raise SteeringError(f"fn takes {signature}, expected a function of (rows) or of (rows, site).")
    return lambda rows, site: fn(rows)
