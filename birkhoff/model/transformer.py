"""The whole model (spec 2): tokens in, streams through the layers, logits out.

The model does not depend on files, requests or text. It is built on any device, filled through `destinations`, and
called with a flattened `Batch`, a `State` (or `Fresh` for whole sequences, the differentiable path) and a `Tap`.
Tensors have the names of the released checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from birkhoff.config import V4Config
from birkhoff.dtype_names import dtype_name
from birkhoff.hooks.schema import HookSchema, schema_of
from birkhoff.hooks.tap import NoTap, Tap
from birkhoff.kernels.packed import PackedType
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.block import Block
from birkhoff.model.compiled import CompiledLayers
from birkhoff.model.linear import Destination, Linear, Numerics, RMSNorm, SharedInput
from birkhoff.model.mhc import HeadMixer
from birkhoff.model.moe import Experts
from birkhoff.model.mtp import MTP
from birkhoff.model.rope import Rope
from birkhoff.model.state import Fresh, State
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.host_experts import HostExperts


class Transformer(nn.Module):
    """`packed` keeps quantised weights in the formats of the release; `store_as` in any other. `mtp` includes the MTP
    block; by default, if the config has one."""

    def __init__(
        self,
        config: V4Config,
        numerics: Numerics | None = None,
        packed: bool = False,
        mtp: bool | None = None,
    ):
        super().__init__()
        self.config = config
        self.packed = packed
        self.numerics = numerics = numerics or Numerics()
        self.rope = rope = Rope(config)
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=numerics.dtype))
        self.layers = nn.ModuleList(
            Block(config, ratio, config.is_hash_routed(layer), rope, numerics, packed)
            for layer, ratio in enumerate(config.compress_ratios)
        )
        self.hc_head = HeadMixer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.head = Linear(config.hidden_size, config.vocab_size, "f32", numerics, packed)
        with_mtp = config.num_nextn_predict_layers > 0 if mtp is None else mtp
        self.mtp: MTP | None = MTP(config, rope, numerics, packed) if with_mtp else None
        self.compiled: CompiledLayers | None = None

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it computes in."""
        return self.numerics.dtype

    @property
    def schema(self) -> dict[str, HookSchema]:
        return schema_of(self.config, dtype_name(self.numerics.dtype))

    @property
    def settings(self) -> dict[str, Any]:
        """What besides weights, text, device and dtype determines the bits of an activation row."""
        numerics = "released" if self.numerics.released else "plain"
        return {"numerics": numerics, "kernels": self.numerics.kernels.name}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by its released name."""
        return ((destination.name, destination.tensor) for destination in self.destinations())

    def blocks(self) -> list[Block]:
        """`layers`, typed."""
        return cast(list[Block], list(self.layers))

    def named_expert_stacks(self) -> list[tuple[str, Experts]]:
        """`expert_stacks` with the prefix of their names in a released checkpoint."""
        named = [
            (f"layers.{layer}.ffn.experts", block.ffn.experts) for layer, block in enumerate(self.blocks())
        ]
        return named if self.mtp is None else [*named, ("mtp.0.ffn.experts", self.mtp.block.ffn.experts)]

    def expert_stacks(self) -> list[Experts]:
        """The routed experts of every layer; those of the MTP block last."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def store_as(self, types: Mapping[str, PackedType]) -> None:
        """Keep weights in the types in which a checkpoint stores them, by released name.

        Call it before the model is given memory. A weight whose matrices are stored in different types, or are not
        in `types`, is held as numbers."""
        by_module: dict[nn.Module, list[PackedType | None]] = {}
        for destination in list(self.destinations()):
            if destination.owner is not None:
                by_module.setdefault(destination.owner, []).append(types.get(destination.name))
        for module, stored in by_module.items():
            known = [each for each in stored if each is not None]
            if len(known) < len(stored):
                continue
            if isinstance(module, Linear):
                module.store_as(known)
            elif isinstance(module, Experts) and all(each == known[i % 3] for i, each in enumerate(known)):
                module.store_as(*known[:3])
        self.packed = all(stack.packed for stack in self.expert_stacks())
        embed = types.get("embed.weight")
        if embed is not None and embed.dtype is not None:
            self.embed = nn.Parameter(
                torch.empty(self.embed.shape, dtype=embed.dtype, device=self.embed.device)
            )

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, in the model's dtype."""
        return self.embed[token_ids].to(self.numerics.dtype)

    def hash_routing_tables(self) -> dict[int, torch.Tensor]:
        """Expert ids of every token, [vocab, k] in host memory, by hash-routed layer."""
        tables = {layer: block.ffn.gate.tid2eid for layer, block in enumerate(self.blocks())}
        return {layer: table.cpu() for layer, table in tables.items() if table is not None}

    def use_expert_store(self, store: ExpertStore) -> None:
        """Keep the experts of a packed model in `store`. Call it before the model is given memory."""
        for layer, stack in enumerate(self.expert_stacks()):
            stack.move_to_store(store, layer)

    def cold_expert_names(self) -> dict[str, tuple[int, int]]:
        """The experts of the layers whose home in the store is host memory, by the names of their tensors up to the
        matrix."""
        names = {}
        for prefix, stack in self.named_expert_stacks():
            store = stack.store
            for expert in range(stack.count) if store is not None and prefix.startswith("layers.") else ():
                if store is not None and store.is_cold((stack.layer, expert)):
                    names[f"{prefix}.{expert}"] = (stack.layer, expert)
        return names

    def stored_expert_types(self) -> list[tuple[PackedType, PackedType]]:
        """The types of gate and up, and of down, by layer of the expert store."""
        types = {stack.layer: stack.types for stack in self.expert_stacks() if stack.types is not None}
        return [types[layer] for layer in sorted(types)]

    def compute_cold_experts_on_host(self, share: float = 1.0) -> bool:
        """Decode steps leave experts that are in host memory, or a `share` of them, to the CPU; none with a share of 0.
        Call it when the store is filled and before steps are recorded. Returns False where a check of it fails; then
        none are left to the CPU."""
        stacks = self.expert_stacks()
        store, types = stacks[0].store, self.stored_expert_types()
        assert store is not None and len(types) == store.layers
        store.compute_on_device()
        for stack in stacks:
            stack.host = None
        if not share:
            return True
        config = self.config
        host = HostExperts(
            store, types, config.hidden_size, config.moe_intermediate_size, config.swiglu_limit, share
        )
        if not host.works(self.numerics.dtype):
            store.compute_on_device()
            return False
        for stack in stacks:
            stack.host = host
        return True

    def allocate(self, device: torch.device | str) -> Transformer:
        """Give a model built on the meta device uninitialised memory on `device`; returns the model.

        Unlike `Module.to_empty` it does not import PyTorch's symbolic shapes, which takes a third of a second."""

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        self._apply(empty)  # type: ignore[no-untyped-call]
        return self

    def fuse(self) -> Transformer:
        """Run linear layers with a common input as one product, once weights are filled; returns the model.

        Values and names of the weights stay the same."""
        for module in self.modules():
            in_proj = getattr(module, "in_proj", None)
            if isinstance(in_proj, SharedInput):
                in_proj.fuse()
        return self

    def forward(
        self, token_ids: torch.Tensor, tap: Tap | None = None, recompute: bool = False
    ) -> torch.Tensor:
        """Whole sequences [T] or [B, T] -> logits [..., T, vocab] float32, differentiable.

        With `recompute` a layer's intermediate tensors are not kept for the backward pass but computed again, so that
        at most one layer's are in memory; what the tap keeps is kept."""
        hidden, _ = self.run(Batch.whole(token_ids), Fresh(), tap or NoTap(), recompute)
        logits: torch.Tensor = self.logits(hidden).unflatten(0, token_ids.shape)
        return logits

    def run_texts(
        self, texts: Sequence[Sequence[int]], tap: Callable[[Sequence[int]], Tap]
    ) -> list[torch.Tensor]:
        """Several whole texts in one pass -> hidden rows [T, d] of each, for `logits`.

        `tap` is called with the row of each text's first token; a text's rows are consecutive."""
        batch = Batch.of([SequenceChunk(index, 0, ids) for index, ids in enumerate(texts)], self.device)
        first = {chunk.slot: offset for chunk, offset in zip(batch.chunks, batch.offsets)}
        rows = [first[index] for index in range(len(texts))]
        hidden, _ = self.run(batch, Fresh(), tap(rows))
        return [hidden[row : row + len(ids)] for row, ids in zip(rows, texts)]

    def run(
        self, batch: Batch, state: State | Fresh, tap: Tap, recompute: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step -> hidden rows [n, d] for `logits`, and the streams [n, m, d] that the MTP block reads."""
        phases = self.rope.step(batch.positions)
        streams = self.embedding(batch.token_ids).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        layer = 0
        while layer < len(self.layers):
            stop = self._idle_until(layer, batch, state, tap)
            if stop > layer:
                assert self.compiled is not None and isinstance(state, State)
                streams = self.compiled(streams, layer, stop, batch, phases, state.layers)
                layer = stop
                continue
            block = self.layers[layer]
            inputs = (streams, batch, phases, state.at(layer), tap.at(layer))
            streams = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
            layer += 1
        merged, streams = self.hc_head.merge(streams, tap.at(len(self.layers) - 1))
        return self.norm(merged), streams

    def _idle_until(self, layer: int, batch: Batch, state: State | Fresh, tap: Tap) -> int:
        """The end of the layers from `layer` on that compiled code can run as a whole: nothing happens in them."""
        if self.compiled is not None and self.compiled.accepts(batch, state):
            while layer < len(self.layers) and type(tap.at(layer)) is NoTap:
                layer += 1
        return layer

    def merge_streams(self, streams: torch.Tensor) -> torch.Tensor:
        """Residual streams [T, m, d], at any depth, to the residual [T, d] before the final norm."""
        merged: torch.Tensor = self.hc_head(streams)[0]
        return merged

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden rows [n, d] -> [n, vocab] float32."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def draft(
        self, streams: torch.Tensor, batch: Batch, state: State | Fresh
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """MTP: `batch` holds the tokens at t + 1 with positions t -> hidden [n, d], streams [n, m, d]."""
        assert isinstance(self.mtp, MTP), "this model was built without its MTP block"
        assert state.mtp is not None, "the state was built without the MTP block"
        hidden, streams = self.mtp(streams, self.embedding(batch.token_ids), batch, state.mtp)
        return hidden, streams

    def mtp_prefill(self, streams: torch.Tensor, batch: Batch, state: State) -> None:
        """Like `draft` for tokens that need no draft: only updates the state."""
        assert isinstance(self.mtp, MTP) and state.mtp is not None, "built without the MTP block"
        self.mtp.prefill(streams, self.embedding(batch.token_ids), batch, state.mtp)

    def destinations(self) -> Iterator[Destination]:
        """Every tensor a released checkpoint must provide, by its released name."""
        yield Destination("embed.weight", self.embed)
        for layer, block in enumerate(self.blocks()):
            yield from block.destinations(f"layers.{layer}")
        yield from self.hc_head.destinations("hc_head")
        yield from self.norm.destinations("norm")
        yield from self.head.destinations("head")
        if self.mtp is not None:
            yield from self.mtp.destinations("mtp.0")
