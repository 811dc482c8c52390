"""SAE quality measured through the model: the loss when rows are replaced by their reconstruction.

Three losses on the same tokens: `plain`, `spliced` (every row replaced by its reconstruction, the error dropped) and
`ablated` (zeros instead; for a view that covers only part of a row, only that part). `recovered` is (ablated -
spliced) / (ablated - plain), the share of the ablation damage that the reconstruction avoids. Ablating a smaller view
does less damage, so `added` = spliced - plain, in nats per token, is reported too.
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

LEAST_DAMAGE = 0.01  # nats per token; below it the share is a quotient of noise
_NAME = "under measurement"  # name the SAE is attached under


@dataclass(frozen=True)
class LossRecovered:
    """Losses in nats per token over `tokens` tokens."""

    tokens: int
    plain: float
    spliced: float
    ablated: float

    @property
    def recovered(self) -> float | None:
        """Share of the ablation loss that the reconstruction avoids; None if ablation does no measurable damage."""
        damage = self.ablated - self.plain
        return (self.ablated - self.spliced) / damage if damage >= LEAST_DAMAGE else None

    @property
    def added(self) -> float:
        """Loss added by the reconstruction."""
        return self.spliced - self.plain

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"recovered": self.recovered, "added": self.added}


def zero_sae(sae: Sae) -> Sae:
    """Return an SAE of the same view that reconstructs zeros; splicing it in ablates the view."""
    zeros = torch.zeros(1, sae.d_model)
    return Sae(zeros, None, zeros, hook=sae.hook, layer=sae.layer, view=sae.view, spread=sae.spread)


def loss_recovered(
    engine: Engine, sae: Sae, texts: Sequence[Sequence[int]], exclude: Sequence[int] = ()
) -> LossRecovered:
    """Measure the three losses over every token of every text but the first, which has no prediction.

    Rows of the tokens in `exclude` (special tokens the SAE was not trained on) are left unchanged in all three.
    """
    kept = [list(ids) for ids in texts if len(ids) > 1]
    if not kept:
        raise OptionError("there is no text of two tokens or more to measure the loss on.")
    tokens = sum(len(ids) - 1 for ids in kept)
    losses = [sum(_loss(engine, ids, None) for ids in kept) / tokens]
    for spliced in (sae, zero_sae(sae)):
        with engine.attach(_NAME, spliced, kind="full"):
            where = {"prompt": {"exclude": {"token_ids": list(exclude)}}} if exclude else None
            steer = [SaeReconstruct(_NAME, error="drop", where=where)]
            losses.append(sum(_loss(engine, ids, steer) for ids in kept) / tokens)
    return LossRecovered(tokens, *losses)


def _loss(engine: Engine, ids: list[int], steer: Any) -> float:
    """Total loss of a text in nats."""
    logprobs = engine.logits(ids, steer=steer)[:-1].log_softmax(-1)
    return -float(logprobs.gather(1, torch.tensor(ids[1:], device=logprobs.device).unsqueeze(1)).sum())


def row_quality(
    engine: Engine, sae: Sae, texts: Sequence[Sequence[int]], skip: int = 1, exclude: Sequence[int] = ()
) -> tuple[Quality, Measure]:
    """Measure explained variance, active features per row and dead share on the rows of texts.

    The first `skip` tokens of each text and the tokens in `exclude` are left out.
    """
    measure = Measure(sae)
    assert sae.hook is not None and sae.layer is not None, "the SAE names its hook and layer"
    hook = captured_hook(sae.hook, sae.view)
    for ids in texts:
        kept = [index for index, token in enumerate(ids) if index >= skip and token not in exclude]
        if kept:
            measure.add(view_rows(engine.trace(ids, [hook])[hook, sae.layer][kept], sae.view))
    return measure.quality(), measure
