"""Mixture of experts (spec 7): every layer has one; the first few choose experts by token id instead of by score."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from birkhoff.config import V4Config
from birkhoff.hooks import sites
from birkhoff.hooks.tap import Tap
from birkhoff.kernels import experts as kernel
from birkhoff.kernels import quant
from birkhoff.model.batch import Batch
from birkhoff.model.linear import Destination, Linear, Numerics


class Gate(nn.Module):
    """Which experts a token goes to and with which weights; always float32."""

    def __init__(self, config: V4Config, hashed: bool):
        super().__init__()
        self.topk, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32))
        self.bias: nn.Parameter | None = None
        self.tid2eid: torch.Tensor | None
        if hashed:
            table = torch.empty(config.vocab_size, self.topk, dtype=torch.int32)
            self.register_buffer("tid2eid", table)
        else:
            self.tid2eid = None
            self.bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, tap: Tap) -> tuple[torch.Tensor, torch.Tensor]:
        """x [n, d] -> expert ids [n, k], weights [n, k]."""
        logits = x.float() @ self.weight.T
        tap.see(sites.MOE_ROUTER_LOGITS, logits)
        given = None if self.tid2eid is None else self.tid2eid[token_ids].long()
        ids, weights = kernel.route(logits, self.bias, given, self.topk, self.factor)
        tap.see(sites.MOE_TOPK, ids, weights)
        return ids, weights

    def destinations(self, name: str) -> Iterator[Destination]:
        yield Destination(f"{name}.weight", self.weight)
        if self.tid2eid is not None:
            yield Destination(f"{name}.tid2eid", self.tid2eid, "ids")
        if self.bias is not None:
            yield Destination(f"{name}.bias", self.bias)


class Experts(nn.Module):
    """The routed experts' matrices, stacked; gate (w1) above up (w3). Packed ones are unpacked one at a time."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.count, self.inner = config.n_routed_experts, config.moe_intermediate_size
        self.numerics, self.packed, self.limit = numerics, packed, config.swiglu_limit
        shapes = {"gate_up": (2 * self.inner, config.hidden_size), "down": (config.hidden_size, self.inner)}
        for name, (rows, columns) in shapes.items():
            if packed:
                self.register_buffer(name, torch.empty(self.count, rows, columns // 2, dtype=torch.int8))
                self.register_buffer(f"{name}_scale", torch.empty(self.count, rows, columns // 32, dtype=torch.uint8))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(self.count, rows, columns, dtype=numerics.dtype)))

    def _matrix(self, name: str, expert: int) -> torch.Tensor:
        stored = getattr(self, name)[expert]
        if not self.packed:
            return stored
        return quant.dequant_fp4(stored, getattr(self, f"{name}_scale")[expert]).to(self.numerics.dtype)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[n, d] -> [n, d] float32, the weighted sum over each token's experts."""
        return kernel.experts(
            x, ids, weights, lambda e: self._matrix("gate_up", e), lambda e: self._matrix("down", e), self.limit,
            self.numerics.round_input,
        )

    def destinations(self, name: str) -> Iterator[Destination]:
        gate, up, whole = slice(0, self.inner), slice(self.inner, None), slice(None)
        for expert in range(self.count):
            for part, stack, rows in (("w1", "gate_up", gate), ("w3", "gate_up", up), ("w2", "down", whole)):
                stored = getattr(self, stack).detach()[expert, rows]
                kind = "codes" if self.packed else "value"
                yield Destination(f"{name}.{expert}.{part}.weight", stored, kind)
                if self.packed:
                    scale = getattr(self, f"{stack}_scale")[expert, rows]
                    yield Destination(f"{name}.{expert}.{part}.scale", scale, "scale")


class SharedExpert(nn.Module):
    """The expert every token visits, with weight one and the same clamp."""

    def __init__(self, config: V4Config, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.limit, self.dtype = config.swiglu_limit, numerics.dtype
        self.w1 = Linear(config.hidden_size, config.moe_intermediate_size, "fp8", numerics, packed)
        self.w3 = Linear(config.hidden_size, config.moe_intermediate_size, "fp8", numerics, packed)
        self.w2 = Linear(config.moe_intermediate_size, config.hidden_size, "fp8", numerics, packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(kernel.swiglu(self.w1(x), self.w3(x), self.limit).to(self.dtype))

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("w1", "w2", "w3"):
            yield from getattr(self, part).destinations(f"{name}.{part}")


class MoE(nn.Module):
    def __init__(self, config: V4Config, hashed: bool, numerics: Numerics, packed: bool = False):
        super().__init__()
        self.gate = Gate(config, hashed)
        self.experts = Experts(config, numerics, packed)
        self.shared_experts = SharedExpert(config, numerics, packed)

    def forward(self, x: torch.Tensor, batch: Batch, tap: Tap) -> torch.Tensor:
        """x [n, d], normalised -> [n, d]."""
        ids, weights = self.gate(x, batch.token_ids, tap)
        return (self.experts(x, ids, weights) + self.shared_experts(x).float()).to(x.dtype)

    def destinations(self, name: str) -> Iterator[Destination]:
        for part in ("gate", "experts", "shared_experts"):
            yield from getattr(self, part).destinations(f"{name}.{part}")
