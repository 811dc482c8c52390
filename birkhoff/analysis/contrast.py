"""`contrast(engine, positive, negative, hook, layers)`: a steering vector from two sets of texts.

Each text gives one row per layer: the mean over its tokens, or its last. A text is a prompt (text or token ids) or a
conversation (a list of messages), of which only the tokens of the answer are used. `ContrastRows.separation` measures
how well every layer and stream separates the two sets on texts that were not used for the direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.activations_store import iter_captures
from birkhoff.capture.spec.request import Capture
from birkhoff.errors import OptionError, SteeringError, quoted
from birkhoff.hooks.layers import parse_layers
from birkhoff.hooks.site_names import Address, from_tool, has_streams, select
from birkhoff.steering.extract import METHODS, Separation, direction, separate
from birkhoff.steering.vector import Vector
from birkhoff.steering.vector_file import SteeringVector

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

TOKENS = ("mean", "last")


@dataclass(frozen=True, eq=False)
class ContrastRows:
    """One row per text and layer: `positive[layer]` and `negative[layer]` are [texts, *row_shape]."""

    hook: str
    positive: Mapping[int, torch.Tensor]
    negative: Mapping[int, torch.Tensor]

    @property
    def layers(self) -> list[int]:
        return sorted(self.positive)

    def separation(self, how: str = "mean_diff") -> list[Separation]:
        """Return the separation at every layer: of the whole row, then of each stream."""
        return [
            entry
            for layer in self.layers
            for entry in separate(self.hook, layer, self.positive[layer], self.negative[layer], how=how)
        ]

    def vector(
        self, layers: Sequence[int], how: str = "mean_diff", streams: Sequence[int] | None = None
    ) -> dict[int, Vector]:
        """Return the rows of a steering vector at these layers; with `streams`, other streams are zero."""
        rows = {}
        for layer in layers:
            row = direction(self.positive[layer], self.negative[layer], how)
            if streams is not None:
                masked = torch.zeros_like(row)
                masked[list(streams)] = row[list(streams)]
                row = masked
            rows[layer] = Vector(row.flatten(), f"the row of layer {layer}")
        return rows


def check_texts(positive: Sequence[Any], negative: Sequence[Any]) -> None:
    """Refuse sets of fewer than two texts."""
    for name, texts in (("positive", positive), ("negative", negative)):
        if isinstance(texts, str) or not isinstance(texts, Sequence) or len(texts) < 2:
            raise OptionError(f"{name} is {quoted(texts)}, expected a list of at least two texts.")


def contrast_rows(
    engine: Engine,
    positive: Sequence[Any],
    negative: Sequence[Any],
    hook: str,
    layers: Any = "all",
    tokens: str = "mean",
) -> ContrastRows:
    """Run both sets of texts and return one row of each text at each layer."""
    if tokens not in TOKENS:
        raise OptionError(f"tokens is {quoted(tokens)}, expected one of {', '.join(TOKENS)}.")
    check_texts(positive, negative)
    count = engine.config.num_hidden_layers
    foreign = from_tool(hook, count, has_streams(engine.schema))
    if foreign is not None:  # the vector is stored under our name
        hook, layers = foreign[0], [foreign[1]]
    sites = select(hook, parse_layers(layers), engine.schema, count)
    selected = list(sites)
    if not engine.schema[sites[selected[0]][0]].steerable:
        raise SteeringError(
            f"{hook} is capture-only: it can be read, not changed. Contrast one that can be steered."
        )
    both = (
        text_rows(engine, texts, sites, lambda rows: rows[0].float(), tokens)
        for texts in (positive, negative)
    )
    return ContrastRows(hook, *both)


def text_rows(
    engine: Engine,
    texts: Sequence[Any],
    sites: Mapping[int, Address],
    row_of: Callable[[torch.Tensor], torch.Tensor],
    reduce: str | None = None,
) -> dict[int, torch.Tensor]:
    """Run texts; for every layer of `sites` one row per text, [texts, ...], made of the captured rows of its tokens."""
    hooks: dict[str, list[int]] = {}
    for name, layer in sites.values():
        hooks.setdefault(name, []).append(layer)

    def captures() -> Iterator[tuple[list[int], Capture]]:
        for text in texts:
            ids, first = token_span(engine, text)
            yield ids, Capture(hooks, positions={"prompt": {"window": [first, None]}}, reduce=reduce)

    by_layer: dict[int, list[torch.Tensor]] = {layer: [] for layer in sites}
    for acts in iter_captures(engine, captures()):
        for layer, site in sites.items():
            by_layer[layer].append(row_of(acts[site].tensor))
    return {layer: torch.stack(rows) for layer, rows in by_layer.items()}


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
    """Return the difference between two sets of texts at a hook as a vector to add; it steers to the positive set."""
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
    """Return the steering vector of previously computed rows."""
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
        quant=str(getattr(engine.config, "expert_dtype", None) or "none"),
        method=how,
        n_pairs=pairs,
        note=note,
    )


def token_span(engine: Engine, text: Any) -> tuple[list[int], int]:
    """Return the token ids and the first position used: after the begin-of-text token, or the answer of a chat."""
    if isinstance(text, Sequence) and not isinstance(text, str) and text and isinstance(text[0], Mapping):
        ids = engine.encode_chat(text)
        answered = len(text) > 1 and text[-1].get("role") == "assistant"
        prefix = engine.encode_chat(text[:-1]) if answered else []
        return ids, min(len(prefix), len(ids) - 1) if prefix else 0
    ids = engine.prompt_ids(text)
    return ids, int(len(ids) > 1 and ids[0] == engine.config.bos_token_id)
