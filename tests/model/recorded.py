"""One recorded run of the model: inputs and outputs of each module, every site, and the state.

The tests of the numerics compare these values with `float64.py`, stage by stage. Nothing in the model is replaced:
modules are observed with hooks, sites with a tap, keys and entries are read from the state, and index queries, which
are not visible elsewhere, through the `Numerics` of the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from birkhoff.config import V4Config
from birkhoff.hooks.tap import EagerTap
from birkhoff.model.batch import Batch, Group, SequenceChunk
from birkhoff.model.linear import Numerics
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer
from tests.model.float64 import Attention, Float64, bf16, exact
from tests.models import fill_random, random_tokens, variant, weights_of

# Wide enough for several groups of 128, 64 and 32 channels with a short one at the end.
WIDE = variant(
    hidden_size=160,
    q_lora_rank=144,
    head_dim=96,
    qk_rope_head_dim=16,
    index_head_dim=64,
    moe_intermediate_size=192,
    o_lora_rank=72,
    compress_ratios=(0, 4, 128, 4),
    num_hash_layers=1,
)
LENGTH = 270


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


class Recording(Numerics):
    """Records the index queries, which are not visible elsewhere."""

    queries: list[torch.Tensor]

    def round_index(self, x):
        rounded = super().round_index(x)
        if x.dim() == 4:  # [B, T, h, c]; the keys are [B, E, c]
            self.queries.append(rounded[0])
        return rounded


@dataclass
class Run:
    """One recorded run: inputs and outputs of every module, the state, and the float64 model."""

    model: Transformer
    config: V4Config
    tokens: torch.Tensor
    modules: dict[str, tuple[np.ndarray, np.ndarray]]
    sites: dict[tuple[str, int], np.ndarray]
    state: State
    group: Group
    queries: dict[int, np.ndarray]
    logits: np.ndarray
    reference: Float64
    single: bool  # computed in float32

    def stored(self, layer: int, kind: str) -> np.ndarray:
        ratio = self.config.compress_ratios[layer]
        return array(self.state.at(layer).entries(kind, self.group, LENGTH // ratio)[0])

    def keys(self, layer: int) -> np.ndarray:
        return array(self.state.at(layer).keys.rows[0][:LENGTH])

    def attention(self, layer: int) -> Attention:
        return Attention(self.reference, f"layers.{layer}.attn", layer, self.config.compress_ratios[layer])


def record(config, dtype) -> Run:
    numerics = Recording(dtype, released=True)
    object.__setattr__(numerics, "queries", [])
    model = Transformer(config, numerics).eval()
    fill_random(model, 11)
    modules, sites = {}, {}
    for name, module in model.named_modules():

        def hook(module, args, out, name=name):
            if torch.is_tensor(out):
                modules[name] = array(args[0]), array(out)

        module.register_forward_hook(hook)
    tokens = random_tokens(config, LENGTH, 11)
    state = State.contiguous(config, 1, LENGTH, lookback=LENGTH, dtype=dtype)  # the ring keeps every row
    batch = Batch.of([SequenceChunk(0, 0, tokens)])
    with torch.no_grad():
        hidden, _ = model.run(batch, state, EagerTap(lambda s, i, x: sites.update({(s.name, i): array(x)})))
        logits = model.logits(hidden)
    csa = [i for i, ratio in enumerate(config.compress_ratios) if ratio == 4]
    queries = {i: array(q) for i, q in zip(csa, numerics.queries, strict=True)}
    weights = {name: array(tensor) for name, tensor in weights_of(model).items()}
    single = dtype == torch.float32
    reference = Float64(config.to_dict(), weights, released=True, cast=exact if single else bf16)
    return Run(
        model,
        config,
        tokens,
        modules,
        sites,
        state,
        batch.groups[0],
        queries,
        array(logits),
        reference,
        single,
    )
