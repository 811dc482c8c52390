"""`contrast(engine, positive, negative, hook, layers)`: a steering vector from two sets of texts.

Each text gives one row per layer: the mean over its tokens, or its last. A text is a prompt (text or token ids) or a
conversation (a list of messages), whose answer's tokens then count alone. The vector that comes out says where it
belongs, and `report` holds how well every layer and every stream tells the two sets apart on texts the direction was
not made from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.capture.spec.request import Capture
from birkhoff.engine.request import Request
from birkhoff.errors import OptionError, SteeringError, quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.plan import SiteRows
from birkhoff.hooks.site_names import Address, resolve
from birkhoff.hooks.sites import BY_NAME
from birkhoff.steering.extract import METHODS, Separation, direction, separate
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TOKENS = ("mean", "last")


@dataclass(frozen=True, eq=False)
class ContrastRows:
    """One row per text and layer: `positive[layer]` is [texts, *row_shape]."""

    hook: str
    positive: Mapping[int, torch.Tensor]
    negative: Mapping[int, torch.Tensor]

    @property
    def layers(self) -> list[int]:
        return sorted(self.positive)

    def separation(self, how: str = "mean_diff") -> list[Separation]:
        """For every layer the row as a whole, then its streams."""
        return [
            entry
            for layer in self.layers
            for entry in separate(self.hook, layer, self.positive[layer], self.negative[layer], how=how)
        ]

    def vector(
        self, layers: Sequence[int], how: str = "mean_diff", streams: Sequence[int] | None = None
    ) -> Any:
        """Rows of a steering vector at these layers; with `streams`, the other streams' blocks are zero."""
        rows = {}
        for layer in layers:
            found = direction(self.positive[layer], self.negative[layer], how)
            if streams is not None:
                kept = torch.zeros_like(found)
                kept[list(streams)] = found[list(streams)]
                found = kept
            rows[layer] = found.flatten()
        return rows


def contrast_rows(
    engine: Engine,
    positive: Sequence[Any],
    negative: Sequence[Any],
    hook: str,
    layers: Any = "all",
    tokens: str = "mean",
) -> ContrastRows:
    """Run both sets and keep one row of each text at each layer."""
    if tokens not in TOKENS:
        raise OptionError(f"tokens is {quoted(tokens)}, expected one of {', '.join(TOKENS)}.")
    for name, texts in (("positive", positive), ("negative", negative)):
        if isinstance(texts, str) or not isinstance(texts, Sequence) or len(texts) < 2:
            raise OptionError(f"{name} is {quoted(texts)}, expected a list of at least two texts.")
    count = engine.config.num_hidden_layers
    once = hook in BY_NAME and BY_NAME[hook].once
    wanted = [count - 1] if once else list(parse_layers(layers).expand(count))
    at = {layer: resolve(hook, layer, engine.schema, count) for layer in wanted}
    if not engine.schema[at[wanted[0]][0]].steerable:
        raise SteeringError(
            f"{hook} is capture-only: it can be read, not changed. Contrast one that can be steered."
        )
    hooks: dict[str, list[int]] = {}
    for name, layer in at.values():
        hooks.setdefault(name, []).append(layer)

    def rows(texts: Sequence[Any]) -> dict[int, torch.Tensor]:
        kept: dict[int, list[torch.Tensor]] = {layer: [] for layer in wanted}
        for acts in _acts(engine, texts, hooks, tokens):
            for layer in wanted:
                kept[layer].append(acts[at[layer]].tensor[0].float())
        return {layer: torch.stack(found) for layer, found in kept.items()}

    return ContrastRows(hook, rows(positive), rows(negative))


def contrast(
    engine: Engine,
    positive: Sequence[Any],
    negative: Sequence[Any],
    hook: str,
    layers: Any = "all",
    how: str = "mean_diff",
    *,
    streams: Sequence[int] | None = None,
    tokens: str = "mean",
    note: str = "",
) -> SteeringVector:
    """The difference between two sets of texts at a site, as a vector to add. Positive texts are where it leads."""
    if how not in METHODS:
        raise OptionError(f"how is {quoted(how)}, expected one of {', '.join(METHODS)}.")
    rows = contrast_rows(engine, positive, negative, hook, layers, tokens)
    return vector_of(engine, rows, rows.layers, how, streams, note)


def vector_of(
    engine: Engine,
    rows: ContrastRows,
    layers: Sequence[int],
    how: str = "mean_diff",
    streams: Sequence[int] | None = None,
    note: str = "",
) -> SteeringVector:
    """A steering vector from rows that were taken before."""
    if streams is not None and not rows.hook.startswith("mhc_streams"):
        raise SteeringError(f"streams is {list(streams)}, but {rows.hook} has one stream. Leave streams out.")
    model, revision = engine.identity()
    pairs = min(len(rows.positive[rows.layers[0]]), len(rows.negative[rows.layers[0]]))
    return SteeringVector(
        rows.vector(layers, how, streams),
        "add",
        rows.hook,
        normalised=how == "pca" and streams is None,
        model=model,
        model_revision=revision,
        quant=str(engine.config.expert_dtype or "none"),
        method=how,
        n_pairs=pairs,
        note=note,
    )


def _acts(
    engine: Engine, texts: Sequence[Any], hooks: dict[str, list[int]], tokens: str
) -> Iterator[Mapping[Address, SiteRows]]:
    """What one reduced capture of each text holds, in order; a few texts are in the engine at a time."""
    flying: deque[Request] = deque()
    try:
        for text in texts:
            ids, first = _tokens(engine, text)
            spec = Capture(hooks, positions={"prompt": {"window": [first, None]}}, reduce=tokens)
            flying.append(engine.submit_prompt(ids, spec))
            if len(flying) >= 2 * engine.max_requests:
                yield engine.wait_for_acts(flying.popleft())
        while flying:
            yield engine.wait_for_acts(flying.popleft())
    finally:
        for request in flying:
            engine.cancel(request)


def _tokens(engine: Engine, text: Any) -> tuple[list[int], int]:
    """Token ids, and the first of them that counts: all of a prompt but its start mark, or the answer of a chat."""
    if isinstance(text, Sequence) and not isinstance(text, str) and text and isinstance(text[0], Mapping):
        ids = engine.encode_chat(text)
        asked = engine.encode_chat(text[:-1]) if len(text) > 1 and text[-1].get("role") == "assistant" else []
        return ids, min(len(asked), len(ids) - 1) if asked else 0
    ids = engine.prompt_ids(text)
    return ids, int(len(ids) > 1 and ids[0] == engine.config.bos_token_id)
