"""The logit lens of a model with several residual streams: what each would say if the model ended here.

A depth is a place between layers: 0 is the embedding, `l` what leaves layer `l - 1`, the last is what the head gets.
At every depth the final norm and the head are applied to one stream (`of=2`), to the plain mean of them (`of="mean"`),
or to what the model's own merge makes of them (`of="head"`), which at the last depth is the model's true output, bit
for bit. Logits are made when they are asked for: a whole lens of a large model would not fit anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from birkhoff.errors import OptionError, SiteError, quoted
from birkhoff.model.transformer import Transformer

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine
    from birkhoff.steering.resolver import Steering

View = int | str  # a stream, "mean" or "head"


class Lens:
    """`lens.logits(depth, of)` is float32 [T, vocab]; `lens.top(depth, of)` the likeliest tokens at one position."""

    def __init__(self, model: Transformer, token_ids: list[int], kept: list[torch.Tensor], per_stream: bool):
        self._model = model
        self.token_ids = token_ids
        self._kept = kept
        self.per_stream = per_stream

    @property
    def depths(self) -> int:
        """One more than there are layers."""
        return len(self._kept)

    @property
    def views(self) -> list[View]:
        streams: list[View] = list(range(self._model.config.hc_mult)) if self.per_stream else []
        return [*streams, "mean", "head"] if self.per_stream else ["head"]

    def logits(self, depth: int, of: View = "head") -> torch.Tensor:
        if isinstance(depth, bool) or not isinstance(depth, int) or not -self.depths <= depth < self.depths:
            raise SiteError(
                f"depth is {quoted(depth)}, this lens has 0..{self.depths - 1} (or from -{self.depths})."
            )
        if isinstance(of, bool) or of not in self.views:
            more = "" if self.per_stream else " Look with per_stream=True for the streams and their mean."
            raise OptionError(
                f"of is {quoted(of)}, expected one of {', '.join(map(repr, self.views))}.{more}"
            )
        model, kept = self._model, self._kept[depth]
        with torch.no_grad():
            if isinstance(of, int):
                single = kept[:, of]  # [T, d]
            elif of == "mean":
                single = kept.mean(1)
            else:
                single = model.hc_head(kept)[0] if self.per_stream else kept
            return model.logits(model.norm(single))

    def surprise(self, depth: int, of: View = "head") -> torch.Tensor:
        """Nats by which each next token of the text was not expected here, [T]; the last has no next one: NaN."""
        logprobs = self.logits(depth, of).log_softmax(-1)
        told = torch.full((len(self.token_ids),), torch.nan)
        following = torch.tensor(self.token_ids[1:], device=logprobs.device)
        told[:-1] = -logprobs[:-1].gather(1, following.unsqueeze(-1)).squeeze(-1).cpu()
        return told

    def top(self, depth: int, of: View = "head", position: int = -1, k: int = 5) -> list[tuple[int, float]]:
        """Token ids and probabilities, the likeliest first."""
        if not isinstance(k, int) or not 1 <= k <= self._model.config.vocab_size:
            raise OptionError(f"k is {quoted(k)}, expected 1 to {self._model.config.vocab_size}.")
        if not -len(self.token_ids) <= position < len(self.token_ids):
            raise SiteError(f"position is {quoted(position)}, the text has {len(self.token_ids)} tokens.")
        chances, ids = self.logits(depth, of)[position].softmax(-1).topk(k)
        return list(zip(ids.tolist(), chances.tolist()))


def look(engine: Engine, token_ids: Sequence[int], per_stream: bool = True, steer: Steering = None) -> Lens:
    """Run the text once and keep its streams at every depth; without `per_stream` only what the head makes of them."""
    trace = engine.trace(token_ids, hooks=["mhc_streams_pre_attn", "mhc_streams_final"], steer=steer)
    last = engine.config.num_hidden_layers - 1
    streams = [trace["mhc_streams_pre_attn", layer] for layer in range(last + 1)]
    streams.append(trace["mhc_streams_final", last])
    model = engine.model
    with torch.no_grad():
        kept = streams if per_stream else [model.hc_head(each)[0] for each in streams]
    return Lens(model, [int(token) for token in token_ids], kept, per_stream)
