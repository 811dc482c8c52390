"""Logit lens: the prediction if the model ended at a given depth.

A depth is a position between layers: 0 is the embedding, `l` the output of layer `l - 1`, the last is the input of
the head. At every depth the final norm and the head are applied to one stream (`of=2`), to the mean of the streams
(`of="mean"`), or to the model's own stream merge (`of="head"`), which at the last depth equals the model's output bit
for bit. With edits a depth has the streams as the edits leave them. An ordinary model has one residual, and "head" is
its only view. Logits are computed on request, because those of all depths of a large model do not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from birkhoff import notebook
from birkhoff.analysis.forward import trace
from birkhoff.errors import OptionError, SiteError, quoted
from birkhoff.option_checks import as_int
from birkhoff.records import Tabular

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.steering.resolver import Steering

View = int | str  # a stream index, "mean" or "head"


class Lens(Tabular):
    """Residual streams of a text at every depth, [T, streams, d], or [T, d] without `per_stream`."""

    def __init__(
        self,
        model: Any,
        token_ids: list[int],
        residuals: list[torch.Tensor],
        per_stream: bool,
        tokens: list[str] | None = None,
        decode: Callable[[Sequence[int]], list[str] | None] | None = None,
        merged: torch.Tensor | None = None,
    ):
        """`decode` gives the text of each of some tokens, `merged` is what the pass made of the last streams."""
        self._model = model
        self._decode = None if tokens is None else decode
        self.token_ids = token_ids
        self.tokens = tokens
        self._residuals = residuals
        self._merged = merged
        self.per_stream = per_stream

    @property
    def depths(self) -> int:
        """Number of depths: one more than there are layers."""
        return len(self._residuals)

    @property
    def views(self) -> list[View]:
        """Accepted values of `of`."""
        return [*range(self._residuals[0].shape[1]), "mean", "head"] if self.per_stream else ["head"]

    def logits(self, depth: int, of: View = "head") -> torch.Tensor:
        """Return float32 logits [T, vocab] at a depth."""
        if as_int(depth) is None or not -self.depths <= depth < self.depths:
            raise SiteError(
                f"depth is {quoted(depth)}, this lens has 0..{self.depths - 1} (or from -{self.depths})."
            )
        if isinstance(of, bool) or of not in self.views:
            more = "" if self.per_stream else " Look with per_stream=True for the streams and their mean."
            raise OptionError(
                f"of is {quoted(of)}, expected one of {', '.join(map(repr, self.views))}.{more}"
            )
        model, residual = self._model, self._residuals[depth]
        with torch.no_grad():
            if isinstance(of, int):
                single = residual[:, of]  # [T, d]
            elif of == "mean":
                single = residual.mean(1)
            elif self._merged is not None and depth % self.depths == self.depths - 1:
                single = self._merged
            else:
                single = model.merge_streams(residual) if self.per_stream else residual
            logits: torch.Tensor = model.logits(model.norm(single))
            return logits

    def surprise(self, depth: int, of: View = "head") -> torch.Tensor:
        """Return the loss of each next token at a depth, [T] in nats; NaN for the last token, which has none."""
        logprobs = self.logits(depth, of).log_softmax(-1)
        losses = torch.full((len(self.token_ids),), torch.nan)
        targets = torch.tensor(self.token_ids[1:], device=logprobs.device)
        losses[:-1] = -logprobs[:-1].gather(1, targets.unsqueeze(-1)).squeeze(-1).cpu()
        return losses

    def top(self, depth: int, of: View = "head", position: int = -1, k: int = 5) -> list[tuple[int, float]]:
        """Return the `k` most likely tokens at a position as (token id, probability), most likely first."""
        if not isinstance(k, int) or not 1 <= k <= self._model.config.vocab_size:
            raise OptionError(f"k is {quoted(k)}, expected 1 to {self._model.config.vocab_size}.")
        if not -len(self.token_ids) <= position < len(self.token_ids):
            raise SiteError(f"position is {quoted(position)}, the text has {len(self.token_ids)} tokens.")
        probabilities, ids = self.logits(depth, of)[position].softmax(-1).topk(k)
        return list(zip(ids.tolist(), probabilities.tolist()))

    def table(
        self, of: View = "head", positions: int = 24
    ) -> tuple[list[list[float]], list[list[str]], list[int]]:
        """The most likely token at every depth for the last `positions` tokens, last depth first: probabilities, texts
        and depths."""
        start = max(len(self.token_ids) - positions, 0)
        chances, texts, depths = [], [], list(reversed(range(self.depths)))
        for depth in depths:
            best = self.logits(depth, of)[start:].softmax(-1).max(-1)
            chances.append(best.values.tolist())
            texts.append([self._text(token) for token in best.indices.tolist()])
        return chances, texts, depths

    def records(self, of: View = "head") -> list[dict[str, Any]]:
        """A row for each depth and position: the token there, the most likely next one and its probability, and the
        surprisal of the token that follows (None at the end)."""
        rows = []
        for depth in range(self.depths):
            logits = self.logits(depth, of)
            best, losses = logits.softmax(-1).max(-1), self.surprise(depth, of).tolist()
            for position, token in enumerate(best.indices.tolist()):
                here = self.token_ids[position] if self.tokens is None else self.tokens[position]
                last = position == len(self.token_ids) - 1
                rows.append(
                    {
                        "depth": depth,
                        "position": position,
                        "token": here,
                        "prediction": self._text(token),
                        "probability": float(best.values[position]),
                        "surprise": None if last else losses[position],
                    }
                )
        return rows

    def _text(self, token: int) -> str:
        texts = None if self._decode is None else self._decode([token])
        return str(token) if texts is None else texts[0]

    def __repr__(self) -> str:
        return f"Lens({len(self.token_ids)} tokens, {self.depths} depths, views {self.views})"

    def _repr_html_(self) -> str:
        chances, texts, depths = self.table()
        shown = len(chances[0])
        names = (self.tokens or [str(token) for token in self.token_ids])[-shown:]
        return notebook.heat(chances, depths, names, texts, "depth")


def compute_lens(
    engine: Engine, texts: Sequence[Sequence[int]], per_stream: bool = True, steer: Steering = None
) -> list[Lens]:
    """Run texts once and keep their residual streams at every depth; without `per_stream` only their merge."""
    last = engine.config.num_hidden_layers - 1
    if engine.num_streams is None:
        return [
            Lens(
                engine.model,
                each.token_ids,
                [*each["pre_attn"], each["final_hidden", last]],
                per_stream=False,
                tokens=each.tokens,
                decode=engine.token_texts,
            )
            for each in trace(engine, texts, ["pre_attn", "final_hidden"], steer, "after")
        ]
    lenses = []
    hooks = ["mhc_streams_pre_attn", "mhc_streams_final", "final_hidden"]
    for each in trace(engine, texts, hooks, steer, "after"):
        residuals = [each["mhc_streams_pre_attn", layer] for layer in range(last + 1)]
        residuals.append(each["mhc_streams_final", last])
        if not per_stream:
            with torch.no_grad():
                residuals = [engine.model.merge_streams(streams) for streams in residuals]
        merged = each["final_hidden", last]
        lenses.append(
            Lens(engine.model, each.token_ids, residuals, per_stream, each.tokens, engine.token_texts, merged)
        )
    return lenses
