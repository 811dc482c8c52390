"""One hooked tensor as an opaque operation: what a compiled or recorded graph of vLLM contains of us.

The operation changes its argument in place, which its schema declares, so that a compiler neither removes nor moves it.
It finds the hooks of its rank where vLLM's own opaque layers are found, in the forward context."""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from birkhoff.hooks.sites import SITES, Site

CONTEXT = "birkhoff.hooks"  # key of the rank's hooks among the layers of the forward context
_BY_ID = {site.id: site for site in SITES}


@torch.library.custom_op("birkhoff::site_", mutates_args={"x"})
def site_(x: torch.Tensor, layer: int, site: int) -> None:
    """Capture and edit the rows of a site in place."""
    hooks = get_forward_context().no_compile_layers.get(CONTEXT) if is_forward_context_available() else None
    if hooks is not None:
        new = hooks.site(layer, _BY_ID[site], x)
        if new is not x:
            x.copy_(new)


@site_.register_fake
def _(x: torch.Tensor, layer: int, site: int) -> None:
    return None


def call_site(x: torch.Tensor, layer: int, site: Site) -> None:
    """Capture and edit the rows of `x` in place."""
    torch.ops.birkhoff.site_(x, layer, site.id)
