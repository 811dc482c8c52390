"""One forward pass with everything kept: every site of every layer, and the logits.

A `Run` is what comparisons compare, wherever it came from: our model over a checkpoint, the `transformers` oracle, or
files that another implementation wrote. Ours runs with the plain kernels on chosen numerics. A `Fault` builds the same
model with one deliberate mistake in it, through the arguments the model has anyway: another config, another kernel,
other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from birkhoff.config import V4Config
from birkhoff.errors import OptionError
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import EagerTap
from birkhoff.kernels.select import KernelSet, select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.weight_loader import load_into

Sites = dict[tuple[str, int], torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Run:
    """Rows are tokens: sites [T, ...] and logits [T, vocab], float32 on the CPU."""

    label: str
    tokens: tuple[int, ...]
    sites: Sites = field(repr=False)
    logits: torch.Tensor | None = field(repr=False)


@dataclass(frozen=True)
class Fault:
    """A mistake that ports of V4 make, and how to make it on purpose."""

    name: str
    config: Callable[[V4Config], V4Config] = lambda config: config
    kernels: Callable[[KernelSet], KernelSet] = lambda kernels: kernels
    weights: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, tensor: None


def run_checkpoint(
    checkpoint: Checkpoint,
    tokens: Sequence[int],
    *,
    dtype: str = "float32",
    numerics: str = "plain",
    device: str = "cpu",
    label: str | None = None,
) -> Run:
    """Run a checkpoint over one sequence with the plain kernels."""
    return run_model(build(checkpoint, dtype, numerics, device), tokens, label or checkpoint.path.name)


def build(
    checkpoint: Checkpoint, dtype: str = "float32", numerics: str = "plain", device: str = "cpu"
) -> Transformer:
    """The trunk of a checkpoint, filled, with the plain kernels."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    if numerics not in ("plain", "released"):
        raise OptionError(f"numerics is {numerics!r}, expected plain or released.")
    how = Numerics(DTYPES[dtype], numerics == "released", select("reference"))
    with torch.device("meta"):
        model = Transformer(checkpoint.config, how, mtp=False)
    model = model.to_empty(device=device).eval()
    load_into(model.destinations(), checkpoint, skip=("mtp.",))
    return model


def with_fault(model: Transformer, fault: Fault) -> Transformer:
    """The same model with one mistake in it; the numbers come from memory, not from files."""
    how = Numerics(model.numerics.dtype, model.numerics.released, fault.kernels(model.numerics.kernels))
    device = next(model.parameters()).device
    with torch.device("meta"):
        faulty = Transformer(fault.config(model.config), how, mtp=False)
    faulty = faulty.to_empty(device=device).eval()
    with torch.no_grad():
        for place, right in zip(faulty.destinations(), model.destinations(), strict=True):
            changed = fault.weights(right.name, right.tensor)
            place.tensor.copy_(right.tensor if changed is None else changed)
    return faulty


def run_model(model: Transformer, tokens: Sequence[int], label: str) -> Run:
    sites: Sites = {}

    def keep(site: Site, layer: int, x: torch.Tensor) -> None:
        sites[site.name, layer] = x.detach().float().cpu()

    device = next(model.parameters()).device
    with torch.no_grad():
        logits = model(torch.tensor(list(tokens), device=device), EagerTap(keep)).float().cpu()
    return Run(label, tuple(tokens), sites, logits)


def random_tokens(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    """Ids for a comparison that needs no text; the same for everybody."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
