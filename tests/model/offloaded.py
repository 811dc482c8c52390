"""Models with their experts in a store: the weights of `packed_model`, with any share of them on the device."""

from __future__ import annotations

import torch

from birkhoff.model.transformer import Transformer
from birkhoff.offload.expert_layout import PackedExpertLayout
from birkhoff.offload.expert_store import ExpertStore
from tests.interpreter import DEVICE


def some_resident(layers: int, experts: int, share: float, seed: int = 0) -> torch.Tensor:
    """[layers, experts] bool: a random set of that share."""
    order = torch.randperm(layers * experts, generator=torch.Generator().manual_seed(seed))
    chosen = order[: round(share * layers * experts)]
    return torch.zeros(layers * experts, dtype=torch.bool).index_fill_(0, chosen, True).view(layers, experts)


def offloaded_model(
    source: Transformer, share: float, spare: int = 4, copy_stream=None
) -> tuple[Transformer, ExpertStore]:
    """A copy of a packed model with its experts in a store."""
    with torch.device("meta"):
        model = Transformer(source.config, source.numerics, packed=True, mtp=source.mtp is not None)
    stacks = model.expert_stacks()
    resident = some_resident(len(stacks), source.config.n_routed_experts, share)
    store = ExpertStore(PackedExpertLayout.of(source.config), resident, DEVICE, spare, copy_stream)
    model.use_expert_store(store)
    model = model.allocate(DEVICE).eval()
    with torch.no_grad():
        for target, original in zip(model.destinations(), source.destinations(), strict=True):
            assert target.name == original.name
            target.tensor.copy_(original.tensor)
    store.copy_stream.wait_current_stream()
    return model, store
