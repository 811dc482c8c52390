"""The SAE edits of a request: `SaeSet` and `SaeReconstruct`. Plain data, checked on construction.

    SaeSet("gg", {34: 5.0})                                   feature 34 is 5, the rest of the row is unchanged
    SaeSet("gg", {"bridge": {"x_max": 2.0}}, kind="additive") plus twice its largest activation, by label
    SaeReconstruct("gg_full", {34: 5.0}, error="keep")        the row becomes its reconstruction (+ its error)

A value may have its own kind: `{34: {"kind": "multiply", "value": 0.5, "only_if_active": True}}`. A module with several
sites is edited at all of them, or by `(hook, layer)`: `{("mlp_out", 3): {34: 5.0}}`. `resolve` returns the form that a
plan carries; `check_together` refuses edits that write one feature twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar, Self

from birkhoff.errors import SaeError, SiteError, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.digest import DigestPart, Phase, framed
from birkhoff.hooks.edit import Op
from birkhoff.hooks.phases import PHASES, covers
from birkhoff.hooks.plan import Key
from birkhoff.hooks.positions import parse_positions
from birkhoff.hooks.resolved_edit import ResolvedEdit
from birkhoff.hooks.schema import HookSchema
from birkhoff.hooks.selector import bind
from birkhoff.option_checks import listed
from birkhoff.sae.clamps import FeatureClamp, parse_clamp, resolve_clamps
from birkhoff.sae.registry import Attached, SaeRegistry, Written
from birkhoff.sae.splice import SaeUse

PATHS, ERRORS = ("both", "read", "carry"), ("drop", "keep")
Site = tuple[str, int] | None  # None: every site of the module
Clamps = tuple[tuple[Site, tuple[FeatureClamp, ...]], ...]


@dataclass(frozen=True)
class _SaeEdit:
    """Fields of both edits. `clamps` is the parsed form of `features`."""

    name: str
    features: InitVar[Any] = None
    phase: str = "both"
    where: Any = None
    path: str = "both"
    streams: Any = None
    kind: InitVar[str] = "absolute"
    only_if_active: InitVar[bool] = False
    when: Any = field(default=None, kw_only=True)  # a gate
    clamps: Clamps = field(init=False, default=())

    mode: ClassVar[str] = ""
    op: ClassVar[str] = "sae"

    def __post_init__(self, features: Any, kind: str, only_if_active: bool) -> None:
        put = object.__setattr__
        if not isinstance(self.name, str) or not self.name:
            raise SaeError(f"module is {quoted(self.name)}, expected the name of an attached dictionary.")
        put(self, "clamps", _clamps(features, kind, only_if_active))
        for field_, value, allowed in (("phase", self.phase, PHASES), ("path", self.path, PATHS)):
            if value not in allowed:
                raise SaeError(f"{field_} is {quoted(value)}, expected one of {', '.join(allowed)}.")
        if self.where is not None:
            put(self, "where", parse_positions(listed(self.where), "where"))
        put(self, "streams", _streams(self.streams))
        self._check()

    def _check(self) -> None:
        pass

    def to_json(self) -> dict[str, Any]:
        """The edit as an entry of `interventions`."""
        out: dict[str, Any] = {"op": "sae", "module": self.name, "mode": self.mode}
        sited: dict[str, Any] = {}
        for site, clamps in self.clamps:
            values = {str(clamp.feature): clamp.to_json() for clamp in clamps}
            if site is None:
                out["set"] = values
            else:
                sited.setdefault(site[0], {})[str(site[1])] = values
        if sited:
            out["set_at"] = sited
        for name in ("phase", "path"):
            if getattr(self, name) != "both":
                out[name] = getattr(self, name)
        if self.where is not None:
            out["where"] = self.where.to_json()
        if self.streams is not None:
            out["streams"] = list(self.streams)
        if self.when is not None:
            out["when"] = self.when.to_json() if hasattr(self.when, "to_json") else dict(self.when)
        return out

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        from birkhoff.sae.sae_fields import parse_intervention  # sae_fields imports this module

        edit = parse_intervention(raw, "")
        if not isinstance(edit, cls):
            raise SaeError(f"mode is {quoted(edit.mode)}, expected {cls.mode!r}.")
        return edit

    def resolve(self, registry: SaeRegistry, prompt: Sequence[int] | int, max_tokens: int) -> ResolvedSae:
        """Resolve against the attached modules and one prompt. All errors are raised here."""
        module = registry[self.name]
        if module.kind != ("full" if self.mode == "reconstruct" else "delta"):
            other = "SaeReconstruct" if module.kind == "full" else "SaeSet"
            raise SaeError(
                f"{quoted(self.name)} is attached as {module.kind!r}, and {type(self).__name__} uses the other kind. "
                f"Use {other}, or attach it again with the kind you mean."
            )
        clamps_at = self._clamps_at(module, registry.schema, registry.num_layers)
        uses: dict[Key, SaeUse] = {}
        for key, clamps in clamps_at.items():
            host, sae = module.hosts[key], module.saes[key]
            if self.streams is not None and host.view.name != "per_stream":
                raise SaeError(
                    f"streams is {list(self.streams)}, and only view 'per_stream' takes streams one by one."
                )
            if self.streams is not None and self.streams[-1] >= host.view.streams:
                raise SaeError(
                    f"streams is {list(self.streams)}, this model has streams 0..{host.view.streams - 1}."
                )
            row = resolve_clamps(clamps, sae, module.features)
            path: Any = self.path if key[0].startswith("mhc_streams") else "both"
            op: Op = "full" if module.kind == "full" else "delta"
            uses[key] = SaeUse(host, row, op, path, self._error(), self.streams)
        selector = None if self.where is None else bind(self.where, prompt, max_tokens, "where")
        rank = _rank(registry, module)
        return ResolvedSae(uses, selector, self.phase, module=module, rank=rank)

    def _error(self) -> str:
        return "keep"

    def _clamps_at(
        self, module: Attached, schema: Mapping[str, HookSchema], num_layers: int
    ) -> dict[Key, list[FeatureClamp]]:
        """The clamps at each site of the module that this edit changes."""
        clamps_at: dict[Key, list[FeatureClamp]] = {}
        for site, clamps in self.clamps:
            for key in module.saes if site is None else (_covered(site, module, schema, num_layers),):
                clamps_at.setdefault(key, []).extend(clamps)
        return clamps_at


@dataclass(frozen=True)
class SaeSet(_SaeEdit):
    """Set features of an attached dictionary: `SaeSet("gg", {34: 5.0})`; the rest of the row is unchanged.

    `features` maps ids or labels to values, or sites `(hook, layer)` to such a mapping. `kind` says what a value is:
    "absolute", "additive", "multiply", "min", "max" or "bound"; `only_if_active` skips features that do not fire. A
    value may be an object with its own `kind`, or `{"x_max": 2.0}`, a multiple of the largest activation. The other
    fields select tokens and streams as those of `Add` do."""

    mode: ClassVar[str] = "delta"

    def _check(self) -> None:
        if not self.clamps:
            raise SaeError("SaeSet names no feature. Give {feature: value}.")


@dataclass(frozen=True)
class SaeReconstruct(_SaeEdit):
    """Replace the row by its reconstruction from features, some of them set: `SaeReconstruct("gg_full", {34: 5.0})`.

    `error` says what happens to the reconstruction error: "drop" or "keep". The other fields are those of `SaeSet`."""

    error: str = "drop"

    mode: ClassVar[str] = "reconstruct"

    def _check(self) -> None:
        if self.error not in ERRORS:
            raise SaeError(f"error is {quoted(self.error)}, expected one of {', '.join(ERRORS)}.")

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"error_term": self.error}

    def _error(self) -> str:
        return self.error

    def _clamps_at(
        self, module: Attached, schema: Mapping[str, HookSchema], num_layers: int
    ) -> dict[Key, list[FeatureClamp]]:
        return {key: [] for key in module.saes} | super()._clamps_at(module, schema, num_layers)


@dataclass(frozen=True, eq=False, kw_only=True)
class ResolvedSae(ResolvedEdit):
    """An edit as a plan carries it."""

    module: Attached
    rank: tuple[int, ...]  # its order among the modules at each site: it runs on the result of earlier ones

    def _digest_part(self, key: Key, site: SaeUse, selected: bytes) -> DigestPart:
        hook, layer = key
        content = framed(
            hook.encode(),
            str(layer).encode(),
            self.module.saes[key].digest.encode(),
            site.path.encode(),
            site.error.encode(),
            b"" if site.streams is None else bytes(site.streams),
            repr(self.rank).encode(),
            selected,
            site.row.content,
            *([] if site.gate is None else [site.gate.content]),
        )
        return DigestPart("full" if site.op == "full" else "delta", content)

    @property
    def phases(self) -> tuple[Phase, ...]:
        both: tuple[Phase, ...] = ("prefill", "decode")
        return tuple(phase for phase in both if covers(self.phase, phase))

    def rows(self) -> set[bytes]:
        """Its rows of the pool: one for each content and phase."""
        whole = [
            framed(repr(key).encode(), use.error.encode(), use.row.content) for key, use in self.sites.items()
        ]
        return {framed(self.module.digest, phase.encode(), *sorted(whole)) for phase in self.phases}

    def writes(self) -> set[Written]:
        """The features it writes; a reconstruction also writes its sites, as feature -1."""
        features = [(key, feature) for key, use in self.sites.items() for feature in use.row.features]
        writes: set[Written] = {
            (self.module.order, key, name, phase) for key, name in features for phase in self.phases
        }
        if self.module.kind == "full":
            writes |= {(self.module.order, key, -1, phase) for key in self.sites for phase in self.phases}
        return writes

    def describe(self) -> dict[str, Any]:
        """The dictionary and the handling of its reconstruction error."""
        use = next(iter(self.sites.values()))
        description: dict[str, Any] = {
            "module": self.module.name,
            "mode": "delta" if use.op == "delta" else "reconstruct",
        }
        if use.op == "full":
            description["error_term"] = use.error
        sites = [f"{hook}[{layer}]" for hook, layer in self.sites]
        gates: dict[str, Any] = {}
        if use.gate is not None:
            gates = {"gates": {"reads": f"{use.gate.key[0]}[{use.gate.key[1]}]"}}
        elif self.tokens is not None:
            gates = {"gates": {"tokens": len(self.tokens)}}
        return {"features": description | {"sites": sites, "path": use.path}, **gates}


def check_together(edits: Sequence[ResolvedSae]) -> None:
    """Refuse edits that write the same feature in the same phase, including those of all requests."""
    seen: dict[Written, ResolvedSae] = {}
    gated = [edit.module.name for edit in edits if any(use.gate is not None for use in edit.sites.values())]
    twice = next((name for name in gated if gated.count(name) > 1), None)
    if twice is not None:
        raise SaeError(
            f"two edits of {quoted(twice)} have a gate, expected one. Join them, or leave one without."
        )
    for edit in edits:
        for written in sorted(edit.writes()):
            if written in seen:
                _, (hook, layer), feature, phase = written
                sae = edit.module.saes[hook, layer]
                what = f"feature {sae.feature_id(feature)}" if feature >= 0 else "the whole row"
                raise SaeError(
                    f"two edits set {what} of {quoted(edit.module.name)} at {hook}[{layer}] in {phase}, and only one "
                    "can hold. Join them, or give them different phases."
                )
            seen[written] = edit


def _rank(registry: SaeRegistry, module: Attached) -> tuple[int, ...]:
    others = [registry[name] for name in registry]
    return tuple(
        sum(key in other.saes and other.order < module.order for other in others) for key in module.saes
    )


def _covered(
    site: tuple[str, int], module: Attached, schema: Mapping[str, HookSchema], num_layers: int
) -> Key:
    try:
        key = site_names.resolve(*site, schema, num_layers)
    except SiteError as error:
        raise SaeError(str(error)) from None
    if key not in module.saes:
        covered = ", ".join(f"{hook}[{layer}]" for hook, layer in module.saes)
        raise SaeError(
            f"{quoted(module.name)} has no dictionary at {site[0]}[{site[1]}]; it covers {covered}."
        )
    return key


def _clamps(features: Any, kind: str, only_if_active: bool) -> Clamps:
    if features is None:
        return ()
    if not isinstance(features, Mapping):
        raise SaeError(f"features is {quoted(features)}, expected {{feature: value}}.")
    by_site = bool(features) and all(isinstance(key, tuple) for key in features)
    groups: dict[Site, Any] = dict(features) if by_site else {None: features} if features else {}
    clamps_at: dict[Site, tuple[FeatureClamp, ...]] = {}
    for site, values in groups.items():
        if site is not None and (len(site) != 2 or not isinstance(site[0], str) or type(site[1]) is not int):
            raise SaeError(f"{quoted(site)} is no site, expected (hook, layer).")
        if not isinstance(values, Mapping):
            raise SaeError(f"features of {quoted(site)} is {quoted(values)}, expected {{feature: value}}.")
        clamps = [
            parse_clamp(name, value, kind, only_if_active, f"features[{quoted(name)}]")
            for name, value in values.items()
        ]
        if len({clamp.feature for clamp in clamps}) < len(clamps):
            raise SaeError(
                f"features {quoted(list(values))} names one feature twice. Give each feature once."
            )
        clamps_at[site] = tuple(
            sorted(clamps, key=lambda clamp: (isinstance(clamp.feature, str), str(clamp.feature)))
        )
    return tuple(sorted(clamps_at.items(), key=lambda entry: entry[0] or ("", -1)))


def _streams(value: Any) -> tuple[int, ...] | None:
    value = listed(value)
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise SaeError(f"streams is {quoted(value)}, expected a list of stream numbers.")
    if any(
        isinstance(stream, bool) or not isinstance(stream, int) or not 0 <= stream < 256 for stream in value
    ):
        raise SaeError(f"streams is {quoted(value)}, expected stream numbers from 0.")
    return tuple(sorted(set(value)))
