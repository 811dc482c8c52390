"""Whether every site of the GPU path equals that of the reference path, in prefill and in decode steps, on random
models.

Both paths run the same packed model: the reference dequantises weights and computes in PyTorch, the kernels read
them as stored. Every tensor that a hook can show is compared row by row. Where the scores of two experts are nearly
equal in the reference, the other path may select the other one: that row has *parted* and is not compared from there
on. Of the remaining rows nearly all must agree in prefill, where a near tie between entries of an index, which no
site shows, may be resolved differently too; in decode steps all must agree. Hash-routed experts never differ. The
buffers of a decode step are filled with NaN before every step, so that values a kernel does not write are detected.

Rows that attend to a parted row in a later layer are compared like any other.

With released numerics a last bit decides how a value is rounded to FP8, so that two right paths drift apart within a
layer. They are compared *stage by stage*: the reference path is given the value that the kernels computed at every site
that can be edited, after its own was recorded, so that each site differs by what one stage does to equal inputs, and no
row parts. Index keys and queries are rounded to FP4 inside a stage, so that the indexer may select other entries at
near ties: its scores are compared like a site, with `FP4_ROUNDING` times the tolerance, and attention over other
entries may have `SWAPPED` times the error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from birkhoff.bench.report import Row, significant
from birkhoff.config import V4Config
from birkhoff.decode.gpu import Decoder
from birkhoff.dtype_names import dtype_name
from birkhoff.engine.cuda_graphs import CudaGraphs
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.plan import Key, Plan, SiteRows, Span
from birkhoff.hooks.sites import (
    ATTN_HEAD_OUT,
    INDEX_SCORES,
    MLP_OUT,
    MOE_ROUTER_LOGITS,
    MOE_TOPK,
    SITES,
    Site,
)
from birkhoff.hooks.tap import EagerTap, Edit, NoTap, RowReader, Seen
from birkhoff.kernels.index.reference import topk_mask
from birkhoff.model.batch import Batch, SequenceChunk
from birkhoff.model.block import Block
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

SiteValues = dict[Key, torch.Tensor]
RouterBiases = Sequence[torch.Tensor | None]  # by layer; None where experts are hash-routed
MAX_BEYOND = {"prompt": 0.01, "decode": 0.0}  # share of rows that have not parted but exceed the tolerance
MAX_PARTED = 0.1  # share of rows, plus one row, but never all
MARGIN = 0.5  # of the tolerance: distance from the last selected score within which a selection is a near tie
FP4_ROUNDING = 2  # times the tolerance, for scores of the indexer with released numerics
SWAPPED = 4  # times the tolerance, for a row of attention over other entries
AFTER_ROUTER = {"logits", MOE_TOPK.name, MLP_OUT.name, *(site.name for site in SITES if site.once)}


def every_site(config: V4Config) -> list[Key]:
    last = config.num_hidden_layers - 1
    return [
        (site.name, layer)
        for site in SITES
        if not site.absent and not site.ragged
        for layer in ([last] if site.once else range(config.num_hidden_layers))
    ]


class CaptureAll:
    """A capture job that takes every row of some sites."""

    after = False

    def __init__(self, keys: Sequence[Key]):
        self.keys = list(keys)
        self.rows: dict[Key, list[torch.Tensor]] = {}

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> range:
        return range(len(token_ids))

    def open(self) -> None:
        pass

    def deliver(self, rows: SiteRows) -> None:
        self.rows.setdefault((rows.hook, rows.layer), []).append(rows.tensor)

    def close(self, finish_reason: str, num_tokens: int) -> None:
        pass


class _IndexTap(EagerTap):
    """Also records the indexer's scores of the given rows, as [n, entries] with zeros where there are none."""

    ragged = True

    def __init__(
        self,
        sites: SiteValues,
        shape: tuple[int, int],
        rows: range,
        seen: Seen,
        edit: Edit | None,
        layer: int = -1,
    ):
        super().__init__(seen, edit, layer=layer)
        self._again = partial(_IndexTap, sites, shape, rows, seen, edit)
        self._sites, self._shape, self._rows = sites, shape, rows

    def at(self, layer: int) -> EagerTap:
        return self._again(layer)

    def read(self, site: Site, before: RowReader, after: RowReader | None = None) -> None:
        if site is INDEX_SCORES:
            scores = torch.zeros(self._shape)
            for row, found in zip(self._rows, before(self._rows)):
                scores[row, : len(found)] = found[:, 1].detach().float().cpu()
            self._sites[site.name, self.layer] = scores


def run_eager(
    model: Transformer, batch: Batch, state: State, plain: bool, given: SiteValues | None = None
) -> SiteValues:
    """The values of every site in one eager pass; `plain` enables gradients, which selects the reference kernels. With
    `given` values the pass goes on with these, stage by stage. Of a prompt that begins here, long enough for the
    indexer to select, its scores too."""
    sites: SiteValues = {}
    length = len(batch.chunks[0].token_ids)
    selecting = range(4 * (model.config.index_topk + 1) - 1, length)

    def replace(site: Any, layer: int, tensor: torch.Tensor) -> torch.Tensor | None:
        value = None if given is None else given.get((site.name, layer))
        return None if value is None else value.to(tensor).view_as(tensor)

    def record(site: Any, layer: int, tensor: torch.Tensor) -> None:
        sites[site.name, layer] = tensor.detach().float().cpu()

    tap = EagerTap(record, None if given is None else replace)
    if selecting and len(batch.chunks) == 1:
        tap = _IndexTap(sites, (length, length // 4), selecting, record, None if given is None else replace)
    with torch.set_grad_enabled(plain):
        hidden, _ = model.run(batch, state, tap)
        sites["logits", -1] = model.logits(hidden).detach().float().cpu()
    return sites


def run_graph_step(
    graphs: CudaGraphs, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]
) -> SiteValues:
    """The values of every site in one CUDA-graph decode step, by capture."""
    jobs = [CaptureAll(every_site(graphs.decoder.config)) for _ in tokens]
    spans = [Span(Plan(jobs=(job,)), row, positions[row], [tokens[row]], 0) for row, job in enumerate(jobs)]
    tap = arm(StepStaging(graphs.decoder.state.device), spans, len(spans))
    assert tap is not None
    graph_plan = graphs.plan(tap)
    assert graph_plan is not None, "captures have a fixed shape"
    buffers, _ = graphs._find_plain(len(tokens), max(positions) + 1)
    buffers.poison()
    logits, _ = graphs.step(tokens, positions, slots, tap, graph_plan)
    tap.deliver()
    sites: SiteValues = {key: torch.cat([job.rows[key][0] for job in jobs]).float() for key in jobs[0].rows}
    return sites | {("logits", -1): logits.float().cpu()}


def router_biases(model: Transformer) -> RouterBiases:
    found_biases: list[torch.Tensor | None] = []
    for block in model.layers:
        assert isinstance(block, Block)
        bias = block.ffn.gate.bias
        found_biases.append(None if bias is None else bias.detach().float().cpu())
    return found_biases


def compare(
    actual: SiteValues,
    reference: SiteValues,
    biases: RouterBiases,
    tolerance: float,
    labels: Row,
    topk: int,
    by_stage: bool = False,
) -> Iterator[Row]:
    """One row per site, over all layers; `labels["phase"]` determines how many rows may differ. The indexer selects
    `topk` entries. `by_stage`: the reference was given the actual values, so that a row with another choice of experts
    is compared again after it."""
    assert actual.keys() == reference.keys(), sorted(actual.keys() ^ reference.keys())
    parted, choices = _choices(actual, reference, biases, MARGIN * tolerance, by_stage)
    rows = len(parted[0])
    most_parted = min(1 + math.ceil(MAX_PARTED * rows), rows - 1)
    scored = {layer for name, layer in reference if name == INDEX_SCORES.name}
    for name in [
        *(site.name for site in SITES if not site.absent and not site.ragged),
        *([INDEX_SCORES.name] if scored else []),
        "logits",
    ]:
        layers = [key for key in reference if key[0] == name]
        swapped_ok = True
        if by_stage and name == ATTN_HEAD_OUT.name:
            parted_layers = [
                _other_entries(actual, reference, layer, topk) if layer in scored else parted[0]
                for _, layer in layers
            ]
            swapped_ok = all(
                bool((_errors(name, actual[key], reference[key])[others] <= SWAPPED * tolerance).all())
                for key, others in zip(layers, parted_layers)
            )
        elif by_stage:
            parted_layers = [parted[key[1] + 1 if name == MOE_TOPK.name else 0] for key in layers]
        else:
            parted_layers = [parted[_routers_before(*key, len(biases))] for key in layers]
        errors = [_errors(name, actual[key], reference[key]) for key in layers]
        compared = torch.cat([error[~parted_rows] for error, parted_rows in zip(errors, parted_layers)])
        compared = compared if len(compared) else torch.tensor([torch.nan])
        allowed = tolerance * (FP4_ROUNDING if by_stage and name == INDEX_SCORES.name else 1)
        beyond = (compared > allowed).float().mean().item()
        finite = all(bool(error.isfinite().all()) for error in errors)  # including parted rows
        parted_ok = all(int(parted_rows.sum()) <= most_parted for parted_rows in parted_layers)
        row = labels | {
            "kind": "site",
            "site": name,
            "layers": len(layers),
            "rows": rows * len(layers),
            "error_median": significant(compared.median().item()),
            "error_most": significant(compared.max().item()),
            "share_beyond": significant(beyond),
            "tolerance": allowed,
            "share_parted": significant(torch.cat(parted_layers).float().mean().item()),
            "passed": finite and beyond <= MAX_BEYOND[labels["phase"]] and parted_ok and swapped_ok,
        }
        if name == MOE_TOPK.name:
            row |= choices | {"passed": row["passed"] and choices["wide_choices"] == 0}
        yield row


def _other_entries(actual: SiteValues, reference: SiteValues, layer: int, topk: int) -> torch.Tensor:
    """The rows [n] for which the scores of the two paths select other entries."""
    scores = [sites[INDEX_SCORES.name, layer] for sites in (actual, reference)]
    visible = torch.arange(scores[0].shape[1]) < (torch.arange(len(scores[0])).unsqueeze(-1) + 1) // 4
    chosen = [topk_mask(each, visible, topk) for each in scores]
    return (chosen[0] != chosen[1]).any(-1)


def _routers_before(name: str, layer: int, layers: int) -> int:
    """Number of layers whose routing precedes a site."""
    return (layers if layer < 0 else layer + 1) if name in AFTER_ROUTER else layer


def _choices(
    actual: SiteValues, reference: SiteValues, biases: RouterBiases, margin: float, by_stage: bool
) -> tuple[list[torch.Tensor], Row]:
    """The rows that have parted before each layer and after the last (`by_stage`: in the layer before), and the margins
    of their selections."""
    parted = [torch.zeros(len(reference[MOE_TOPK.name, 0]), dtype=torch.bool)]
    largest_margin = 0.0
    wide_choices = 0
    for layer, bias in enumerate(biases):
        logits = reference[MOE_ROUTER_LOGITS.name, layer]
        selected, expected = (
            _members(sites[MOE_TOPK.name, layer][..., 0], logits.shape[1]) for sites in (actual, reference)
        )
        differs = (selected != expected).any(-1)
        if bias is None:
            wide_choices += int(differs.sum())
        else:
            scores = F.softplus(logits).sqrt() + bias
            last = scores.topk(reference[MOE_TOPK.name, layer].shape[1]).values[:, -1:]
            distance = torch.where(selected != expected, (scores - last).abs(), 0.0).amax(-1)
            # Equally many, no duplicates.
            near_tie = (distance <= margin) & (selected.sum(-1) == expected.sum(-1))
            newly_parted = differs if by_stage else differs & ~parted[-1]  # others have different scores
            wide_choices += int((newly_parted & ~near_tie).sum())
            largest_margin = max(
                largest_margin, distance[newly_parted].max().item() if newly_parted.any() else 0.0
            )
        parted.append(differs if by_stage else parted[-1] | differs)
    return parted, {
        "margin_most": significant(largest_margin),
        "margin": margin,
        "wide_choices": wide_choices,
    }


def _members(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """ids [n, k] -> selection mask [n, E]; invalid ids select no expert."""
    return (ids.unsqueeze(-1) == torch.arange(experts)).any(1)


def _errors(name: str, actual: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Relative error of each row; for MOE_TOPK of the weights."""
    if name == MOE_TOPK.name:
        actual, reference = (rows[..., 1].gather(1, rows[..., 0].argsort(-1)) for rows in (actual, reference))
    actual, reference = actual.flatten(1), reference.flatten(1)
    error: torch.Tensor = (actual - reference).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-6)
    return error


def compare_sites(
    model: Transformer,
    device: torch.device,
    lengths: Sequence[int],
    steps: int,
    tolerance: float,
    fast: bool | None,
) -> Iterator[Row]:
    """Prefill prompts of `lengths` tokens, then decode `steps` tokens after each, on both paths; `model` uses GPU
    kernels. Released numerics are compared stage by stage."""
    config, by_stage = model.config, model.numerics.released
    rows = len(lengths)
    biases = router_biases(model)
    tokens = torch.randint(config.vocab_size, (rows, max(lengths) + steps))
    states = [
        State.contiguous(config, rows + 1, max(lengths) + steps, device=device, dtype=model.numerics.dtype)
        for _ in range(2)
    ]
    common = {
        "hidden": config.hidden_size,
        "layers_in_all": config.num_hidden_layers,
        "dtype": dtype_name(model.numerics.dtype),
    }
    for slot, length in enumerate(lengths):
        batch = Batch.of([SequenceChunk(slot, 0, tokens[slot, :length])], device)
        actual = run_eager(model, batch, states[1], plain=False)
        reference = run_eager(model, batch, states[0], True, actual if by_stage else None)
        labels = common | {"phase": "prompt", "tokens": length}
        yield from compare(actual, reference, biases, tolerance, labels, config.index_topk, by_stage)
    with torch.no_grad():
        for slot, length in enumerate(lengths):  # both decode from the same cache
            model.run(Batch.of([SequenceChunk(slot, 0, tokens[slot, :length])], device), states[1], NoTap())
            states[1].restore(slot, states[0].save(slot, length))
        for layer, other in zip(states[1].layers, states[0].layers):
            for kind, pages in other.pages.items():
                layer.pages[kind].copy_(pages)
        graphs = CudaGraphs(
            Decoder(model, states[1], fast=fast), scratch_slot=rows, max_context=max(lengths) + steps
        )
    for step in range(steps):
        positions = [length + step for length in lengths]
        step_tokens = [int(tokens[slot, positions[slot]]) for slot in range(rows)]
        chunks = [
            SequenceChunk(slot, positions[slot], torch.tensor([step_tokens[slot]])) for slot in range(rows)
        ]
        with torch.no_grad():
            actual = run_graph_step(graphs, step_tokens, positions, list(range(rows)))
        batch = Batch.of(chunks, device)
        reference = run_eager(model, batch, states[0], True, actual if by_stage else None)
        labels = common | {"phase": "decode", "step": step}
        yield from compare(actual, reference, biases, tolerance, labels, config.index_topk, by_stage)
