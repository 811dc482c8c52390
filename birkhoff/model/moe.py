"""Mixture of experts (spec 7). Every layer has one; the first few select experts by token id instead of by score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.edit import Routing
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import experts as kernel
from birkhoff.kernels.packed import TYPES, PackedMatrix, PackedType, native
from birkhoff.kernels.quant.rounded_rows import Input, rows_of
from birkhoff.model.batch import Batch
from birkhoff.model.compiled import CompiledMoE
from birkhoff.model.linear import Destination, Linear, Numerics, SharedInput
from birkhoff.offload.expert_layout import PARTS, code_dtype, matrices_of
from birkhoff.offload.expert_store import ExpertStore
from birkhoff.offload.host_experts import HostExperts
from birkhoff.offload.prefetch import ExpertPrefetch

ExpertMatrices = tuple[PackedMatrix, PackedMatrix, PackedMatrix]  # gate, up, down
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
        return tap.route(sites.MOE_TOPK, ids, weights, self.routing(logits, token_ids))

    def routing(self, logits: torch.Tensor, token_ids: torch.Tensor) -> Routing:
        """What the experts of these rows are chosen by."""
        return Routing(logits, self.bias, self.tid2eid, token_ids, self.factor)

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.project.destinations(name)
        if self.tid2eid is not None:
            yield Destination(f"{name}.tid2eid", self.tid2eid, "ids")
        if self.bias is not None:
            yield Destination(f"{name}.bias", self.bias)


class Experts(nn.Module):
    """The stacked matrices of the routed experts; gate (w1) above up (w3).

    Packed experts (`types`: of gate and up, of down) are dequantised one at a time, or read by kernels. They may be
    kept in an `ExpertStore` (`move_to_store`) or in mapped files (`map_files`) instead of the module's own memory."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.count = config.n_routed_experts
        self.inner = config.moe_intermediate_size
        self.numerics = numerics
        self.types: tuple[PackedType, PackedType] | None = None
        self.hidden = config.hidden_size
        self.limit = config.swiglu_limit
        self.mapped: list[ExpertMatrices] | None = None
        self.store: ExpertStore | None = None
        self.host: HostExperts | None = None  # computes what decode steps leave to the CPU
        self.layer = 0  # in the store
        self._addresses: tuple[int, torch.Tensor] | None = None  # with the address they were computed for
        self._products: tuple[int, native.ExpertProducts] | None = None  # likewise
        hidden = config.hidden_size
        inner = self.inner
        if packed:
            self._keep_codes((TYPES["FP4"], TYPES["FP4"]), None)
        else:
            self.gate_up = nn.Parameter(torch.empty(self.count, 2 * inner, hidden, dtype=numerics.dtype))
            # Transposed, so that all experts side by side are one matrix.
            self.down = nn.Parameter(torch.empty(self.count, inner, hidden, dtype=numerics.dtype))

    @property
    def packed(self) -> bool:
        """Whether the experts are codes."""
        return self.types is not None

    def store_as(self, gate: PackedType, up: PackedType, down: PackedType) -> bool:
        """Keep the experts in the types in which they are stored, if gate and up have the same; call it before the
        model is given memory. Returns whether they are."""
        if gate != up or self.hidden % gate.block or self.inner % down.block:
            return False
        device = self.gate_up.device
        del self.gate_up, self.down
        self._keep_codes((gate, down), device)
        return True

    def _keep_codes(self, types: tuple[PackedType, PackedType], device: torch.device | None) -> None:
        self.types = types
        shapes = (("gate_up", 2, self.inner, self.hidden), ("down", 1, self.hidden, self.inner))
        for kind, (name, parts, rows, columns) in zip(types, shapes):
            shape = (self.count, parts * rows, kind.row_bytes(columns))
            codes = torch.empty(shape, dtype=code_dtype(kind), device=device)
            self.register_buffer(name, codes)
            scale = kind.scale_shape(rows, columns)
            if scale is not None:
                tensor = torch.empty(self.count, parts * scale[0], scale[1], dtype=torch.uint8, device=device)
                self.register_buffer(f"{name}_scale", tensor)

    def map_files(self, matrices: list[ExpertMatrices]) -> None:
        """Read the experts from mapped files, gate, up and down of each, and drop the module's own memory."""
        assert self.packed and len(matrices) == self.count
        for name in PARTS:
            if hasattr(self, name):
                delattr(self, name)
        self.mapped = matrices

    def matrices(self, expert: int) -> ExpertMatrices:
        """Gate, up and down of one packed expert as stored, as views."""
        assert self.types is not None, "the experts are held as numbers"
        return self.mapped[expert] if self.mapped is not None else self._views(self.stored_parts(expert))

    def _views(self, parts: Sequence[torch.Tensor | None]) -> ExpertMatrices:
        """Gate, up and down in the four parts of an expert."""
        assert self.types is not None
        return matrices_of(parts, self.types, self.hidden, self.inner)

    def move_to_store(self, store: ExpertStore, layer: int) -> None:
        """Use the experts of a layer of `store`, which are still to be filled, and drop the module's own memory."""
        assert self.packed, "only packed experts can be kept in a store"
        for name in PARTS:
            if hasattr(self, name):
                delattr(self, name)
        self.store = store
        self.layer = layer

    def stored_parts(self, expert: int) -> tuple[Any, ...]:
        """Codes and scales of gate and up, and of down, of one packed expert, without a copy; None for scales that are
        part of the codes."""
        if self.store is not None:
            return self.store.home_parts((self.layer, expert))
        stacks = (getattr(self, name, None) for name in PARTS)
        return tuple(None if stack is None else stack[expert] for stack in stacks)

    def stack(self, prefetch: ExpertPrefetch | None = None) -> kernel.Stack:
        """The experts as the `experts` kernels take them."""
        if not self.packed:
            dense = (self.gate_up, self.down)
            return kernel.Stack(self.count, self.gate_up.__getitem__, self.down.__getitem__, dense)

        if self.store is None:
            return kernel.Stack(
                self.count,
                lambda e: self._dequantise(self.matrices(e)[:2]),
                lambda e: self._dequantise(self.matrices(e)[2:]).T,
                None,
                lambda: [(None, self.addresses())],
                self.inner,
                self.types,
                self.products,
            )
        device = self.store.device
        parts = self.stored_parts if prefetch is None else prefetch.parts

        def matrices(expert: int) -> ExpertMatrices:
            # An expert that found no slot on the device is copied.
            return self._views([None if part is None else part.to(device) for part in parts(expert)])

        def waves() -> Iterable[tuple[Sequence[int] | None, torch.Tensor]]:
            return [(None, self.addresses())] if prefetch is None else prefetch.waves()

        return kernel.Stack(
            self.count,
            lambda e: self._dequantise(matrices(e)[:2]),
            lambda e: self._dequantise(matrices(e)[2:]).T,
            None,
            waves,
            self.inner,
            self.types,
        )

    def products(self) -> native.ExpertProducts:
        """Packed experts in host memory as the native CPU kernels take them."""
        address = 0 if self.mapped is not None else self.gate_up.data_ptr()
        if self._products is None or self._products[0] != address:
            matrices = [matrix for expert in range(self.count) for matrix in self.matrices(expert)]
            self._products = address, native.ExpertProducts(matrices, self.limit)
        return self._products[1]

    def _dequantise(self, matrices: Sequence[PackedMatrix]) -> torch.Tensor:
        """Matrices below each other as numbers, in the model's dtype."""
        dequantise = self.numerics.kernels.dequantise
        parts = [dequantise(matrix) for matrix in matrices]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self.numerics.dtype)

    def addresses(self) -> torch.Tensor:
        """Addresses of each packed expert's codes and scales, [E, 4] int64: gate and up, scales, down, scales."""
        if self.store is not None:
            return self.store.table[self.layer]
        address = self.gate_up.data_ptr()
        if self._addresses is None or self._addresses[0] != address:
            rows = [
                [0 if part is None else part.data_ptr() for part in self.stored_parts(expert)]
                for expert in range(self.count)
            ]
            self._addresses = address, torch.tensor(rows, dtype=torch.int64, device=self.gate_up.device)
        return self._addresses[1]

    def forward(
        self, x: Input, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, d] -> [n, d]: the weighted sum over each token's experts, float32; plus `shared`, in its dtype."""
        if self.store is None:
            return self._compute(x, ids, weights, shared)
        self.store.count_reads(ids.unsqueeze(0), self.layer)
        if self.numerics.kernels.on_gpu and not self.store.any_cold(self.layer):
            return self._compute(x, ids, weights, shared)
        # Reading the ids back would stall the GPU; large chunks use nearly every expert.
        every = ids.numel() >= ALL_EXPERTS * self.count
        used = range(self.count) if every else torch.unique(ids).tolist()
        with ExpertPrefetch(self.store, self.layer, used) as prefetch:
            return self._compute(x, ids, weights, shared, prefetch)

    def _compute(
        self,
        x: Input,
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
        for expert in range(self.count) if self.mapped is None else ():
            if self.types is None:
                rows, down = self.gate_up.detach()[expert], self.down.detach()[expert].T
                for part, tensor in (("w1", rows[gate]), ("w3", rows[up]), ("w2", down)):
                    yield Destination(f"{name}.{expert}.{part}.weight", tensor, owner=self)
                continue
            codes, scale, down, down_scale = self.stored_parts(expert)
            half = 0 if scale is None else len(scale) // 2
            halves = (None, None) if scale is None else (scale[:half], scale[half:])
            parts = (("w1", codes[gate], halves[0]), ("w3", codes[up], halves[1]), ("w2", down, down_scale))
            for kind, (part, tensor, part_scale) in zip((self.types[0], *self.types), parts):
                full = f"{name}.{expert}.{part}"
                if part_scale is None:
                    yield Destination(f"{full}.weight", tensor, "blocks", kind, self)
                    continue
                yield Destination(f"{full}.weight", tensor, "codes", kind, self)
                yield Destination(f"{full}.scale", part_scale, "scale", kind, self)


class SharedExpert(nn.Module):
    """The expert that every token uses, with weight one and the same clamp."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.limit = config.swiglu_limit
        self.numerics = numerics
        inner = config.moe_intermediate_size
        self.gate_up = Linear(config.hidden_size, {"w1": inner, "w3": inner}, "fp8", numerics, packed)
        self.w2 = Linear(inner, config.hidden_size, "fp8", numerics, packed)

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Output of the layer `gate_up` [n, 2 * inner] -> [n, d]."""
        numerics = self.numerics
        y: torch.Tensor = self.w2(
            numerics.kernels.glu(gate_up, self.limit, numerics.dtype, numerics.released)
        )
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

    def forward(self, x: Input, batch: Batch, tap: Tap) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        if self.compiled is not None and self.compiled.accepts(rows_of(x)):
            return self.compiled(rows_of(x), batch, tap)
        logits, gate_up = self.in_proj(x)
        ids, weights = self.gate(logits, batch.token_ids, tap)
        y: torch.Tensor = self.experts(x, ids, weights, self.shared_experts(gate_up))
        return y

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("gate", "experts", "shared_experts"):
            yield from getattr(self, part).destinations(f"{name}.{part}")
