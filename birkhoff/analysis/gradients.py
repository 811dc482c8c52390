"""Gradients of whole-text forward passes at every site: `with engine.grad() as g`.

Inside the block `engine.logits` and `engine.trace` keep the graph of their forward passes, so any number computed
from their results can be differentiated; `g.backward(number)` then computes its gradient at every recorded site. The
tensor of a site is the one that leaves it: after the edits, as the rest of the model uses it. Sites that can only be
read (mixers, the router) have gradients as well. A chosen set has none: which experts, entries or blocks are selected
is a constant of the derivative.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.errors import OptionError, SiteError
from birkhoff.hooks.edit import Routing
from birkhoff.hooks.plan import Key
from birkhoff.hooks.site_names import has_streams
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import Reads, RecordingTap, Tap, stack_parts
from birkhoff.model.transformer import Transformer
from birkhoff.trace import TensorsBySite

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine

Change = Callable[[torch.Tensor], torch.Tensor]  # of what leaves a site


class SiteTensors:
    """The tensors of sites in one pass, as nodes of its graph. `changes` are applied to what leaves their site."""

    def __init__(self, keys: Collection[Key], changes: Mapping[Key, Change] | None = None):
        self._keys = frozenset(keys)
        self._changes = dict(changes or {})
        self.parts: dict[Key, tuple[torch.Tensor, ...]] = {}  # several: what is read and what is carried
        self.stacked: set[Key] = set()  # sites that show several tensors as one

    def __getitem__(self, key: Key) -> torch.Tensor:
        """The value of a site; the carried streams, if an edit tells them from those that are read."""
        parts = self.parts[key]
        return stack_parts(*parts) if key in self.stacked else parts[-1]

    def leaving(self, key: Key, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nodes that stand for these tensors from here on."""
        same = all(tensor is tensors[0] for tensor in tensors)
        change = self._changes.get(key)
        if change is not None:
            tensors = (change(tensors[0]),) * len(tensors) if same else tuple(map(change, tensors))
        if key not in self._keys:
            return tensors
        # Streams were read with these weights already: the same tensor, not a copy.
        if key[0].endswith("_mix"):
            self.parts.setdefault(key, tensors[:1])
            return tensors
        nodes = tuple(_node(tensor) for tensor in (tensors[:1] if same else tensors))
        self.parts.setdefault(key, nodes)  # a layer that is computed again gives the same values
        return nodes * len(tensors) if same else nodes

    def seen(self, key: Key, parts: Sequence[torch.Tensor]) -> None:
        if key in self._keys:
            if len(parts) > 1:
                self.stacked.add(key)
            self.parts.setdefault(key, tuple(parts))

    def gradients(self, value: torch.Tensor, retain: bool = False) -> dict[Key, torch.Tensor]:
        """The gradient of a number at every recorded site, in the shape of the site; zeros where it has none."""
        flat = [(key, part) for key, parts in self.parts.items() for part in parts]
        inputs = [part for _, part in flat if part.requires_grad]
        found = torch.autograd.grad(value, inputs, retain_graph=retain, allow_unused=True) if inputs else ()
        given = iter(found)
        gradients: dict[Key, list[torch.Tensor]] = {}
        for key, part in flat:
            gradient = next(given) if part.requires_grad else None
            dense = torch.zeros(part.shape, device=part.device) if gradient is None else gradient
            gradients.setdefault(key, []).append(dense)
        return {
            key: stack_parts(*parts) if key in self.stacked else sum(parts[1:], parts[0])
            for key, parts in gradients.items()
        }


class GraphTensorsTap(RecordingTap):
    """Calls the tap inside, and hands what leaves each site to `SiteTensors`."""

    def __init__(self, inner: Tap, tensors: SiteTensors, layer: int = -1):
        super().__init__(inner, lambda site, layer, tensor: None, layer)
        self._tensors = tensors

    def at(self, layer: int) -> GraphTensorsTap:
        return GraphTensorsTap(self._inner.at(layer), self._tensors, layer)

    def see(self, site: Site, *parts: torch.Tensor) -> None:
        self._inner.see(site, *parts)
        self._tensors.seen((site.name, self.layer), parts)

    def __call__(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        return self._tensors.leaving((site.name, self.layer), self._inner(site, x))[0]

    def part(
        self, site: Site, x: torch.Tensor, reads: Reads | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        read, carried = self._tensors.leaving((site.name, self.layer), *self._inner.part(site, x, reads))
        return read, carried

    def route(
        self, site: Site, ids: torch.Tensor, weights: torch.Tensor, routing: Routing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = self._inner.route(site, ids, weights, routing)
        self._tensors.seen((site.name, self.layer), (ids, weights))
        return ids, weights


class Gradients(Mapping[Key, torch.Tensor]):
    """Forward passes with gradients, and the gradients at their sites. `g[hook, layer]` is `[T, *row_shape]`.

    `g.acts[hook, layer]` is the tensor the gradient belongs to. Keys are those of a `Trace`: `g["mlp_out", -1]`,
    `g["mlp_out"]` for all layers, names of other tools. After several passes in one block both refer to the
    last one; `g.passes` has all of them in order."""

    def __init__(self, engine: Engine, keys: Collection[Key], recompute: bool):
        self._engine = engine
        self._keys = keys
        self._recompute = recompute
        self.passes: list[PassGradients] = []

    def logits(self, token_ids: Sequence[int], tap: Tap, traced: Collection[Key] = ()) -> torch.Tensor:
        """Logits [T, vocab] of one text as part of a graph; its sites, and those that are traced, are recorded as one
        pass."""
        tensors = SiteTensors({*self._keys, *traced})
        ids = torch.tensor(token_ids, device=self._engine.model.device)
        with torch.enable_grad():
            logits = run_with_graph(self._engine.model, ids, GraphTensorsTap(tap, tensors), self._recompute)
        count, streams = self._engine.config.num_hidden_layers, has_streams(self._engine.schema)
        self.passes.append(PassGradients(tensors, count, streams))
        return logits

    def backward(self, value: torch.Tensor, retain_graph: bool = False) -> None:
        """Compute the gradient of `value`, a tensor of one number, at every recorded site of every pass.

        `retain_graph` keeps the graph for a second call, which replaces the gradients of the first."""
        if not self.passes:
            raise OptionError(
                "there is no forward pass to differentiate. Call engine.logits or engine.trace first."
            )
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise OptionError(f"value is {shape}, expected a tensor of one number, as logits[-1, token].")
        if not value.requires_grad:
            raise OptionError(
                "value depends on no tensor of this block. Compute it from the results of engine.logits or "
                "engine.trace inside the block, without detach or .item()."
            )
        for index, each in enumerate(self.passes):
            each.compute(value.sum(), retain_graph or index < len(self.passes) - 1)

    @property
    def acts(self) -> TensorsBySite:
        return self._last.acts

    @property
    def _last(self) -> PassGradients:
        if not self.passes:
            raise OptionError("nothing was run in this block. Call engine.logits or engine.trace inside it.")
        return self.passes[-1]

    def __getitem__(self, key: Key | str) -> torch.Tensor:
        return self._last[key]

    def __contains__(self, key: object) -> bool:
        return key in self._last

    def __iter__(self) -> Iterator[Key]:
        return iter(self._last)

    def __len__(self) -> int:
        return len(self._last)

    def _ipython_key_completions_(self) -> list[Key]:
        return list(self.passes[-1]) if self.passes else []

    def __repr__(self) -> str:
        sites = list(self.passes[-1]) if self.passes else []
        hooks = ", ".join(dict.fromkeys(hook for hook, _ in sites)) or "no gradients yet: g.backward(number)"
        return f"Gradients({len(self.passes)} passes; {hooks})"

    def release(self) -> None:
        """Drop the graphs; gradients and values stay."""
        for each in self.passes:
            each.release()


class SiteGradients(TensorsBySite):
    _absent, _holder, _name = "has no gradient", "This block", "g"


class SiteActs(TensorsBySite):
    _absent, _holder, _name = "was not recorded", "This block", "g.acts"


class PassGradients(Mapping[Key, torch.Tensor]):
    """One forward pass: its gradients by site, and the values they belong to."""

    def __init__(self, tensors: SiteTensors, num_layers: int, streams: bool):
        self._tensors: SiteTensors | None = tensors
        self._shape = num_layers, streams
        self._gradients = SiteGradients({}, *self._shape)
        self._acts = SiteActs({}, *self._shape)

    @property
    def acts(self) -> TensorsBySite:
        """The tensors that left the sites, without their graph."""
        if self._tensors is not None:
            values = {key: self._tensors[key].detach() for key in self._tensors.parts}
            self._acts = SiteActs(values, *self._shape)
        return self._acts

    def nodes(self, keys: Collection[Key]) -> dict[Key, torch.Tensor]:
        """The tensors that left these sites, with their graph."""
        assert self._tensors is not None, "the pass has just been run"
        return {key: self._tensors[key] for key in self._tensors.parts if key in keys}

    def compute(self, value: torch.Tensor, retain: bool) -> None:
        if self._tensors is None:
            raise OptionError("the block has ended and its graph is gone. Call backward inside it.")
        self._gradients = SiteGradients(self._tensors.gradients(value, retain), *self._shape)

    def release(self) -> None:
        self._acts = SiteActs(dict(self.acts), *self._shape)
        self._tensors = None

    def __getitem__(self, key: Key | str) -> torch.Tensor:
        if not self._gradients:
            raise SiteError("there are no gradients yet. Call g.backward(value) inside the block.")
        return self._gradients[key]

    def __contains__(self, key: object) -> bool:
        return key in self._gradients

    def __iter__(self) -> Iterator[Key]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)


class GradientScope(threading.local):
    """The open `engine.grad()` block of this thread: passes of other threads have no graph."""

    active: Gradients | None = None

    @contextmanager
    def opened(self, gradients: Gradients) -> Iterator[Gradients]:
        if self.active is not None:
            raise OptionError("engine.grad() is open already in this thread. Close that block first.")
        self.active = gradients
        try:
            yield gradients
        finally:
            self.active = None
            gradients.release()


def run_with_graph(model: Any, ids: torch.Tensor, tap: Tap, recompute: bool) -> torch.Tensor:
    """Logits [..., T, vocab] of texts of equal length. Only DeepSeek-V4 computes layers again; others keep them."""
    logits: torch.Tensor = model(ids, tap, recompute) if isinstance(model, Transformer) else model(ids, tap)
    return logits


def _node(tensor: torch.Tensor) -> torch.Tensor:
    """A node of the graph for this tensor; a leaf, if nothing before it has a gradient."""
    # A copy, not a view: a model of Transformers may write to the tensor afterwards.
    return tensor.clone() if tensor.requires_grad else tensor.detach().clone().requires_grad_()
