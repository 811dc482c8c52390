"""Forward passes that record every site of every layer and of the MTP block, and the logits.

A `ForwardRun` is the input of a comparison, whether it comes from our model, the `transformers` oracle, or files of
another implementation. Our model runs with the reference kernels. A `Fault` builds the same model with one deliberate
mistake, through the model's arguments: config, kernels or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from birkhoff.api.run_plan import free_bytes_of
from birkhoff.byte_size import format_bytes
from birkhoff.config import V4Config
from birkhoff.errors import CapacityError, OptionError
from birkhoff.hooks.sites import INDEX_SCORES, Site
from birkhoff.hooks.tap import EagerTap, ReadingTap, RowReader
from birkhoff.kernels.select import KernelSet, select
from birkhoff.model.batch import Batch
from birkhoff.model.linear import Numerics
from birkhoff.model.state import Fresh
from birkhoff.model.transformer import Transformer
from birkhoff.weights.checkpoint import Checkpoint
from birkhoff.weights.weight_loader import load_into

Sites = dict[tuple[str, int], torch.Tensor]
# Model, trunk streams [T, m, d] and token ids [T] -> input of the MTP block [T - 1, m, d].
MtpInput = Callable[[Transformer, torch.Tensor, torch.Tensor], torch.Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MTP = -1  # the layer of the sites of the MTP block


@dataclass(frozen=True)
class ForwardRun:
    """Rows are tokens: sites [T, ...] and logits [T, vocab], float32 on the CPU.

    Of the ragged sites only `index_scores` is recorded, as [T, T // 4] with zeros for unfinished blocks. `mtp` is the
    run of the MTP block: its `tokens` are the next tokens, those at 1 to T - 1, and row t is computed from the trunk's
    streams at t and the token at t + 1. Its sites have the layer `MTP`."""

    label: str
    tokens: tuple[int, ...]
    sites: Sites = field(repr=False)
    logits: torch.Tensor | None = field(repr=False)
    mtp: ForwardRun | None = field(default=None, repr=False)

    def leading(self, rows: int) -> ForwardRun:
        """The first rows, for runs without `index_scores`."""
        logits = None if self.logits is None else self.logits[:rows]
        sites = {key: x[:rows] for key, x in self.sites.items()}
        return ForwardRun(self.label, self.tokens[:rows], sites, logits)


def site_label(site: str, layer: int) -> str:
    """A site in a report: `mlp_out[3]`, of the MTP block `mtp.mlp_out`."""
    return f"mtp.{site}" if layer == MTP else f"{site}[{layer}]"


def layer_label(layer: int) -> str:
    """A layer in a message: `layer 3`, or `the MTP block`."""
    return "the MTP block" if layer == MTP else f"layer {layer}"


def mtp_config(config: V4Config) -> V4Config:
    """The MTP block's layer as a model of its own: one sliding layer, routed by score."""
    return replace(
        config, num_hidden_layers=1, compress_ratios=(0,), num_hash_layers=0, num_nextn_predict_layers=0
    )


def next_token_input(model: Transformer, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The input of the MTP block: the streams at t joined with the embedding of the token at t + 1."""
    assert model.mtp is not None
    return model.mtp.join_input(streams[:-1], model.embedding(tokens[1:]))


@dataclass(frozen=True)
class Fault:
    """A known mistake of V4 ports, and the changes that reproduce it."""

    name: str
    config: Callable[[V4Config], V4Config] = lambda config: config
    kernels: Callable[[KernelSet], KernelSet] = lambda kernels: kernels
    weights: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda name, tensor: None
    mtp_input: MtpInput = next_token_input


def build(
    checkpoint: Checkpoint, dtype: str = "float32", numerics: str = "plain", device: str = "cpu"
) -> Transformer:
    """Build a model with the reference kernels and load the checkpoint into it."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}.")
    if numerics not in ("plain", "released"):
        raise OptionError(f"numerics is {numerics!r}, expected plain or released.")
    numeric_options = Numerics(DTYPES[dtype], numerics == "released", select("reference"))
    with torch.device("meta"):
        model = Transformer(checkpoint.config, numeric_options)
    _check_memory(model, checkpoint, dtype, device)
    model = model.allocate(device).eval()
    others = range(1, checkpoint.config.num_nextn_predict_layers)  # the model has one MTP block
    load_into(model.destinations(), checkpoint, skip=tuple(f"mtp.{index}." for index in others))
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


def with_fault(model: Transformer, fault: Fault, mtp: bool = False) -> Transformer:
    """Build the same model with one mistake, with or without its MTP block; weights are copied from memory."""
    numeric_options = Numerics(
        model.numerics.dtype, model.numerics.released, fault.kernels(model.numerics.kernels)
    )
    device = next(model.parameters()).device
    with torch.device("meta"):
        faulty = Transformer(fault.config(model.config), numeric_options, mtp=mtp)
    faulty = faulty.allocate(device).eval()
    sources = [source for source in model.destinations() if mtp or not source.name.startswith("mtp.")]
    with torch.no_grad():
        for target, source in zip(faulty.destinations(), sources, strict=True):
            changed = fault.weights(source.name, source.tensor)
            target.tensor.copy_(source.tensor if changed is None else changed)
    return faulty


def run_model(model: Transformer, tokens: Sequence[int], label: str) -> ForwardRun:
    """Run a model over one sequence, recording every site; of a model with an MTP block also that."""
    sites: Sites = {}

    def keep_scores(layer: int, read: RowReader) -> None:
        scores = torch.zeros(len(tokens), len(tokens) // 4)
        for row, blocks in zip(scores, read(range(len(tokens)))):
            row[: len(blocks)] = blocks[:, 1].cpu()
        if scores.numel():
            sites[INDEX_SCORES.name, layer] = scores

    tap = ReadingTap(_recording(sites), INDEX_SCORES, keep_scores)
    ids = torch.tensor(list(tokens), device=model.device)
    with torch.no_grad():
        hidden, streams = model.run(Batch.whole(ids), Fresh(), tap)
        logits = model.logits(hidden).float().cpu()
    mtp = run_mtp(model, streams, tokens, label) if model.mtp is not None and len(tokens) > 1 else None
    return ForwardRun(label, tuple(tokens), sites, logits, mtp)


def run_layer(
    model: Transformer, layer: int, streams: torch.Tensor, tokens: Sequence[int], label: str
) -> ForwardRun:
    """Run one layer over the streams [T, m, d] that enter it, recording its sites and the streams that leave it."""
    sites: Sites = {}
    batch = Batch.whole(torch.tensor(list(tokens), device=model.device))
    phases = model.rope.step(batch.positions)
    with torch.no_grad():
        entering = streams.to(model.device, model.dtype)
        leaving = model.blocks()[layer](entering, batch, phases, Fresh(), _recording(sites).at(layer))
    last = layer + 1 == model.config.num_hidden_layers
    sites[("mhc_streams_final", layer) if last else ("mhc_streams_pre_attn", layer + 1)] = (
        leaving.float().cpu()
    )
    return ForwardRun(label, tuple(tokens), sites, None)


def run_mtp(
    model: Transformer,
    streams: torch.Tensor,
    tokens: Sequence[int],
    label: str,
    mtp_input: MtpInput = next_token_input,
) -> ForwardRun:
    """Run the MTP block over the trunk's streams [T, m, d] of one sequence, recording every site."""
    assert model.mtp is not None
    sites: Sites = {}
    ids = torch.tensor(list(tokens), device=model.device)
    with torch.no_grad():
        joined = mtp_input(model, streams.to(model.device, model.dtype), ids)
        hidden, _ = model.mtp.run(joined, Batch.whole(ids[1:]), Fresh(), _recording(sites).at(MTP))
        logits = model.logits(hidden).float().cpu()
    return ForwardRun(label, tuple(tokens[1:]), sites, logits)


def _recording(sites: Sites) -> EagerTap:
    def keep(site: Site, layer: int, x: torch.Tensor) -> None:
        sites[site.name, layer] = x.detach().float().cpu()

    return EagerTap(keep)


def finished_blocks(tokens: int) -> torch.Tensor:
    """Return which blocks of 4 tokens are finished at each token, [tokens, tokens // 4] bool."""
    return torch.arange(tokens // 4) < (torch.arange(tokens).unsqueeze(-1) + 1) // 4


def random_tokens(vocab_size: int, count: int, seed: int = 0) -> list[int]:
    """Return deterministic pseudo-random token ids."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()
