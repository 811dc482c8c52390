"""Is every site of the GPU path the site of the plain path? Asked of a prompt and of decoding steps, on random models.

Both paths run the same packed model: the plain one unpacks weights and computes in PyTorch, the other reads them as
stored. Every tensor that a hook can show is compared row by row. Where the plain path's scores of two experts are
nearly equal, the other path may choose the other one: that row has *parted*, and is no longer compared from there on.
Of the others nearly all must agree in prompts, where a choice between equal entries of an index may fall the other way
too, which no site shows; in decoding steps, all. Experts that are looked up by token id never differ. Buffers of the
decoding step are NaN before every step, so that what a kernel forgot to write shows.

Rows that attend to a parted one in a later layer are compared as any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from birkhoff.bench.report import significant
from birkhoff.config import V4Config
from birkhoff.decode.gpu import Decoder
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.plan import Key, Plan, SiteRows, Span
from birkhoff.hooks.sites import MLP_OUT, MOE_ROUTER_LOGITS, MOE_TOPK, SITES
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.block import Block
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

Row = dict[str, Any]
Seen = dict[Key, torch.Tensor]
Biases = Sequence[
    torch.Tensor | None
]  # of every layer's router, None where experts are looked up by token id
MAY_DIFFER = {
    "prompt": 0.01,
    "decode": 0.0,
}  # share of rows beyond the tolerance, of those that have not parted
MAY_PART = 0.1  # share of rows that may, and one row more, but never all
MARGIN = (
    0.5  # of the tolerance: how far a score may be from the last chosen one's for its expert to come or go
)
BEHIND_ROUTER = {"logits", MOE_TOPK.name, MLP_OUT.name, *(site.name for site in SITES if site.once)}


def every_site(config: V4Config) -> list[Key]:
    last = config.num_hidden_layers - 1
    return [
        (site.name, layer)
        for site in SITES
        if not site.absent
        for layer in ([last] if site.once else range(config.num_hidden_layers))
    ]


class Taken:
    """A job that takes every row of some sites."""

    after = False

    def __init__(self, keys: Sequence[Key]):
        self.keys = list(keys)
        self.got: dict[Key, list[torch.Tensor]] = {}

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> range:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        self.got.setdefault((rows.hook, rows.layer), []).append(rows.tensor)

    def close(self, finish_reason: str, num_tokens: int) -> None:
        pass


def read_plainly(model: Transformer, batch: Batch, state: State, plain: bool) -> Seen:
    """Every site of one pass. While gradients could be recorded, a model computes with plain twins: none is here."""
    seen: Seen = {}

    def see(site: Any, layer: int, tensor: torch.Tensor) -> None:
        seen[site.name, layer] = tensor.detach().float().cpu()

    with torch.set_grad_enabled(plain):
        hidden, _ = model.run(batch, state, EagerTap(see))
        seen["logits", -1] = model.logits(hidden).detach().float().cpu()
    return seen


def replayed(
    graphs: CudaGraphs, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
) -> Seen:
    """The same sites of one decoding step, captured on the way."""
    jobs = [Taken(every_site(graphs.decoder.config)) for _ in tokens]
    spans = [Span(Plan(jobs=(job,)), row, positions[row], [tokens[row]], 0) for row, job in enumerate(jobs)]
    tap = arm(StepStaging(graphs.decoder.state.device), spans, len(spans))
    assert tap is not None
    wishes = graphs.plan(tap)
    assert wishes is not None, "captures have a fixed shape"
    buffers, _ = graphs._find_plain(len(tokens), max(positions) + 1)
    buffers.poison()
    logits, _ = graphs.step(tokens, positions, slots, tap, wishes)
    tap.deliver()
    seen: Seen = {key: torch.cat([job.got[key][0] for job in jobs]).float() for key in jobs[0].got}
    return seen | {("logits", -1): logits.float().cpu()}


def router_biases(model: Transformer) -> Biases:
    found: list[torch.Tensor | None] = []
    for block in model.layers:
        assert isinstance(block, Block)
        bias = block.ffn.gate.bias
        found.append(None if bias is None else bias.detach().float().cpu())
    return found


def compare(mine: Seen, true: Seen, biases: Biases, tolerance: float, what: Row) -> Iterator[Row]:
    """One row for each site, over all layers; `what["phase"]` says how many rows may differ."""
    assert mine.keys() == true.keys(), sorted(mine.keys() ^ true.keys())
    parted, choices = _choices(mine, true, biases, MARGIN * tolerance)
    rows = len(parted[0])
    most_parted = min(1 + math.ceil(MAY_PART * rows), rows - 1)
    for name in [*(site.name for site in SITES if not site.absent), "logits"]:
        layers = [key for key in true if key[0] == name]
        gone = [parted[_parts_before(*key, len(biases))] for key in layers]
        errors = [_errors(name, mine[key], true[key]) for key in layers]
        kept = torch.cat([error[~away] for error, away in zip(errors, gone)])
        kept = kept if len(kept) else torch.tensor([torch.nan])
        beyond = (kept > tolerance).float().mean().item()
        finite = all(bool(error.isfinite().all()) for error in errors)  # also where a row has parted
        few_parted = all(int(away.sum()) <= most_parted for away in gone)
        row = what | {
            "kind": "site",
            "site": name,
            "layers": len(layers),
            "rows": rows * len(layers),
            "error_median": significant(kept.median().item()),
            "error_most": significant(kept.max().item()),
            "share_beyond": significant(beyond),
            "tolerance": tolerance,
            "share_parted": significant(torch.cat(gone).float().mean().item()),
            "passed": finite and beyond <= MAY_DIFFER[what["phase"]] and few_parted,
        }
        if name == MOE_TOPK.name:
            row |= choices | {"passed": row["passed"] and choices["wide_choices"] == 0}
        yield row


def _parts_before(name: str, layer: int, layers: int) -> int:
    """How many layers' choices lie before a site."""
    return (layers if layer < 0 else layer + 1) if name in BEHIND_ROUTER else layer


def _choices(mine: Seen, true: Seen, biases: Biases, margin: float) -> tuple[list[torch.Tensor], Row]:
    """Which rows have parted before each layer, and behind the last; and how near to equal their choices were."""
    parted = [torch.zeros(len(true[MOE_TOPK.name, 0]), dtype=torch.bool)]
    most = 0.0
    wide = 0
    for layer, bias in enumerate(biases):
        logits = true[MOE_ROUTER_LOGITS.name, layer]
        here, there = (_members(seen[MOE_TOPK.name, layer][..., 0], logits.shape[1]) for seen in (mine, true))
        differs = (here != there).any(-1)
        if bias is None:
            wide += int(differs.sum())
        else:
            scores = F.softplus(logits).sqrt() + bias
            last = scores.topk(true[MOE_TOPK.name, layer].shape[1]).values[:, -1:]
            far = torch.where(here != there, (scores - last).abs(), 0.0).amax(-1)
            near = (far <= margin) & (here.sum(-1) == there.sum(-1))  # as many as there should be, none twice
            first = differs & ~parted[-1]  # a row that has parted before has other scores by right
            wide += int((first & ~near).sum())
            most = max(most, far[first].max().item() if first.any() else 0.0)
        parted.append(parted[-1] | differs)
    return parted, {"margin_most": significant(most), "margin": margin, "wide_choices": wide}


def _members(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """[n, k] -> [n, E]: who was chosen. What is no expert's number chooses nobody."""
    return (ids.unsqueeze(-1) == torch.arange(experts)).any(1)


def _errors(name: str, mine: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """How far each row is off, relative to its size; of choices, their weights."""
    if name == MOE_TOPK.name:
        mine, true = (rows[..., 1].gather(1, rows[..., 0].argsort(-1)) for rows in (mine, true))
    mine, true = mine.flatten(1), true.flatten(1)
    return (mine - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-6)


def compare_sites(
    model: Transformer,
    device: torch.device,
    lengths: Sequence[int],
    steps: int,
    tolerance: float,
    fast: bool | None,
) -> Iterator[Row]:
    """Prompts of `lengths` tokens, then `steps` tokens behind each, both ways; `model` has the kernels of a GPU."""
    config = model.config
    rows = len(lengths)
    biases = router_biases(model)
    tokens = torch.randint(config.vocab_size, (rows, max(lengths) + steps))
    states = [
        State.contiguous(config, rows + 1, max(lengths) + steps, device=device, dtype=model.numerics.dtype)
        for _ in range(2)
    ]
    about = {
        "hidden": config.hidden_size,
        "layers_in_all": config.num_hidden_layers,
        "dtype": dtype_name(model.numerics.dtype),
    }
    for slot, length in enumerate(lengths):
        batch = Batch.of([SequenceChunk(slot, 0, tokens[slot, :length])], device)
        true = read_plainly(model, batch, states[0], plain=True)
        mine = read_plainly(model, batch, states[1], plain=False)
        yield from compare(mine, true, biases, tolerance, about | {"phase": "prompt", "tokens": length})
    with torch.no_grad():
        for slot, length in enumerate(lengths):  # both decode behind the same past
            model.run(Batch.of([SequenceChunk(slot, 0, tokens[slot, :length])], device), states[1], NoTap())
            states[1].restore(slot, states[0].save(slot, length))
        for layer, other in zip(states[1].layers, states[0].layers):
            for kind, pages in other.pages.items():
                layer.pages[kind].copy_(pages)
        graphs = CudaGraphs(
            Decoder(model, states[1], fast=fast), scratch_slot=rows, max_context=max(lengths) + steps
        )
    for step in range(steps):
        at = [length + step for length in lengths]
        chosen = [int(tokens[slot, at[slot]]) for slot in range(rows)]
        pieces = [SequenceChunk(slot, at[slot], torch.tensor([chosen[slot]])) for slot in range(rows)]
        true = read_plainly(model, Batch.of(pieces, device), states[0], plain=True)
        with torch.no_grad():
            mine = replayed(graphs, chosen, at, list(range(rows)))
        yield from compare(mine, true, biases, tolerance, about | {"phase": "decode", "step": step})
