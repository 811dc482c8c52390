"""One training step, run eagerly or captured once in a CUDA graph and replayed.

A step creates leaves, runs trunk and MTP, differentiates, updates masters and router biases, and adds to running sums.
It reads its batch and `Moment` from fixed buffers and never synchronises, so the whole step including the optimiser is
one graph: at 32 rows, launching about a thousand small kernels would take longer than the work. If capture fails, the
step stays eager and logs it; the results are the same.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from training.data import ANSWER, REQUEST
from training.forward import Forward, Knobs
from training.optim import Optimiser
from training.parameters import Store, bias_names
from training.settings import Moment, Settings

METRICS = ("loss", "mtp_loss", "index_loss", "balance_loss", "grad_norm", "steps")


class Prepared(NamedTuple):
    """A batch on the device: next tokens and their weights for the trunk, and the following ones for MTP."""

    ids: Tensor
    valid: Tensor
    next_ids: Tensor
    weight: Tensor
    after_ids: Tensor
    after_weight: Tensor


def prepare(ids: Tensor, roles: Tensor, pad: int, request_weight: float) -> Prepared:
    """Shift ids and roles [b, t]; positions past the row have weight 0."""
    weight = torch.where(roles == ANSWER, 1.0, torch.where(roles == REQUEST, request_weight, 0.0))

    def shift(x: Tensor, by: int, fill: float) -> Tensor:
        return torch.cat((x[:, by:], x.new_full((x.shape[0], by), fill)), 1)

    return Prepared(
        ids, ids != pad, shift(ids, 1, pad), shift(weight, 1, 0.0), shift(ids, 2, pad), shift(weight, 2, 0.0)
    )


class Step:
    """The step of one run on one device."""

    def __init__(self, forward: Forward, store: Store, optimiser: Optimiser, settings: Settings, pad: int):
        self.forward = forward
        self.store = store
        self.optimiser = optimiser
        self.settings = settings
        self.pad = pad
        self.device = store.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.stream_dtype = (
            torch.float32 if settings.stream_float32 or self.dtype == torch.float32 else self.dtype
        )
        shape = (settings.batch, settings.length)
        self.ids = torch.zeros(shape, dtype=torch.long, device=self.device)
        self.roles = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        self.moment = torch.zeros(len(Moment._fields), device=self.device)
        self._inputs = (self.ids, self.roles, self.moment)
        self.sums = torch.zeros(len(METRICS), device=self.device)
        self.shares = torch.zeros(
            len(bias_names(store.config)) + store.config.num_hash_layers,
            store.config.n_routed_experts,
            device=self.device,
        )
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._pinned: list[tuple[Tensor, Tensor, Tensor, torch.cuda.Event]] = []
        self._turn = 0
        self.graph_error: str | None = None

    def load(self, ids: np.ndarray, roles: np.ndarray, moment: Moment) -> None:
        """Copy a batch and its moment to the device, queued after running work."""
        if self.device.type != "cuda":
            self.ids.copy_(torch.from_numpy(ids.astype(np.int64)))
            self.roles.copy_(torch.from_numpy(roles))
            self.moment.copy_(torch.tensor(moment))
            return
        if not self._pinned:
            for _ in range(4):  # a ring, so that a buffer is not overwritten during its copy
                ids_host, roles_host, moment_host = (torch.zeros_like(x, device="cpu") for x in self._inputs)
                pinned = (ids_host.pin_memory(), roles_host.pin_memory(), moment_host.pin_memory())
                self._pinned.append((*pinned, torch.cuda.Event()))
        host_ids, host_roles, host_moment, copied = self._pinned[self._turn % len(self._pinned)]
        self._turn += 1
        copied.synchronize()
        host_ids.copy_(torch.from_numpy(ids.astype(np.int64)))
        host_roles.copy_(torch.from_numpy(roles))
        host_moment.copy_(torch.tensor(moment))
        self.ids.copy_(host_ids, non_blocking=True)
        self.roles.copy_(host_roles, non_blocking=True)
        self.moment.copy_(host_moment, non_blocking=True)
        copied.record()

    def run(self, rounded: bool = False) -> None:
        """Run the step on the loaded batch."""
        if rounded in self._graphs:
            self._graphs[rounded].replay()
        else:
            self._once(rounded)

    def record(self, rounded: bool = False) -> bool:
        """Capture the step in a graph without running it; return whether a graph exists.

        The step must have run eagerly before: compilation, library workspaces and autotuning cannot be captured.
        """
        if self.device.type != "cuda":
            return False
        self.forget()
        try:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._once(rounded)
            self._graphs[rounded] = graph
        except Exception as error:  # continue eagerly, which is slower
            self.graph_error = f"{type(error).__name__}: {error}"
            print(f"no CUDA graph, running eagerly: {self.graph_error}", file=sys.stderr, flush=True)
            torch.cuda.synchronize()
            return False
        return True

    def forget(self) -> None:
        """Drop captured graphs and their memory."""
        if self._graphs:
            torch.cuda.synchronize()
            self._graphs.clear()
            torch.cuda.empty_cache()

    def read(self) -> dict[str, float]:
        """Return means since the last call (synchronises), and the expert imbalance of the last step."""
        values = dict(zip(METRICS, self.sums.tolist()))
        self.sums.zero_()
        steps = max(values.pop("steps"), 1.0)
        busiest = (self.shares.max(-1).values * self.shares.shape[-1]).tolist()
        means = {name: value / steps for name, value in values.items()}
        return means | {"busiest_expert": max(busiest)}

    def _once(self, rounded: bool) -> None:
        config, settings = self.store.config, self.settings
        now = dict(zip(Moment._fields, self.moment.unbind()))
        batch = prepare(self.ids, self.roles, self.pad, settings.request_weight)
        leaves = self.store.leaves(self.dtype, rounded)
        weights = self.store.named(leaves)
        knobs = Knobs(now["dropout"], now["dense"])
        trunk = self.forward.trunk(weights, batch.ids, batch.valid, knobs, self.stream_dtype)
        loads = list(trunk.loads)
        text = self.forward.losses(trunk.hidden, weights, batch.next_ids)
        loss = (text * batch.weight).sum() / batch.weight.sum().clamp_min(1)
        total, mtp_loss = loss, torch.zeros_like(loss)
        if config.num_nextn_predict_layers:
            drafted, load = self.forward.mtp(weights, trunk.streams, batch.next_ids, batch.valid, knobs)
            loads.append(load)
            ahead = self.forward.losses(drafted, weights, batch.after_ids)
            mtp_loss = (ahead * batch.after_weight).sum() / batch.after_weight.sum().clamp_min(1)
            total = total + now["mtp_weight"] * mtp_loss
        index_loss = torch.stack(trunk.index_losses).mean() if trunk.index_losses else torch.zeros_like(loss)
        balance = torch.stack([load.loss for load in loads]).mean()
        total = total + settings.index_weight * index_loss + settings.balance_weight * len(loads) * balance
        grads = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()))))
        corrections = (now["adam_first_correction"], now["adam_second_correction"])
        norm = self.optimiser.update(grads, now["rate"], *corrections)
        with torch.no_grad():
            shares = torch.stack([load.share for load in loads])
            self.shares.copy_(shares)
            even = 1 / config.n_routed_experts
            for bias, share in zip(self.store.biases.values(), shares[config.num_hash_layers :]):
                bias.add_(now["bias_rate"] * torch.sign(even - share))
            self.sums.add_(
                torch.stack([loss, mtp_loss, index_loss, balance, norm, torch.ones_like(loss)]).detach()
            )
