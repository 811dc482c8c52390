"""Speed of training a dictionary on a device, beside a plain PyTorch loop and the time of the one product it needs.

    plain loop   forty lines of PyTorch: TopK by autograd with dense products in bfloat16, float32 weights, fused Adam
    encoder      the product of rows and encoder alone, in the same precision: no trainer can be faster
    KIND         `Trainer` of that kind; `times_plain` is its speed divided by that of the plain loop

Rows are sums of a few random directions with frequencies that fall as one over the rank, so that features fire as
unevenly as in a model. They exist on the device before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from birkhoff.bench.report import Row, check_positive, facts, significant, summary
from birkhoff.bench.timing import synchronize
from birkhoff.sae.train import KINDS, PRODUCTS, Trainer, TrainOptions


@dataclass(frozen=True)
class SaeSetting:
    """Parameters, repeated in every row."""

    features: int = 65_536
    width: int = 16_384
    k: int = 32
    batch_rows: int = 4096
    steps: int = 10
    warm_steps: int = 3
    products: str = "bfloat16"

    def __post_init__(self) -> None:
        check_positive(self, "features", "width", "k", "batch_rows", "steps", "warm_steps")

    def options(self, kind: str) -> TrainOptions:
        total = self.steps + self.warm_steps
        return TrainOptions(
            self.features, k=self.k, kind=kind, steps=100 * total, products=self.products, rate=1e-4
        )


def bench_sae(
    device: torch.device | str, setting: SaeSetting | None = None, kinds: Sequence[str] = KINDS
) -> Iterator[Row]:
    """One row for the plain loop, one for the encoder's product, and one for each kind."""
    setting = setting or SaeSetting()
    device = torch.device(device)
    common = facts() | {"bench": "sae", "device": _device_name(device), **vars(setting)}
    batches = planted_batches(setting, device)
    plain = _rates(PlainLoop(setting, batches[0]).step, batches, setting, device)
    yield common | {"contender": "plain loop", "rows_per_second": summary(plain)}
    product = _rates(_encoder_product(setting, device), batches, setting, device)
    yield common | {"contender": "encoder", "rows_per_second": summary(product)}
    for kind in kinds:
        trainer = Trainer(setting.options(kind), batches[0], device=device)
        rates = _rates(trainer.step, batches, setting, device)
        last = trainer.step(batches[0])
        del trainer
        yield (
            common
            | {
                "contender": kind,
                "rows_per_second": summary(rates),
                "times_plain": significant(summary(rates)["median"] / summary(plain)["median"]),
                "share_of_encoder": significant(summary(rates)["median"] / summary(product)["median"]),
                "features_per_row": significant(last.l0),
                "explained": significant(last.explained),
            }
        )


class PlainLoop:
    """The baseline without this package: a TopK autoencoder by autograd."""

    def __init__(self, setting: SaeSetting, sample: torch.Tensor):
        device, self.k, self.dtype = sample.device, setting.k, PRODUCTS[setting.products]
        decoder = torch.randn(setting.features, setting.width, device=device)
        decoder /= decoder.norm(dim=1, keepdim=True)
        self.encoder = decoder.clone().requires_grad_()
        self.bias = torch.zeros(setting.features, device=device, requires_grad=True)
        self.decoder = decoder.requires_grad_()
        self.centre = sample.float().mean(0).requires_grad_()
        parameters = [self.encoder, self.bias, self.decoder, self.centre]
        self.optimizer = torch.optim.Adam(parameters, lr=1e-4, fused=device.type == "cuda")

    def step(self, rows: torch.Tensor) -> None:
        x = rows.to(self.dtype)
        z = (x - self.centre.to(self.dtype)) @ self.encoder.to(self.dtype).T + self.bias.to(self.dtype)
        values, features = z.topk(self.k, dim=1)
        f = torch.zeros_like(z).scatter(1, features, values.relu())
        loss = (f @ self.decoder.to(self.dtype) + self.centre - x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            self.decoder /= self.decoder.norm(dim=1, keepdim=True)


def _encoder_product(setting: SaeSetting, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    dtype = PRODUCTS[setting.products]
    encoder = torch.randn(setting.features, setting.width, device=device).to(dtype)
    return lambda rows: rows.to(dtype) @ encoder.T


def planted_batches(setting: SaeSetting, device: torch.device, count: int = 4) -> list[torch.Tensor]:
    """Batches of rows [n, width] in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    directions = min(4096, setting.features)
    table = torch.randn(directions, setting.width, generator=generator, device=device).bfloat16()
    chance = (16 / (1 + torch.arange(directions, device=device) / 8)).clamp(max=0.5)
    chance *= min(1.0, setting.k / float(chance.sum()))
    batches = []
    for _ in range(count):
        shape = (setting.batch_rows, directions)
        on = torch.rand(shape, generator=generator, device=device) < chance
        noise = torch.randn(setting.batch_rows, setting.width, generator=generator, device=device)
        batches.append(on.to(table.dtype) @ table + noise.to(table.dtype) * 0.3)
    return batches


def _rates(
    step: Callable[[torch.Tensor], object],
    batches: Sequence[torch.Tensor],
    setting: SaeSetting,
    device: torch.device,
) -> list[float]:
    """Rows per second of each timed step, completed on the device."""
    rates = []
    for index in range(-setting.warm_steps, setting.steps):
        rows = batches[index % len(batches)]
        synchronize(device)
        began = time.perf_counter()
        step(rows)
        synchronize(device)
        if index >= 0:
            rates.append(len(rows) / (time.perf_counter() - began))
    return rates


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
