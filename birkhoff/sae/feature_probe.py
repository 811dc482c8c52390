"""The active features at a site: the k largest of every row, read during a pass, or the k that say most about it.

Some features are active on most tokens and strong on all of them. In the order "specific" a feature counts by its
activation times -log(density), the surprise that it is active at all; densities are those of the dictionary's
descriptions.

A probe takes the place of a splice and changes nothing. It runs before the edits of its site, so it sees the row
that the features of an edit would be computed from; edits of earlier sites have been applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from birkhoff.errors import OptionError
from birkhoff.hooks.digest import DigestPart, Phase
from birkhoff.hooks.edit import GraphSplice, Op, Path, SiteContext
from birkhoff.hooks.plan import Key
from birkhoff.option_checks import check_choice
from birkhoff.sae.activations import TopK
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.encode import CHUNK, top
from birkhoff.sae.features import FeatureEntry
from birkhoff.sae.row_norm import normalize_rows
from birkhoff.sae.splice import SaeHost

Order = Literal["specific", "strength"]
ORDERS = ("specific", "strength")
STRONGEST = 256  # features of a row that are compared when the order is "specific"
RAREST = 1e-6  # densities below this count as this


@dataclass(frozen=True)
class Feature:
    """One active feature of one token; `stream` is set if every stream is encoded by itself."""

    feature: int
    activation: float
    label: str | None = None
    stream: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(eq=False)
class Probe:
    """Host and use in one. After the pass, `results` holds the k largest activations of each unit and their
    features."""

    reader: SaeHost
    k: int
    order: int = 0
    op: Op = "patch"
    path: Path = "both"
    needs_post: bool = False
    gate: None = None
    results: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def host(self) -> Probe:
        return self

    def run(
        self, x: torch.Tensor, uses: Sequence[tuple[Any, list[int]]], context: SiteContext
    ) -> torch.Tensor:
        view, weights = self.reader.view, self.reader.weights
        rows = view.by_unit(x)
        index = [unit for _, rows_of_use in uses for unit in view.unit_indices(rows_of_use, None)]
        for part in torch.split(torch.tensor(index, device=x.device), CHUNK):
            v = normalize_rows(view.read(rows, part, context).v, weights.normalize).rows
            k = min(self.k, weights.encoder.shape[0])
            if isinstance(weights.activation, TopK):
                values, features = top(weights, v, min(k, weights.activation.k))
                values = weights.activation.finish(values)
            else:
                values, features = top(weights, v, k, activated=True)
            self.results.append((values.cpu(), features.cpu()))
        return x

    def graph_kind(self, uses: Sequence[tuple[Any, list[int]]]) -> None:
        """Probes copy to the host and run in eager steps only."""
        return

    def graph_splice(self, kind: Any) -> GraphSplice:
        raise AssertionError("a probe has no graph kind")


@dataclass(frozen=True, eq=False)
class ProbePlan:
    """A probe as a plan carries it: every token, at one site."""

    sites: dict[Key, Probe]
    generated: ClassVar[bool] = True

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def describe(self) -> dict[str, Any]:
        return {}

    def digest_parts(self, phase: Phase) -> Sequence[DigestPart]:
        return ()


def order_of(sae: Sae, order: str | None) -> Order:
    """The order to use: the given one, by default "specific" if the dictionary is described, else "strength"."""
    if order is None:
        return "specific" if sae.descriptions else "strength"
    check_choice("order", order, ORDERS)
    if order == "specific" and not sae.descriptions:
        raise OptionError(
            "order is 'specific', but this dictionary has no descriptions, so nobody knows how often its features are "
            "active. Make them with `birkhoff sae features DIRECTORY --texts FILE --write`, or order by 'strength'."
        )
    return "specific" if order == "specific" else "strength"


def active_features(
    probe: Probe, sae: Sae, tokens: int, k: int, order: Order = "strength"
) -> list[list[Feature]]:
    """The nonzero features of each token, at most k, largest or most specific first. A feature that is not described
    comes after those that are."""
    described: Mapping[int, FeatureEntry] = sae.descriptions if order == "specific" else {}

    def rank(hit: Feature) -> tuple[float, float, int]:
        entry = described.get(hit.feature)
        surprise = 0.0 if entry is None else -math.log(min(max(entry.density, RAREST), 1.0))
        return -hit.activation * surprise, -hit.activation, hit.feature

    values, indices = (torch.cat(parts) for parts in zip(*probe.results))
    reader = probe.reader
    per_token = len(values) // tokens
    feature_of = reader.features if not sae.activation.whole_row else None  # rows on the device -> features
    result: list[list[Feature]] = []
    for token in range(tokens):
        features: list[Feature] = []
        for stream in range(per_token):
            unit = token * per_token + stream
            for value, index in zip(values[unit].tolist(), indices[unit].tolist()):
                feature = index if feature_of is None else feature_of[index]
                if value != 0:
                    label = sae.label(feature)
                    feature_id = sae.feature_id(feature)
                    features.append(Feature(feature_id, value, label, stream if per_token > 1 else None))
        features.sort(key=rank)
        result.append(features[:k])
    return result
