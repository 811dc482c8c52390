"""Dictionaries of an engine: attaching, clamps of all requests, resolution of one request's edits, and probes.

`SaeResolver` holds the registry of attached dictionaries and the tier of clamps that every request gets. A change
of that tier is checked as a whole, also against running requests, before it takes effect."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from birkhoff.errors import SaeError, quoted
from birkhoff.hooks.digest import combine
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.plan import Key
from birkhoff.hooks.schema import HookSchema
from birkhoff.option_checks import check_int
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.feature_edits import ResolvedSae, SaeReconstruct, SaeSet, check_together
from birkhoff.sae.feature_index import FeatureIndex
from birkhoff.sae.feature_probe import Probe, ProbePlan
from birkhoff.sae.features import FeatureEntry
from birkhoff.sae.files import load_named, locate_sae
from birkhoff.sae.registry import Attached, SaeRegistry, SaeReservation, Written
from birkhoff.sae.sae_manifest import clampable_features

SaeEdit = SaeSet | SaeReconstruct


class Attachment:
    """The result of `engine.attach`. As a context manager it detaches at the end and lets running requests finish."""

    def __init__(self, registry: SaeRegistry, module: Attached):
        self._registry = registry
        self.module = module

    @property
    def name(self) -> str:
        return self.module.name

    def __repr__(self) -> str:
        sites = ", ".join(f"{hook}[{layer}]" for hook, layer in sorted(self.module.saes))
        return f"Attachment({self.name!r}, {self.module.kind}, {sites})"

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self.name in self._registry and self._registry[self.name] is self.module:
            self._registry.detach(self.name, drain=True)


class SaeResolver:
    def __init__(self, schema: Mapping[str, HookSchema], num_layers: int, device: torch.device | str):
        self.registry = SaeRegistry(schema, num_layers, device)
        self._blocks: list[tuple[SaeEdit, ...]] = []  # one entry per open `for_all` block
        self._persistent: tuple[SaeEdit, ...] = ()  # from `set_for_all`
        self.gate: Callable[[Any], SiteGate | frozenset[int]] | None = None  # resolves the gates of edits

    def __repr__(self) -> str:
        return f"SaeResolver({', '.join(self.registry) or 'none attached'})"

    def attach(
        self,
        name: str,
        sae: Any,
        kind: str = "delta",
        features: Iterable[int | str] | None = None,
        replace: bool = False,
    ) -> Attachment:
        """Attach a dictionary, several for several sites, the path of their files, the name of a published one, or the
        name of a model that has one."""
        saes = sae
        if isinstance(sae, (str, Path)):
            saes = load_named(sae)
            features = clampable_features(locate_sae(sae)[0]) if features is None else features
        if replace:
            self._check_not_in_tier(name)
        return Attachment(self.registry, self.registry.attach(name, saes, kind, features, replace))

    def detach(self, name: str, drain: bool = False) -> None:
        self.registry[name]  # raises if it is not attached
        self._check_not_in_tier(name)
        self.registry.detach(name, drain)

    def descriptions(self, name: str) -> FeatureIndex:
        """The described features of an attached dictionary; the first one of a module with several sites."""
        return next(iter(self.registry[name].saes.values())).descriptions

    def describe_feature(self, name: str, feature: int | str) -> FeatureEntry:
        """What is known about one feature, given by number or label."""
        sae = next(iter(self.registry[name].saes.values()))
        feature_id = sae.feature_id(sae.feature(feature))
        if feature_id not in sae.descriptions:
            raise SaeError(
                f"feature {feature_id} of {quoted(name)} is not described. Describe its features with birkhoff sae "
                "features DIR --texts FILE --write, and attach the directory."
            )
        return sae.descriptions[feature_id]

    def edits(
        self, request_edits: Sequence[SaeEdit], prompt: Sequence[int] | int, max_tokens: int
    ) -> tuple[ResolvedSae, ...]:
        """The edits of all requests and the request's own, resolved for one prompt and checked for conflicts."""
        resolved = tuple(self._resolved(edit, prompt, max_tokens) for edit in (*self.tier, *request_edits))
        check_together(resolved)
        return resolved

    def _resolved(self, edit: SaeEdit, prompt: Sequence[int] | int, max_tokens: int) -> ResolvedSae:
        resolved = edit.resolve(self.registry, prompt, max_tokens)
        if edit.when is None:
            return resolved
        if self.gate is None:
            raise SaeError("gates of features are not served here. Leave when out.")
        return resolved.gated(self.gate(edit.when))

    def reservations(self, edits: Sequence[ResolvedSae]) -> tuple[SaeReservation, ...]:
        """The reservations of a request with these edits."""
        if not edits:
            return ()
        modules = list(dict.fromkeys(edit.module for edit in edits))
        rows: dict[str, set[bytes]] = {}
        for edit in edits:
            rows.setdefault(edit.module.kind, set()).update(edit.rows())
        writes: set[Written] = set().union(*(edit.writes() for edit in edits))
        return (self.registry.reservation(modules, rows, writes),)

    @property
    def tier(self) -> tuple[SaeEdit, ...]:
        """The edits of all requests: first those from `set_for_all`, then those of open blocks, outermost first."""
        return (*self._persistent, *(edit for block in self._blocks for edit in block))

    @contextmanager
    def for_all(self, edits: Sequence[SaeEdit]) -> Iterator[None]:
        """Apply these edits to every request submitted inside the block."""
        block = tuple(edits)
        self._check_tier((*self.tier, *block), block)
        self._blocks.append(block)
        try:
            yield
        finally:
            self._blocks.remove(block)

    def set_for_all(self, edits: Sequence[SaeEdit], replace: bool = True) -> None:
        """Apply these edits to every request until they are cleared; `replace` drops those set before."""
        kept = () if replace else self._persistent
        blocks = tuple(edit for block in self._blocks for edit in block)
        self._check_tier((*kept, *edits, *blocks), edits)
        self._persistent = (*kept, *edits)

    def clear_for_all(self) -> None:
        self._persistent = ()

    def status(self) -> dict[str, Any]:
        """Attached modules, edits of all requests, and usage of the pools."""
        return {
            "modules": [self.registry[name].describe() for name in self.registry],
            "for_all": [edit.to_json() for edit in self.tier],
            "rows": {
                kind: {"used": pool.used, "size": pool.size} for kind, pool in self.registry.pools.items()
            },
        }

    def digest(self) -> str | None:
        """128-bit digest of the edits of all requests, dictionaries by their content; None if there are none."""
        edits = [self._resolved(edit, 1, 2) for edit in self.tier]
        parts = [
            combine(part for edit in edits for part in edit.digest_parts(phase))
            for phase in ("prefill", "decode")
        ]
        if not edits:
            return None
        return hashlib.sha256(b"|".join(part or b"" for part in parts)).hexdigest()[:32]

    def probe(self, name: str, k: int, at: Key | None = None) -> tuple[Probe, ProbePlan, Sae]:
        """A probe for the k largest features of an attached dictionary; `at` is the site if it has several."""
        module = self.registry[name]
        check_int("k", k, error=SaeError)
        sites = ", ".join(f"{hook}[{layer}]" for hook, layer in module.saes)
        if at is None and len(module.saes) > 1:
            raise SaeError(f"{quoted(name)} has dictionaries at {sites}. Say which: at=(hook, layer).")
        key = next(iter(module.saes)) if at is None else at
        if key not in module.saes:
            raise SaeError(f"{quoted(name)} has no dictionary at {quoted(at)}; it covers {sites}.")
        probe = Probe(module.hosts[key], k)
        return probe, ProbePlan({key: probe}), module.saes[key]

    def _check_tier(self, tier: Sequence[SaeEdit], new: Sequence[SaeEdit]) -> None:
        for edit in new:
            if isinstance(edit, SaeReconstruct):
                raise SaeError(
                    "SaeReconstruct is for single requests: the tier of every request sets features only."
                )
        check_together([self._resolved(edit, 1, 2) for edit in tier])
        for edit in new:
            self.registry.check_not_written(edit.resolve(self.registry, 1, 2).writes())

    def _check_not_in_tier(self, name: str) -> None:
        if any(edit.name == name for edit in self.tier):
            raise SaeError(f"every request gets features of {quoted(name)} set. Clear that first.")


def split_edits(steer: Any) -> tuple[Any, list[SaeEdit]]:
    """Split edits into vector edits, in the form given, and SAE edits."""
    if isinstance(steer, (SaeSet, SaeReconstruct)):
        return None, [steer]
    if not isinstance(steer, (list, tuple)):
        return steer, []
    features = [edit for edit in steer if isinstance(edit, (SaeSet, SaeReconstruct))]
    rest = [edit for edit in steer if not isinstance(edit, (SaeSet, SaeReconstruct))]
    return (rest if features else steer), features
