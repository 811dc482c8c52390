"""Forward passes that record every site of every layer, and the logits.

A `ForwardRun` is the input of a comparison, whether it comes from our model, the `transformers` oracle, or files of
another implementation. Our model runs with the reference kernels. A `Fault` builds the same model with one deliberate
mistake, through the model's arguments: config, kernels or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from birkhoff.api.run_plan import free_bytes_of
from birkhoff.byte_size import format_bytes
from birkhoff.config import V4Config
from birkhoff.errors import CapacityError, OptionError
from birkhoff.hooks.sites import INDEX_SCORES, Site
from birkhoff.hooks.tap import EagerTap, ReadingTap, RowReader
from birkhoff.kernels.select import KernelSet, select
from birkhoff.model.linear import Numerics
from birkhoff.model.transformer import Transformer
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.weight_loader import load_into

Sites = dict[tuple[str, int], torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ForwardRun:
    """Rows are tokens: sites [T, ...] and logits [T, vocab], float32 on the CPU.

    Of the ragged sites only `index_scores` is recorded, as [T, T // 4] with zeros for unfinished blocks."""

    label: str
    tokens: tuple[int, ...]
    sites: Sites = field(repr=False)
    logits: torch.Tensor | None = field(repr=False)


@dataclass(frozen=True)
class Fault:
    """A known mistake of V4 ports, and the changes that reproduce it."""

    name: str
    config: Callable[[V4Config], V4Config] = lambda config: config
    kernels: Callable[[KernelSet], KernelSet] = lambda kernels: kernels
    weights: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, tensor: None


def build(
    checkpoint: Checkpoint, dtype: str = "float32", numerics: str = "plain", device: str = "cpu"
) -> Transformer:
    """Build a model with the reference kernels and load the checkpoint's trunk into it."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    if numerics not in ("plain", "released"):
        raise OptionError(f"numerics is {numerics!r}, expected plain or released.")
    numeric_options = Numerics(DTYPES[dtype], numerics == "released", select("reference"))
    with torch.device("meta"):
        model = Transformer(checkpoint.config, numeric_options, mtp=False)
    _check_memory(model, checkpoint, dtype, device)
    model = model.allocate(device).eval()
    load_into(model.destinations(), checkpoint, skip=("mtp.",))
    return model


def _check_memory(model: Transformer, checkpoint: Checkpoint, dtype: str, device: str) -> None:
    """Refuse a model that does not fit: the reference kernels run unpacked weights."""
    needed = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    free = free_bytes_of(torch.device(device))
    if needed > free:
        raise CapacityError(
            f"{checkpoint.path} has {format_bytes(needed)} of weights in {dtype}, which the reference kernels run "
            f"unpacked, and {format_bytes(free)} are free on {device}. Compare a checkpoint with fewer layers "
            "and experts: birkhoff synth DIR --like flash --layers 4 --routed-experts 8."
        )


def with_fault(model: Transformer, fault: Fault) -> Transformer:
    """Build the same model with one mistake; weights are copied from memory."""
    numeric_options = Numerics(
        model.numerics.dtype, model.numerics.released, fault.kernels(model.numerics.kernels)
    )
    device = next(model.parameters()).device
    with torch.device("meta"):
        faulty = Transformer(fault.config(model.config), numeric_options, mtp=False)
    faulty = faulty.allocate(device).eval()
    with torch.no_grad():
        for target, source in zip(faulty.destinations(), model.destinations(), strict=True):
            changed = fault.weights(source.name, source.tensor)
            target.tensor.copy_(source.tensor if changed is None else changed)
    return faulty


def run_model(model: Transformer, tokens: Sequence[int], label: str) -> ForwardRun:
    """Run a model over one sequence, recording every site."""
    sites: Sites = {}

    def keep(site: Site, layer: int, x: torch.Tensor) -> None:
        sites[site.name, layer] = x.detach().float().cpu()

    def keep_scores(layer: int, read: RowReader) -> None:
        scores = torch.zeros(len(tokens), len(tokens) // 4)
        for row, blocks in zip(scores, read(range(len(tokens)))):
            row[: len(blocks)] = blocks[:, 1].cpu()
        if scores.numel():
            sites[INDEX_SCORES.name, layer] = scores

    device = next(model.parameters()).device
    tap = ReadingTap(EagerTap(keep), INDEX_SCORES, keep_scores)
    with torch.no_grad():
        logits = model(torch.tensor(list(tokens), device=device), tap).float().cpu()
    return ForwardRun(label, tuple(tokens), sites, logits)


def finished_blocks(tokens: int) -> torch.Tensor:
    """Return which blocks of 4 tokens are finished at each token, [tokens, tokens // 4] bool."""
    return torch.arange(tokens // 4) < (torch.arange(tokens).unsqueeze(-1) + 1) // 4


def random_tokens(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    """Return deterministic pseudo-random token ids."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
