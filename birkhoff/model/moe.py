"""Mixture of experts (spec 7). Every layer has one; the first few select experts by token id instead of by score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import experts as kernel
from birkhoff.kernels import quant
from birkhoff.model.batch import Batch
from birkhoff.model.compiled import CompiledMoE
from birkhoff.model.linear import Destination, Linear, Numerics, SharedInput
from birkhoff.offload.expert_layout import PARTS
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.prefetch import ExpertPrefetch

ALL_EXPERTS = 16  # selections per expert, on average, from which every expert is assumed to be selected


class Router(nn.Module):
    """Selects the experts of each token and their weights, in float32."""

    def __init__(self, config: V4Config, hashed: bool, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.topk = config.num_experts_per_tok
        self.factor = config.routed_scaling_factor
        self.kernels = numerics.kernels
        self.project = Linear(config.hidden_size, config.n_routed_experts, "f32", numerics, packed)
        self.bias: nn.Parameter | None = None
        self.tid2eid: torch.Tensor | None
        if hashed:
            table = torch.empty(config.vocab_size, self.topk, dtype=torch.int32)
            self.register_buffer("tid2eid", table)
        else:
            self.tid2eid = None
            self.bias = nn.Parameter(
                torch.empty(config.n_routed_experts, dtype=torch.float32), requires_grad=False
            )

    def forward(
        self, logits: torch.Tensor, token_ids: torch.Tensor, tap: Tap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of `project` [n, E] -> expert ids [n, k], weights [n, k]."""
        tap.see(sites.MOE_ROUTER_LOGITS, logits)
        hash_ids = None if self.tid2eid is None else self.tid2eid[token_ids].long()
        ids, weights = self.kernels.route(logits, self.bias, hash_ids, self.topk, self.factor)
        tap.see(sites.MOE_TOPK, ids, weights)
        return ids, weights

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.project.destinations(name)
        if self.tid2eid is not None:
            yield Destination(f"{name}.tid2eid", self.tid2eid, "ids")
        if self.bias is not None:
            yield Destination(f"{name}.bias", self.bias)


class Experts(nn.Module):
    """The stacked matrices of the routed experts; gate (w1) above up (w3).

    Packed experts are dequantised one at a time. They may be kept in an `ExpertStore` instead of the module's own
    memory (`move_to_store`)."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.count = config.n_routed_experts
        self.inner = config.moe_intermediate_size
        self.numerics = numerics
        self.packed = packed
        self.limit = config.swiglu_limit
        self.store: ExpertStore | None = None
        self.layer = 0  # in the store
        self._addresses: tuple[int, torch.Tensor] | None = None  # with the address they were computed for
        hidden = config.hidden_size
        inner = self.inner
        count = self.count
        if packed:
            for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
                self.register_buffer(name, torch.empty(count, rows, columns // 2, dtype=torch.int8))
                self.register_buffer(
                    f"{name}_scale", torch.empty(count, rows, columns // 32, dtype=torch.uint8)
                )
        else:
            self.gate_up = nn.Parameter(torch.empty(count, 2 * inner, hidden, dtype=numerics.dtype))
            # Transposed, so that all experts side by side are one matrix.
            self.down = nn.Parameter(torch.empty(count, inner, hidden, dtype=numerics.dtype))

    def move_to_store(self, store: ExpertStore, layer: int) -> None:
        """Use the experts of a layer of `store`, which are still to be filled, and drop the module's own memory."""
        assert self.packed, "only packed experts can be kept in a store"
        for name in PARTS:
            delattr(self, name)
        self.store = store
        self.layer = layer

    def stored_parts(self, expert: int) -> tuple[torch.Tensor, ...]:
        """Codes and scales of gate and up, and of down, of one packed expert, without a copy."""
        if self.store is not None:
            return self.store.home_parts((self.layer, expert))
        return tuple(getattr(self, name)[expert] for name in PARTS)

    def stack(self, prefetch: ExpertPrefetch | None = None) -> kernel.Stack:
        """The experts as the `experts` kernels take them."""
        if not self.packed:
            dense = (self.gate_up, self.down)
            return kernel.Stack(self.count, self.gate_up.__getitem__, self.down.__getitem__, dense)

        parts = self.stored_parts if prefetch is None else prefetch.parts

        def unpack(first: int, expert: int) -> torch.Tensor:
            codes, scale = parts(expert)[first : first + 2]
            if self.store is not None:  # copies an expert that found no slot on the device
                codes = codes.to(self.store.device)
                scale = scale.to(self.store.device)
            return quant.dequant_fp4(codes, scale).to(self.numerics.dtype)

        def waves() -> Iterable[tuple[Sequence[int] | None, torch.Tensor]]:
            return [(None, self.addresses())] if prefetch is None else prefetch.waves()

        return kernel.Stack(
            self.count, lambda e: unpack(0, e), lambda e: unpack(2, e).T, None, waves, self.inner
        )

    def addresses(self) -> torch.Tensor:
        """Addresses of each packed expert's codes and scales, [E, 4] int64: gate and up, scales, down, scales."""
        if self.store is not None:
            return self.store.table[self.layer]
        address = self.gate_up.data_ptr()
        if self._addresses is None or self._addresses[0] != address:
            rows = [[part.data_ptr() for part in self.stored_parts(expert)] for expert in range(self.count)]
            self._addresses = address, torch.tensor(rows, dtype=torch.int64, device=self.gate_up.device)
        return self._addresses[1]

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, d] -> [n, d]: the weighted sum over each token's experts, float32; plus `shared`, in its dtype."""
        if self.store is None:
            return self._compute(x, ids, weights, shared)
        self.store.count_reads(ids.unsqueeze(0), self.layer)
        if self.numerics.kernels.reads_codes and not self.store.any_cold(self.layer):
            return self._compute(x, ids, weights, shared)
        # Reading the ids back would stall the GPU; large chunks use nearly every expert.
        every = ids.numel() >= ALL_EXPERTS * self.count
        used = range(self.count) if every else torch.unique(ids).tolist()
        with ExpertPrefetch(self.store, self.layer, used) as prefetch:
            return self._compute(x, ids, weights, shared, prefetch)

    def _compute(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None,
        prefetch: ExpertPrefetch | None = None,
    ) -> torch.Tensor:
        round_input = self.numerics.round_input if self.numerics.released else None
        y: torch.Tensor = self.numerics.kernels.experts(
            x, ids, weights, self.stack(prefetch), self.limit, round_input, shared
        )
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        gate = slice(0, self.inner)
        up = slice(self.inner, None)
        whole = slice(None)
        for expert in range(self.count):
            packed = self.stored_parts(expert) if self.packed else ()
            for part, first, rows in (("w1", 0, gate), ("w3", 0, up), ("w2", 2, whole)):
                full = f"{name}.{expert}.{part}"
                if self.packed:
                    yield Destination(f"{full}.weight", packed[first][rows], "codes")
                    yield Destination(f"{full}.scale", packed[first + 1][rows], "scale")
                else:
                    stored = (self.down if first else self.gate_up).detach()[expert]
                    yield Destination(f"{full}.weight", stored.T if part == "w2" else stored[rows])


class SharedExpert(nn.Module):
    """The expert that every token uses, with weight one and the same clamp."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.limit = config.swiglu_limit
        self.dtype = numerics.dtype
        self.kernels = numerics.kernels
        inner = config.moe_intermediate_size
        self.gate_up = Linear(config.hidden_size, {"w1": inner, "w3": inner}, "fp8", numerics, packed)
        self.w2 = Linear(inner, config.hidden_size, "fp8", numerics, packed)

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Output of the layer `gate_up` [n, 2 * inner] -> [n, d]."""
        y: torch.Tensor = self.w2(self.kernels.glu(gate_up, self.limit, self.dtype))
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.gate_up.destinations(name)
        yield from self.w2.destinations(f"{name}.w2")


class MoE(nn.Module):
    """The expert sublayer: router, routed experts and shared expert."""

    def __init__(self, config: V4Config, hashed: bool, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.gate = Router(config, hashed, numerics, packed)
        self.experts = Experts(config, numerics, packed)
        self.shared_experts = SharedExpert(config, numerics, packed)
        self.in_proj = SharedInput([self.gate.project, self.shared_experts.gate_up])
        self.compiled: CompiledMoE | None = None

    def forward(self, x: torch.Tensor, batch: Batch, tap: Tap) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        if self.compiled is not None and self.compiled.accepts(x):
            return self.compiled(x, batch, tap)
        logits, gate_up = self.in_proj(x)
        ids, weights = self.gate(logits, batch.token_ids, tap)
        y: torch.Tensor = self.experts(x, ids, weights, self.shared_experts(gate_up))
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("gate", "experts", "shared_experts"):
            yield from getattr(self, part).destinations(f"{name}.{part}")
