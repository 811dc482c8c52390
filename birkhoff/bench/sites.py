"""Is every site of the GPU path the site of the plain path? Asked of a prompt and of decoding steps, on random models.

Both paths run the same packed model: the plain one unpacks weights and computes in PyTorch, the other reads them as
stored. Every tensor that a hook can show is compared row by row. Nearly all rows must agree; the few that may not are
those where a choice between two almost equal experts or entries fell the other way, and what comes after it. Buffers of
the decoding step are NaN before every step, so that what a kernel forgot to write shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from birkhoff.bench.report import significant
from birkhoff.config import V4Config
from birkhoff.engine.graphs import Graphs
from birkhoff.hooks.live import Staging, arm
from birkhoff.hooks.plan import Key, Plan, Rows, Span
from birkhoff.hooks.sites import BY_NAME, MOE_TOPK, SITES
from birkhoff.hooks.tap import EagerTap, NoTap
from birkhoff.model.batch import Batch, Piece
from birkhoff.model.device import Decoder
from birkhoff.model.state import State
from birkhoff.model.transformer import Transformer

Row = dict[str, Any]
Seen = dict[Key, torch.Tensor]
MAY_DIFFER = 0.1  # share of rows beyond the tolerance


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

    def deliver(self, rows: Rows) -> None:
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


def replayed(graphs: Graphs, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Seen:
    """The same sites of one decoding step, captured on the way."""
    jobs = [Taken(every_site(graphs.decoder.config)) for _ in tokens]
    spans = [Span(Plan(jobs=(job,)), row, positions[row], [tokens[row]], 0) for row, job in enumerate(jobs)]
    tap = arm(Staging(graphs.decoder.state.device), spans, len(spans))
    assert tap is not None
    wishes = graphs.sorted_out(tap)
    assert wishes is not None, "captures have a fixed shape"
    desk, _ = graphs._find(len(tokens), max(positions) + 1)
    desk.poison()
    logits, _ = graphs.step(tokens, positions, slots, tap, wishes)
    tap.deliver()
    seen: Seen = {key: torch.cat([job.got[key][0] for job in jobs]).float() for key in jobs[0].got}
    return seen | {("logits", -1): logits.float().cpu()}


def compare(mine: Seen, true: Seen, tolerance: float, what: Row) -> Iterator[Row]:
    """One row for each site, over all layers."""
    assert mine.keys() == true.keys(), sorted(mine.keys() ^ true.keys())
    for name in [*(site.name for site in SITES if not site.absent), "logits"]:
        layers = [key for key in true if key[0] == name]
        errors = torch.cat([_errors(name, mine[key], true[key]) for key in layers])
        beyond = (errors > tolerance).float().mean().item()
        yield what | {
            "kind": "site", "site": name, "layers": len(layers), "rows": len(errors),
            "error_median": significant(errors.median().item()), "error_most": significant(errors.max().item()),
            "share_beyond": significant(beyond), "tolerance": tolerance,
            "passed": bool(errors.isfinite().all()) and beyond <= MAY_DIFFER,
        }  # fmt: skip


def _errors(name: str, mine: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """How far each row is off, relative to its size; of choices, the share that is not the same."""
    if name in BY_NAME and BY_NAME[name] is MOE_TOPK:
        same = [set(a) == set(b) for a, b in zip(mine[..., 0].tolist(), true[..., 0].tolist())]
        return 1 - torch.tensor(same).float()
    mine, true = mine.flatten(1), true.flatten(1)
    return (mine - true).norm(dim=-1) / true.norm(dim=-1).clamp_min(1e-6)


def compare_sites(
    model: Transformer, device: torch.device, lengths: Sequence[int], steps: int, tolerance: float, fast: bool | None
) -> Iterator[Row]:
    """Prompts of `lengths` tokens, then `steps` tokens behind each, both ways; `model` has the kernels of a GPU."""
    config, rows = model.config, len(lengths)
    tokens = torch.randint(config.vocab_size, (rows, max(lengths) + steps))
    states = [
        State.contiguous(config, rows + 1, max(lengths) + steps, device=device, dtype=model.numerics.dtype)
        for _ in range(2)
    ]
    about = {"hidden": config.hidden_size, "layers_in_all": config.num_hidden_layers,
             "dtype": str(model.numerics.dtype).removeprefix("torch.")}  # fmt: skip
    for slot, length in enumerate(lengths):
        batch = Batch.of([Piece(slot, 0, tokens[slot, :length])], device)
        true = read_plainly(model, batch, states[0], plain=True)
        mine = read_plainly(model, batch, states[1], plain=False)
        yield from compare(mine, true, tolerance, about | {"phase": "prompt", "tokens": length})
    with torch.no_grad():
        for slot, length in enumerate(lengths):  # both decode behind the same past
            model.run(Batch.of([Piece(slot, 0, tokens[slot, :length])], device), states[1], NoTap())
            states[1].restore(slot, states[0].save(slot, length))
        for layer, other in zip(states[1].layers, states[0].layers):
            for kind, pages in other.pages.items():
                layer.pages[kind].copy_(pages)
        graphs = Graphs(Decoder(model, states[1], fast=fast), scratch=rows, max_context=max(lengths) + steps)
    for step in range(steps):
        at = [length + step for length in lengths]
        chosen = [int(tokens[slot, at[slot]]) for slot in range(rows)]
        pieces = [Piece(slot, at[slot], torch.tensor([chosen[slot]])) for slot in range(rows)]
        true = read_plainly(model, Batch.of(pieces, device), states[0], plain=True)
        with torch.no_grad():
            mine = replayed(graphs, chosen, at, list(range(rows)))
        yield from compare(mine, true, tolerance, about | {"phase": "decode", "step": step})
