"""Muon for matrices and AdamW for the rest, on the stacks of `Store`; all changing values are device scalars.

Muon orthogonalises the momentum of each matrix (each expert, each output group) by five Newton-Schulz steps in bf16,
one stack at a time, and scales the step by 0.2 sqrt(max(rows, columns)), so that its size per element matches AdamW's
and rates are comparable. Weight decay is decoupled and excludes norms, mHC, sinks, biases and the router. An update
reads no device value on the host, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.parameters import Store
from training.settings import Settings

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STEPS = 5
ADAM_EPS = 1e-8


def orthogonalise(stack: Tensor) -> Tensor:
    """Map each matrix of [n, rows, columns] to about U V^T of its SVD; bf16 internally on CUDA."""
    a, b, c = NEWTON_SCHULZ
    x = stack.bfloat16() if stack.is_cuda else stack.float()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() + 1e-7).to(x.dtype)
    for _ in range(STEPS):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


class Optimiser:
    def __init__(self, store: Store, settings: Settings):
        self.store = store
        self.settings = settings
        self.first = {group: torch.zeros_like(master) for group, master in store.masters.items()}
        self.second = {group: torch.zeros_like(store.masters[group]) for group in store.flats}
        s = settings
        self.rates = {"embedding": s.embedding_rate, "mhc": s.mhc_rate, "small": s.small_rate}
        self.decays = {"embedding": s.embedding_decay, "mhc": 0.0, "small": 0.0}

    @torch.no_grad()
    def update(
        self, grads: dict[str, Tensor], rate: Tensor, first_correction: Tensor, second_correction: Tensor
    ) -> Tensor:
        """Update the masters by one step; return the gradient norm before clipping."""
        norm = torch.stack([grad.float().square().sum() for grad in grads.values()]).sum().sqrt()
        clip = (self.settings.clip / (norm + 1e-6)).clamp(max=1.0)
        for group, grad in grads.items():
            grad = grad.float() * clip
            if group in self.second:
                self._adam(group, grad, rate, first_correction, second_correction)
            else:
                self._muon(group, grad, rate)
        return norm

    def _muon(self, group: str, grad: Tensor, rate: Tensor) -> None:
        master = self.store.masters[group]
        momentum = self.first[group]
        keep = self.settings.muon_momentum
        momentum.lerp_(grad, 1 - keep)
        step = orthogonalise(grad.lerp(momentum, keep))  # Nesterov: look one step ahead
        rate = rate * self.settings.muon_rate
        master.mul_(1 - rate * self.settings.weight_decay)
        master.sub_(step.float() * (rate * 0.2 * max(master.shape[1:]) ** 0.5))

    def _adam(
        self, group: str, grad: Tensor, rate: Tensor, first_correction: Tensor, second_correction: Tensor
    ) -> None:
        master = self.store.masters[group]
        first = self.first[group]
        second = self.second[group]
        first.lerp_(grad, 1 - self.settings.adam_first)
        second.lerp_(grad.square(), 1 - self.settings.adam_second)
        step = (first / first_correction) / ((second / second_correction).sqrt() + ADAM_EPS)
        rate = rate * self.rates[group]
        master.mul_(1 - rate * self.decays[group])
        master.sub_(step * rate)

    def state(self) -> dict[str, Tensor]:
        first = {f"first.{group}": tensor for group, tensor in self.first.items()}
        return first | {f"second.{group}": tensor for group, tensor in self.second.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
