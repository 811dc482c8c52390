"""One hooked tensor as an opaque operation: what a compiled or recorded graph of vLLM contains of us.

The operation changes its argument in place, which its schema declares, so that a compiler neither removes nor moves it.
It finds the hooks of its rank where vLLM's own opaque layers are found, in the forward context. While vLLM records a
CUDA graph, what it runs are the fixed operations of `recorded_sites.py`. Code that is not compiled calls the hooks
without it."""

from __future__ import annotations

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available

from birkhoff.hooks.sites import SITES, Site
from birkhoff.vllm.armed_layers import SiteCall
from birkhoff.vllm.rank_requests import RankRequests

CONTEXT = "birkhoff.hooks"  # key of the rank's hooks among the layers of the forward context
_BY_ID = {site.id: site for site in SITES}
_NAME = "birkhoff::site_"


def _run(x: torch.Tensor, layer: int, site: int) -> None:
    """Capture and edit the rows of a site in place."""
    hooked = get_forward_context().no_compile_layers.get(CONTEXT) if is_forward_context_available() else None
    if hooked is not None:
        hooked.edit_in_place(x, layer, _BY_ID[site])


def _fake(x: torch.Tensor, layer: int, site: int) -> None:
    """It returns nothing, whatever the shapes."""


# Not `custom_op`, whose calls take three times as long: a compiled graph makes one at every armed site of every step.
torch.library.define(_NAME, "(Tensor(a!) x, int layer, int site) -> ()")
torch.library.impl(_NAME, "CompositeExplicitAutograd", _run)
torch.library.register_fake(_NAME, _fake)


def in_graph() -> bool:
    """Whether the running forward pass is one that vLLM records or replays as a CUDA graph."""
    return (
        is_forward_context_available()
        and get_forward_context().cudagraph_runtime_mode is not CUDAGraphMode.NONE
    )


def site_call(hooked: RankRequests) -> SiteCall:
    """How armed modules reach the hooks: by the operation where they are compiled."""

    def call(x: torch.Tensor, layer: int, site: Site) -> None:
        if torch.compiler.is_compiling():
            torch.ops.birkhoff.site_(x, layer, site.id)
        else:
            hooked.edit_in_place(x, layer, site)

    return call
