"""Initialise a run: random matrices, staggered hyper-connections, balanced hash tables.

mHC starts with four copies of one stream, which equal gates would preserve. So sub-layer i reads mostly stream i mod 4
and writes slightly more to it, and mixing starts near the identity. `scale` bounds how far the input moves a gate from
its start. A hash table gives each token id `k` distinct experts, and each expert the same number of ids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from birkhoff.config import V4Config
from training.parameters import Store

MIX_DIAGONAL = 3.0
READ_BASE = (1.5, -1.5)  # the sub-layer's own stream, the others
WRITE_BASE = (1.0, -0.5)


def initialise(
    store: Store, seed: int, spread: float = 0.02, mhc_scale: float = 0.5, stagger: bool = True
) -> None:
    """Fill masters and tables; a seed gives the same weights on any device."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    config = store.config
    for parameter in store.parameters:
        name, shape = parameter.name, parameter.shape
        if name.endswith(("norm.weight", "enorm.weight", "hnorm.weight")):
            value = torch.ones(shape)
        elif "hc_" in name:
            value = _mhc(name, shape, config, draw, mhc_scale, stagger)
        elif name.endswith(("attn_sink", ".ape")):
            value = torch.zeros(shape)
        else:
            value = torch.randn(shape, generator=draw) * spread
        tensors[name] = value
    tensors |= {name: torch.zeros_like(bias) for name, bias in store.biases.items()}
    tensors |= {name: hash_table(config, draw) for name in store.tables}
    store.load(tensors)


def _mhc(
    name: str, shape: tuple[int, ...], config: V4Config, draw: torch.Generator, scale: float, stagger: bool
) -> Tensor:
    count = config.hc_mult
    if name.endswith("_scale"):
        return torch.full(shape, scale)
    if name.endswith("_fn"):
        return torch.randn(shape, generator=draw) * (count * config.hidden_size) ** -0.5
    if name.endswith("hc_head_base"):
        return torch.zeros(shape)
    favoured = _sub_layer(name, config) % count
    is_favoured = torch.arange(count) == favoured
    read = torch.where(is_favoured, *READ_BASE) if stagger else torch.zeros(count)
    write = torch.where(is_favoured, *WRITE_BASE) if stagger else torch.zeros(count)
    mixing = torch.eye(count) * MIX_DIAGONAL
    return torch.cat((read, write, mixing.flatten()))


def _sub_layer(name: str, config: V4Config) -> int:
    """Index sub-layers through the model, attention before experts; the MTP layer follows the trunk."""
    layer = config.num_hidden_layers if name.startswith("mtp.") else int(name.split(".")[1])
    return 2 * layer + ("hc_ffn" in name)


def hash_table(config: V4Config, draw: torch.Generator) -> Tensor:
    """Return [vocab, k] distinct experts per id, with every expert equally frequent."""
    experts = config.n_routed_experts
    count = config.num_experts_per_tok
    tables = []
    for _ in range(math.ceil(config.vocab_size / experts)):
        # Each group of `experts` ids uses one shuffled ring and one set of offsets: balanced in every column.
        start = torch.randperm(experts, generator=draw)
        steps = torch.cat(
            (torch.zeros(1, dtype=torch.long), torch.randperm(experts - 1, generator=draw)[: count - 1] + 1)
        )
        tables.append((start[:, None] + steps) % experts)
    return torch.cat(tables)[: config.vocab_size]
