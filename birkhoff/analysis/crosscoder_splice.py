"""Splices a crosscoder or transcoder into the model: rows of its output sites become what its features say.

With f the features of a token, f' the features after the edit and x_j the row of output site j:

    error="keep"   x_j + sum_i (f'_i - f_i) w_ij      other features and the error are unchanged
    error="drop"   sum_i f'_i w_ij + b_j              the reconstruction alone

A transcoder reads before it writes, so features are computed and written in the same pass, in `logits`, `trace` and a
local `generate`, for the prompt and for generated tokens; x_j is the row as it is there. A crosscoder also reads
layers that come after the first one it writes. Its features are therefore those of a first pass without edits, and a
second pass sets every output row from the x_j of the first: a change that the model itself carries from one site to
the next is not added twice. That needs the tokens in advance, so it covers the prompt (`splice(..., prompt)`); adding
constant amounts (`kind="additive"`, error kept) needs no features and covers generated tokens too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.sae_quality import LossRecovered
from birkhoff.errors import OptionError, SaeError, quoted
from birkhoff.hooks.call_use import CallSite
from birkhoff.hooks.site_names import Address
from birkhoff.sae.crosscoder import Crosscoder, SitePart
from birkhoff.steering.call import Call

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.text.prompts import Prompt

ERRORS, KINDS = ("keep", "drop"), ("absolute", "additive", "multiply")


def splice(
    engine: Engine,
    crosscoder: Crosscoder,
    features: Mapping[int | str, float] | None = None,
    prompt: Prompt | None = None,
    *,
    kind: str = "absolute",
    error: str = "keep",
    where: Any = None,
) -> list[Call]:
    """Edits for `steer=` of one request that set `features` (numbers or labels) and, with `error="drop"`, replace rows
    by their reconstruction, at the tokens that `where` selects (as for vectors; by default all). A crosscoder needs the
    prompt, except for additions."""
    for name, value, allowed in (("kind", kind, KINDS), ("error", error, ERRORS)):
        if value not in allowed:
            raise OptionError(f"{name} is {quoted(value)}, expected one of {', '.join(allowed)}.")
    values = {crosscoder.sae.feature(name): float(value) for name, value in (features or {}).items()}
    if not values and error == "keep":
        raise OptionError("nothing to splice: give features, or error='drop' for the reconstruction.")
    edit = _FeatureEdit(crosscoder, values, kind, error)
    if kind == "additive" and error == "keep":
        return [Call(edit.added(site), site.hook, [site.layer], where) for site in crosscoder.outputs]
    if crosscoder.causal:
        return _one_pass(edit, where)
    if prompt is None:
        raise SaeError(
            "a crosscoder reads layers after the first one it writes, so its features come from a pass over the "
            "prompt: splice(engine, crosscoder, features, prompt). Only additions do without."
        )
    return _two_passes(engine, edit, engine.prompt_ids(prompt), where)


def crosscoder_loss(
    engine: Engine, crosscoder: Crosscoder, texts: Sequence[Sequence[int]], exclude: Sequence[int] = ()
) -> LossRecovered:
    """Loss of texts (token ids) as they are, with all output rows replaced by their reconstructions, and by zeros. Rows
    of the tokens in `exclude` stay as they are."""
    where = {"prompt": {"exclude": {"token_ids": list(exclude)}}} if exclude else None
    kept = [list(ids) for ids in texts if len(ids) > 1]
    if not kept:
        raise OptionError("there is no text of two tokens or more to measure the loss on.")
    tokens = sum(len(ids) - 1 for ids in kept)
    losses = [0.0, 0.0, 0.0]
    for ids in kept:
        ablated = [Call(_zeros(site), site.hook, [site.layer], where) for site in crosscoder.outputs]
        spliced = splice(engine, crosscoder, None, ids, error="drop", where=where)
        for index, steer in enumerate((None, spliced, ablated)):
            logprobs = engine.logits(ids, steer=steer)[:-1].log_softmax(-1)
            following = torch.tensor(ids[1:], device=logprobs.device).unsqueeze(1)
            losses[index] -= float(logprobs.gather(1, following).sum())
    return LossRecovered(tokens, *(loss / tokens for loss in losses))


class _FeatureEdit:
    """Features before and after an edit, and the rows that follow from them."""

    def __init__(self, crosscoder: Crosscoder, values: Mapping[int, float], kind: str, error: str):
        self.crosscoder, self._kind, self._error = crosscoder, kind, error
        self._index = torch.tensor(list(values), dtype=torch.long)
        self._values = torch.tensor(list(values.values()))

    def features(self, inputs: Mapping[Address, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [n, F] of the rows of the input sites, before and after the edit."""
        before = self.crosscoder.encode(inputs)
        index, values = self._index.to(before.device), self._values.to(before.device)
        after = before.clone()
        if len(index):
            old = before[:, index]
            new = {"absolute": values.expand_as(old), "additive": old + values, "multiply": old * values}
            after[:, index] = new[self._kind]
        return before, after

    def row(
        self, site: SitePart, before: torch.Tensor, after: torch.Tensor, present: torch.Tensor
    ) -> torch.Tensor:
        """The new rows of an output site whose rows are `present`."""
        if self._error == "drop":
            return site.replaced(present, self.crosscoder.decode(after)[site.address])
        change = self.crosscoder.change(after - before)[site.address]
        return site.replaced(present, site.read(present) + change)

    def added(self, site: SitePart) -> Any:
        """The function of a site that adds constant amounts of the features."""
        difference = torch.zeros(1, self.crosscoder.features)
        difference[0, self._index] = self._values
        change = self.crosscoder.change(difference)[site.address]

        def add(rows: torch.Tensor) -> torch.Tensor:
            return site.replaced(rows, site.read(rows) + change.to(rows.device))

        return add


def _one_pass(edit: _FeatureEdit, where: Any) -> list[Call]:
    """Functions at the input sites that keep their rows, and one at each output site that writes.

    Requests of a step pass every site in the same order, so what was kept first belongs to the first that writes.
    """
    crosscoder = edit.crosscoder
    waiting: list[tuple[tuple[int, ...], dict[Address, torch.Tensor]]] = []
    last = len(crosscoder.outputs) - 1

    def keep(rows: torch.Tensor, site: CallSite) -> None:
        address = (site.hook, site.layer)
        for positions, kept in waiting:
            if positions == site.positions and address not in kept:
                kept[address] = rows
                return
        waiting.append((site.positions, {address: rows}))

    def writer(index: int, part: SitePart) -> Any:
        def write(rows: torch.Tensor, site: CallSite) -> torch.Tensor:
            place = next((n for n, (positions, _) in enumerate(waiting) if positions == site.positions), None)
            if place is None:
                raise SaeError("the rows that this transcoder reads were not seen in this pass.")
            kept = waiting[place][1]
            if index == last:
                del waiting[place]
            return edit.row(part, *edit.features(kept), rows)

        return write

    edits = [Call(keep, site.hook, [site.layer], where) for site in crosscoder.inputs]
    return edits + [
        Call(writer(index, site), site.hook, [site.layer], where)
        for index, site in enumerate(crosscoder.outputs)
    ]


def _two_passes(engine: Engine, edit: _FeatureEdit, ids: list[int], where: Any) -> list[Call]:
    """Run the prompt without edits, and make functions that set the rows of its tokens."""
    crosscoder = edit.crosscoder
    hooks = list(dict.fromkeys(site.hook for site in (*crosscoder.inputs, *crosscoder.outputs)))
    trace = engine.trace(ids, hooks)
    before, after = edit.features({site.address: trace[site.address] for site in crosscoder.inputs})
    rows = {site.address: edit.row(site, before, after, trace[site.address]) for site in crosscoder.outputs}

    def setter(table: torch.Tensor) -> Any:
        def put(old: torch.Tensor, site: CallSite) -> torch.Tensor:
            return table.to(old.device)[list(site.positions)]

        return put

    return [
        Call(setter(rows[site.address]), site.hook, [site.layer], where, "prefill")
        for site in crosscoder.outputs
    ]


def _zeros(site: SitePart) -> Any:
    def put(rows: torch.Tensor) -> torch.Tensor:
        return site.replaced(rows, torch.zeros_like(site.read(rows)))

    return put
