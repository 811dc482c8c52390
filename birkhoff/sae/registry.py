"""The dictionaries attached to an engine, by name, and their reservations by running requests.

Attaching is atomic: everything is checked, built and run once before it is registered, and a failing step undoes the
registration. A site can have any number of `delta` modules, in the order in which they were attached, and one `full`
module. Running requests keep the modules they resolved: a module that is detached or replaced is freed when the last of
them ends.

Clamp rows are counted in two pools, one per kind: a row is one content of clamps in one phase, shared by requests with
equal content. A request that does not fit at the moment waits; one that can never fit is refused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from birkhoff.errors import CapacityError, SaeBusy, SaeError, SiteError, did_you_mean, quoted
from birkhoff.hooks import site_names
from birkhoff.hooks.digest import framed
from birkhoff.hooks.plan import Key
from birkhoff.hooks.schema import HookSchema
from birkhoff.sae.dictionary import Sae
from birkhoff.sae.splice import SaeHost
from birkhoff.sae.views import make_view

KINDS = ("delta", "full")
ROWS = 256  # contents of clamps in flight, of each kind
Written = tuple[int, Key, int, str]  # module's order, site, feature, phase; may be written once


@dataclass(eq=False)
class Attached:
    """One module: the dictionaries of one name at their sites."""

    name: str
    kind: str
    order: int
    saes: Mapping[Key, Sae]
    hosts: Mapping[Key, SaeHost]
    features: frozenset[int] | None  # that can be clamped; None for all
    live: int = 0  # reservations of running requests

    @property
    def digest(self) -> bytes:
        return framed(*(self.saes[key].digest.encode() for key in sorted(self.saes)))

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "sites": [f"{hook}[{layer}]" for hook, layer in self.saes],
            "features": None
            if self.features is None
            else sorted(next(iter(self.saes.values())).feature_id(row) for row in self.features),
            "live": self.live,
            "bytes": sum(host.num_bytes for host in self.hosts.values()),
        }


class RowPool:
    """Clamp rows in use, each counted once for all requests that share it."""

    def __init__(self, kind: str, size: int):
        self.kind = kind
        self.size = size
        self._counts: Counter[bytes] = Counter()

    @property
    def used(self) -> int:
        return len(self._counts)

    def take(self, rows: Collection[bytes]) -> bool:
        if self.used + len({row for row in rows if row not in self._counts}) > self.size:
            return False
        self._counts.update(set(rows))
        return True

    def release(self, rows: Collection[bytes]) -> None:
        for row in set(rows):
            self._counts[row] -= 1
            if not self._counts[row]:
                del self._counts[row]


@dataclass(eq=False)
class SaeReservation:
    """What one request reserves of the registry while it runs."""

    registry: SaeRegistry
    modules: tuple[Attached, ...]
    rows: Mapping[str, frozenset[bytes]]  # by kind
    writes: frozenset[Written]
    reserved: bool = field(default=False, init=False)

    def reserve(self) -> bool:
        return self.registry.reserve(self)

    def release(self) -> None:
        self.registry.release(self)


class SaeRegistry:
    def __init__(
        self, schema: Mapping[str, HookSchema], num_layers: int, device: torch.device | str, rows: int = ROWS
    ):
        self.schema = schema
        self.num_layers = num_layers
        self._device = torch.device(device)
        self.pools = {kind: RowPool(kind, rows) for kind in KINDS}
        self._modules: dict[str, Attached] = {}
        self._full: dict[Key, str] = {}
        self._leaving: list[Attached] = []
        self._writes: Counter[Written] = Counter()
        self._order = 0
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __getitem__(self, name: str) -> Attached:
        if name not in self._modules:
            known = ", ".join(sorted(self._modules)) or "none"
            raise SaeError(
                f"there is no module named {quoted(name)}; attached: {known}."
                f"{did_you_mean(name, self._modules)} "
                "Attach it first: engine.attach(name, sae)."
            )
        return self._modules[name]

    def state(self) -> tuple[Any, ...]:
        """Everything that attaching or running can change, for comparison."""
        modules = tuple((name, id(module), module.live) for name, module in self._modules.items())
        pools = tuple((kind, dict(pool._counts)) for kind, pool in self.pools.items())
        leaving = tuple(id(module) for module in self._leaving)
        return modules, dict(self._full), pools, leaving, self._order, dict(self._writes)

    def attach(
        self,
        name: str,
        saes: Sae | Sequence[Sae],
        kind: str = "delta",
        features: Iterable[int | str] | None = None,
        replace: bool = False,
        reached: Callable[[str], None] = lambda step: None,
    ) -> Attached:
        """Check, build, run once and register. `reached` is called before each step; if it raises, all steps are
        undone."""
        reached("check")
        checked = self._check(name, saes, kind, replace)
        sites = {self._site(sae): sae for sae in checked}
        if len(sites) < len(checked):
            raise SaeError(f"module {quoted(name)} has two dictionaries for one site. Give one for each.")
        views = {
            key: make_view(sae.view, sae.spread, sae.d_model, *key, self.schema[key[0]])
            for key, sae in sites.items()
        }
        allowed = self._allowed(features, sites.values())
        loaded = sorted(allowed) if kind == "delta" and allowed is not None else None
        hosts = {}
        for key, sae in sites.items():
            reached(f"buffers of {key[0]}[{key[1]}]")
            hosts[key] = SaeHost(sae, views[key], loaded, self._device, self._order)
        for key, host in hosts.items():
            reached(f"first run at {key[0]}[{key[1]}]")
            host.warm()
        with self._lock, ExitStack() as undo:
            undo.callback(
                self._restore, dict(self._modules), dict(self._full), list(self._leaving), self._order
            )
            module = Attached(name, kind, self._order, sites, hosts, allowed)
            reached("order")
            self._order += 1
            if name in self._modules:
                reached("take out the old one")
                self._remove(self._modules[name])
            reached("sites")
            self._claim(module)
            reached("name")
            self._modules[name] = module
            reached("done")
            undo.pop_all()
        return module

    def detach(self, name: str, drain: bool = False) -> None:
        """Detach a module. Refused while running requests use it, unless they may finish with it (`drain`)."""
        with self._lock:
            module = self[name]
            if module.live and not drain:
                raise SaeBusy(
                    f"{module.live} running requests use {quoted(name)}. Wait for them, or detach with drain=True: "
                    "they finish on it and no new ones begin."
                )
            self._remove(module)

    def reserve(self, reservation: SaeReservation) -> bool:
        with self._lock:
            assert not reservation.reserved, "a request is admitted once"
            for kind, rows in reservation.rows.items():
                if not self.pools[kind].take(rows):
                    for taken in list(reservation.rows)[: list(reservation.rows).index(kind)]:
                        self.pools[taken].release(reservation.rows[taken])
                    return False
            reservation.reserved = True
            self._writes.update(reservation.writes)
            for module in reservation.modules:
                module.live += 1
            return True

    def release(self, reservation: SaeReservation) -> None:
        with self._lock:
            if not reservation.reserved:
                return
            reservation.reserved = False
            for kind, rows in reservation.rows.items():
                self.pools[kind].release(rows)
            self._writes.subtract(reservation.writes)
            self._writes = +self._writes
            for module in reservation.modules:
                module.live -= 1
                if not module.live and module in self._leaving:
                    self._leaving.remove(module)

    def reservation(
        self, modules: Sequence[Attached], rows: Mapping[str, Collection[bytes]], writes: Collection[Written]
    ) -> SaeReservation:
        """The reservation of a request, to be made at admission; refused if it can never fit."""
        for kind, contents in rows.items():
            if len(set(contents)) > self.pools[kind].size:
                raise CapacityError(
                    f"this request needs {len(set(contents))} rows of {kind} clamps, and {self.pools[kind].size} can "
                    "ever be free. Ask for fewer features in fewer edits."
                )
        return SaeReservation(
            self,
            tuple(modules),
            {kind: frozenset(contents) for kind, contents in rows.items()},
            frozenset(writes),
        )

    def check_not_written(self, writes: Collection[Written]) -> None:
        """For clamps of all requests: refuse features that a running request already writes."""
        with self._lock:
            for order, (hook, layer), feature, phase in sorted(set(writes) & set(self._writes)):
                name = next(
                    (m.name for m in self._modules.values() if m.order == order), "a module that is leaving"
                )
                sae = self._modules[name].saes.get((hook, layer)) if name in self._modules else None
                feature_id = feature if sae is None or feature < 0 else sae.feature_id(feature)
                raise SaeError(
                    f"a running request already sets feature {feature_id} of {name} at {hook}[{layer}] in {phase}. "
                    "Wait until it has ended, or leave that feature to requests."
                )

    def _check(self, name: Any, saes: Any, kind: Any, replace: bool) -> list[Sae]:
        if not isinstance(name, str) or not name:
            raise SaeError(f"a module is named by a text, not {quoted(name)}.")
        if name in self._modules and not replace:
            raise SaeError(f"{quoted(name)} is attached already. Detach it, or attach with replace=True.")
        if kind not in KINDS:
            raise SaeError(f"kind is {quoted(kind)}, expected one of {', '.join(KINDS)}.")
        checked = [saes] if isinstance(saes, Sae) else list(saes) if isinstance(saes, (list, tuple)) else []
        if not checked or not all(isinstance(sae, Sae) for sae in checked):
            raise SaeError(
                f"got {quoted(saes)}, expected an Sae or a list of them. Read one with Sae.load(path)."
            )
        for sae in checked if kind == "full" else ():
            sae.check_whole(f"kind 'full' of {quoted(name)}")
        return checked

    def _site(self, sae: Sae) -> Key:
        if sae.hook is None or sae.layer is None:
            missing = "hook" if sae.hook is None else "layer"
            trained = sae.metadata.get("hook_name")
            why = f" It was trained at {trained}, which is no site of ours." if trained else ""
            raise SaeError(
                f"{sae} says no {missing}.{why} Give it when loading, or place it with sae.at(hook, layer)."
            )
        try:
            hook, layer = site_names.resolve(sae.hook, sae.layer, self.schema, self.num_layers)
        except SiteError as error:
            raise SaeError(str(error)) from None
        if not self.schema[hook].steerable:
            raise SaeError(
                f"{hook} is capture-only: it can be read, not changed, so nothing is attached there."
            )
        return hook, layer

    def _allowed(self, features: Iterable[int | str] | None, saes: Iterable[Sae]) -> frozenset[int] | None:
        if features is None:
            return None
        if isinstance(features, str) or not isinstance(features, Iterable):
            raise SaeError(
                f"features is {quoted(features)}, expected a list of features, by number or label."
            )
        wanted = list(features)
        chosen = [frozenset(sae.feature(name) for name in wanted) for sae in saes]
        if len(set(chosen)) > 1:
            raise SaeError("a label stands for different features at different sites. Give numbers.")
        if not chosen[0] or len(chosen[0]) < len(wanted):
            raise SaeError(f"features is {quoted(wanted)}, expected at least one, and each once.")
        return chosen[0]

    def _claim(self, module: Attached) -> None:
        if module.kind != "full":
            return
        for key in module.saes:
            if key in self._full:
                raise SaeError(
                    f"{key[0]}[{key[1]}] already has the full module {quoted(self._full[key])}, and a row can be "
                    "replaced by one reconstruction. Detach that one, or attach this one as delta."
                )
        self._full.update(dict.fromkeys(module.saes, module.name))

    def _remove(self, module: Attached) -> None:
        del self._modules[module.name]
        for key in [key for key, name in self._full.items() if name == module.name]:
            del self._full[key]
        if module.live:
            self._leaving.append(module)

    def _restore(
        self, modules: dict[str, Attached], full: dict[Key, str], leaving: list[Attached], order: int
    ) -> None:
        self._modules = modules
        self._full = full
        self._leaving = leaving
        self._order = order
