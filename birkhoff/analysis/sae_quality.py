"""How good a dictionary is with the model in the loop: what does the model predict when it sees the reconstruction?

Three losses on the same tokens: `plain`, `spliced` (the dictionary's reconstruction in place of every row, its error
dropped) and `ablated` (zeros where the dictionary looks: of a view that does not see all of a row, only what it sees is
taken away). `recovered` is the share of the damage of ablation that the dictionary undoes, (ablated - spliced) /
(ablated - plain). A view that sees less does less damage, so `added`, spliced - plain in nats per token, stands beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.sae_rows import captured_hook, view_rows
from birkhoff.errors import OptionError
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.evaluate import Measure, Quality
from birkhoff.sae.feature_edits import SaeReconstruct

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

_NAME = "under measurement"


@dataclass(frozen=True)
class LossRecovered:
    """Nats per token over `tokens`."""

    tokens: int
    plain: float
    spliced: float
    ablated: float

    @property
    def recovered(self) -> float:
        damage = self.ablated - self.plain
        return (self.ablated - self.spliced) / damage if damage > 0 else 0.0

    @property
    def added(self) -> float:
        return self.spliced - self.plain

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"recovered": self.recovered, "added": self.added}


def silent(sae: Sae) -> Sae:
    """A dictionary of the same view that says zero of everything: splicing it in is ablation."""
    nothing = torch.zeros(1, sae.d_model)
    return Sae(nothing, None, nothing, hook=sae.hook, layer=sae.layer, view=sae.view, spread=sae.spread)


def loss_recovered(
    engine: Engine, sae: Sae, texts: Sequence[Sequence[int]], leave: Sequence[int] = ()
) -> LossRecovered:
    """Over every token of every text but the first, which nothing predicts.

    Rows of the tokens `leave` (marks a dictionary was not trained on) stay as they are in all three."""
    kept = [list(ids) for ids in texts if len(ids) > 1]
    if not kept:
        raise OptionError("there is no text of two tokens or more to measure the loss on.")
    tokens = sum(len(ids) - 1 for ids in kept)
    losses = [sum(_loss(engine, ids, None) for ids in kept) / tokens]
    for dictionary in (sae, silent(sae)):
        with engine.attach(_NAME, dictionary, kind="full"):
            where = {"prompt": {"exclude": {"token_ids": list(leave)}}} if leave else None
            steer = [SaeReconstruct(_NAME, error="drop", where=where)]
            losses.append(sum(_loss(engine, ids, steer) for ids in kept) / tokens)
    return LossRecovered(tokens, *losses)


def _loss(engine: Engine, ids: list[int], steer: Any) -> float:
    """Nats of a whole text."""
    chances = engine.logits(ids, steer=steer)[:-1].log_softmax(-1)
    return -chances.gather(1, torch.tensor(ids[1:], device=chances.device).unsqueeze(1)).sum().item()


def row_quality(
    engine: Engine, sae: Sae, texts: Sequence[Sequence[int]], skip: int = 1, leave: Sequence[int] = ()
) -> tuple[Quality, Measure]:
    """Variance explained, features per row and dead share on rows of these texts, without the first `skip` tokens of
    each and without the tokens `leave`."""
    measure = Measure(sae)
    assert sae.hook is not None and sae.layer is not None, "a dictionary in use has its place"
    hook = captured_hook(sae.hook, sae.view)
    for ids in texts:
        kept = [place for place, token in enumerate(ids) if place >= skip and token not in leave]
        if kept:
            measure.add(view_rows(engine.trace(ids, [hook])[hook, sae.layer][kept], sae.view))
    return measure.quality(), measure
