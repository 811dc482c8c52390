"""One edit of a request as a plan carries it, whatever it changes: rows, features, the router, attention.

An operation at a site brings its own canonical bytes (`digest_part`); an operation without any, such as a function, is
never shared through a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from birkhoff.hooks.digest import DigestPart, Phase
from birkhoff.hooks.gating import SiteGate
from birkhoff.hooks.phases import covers, every_generated, of_tokens, offsets, with_tokens
from birkhoff.hooks.plan import Key
from birkhoff.hooks.selector import PositionSelector


@dataclass(frozen=True, eq=False)
class ResolvedEdit:
    """Operations by site, and which tokens they change: those of a phase that the selector chose, limited to some
    positions or token ids. `report` is what a response says about the edit, `gate_report` about its gate."""

    sites: Mapping[Key, Any]
    selector: PositionSelector | None
    phase: str
    positions: frozenset[int] | None = None
    prompt_len: int = 0
    tokens: frozenset[int] | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    gate_report: Mapping[str, Any] | None = None

    def gated(self, gate: SiteGate | frozenset[int], gate_report: Mapping[str, Any] | None = None) -> Self:
        """The edit where a gate is open."""
        if isinstance(gate, frozenset):
            return replace(self, tokens=gate, gate_report=gate_report)
        for key in self.sites:
            gate.check_before(key)
        operations = {id(site): replace(site, gate=gate) for site in self.sites.values()}
        sites = {key: operations[id(site)] for key, site in self.sites.items()}
        return replace(self, sites=sites, gate_report=gate_report)

    @property
    def generated(self) -> bool | None:
        every = every_generated(self.phase, self.selector) if self.sites else False
        limited = self.positions is not None or self.tokens is not None
        return None if every and limited else every

    def offsets(self, start: int, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        if not self.sites:
            return ()
        selected = offsets(self.phase, self.selector, start, token_ids, prompt_len)
        selected = of_tokens(selected, token_ids, self.tokens)
        if self.positions is None:
            return selected
        return [offset for offset in selected if start + offset in self.positions]

    def digest_parts(self, phase: Phase) -> Sequence[DigestPart]:
        selected = b"" if self.selector is None else self.selector.signature(phase)
        if not covers(self.phase, phase) or selected is None:
            return ()
        if self.positions is not None and not any(
            (position < self.prompt_len) == (phase == "prefill") for position in self.positions
        ):
            return ()
        selected = with_tokens(selected, self.tokens)
        parts = (self._digest_part(key, site, selected) for key, site in self.sites.items())
        return [part for part in parts if part is not None]

    def _digest_part(self, key: Key, site: Any, selected: bytes) -> DigestPart | None:
        part: DigestPart | None = site.digest_part(key, selected)
        return part

    def describe(self) -> Mapping[str, Any]:
        return dict(self.report) | ({} if self.gate_report is None else {"gates": self.gate_report})
