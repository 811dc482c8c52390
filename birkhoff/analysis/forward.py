"""Forward pass of one text outside the engine's batches: every token is a prompt token, and every site is accessible.

`edit_tap` builds the tap of such a pass with a caller's edits; `trace` records tensors, `features` reads the features
of an attached SAE.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from birkhoff.analysis.sae_rows import text_ids
from birkhoff.errors import SiteError, quoted
from birkhoff.hooks.batch_tap import StepStaging, arm
from birkhoff.hooks.plan import Edit, Plan, Span
from birkhoff.hooks.sites import Site
from birkhoff.hooks.tap import NoTap, RecordingTap, Tap
from birkhoff.output import Trace
from birkhoff.sae.feature_probe import Feature, active_features
from birkhoff.text.prompts import Prompt, check_ids

if TYPE_CHECKING:
    from birkhoff.api.engine import Engine


def edit_tap(engine: Engine, steer: Any, ids: Sequence[int], first: tuple[Edit, ...] = ()) -> Tap:
    """Return the tap of a forward pass over these tokens: the edits in `first`, then those of `steer`."""
    edits = engine.resolve(steer, ids, 1)
    span = Span(Plan(edits=(*first, *edits)), 0, 0, ids, len(ids))
    return arm(StepStaging(engine.model.device), [span]) or NoTap()


def trace(engine: Engine, token_ids: Sequence[int], hooks: str | Sequence[str], steer: Any) -> Trace:
    """Run the tokens and return the logits and the tensors of `hooks` ("all", a name or a list) at all layers."""
    recorded = _check_hooks(engine, hooks)
    ids = check_ids(token_ids, engine.config)
    tensors: dict[tuple[str, int], torch.Tensor] = {}

    def record(site: Site, layer: int, tensor: torch.Tensor) -> None:
        if site.name in recorded:
            tensors[site.name, layer] = tensor.detach().clone()

    with torch.no_grad():
        tokens = torch.tensor(ids, device=engine.model.device)
        logits = engine.model(tokens, RecordingTap(edit_tap(engine, steer, ids), record))
    return Trace(logits, tensors)


def features(
    engine: Engine, prompt: Prompt, name: str, k: int, at: tuple[str, int] | None, steer: Any
) -> list[list[Feature]]:
    """Run the prompt and return the `k` strongest features of an attached SAE for each token of it, the begin-of-text
    token included if the dictionary expects it."""
    probe, plan, sae = engine.saes.probe(name, k, at)
    ids = text_ids(engine, sae, prompt)
    with torch.no_grad():
        tokens = torch.tensor(ids, device=engine.model.device)
        engine.model(tokens, edit_tap(engine, steer, ids, (plan,)))
    return active_features(probe, sae, len(ids))


def _check_hooks(engine: Engine, hooks: str | Sequence[str]) -> set[str]:
    known = engine.schema
    if hooks == "all":
        return set(known)
    names = [hooks] if isinstance(hooks, str) or not isinstance(hooks, (Sequence, Set)) else list(hooks)
    for hook in names:
        if not isinstance(hook, str) or hook not in known:
            raise SiteError(
                f"{quoted(hook)} is not a hook of this model. It has: {', '.join(sorted(known))}."
            )
    return set(names)
