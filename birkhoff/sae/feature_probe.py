"""Which features are live at a site: the k largest of every row, read in passing.

A probe stands in the place of a splice and changes nothing. It runs before anything is done to the site, so it sees
what the features of an edit would be computed from; edits of earlier sites have been made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from birkhoff.hooks.edit import Op, Path, SiteContext
from birkhoff.hooks.plan import Key
from birkhoff.sae.activations import TopK
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.encode import CHUNK, top
from birkhoff.sae.splice import SaeHost


@dataclass(frozen=True)
class Feature:
    """One live feature of one token; `stream` where every stream is read by itself."""

    feature: int
    activation: float
    label: str | None = None
    stream: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(eq=False)
class Probe:
    """Host and use in one. `found` holds, after the pass, the k largest activations of each unit and their names."""

    reader: SaeHost
    k: int
    order: int = 0
    op: Op = "patch"
    path: Path = "both"
    needs_post: bool = False
    found: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def host(self) -> Probe:
        return self

    def run(
        self, x: torch.Tensor, uses: Sequence[tuple[Any, list[int]]], around: SiteContext
    ) -> torch.Tensor:
        laid, held = self.reader.view.laid_out(x), self.reader.held
        numbers = [unit for _, rows in uses for unit in self.reader.view.numbers(rows, None)]
        for part in torch.tensor(numbers, device=x.device).split(CHUNK):
            v = self.reader.view.read(laid, part, around).v
            k = min(self.k, held.encoder.shape[0])
            if isinstance(held.activation, TopK):
                values, names = top(held, v, min(k, held.activation.k))
                values = held.activation.finish(values)
            else:
                values, names = top(held, v, k, activated=True)
            self.found.append((values.cpu(), names.cpu()))
        return x


@dataclass(frozen=True, eq=False)
class ProbePlan:
    """A probe as a plan carries it: every token, at one site."""

    sites: dict[Key, Probe]
    generated: ClassVar[bool] = True

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        return range(len(token_ids))

    def digest_parts(self, phase: str) -> Sequence[Any]:
        return ()


def live_features(probe: Probe, sae: Sae, tokens: int) -> list[list[Feature]]:
    """The features of each token that are not zero, largest first, k at most."""
    values, names = (torch.cat(parts) for parts in zip(*probe.found))
    reader = probe.reader
    per_token = len(values) // tokens
    renamed = reader.features if reader.features is not None and not sae.activation.whole_row else None
    found: list[list[Feature]] = []
    for token in range(tokens):
        here: list[Feature] = []
        for stream in range(per_token):
            unit = token * per_token + stream
            for value, name in zip(values[unit].tolist(), names[unit].tolist()):
                feature = name if renamed is None else renamed[name]
                if value != 0:
                    here.append(
                        Feature(feature, value, sae.labels.get(feature), stream if per_token > 1 else None)
                    )
        found.append(sorted(here, key=lambda hit: (-hit.activation, hit.feature))[: probe.k])
    return found
