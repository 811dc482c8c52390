"""Mixture of experts (spec 7): every layer has one; the first few choose experts by token id instead of by score."""

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

EVERYBODY = 16  # choices for each expert, on average, from which all are taken to be chosen


class Gate(nn.Module):
    """Which experts a token goes to and with which weights; always float32."""

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
        """Rows of `project` [n, E] -> expert ids [n, k], weights [n, k]."""
        tap.see(sites.MOE_ROUTER_LOGITS, logits)
        given = None if self.tid2eid is None else self.tid2eid[token_ids].long()
        ids, weights = self.kernels.route(logits, self.bias, given, self.topk, self.factor)
        tap.see(sites.MOE_TOPK, ids, weights)
        return ids, weights

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.project.destinations(name)
        if self.tid2eid is not None:
            yield Destination(f"{name}.tid2eid", self.tid2eid, "ids")
        if self.bias is not None:
            yield Destination(f"{name}.bias", self.bias)


class Experts(nn.Module):
    """The routed experts' matrices, stacked; gate (w1) above up (w3). Packed ones are unpacked one at a time, and may
    lie elsewhere, behind a table of addresses (`hold`)."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.count = config.n_routed_experts
        self.inner = config.moe_intermediate_size
        self.numerics = numerics
        self.packed = packed
        self.limit = config.swiglu_limit
        self.store: ExpertStore | None = None
        self.layer = 0  # in the store
        self._table: tuple[int, torch.Tensor] | None = None
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
            # Turned round, so that all experts side by side are one matrix.
            self.down = nn.Parameter(torch.empty(count, inner, hidden, dtype=numerics.dtype))

    def hold(self, store: ExpertStore, layer: int) -> None:
        """From now on these experts are those of a layer of `store`; still to be filled, and without memory here."""
        assert self.packed, "only packed experts can lie elsewhere"
        for name in PARTS:
            delattr(self, name)
        self.store = store
        self.layer = layer

    def at_home(self, expert: int) -> tuple[torch.Tensor, ...]:
        """One packed expert where it lies: codes and scales of gate and up, and of down."""
        if self.store is not None:
            return self.store.home((self.layer, expert))
        return tuple(getattr(self, name)[expert] for name in PARTS)

    def stack(self, stage: ExpertPrefetch | None = None) -> kernel.Stack:
        if not self.packed:
            dense = (self.gate_up, self.down)
            return kernel.Stack(self.count, self.gate_up.__getitem__, self.down.__getitem__, dense)

        parts = self.at_home if stage is None else stage.parts

        def unpack(first: int, expert: int) -> torch.Tensor:
            codes, scale = parts(expert)[first : first + 2]
            if self.store is not None:  # where no run was free on the device, this is the copy
                codes = codes.to(self.store.device)
                scale = scale.to(self.store.device)
            return quant.dequant_fp4(codes, scale).to(self.numerics.dtype)

        def turns() -> Iterable[tuple[Sequence[int] | None, torch.Tensor]]:
            return [(None, self.addresses())] if stage is None else stage.waves()

        return kernel.Stack(
            self.count, lambda e: unpack(0, e), lambda e: unpack(2, e).T, None, turns, self.inner
        )

    def addresses(self) -> torch.Tensor:
        """Where each packed expert's codes and scales begin: [E, 4] int64 (gate and up, scales, down, scales)."""
        if self.store is not None:
            return self.store.table[self.layer]
        place = self.gate_up.data_ptr()
        if self._table is None or self._table[0] != place:  # they may have moved since
            rows = [[part.data_ptr() for part in self.at_home(expert)] for expert in range(self.count)]
            self._table = place, torch.tensor(rows, dtype=torch.int64, device=self.gate_up.device)
        return self._table[1]

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[n, d] -> [n, d] float32, the weighted sum over each token's experts; with what stands `beside`, like it."""
        round_input = self.numerics.round_input if self.numerics.released else None
        if self.store is None:
            return self.numerics.kernels.experts(
                x, ids, weights, self.stack(), self.limit, round_input, beside
            )
        self.store.count(ids.unsqueeze(0), self.layer)
        if self.numerics.kernels.reads_codes and not self.store.any_cold(self.layer):
            return self.numerics.kernels.experts(
                x, ids, weights, self.stack(), self.limit, round_input, beside
            )
        # Asking the device who is wanted would let it run dry; a chunk of thousands wants nearly everybody.
        many = ids.numel() >= EVERYBODY * self.count
        with ExpertPrefetch(
            self.store, self.layer, range(self.count) if many else ids.unique().tolist()
        ) as stage:
            return self.numerics.kernels.experts(
                x, ids, weights, self.stack(stage), self.limit, round_input, beside
            )

    def destinations(self, name: str) -> Iterator[Destination]:
        gate = slice(0, self.inner)
        up = slice(self.inner, None)
        whole = slice(None)
        for expert in range(self.count):
            packed = self.at_home(expert) if self.packed else ()
            for part, first, rows in (("w1", 0, gate), ("w3", 0, up), ("w2", 2, whole)):
                full = f"{name}.{expert}.{part}"
                if self.packed:
                    yield Destination(f"{full}.weight", packed[first][rows], "codes")
                    yield Destination(f"{full}.scale", packed[first + 1][rows], "scale")
                else:
                    stored = (self.down if first else self.gate_up).detach()[expert]
                    yield Destination(f"{full}.weight", stored.T if part == "w2" else stored[rows])


class SharedExpert(nn.Module):
    """The expert every token visits, with weight one and the same clamp."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.limit = config.swiglu_limit
        self.dtype = numerics.dtype
        self.kernels = numerics.kernels
        inner = config.moe_intermediate_size
        self.open = Linear(config.hidden_size, {"w1": inner, "w3": inner}, "fp8", numerics, packed)
        self.w2 = Linear(inner, config.hidden_size, "fp8", numerics, packed)

    def forward(self, opened: torch.Tensor) -> torch.Tensor:
        """Rows of `open` [n, gate and up] -> [n, d]."""
        return self.w2(self.kernels.glu(opened, self.limit, self.dtype))

    def destinations(self, name: str) -> Iterator[Destination]:
        yield from self.open.destinations(name)
        yield from self.w2.destinations(f"{name}.w2")


class MoE(nn.Module):
    def __init__(self, config: V4Config, hashed: bool, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.gate = Gate(config, hashed, numerics, packed)
        self.experts = Experts(config, numerics, packed)
        self.shared_experts = SharedExpert(config, numerics, packed)
        self.entry = SharedInput([self.gate.project, self.shared_experts.open])
        self.compiled: CompiledMoE | None = None

    def forward(self, x: torch.Tensor, batch: Batch, tap: Tap) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        if self.compiled is not None and self.compiled.accepts(x):
            return self.compiled(x, batch, tap)
        logits, opened = self.entry(x)
        ids, weights = self.gate(logits, batch.token_ids, tap)
        return self.experts(x, ids, weights, self.shared_experts(opened))

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("gate", "experts", "shared_experts"):
            yield from getattr(self, part).destinations(f"{name}.{part}")
